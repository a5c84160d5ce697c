//! One actor for each sandbox: an explicit state machine, a journal, and the two primitives *capture* and *launch*.
//!
//! This room owns the life of sandboxes on a node. It knows no HTTP, no template names (callers hand it a resolved
//! [`Checkpoint`](aenv_types::Checkpoint)) and no engine in particular.

#![forbid(unsafe_code)]

mod admission;
mod capture;
mod checkpoints;
mod collector;
mod crash;
mod deadline;
pub mod error;
mod expiries;
mod files;
mod guest;
pub mod handle;
pub mod home_lock;
mod host;
mod identity;
mod images;
mod journal;
mod launch;
mod metrics;
mod node;
mod pressure;
mod reconcile;
pub mod request;
mod sandbox;
mod seams;
mod shared;
mod standby;
mod timeline;
pub mod view;

#[cfg(test)]
mod tests;

pub use crash::{CRASH_POINTS, CRASH_VARIABLE};
pub use error::{SandboxError, TeamResource};
pub use expiries::Expiry;
pub use handle::{
    Blobs, CacheListing, Orchestrator, Parts, Settings, Sharing, StandbySettings, StartError, Wake,
};
pub use home_lock::HomeLock;
pub use pressure::meminfo;
pub use request::{
    CaptureMode, CreateRequest, Lifecycle, OnTimeout, PauseMode, ProxyOptions, TeamLimits, Timeout,
};
pub use view::{
    ChildResult, Gate, MetricSample, NodeMemory, Publication, Route, SandboxState, SandboxView, Timings,
};
