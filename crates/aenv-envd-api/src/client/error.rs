//! Why a call of a guest failed.

use std::{io, time::Duration};

use connectrpc::{ConnectError, ErrorCode};
use http::StatusCode;
use thiserror::Error;

/// Why a call of a guest failed.
#[derive(Debug, Error)]
pub enum EnvdError {
    /// No connection came about.
    #[error("the guest agent cannot be reached: {0}")]
    Unreachable(#[source] io::Error),
    /// The connection broke.
    #[error("the connection to the guest agent broke: {0}")]
    Broken(#[source] hyper::Error),
    /// Nothing came back in time.
    #[error("the guest agent did not answer within {bound:?}")]
    TimedOut {
        /// How long was waited.
        bound: Duration,
    },
    /// envd answered with an HTTP error.
    #[error("{message} (the guest agent answered {status})")]
    Refused {
        /// The status.
        status: StatusCode,
        /// envd's own words.
        message: String,
    },
    /// envd answered a call of its process or filesystem service with an error.
    #[error("{}: {message}", code.as_str())]
    Rpc {
        /// Kind of the error.
        code: ErrorCode,
        /// envd's own words.
        message: String,
    },
    /// The template's envd knows nothing of volumes.
    #[error("this template's guest agent is older than volumes; build the template again")]
    NoVolumes,
    /// Something that was sent or received has no valid form.
    #[error("malformed message to or from the guest agent: {message}")]
    Malformed {
        /// What is wrong with it.
        message: String,
    },
}

impl EnvdError {
    /// Whether the call may have never reached envd, so that trying again makes sense.
    pub fn is_transport(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Broken(_))
    }
}

impl From<ConnectError> for EnvdError {
    fn from(error: ConnectError) -> Self {
        Self::Rpc { code: error.code, message: error.message.unwrap_or_default() }
    }
}
