//! Processes: starting them as a guest's user, fanning their output out, feeding and signalling them.
//!
//! A process belongs to nobody: its streams come and go, it ends when it ends (or at the deadline that its start named). Each
//! process has one task, which reads its output, hands it to every subscriber through a bounded queue, and reaps it.

mod events;
mod input;
mod output;
mod registry;
mod service;
mod spawn;
mod supervise;

pub use registry::Processes;
pub use service::Service;

use connectrpc::{ConnectError, ErrorCode};
use thiserror::Error;

use crate::{paths::PathError, users::LookupError};

/// Why a call of the process service failed.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// The request lacks something.
    #[error("{0}")]
    Invalid(String),
    /// The request's user is not there.
    #[error("{0}")]
    User(#[from] LookupError),
    /// The request's `Authorization` header cannot be read.
    #[error("{0}")]
    Credentials(&'static str),
    /// The working folder has no valid form.
    #[error("{0}")]
    Path(#[from] PathError),
    /// The working folder is not there.
    #[error("cwd '{0}' does not exist")]
    NoCwd(String),
    /// The program cannot be started.
    #[error("error starting process '{cmd}': {source}")]
    Start {
        /// The program.
        cmd: String,
        /// Why.
        source: std::io::Error,
    },
    /// No live process has the pid.
    #[error("process with pid {0} not found")]
    NoPid(u32),
    /// No live process has the tag.
    #[error("process with tag {0} not found")]
    NoTag(String),
    /// Input did not reach the process.
    #[error("error writing to {target}: {message}")]
    Write {
        /// `stdin` or `tty`.
        target: &'static str,
        /// Why.
        message: String,
    },
    /// Standard input cannot be closed.
    #[error("error closing stdin: {0}")]
    CloseStdin(&'static str),
    /// The terminal cannot be resized.
    #[error("error resizing tty: {0}")]
    Resize(String),
    /// A signal that the API does not send.
    #[error("invalid signal: {0}")]
    Signal(i32),
    /// The kernel refused a signal.
    #[error("error sending signal: {0}")]
    Kill(nix::Error),
}

impl ProcessError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) | Self::Path(_) | Self::NoCwd(_) => ErrorCode::InvalidArgument,
            Self::User(LookupError::Unknown(_)) | Self::Credentials(_) => ErrorCode::Unauthenticated,
            Self::Start { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => ErrorCode::NotFound,
                std::io::ErrorKind::PermissionDenied => ErrorCode::PermissionDenied,
                std::io::ErrorKind::InvalidInput => ErrorCode::InvalidArgument,
                std::io::ErrorKind::WouldBlock => ErrorCode::ResourceExhausted,
                _ => ErrorCode::Internal,
            },
            Self::NoPid(_) | Self::NoTag(_) => ErrorCode::NotFound,
            Self::CloseStdin(_) => ErrorCode::Unknown,
            Self::Signal(_) => ErrorCode::Unimplemented,
            Self::User(LookupError::Unreadable(_)) | Self::Write { .. } | Self::Resize(_) | Self::Kill(_) => {
                ErrorCode::Internal
            }
        }
    }
}

impl From<ProcessError> for ConnectError {
    fn from(error: ProcessError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
