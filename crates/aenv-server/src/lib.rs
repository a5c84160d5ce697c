//! aenv-server: HTTP API, data-plane proxy, dashboard.
//!
//! This room turns HTTP into calls of the rooms below and their errors into answers. [`app`] decides whether a request is
//! the control plane's ([`routes`]) or a sandbox's ([`proxy`]). It owns API keys, logs and idempotency keys ([`db`]), and no
//! byte and no state of a sandbox: it may be killed at any time.

#![forbid(unsafe_code)]

pub mod app;
pub mod artifacts;
pub mod audit;
pub mod auth;
pub mod config;
pub mod convert;
pub mod db;
pub mod deadlines;
pub mod doctor;
pub mod events;
pub mod extract;
pub mod failure;
pub mod floor;
pub mod idempotency;
pub mod keys;
pub mod limits;
pub mod listen;
pub mod node;
pub mod openapi;
pub mod proxy;
pub mod routes;
pub mod secrets;
pub mod serve;
pub mod spawns;
pub mod state;
pub mod telling;
pub mod upkeep;
