//! The in-sandbox API: protobuf messages, the body of `/init`, signatures, and the client that the host uses.
//!
//! The guest daemon (`aenv-envd`) serves it, the orchestrator and the template builder call it. This room owns the wire: what
//! is sent and how it is signed. It must never touch a filesystem or start a process, and knows no namespaces: the way into
//! a guest is a [`Dial`](aenv_types::Dial).

#![forbid(unsafe_code)]

pub mod client;
pub mod init;
pub mod metrics;
pub mod signature;
pub mod tunnel;

/// Messages and services generated from `proto/`.
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::large_futures, rustdoc::all)]
pub mod proto {
    connectrpc::include_generated!();
}

pub use client::{Download, EnvdClient, EnvdError, ExitStatus, Output, ProcessStream, RunRequest};
pub use init::{InitRequest, MOUNTED_HEADER, VolumeMount};
pub use metrics::Metrics;
pub use signature::{FileOperation, sign};
pub use tunnel::LoopbackDial;

/// Port of envd in every guest.
pub const PORT: u16 = 49983;

/// Version that envd reports; E2B's clients gate features by it.
pub const ENVD_VERSION: &str = "0.6.13";
