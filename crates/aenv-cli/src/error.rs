//! What a command can fail with, and the exit code of each.

use std::time::Duration;

use serde_json::Value;
use thiserror::Error;

/// Why a command failed.
#[derive(Debug, Error)]
pub(crate) enum CliError {
    /// The server answered with an error.
    #[error("{message}")]
    Api {
        /// HTTP status.
        status: u16,
        /// What the server says.
        message: String,
        /// Its stable code.
        code: Option<String>,
        /// Seconds after which it may be asked again, if it says so.
        retry_after: Option<u64>,
    },
    /// Nothing came within the time that was given for it.
    #[error("no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
    /// The server cannot be reached.
    #[error(
        "the server at {url} cannot be reached: {message}\n  start one with `aenv-server`, or set AENV_URL"
    )]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        message: String,
    },
    /// No API key.
    #[error(
        "no API key: run `aenv auth login`, or set AENV_API_KEY (the server keeps its first key in <home>/secrets/api-key)"
    )]
    NoKey,
    /// The arguments do not fit together.
    #[error("{0}")]
    Usage(String),
    /// A process in the sandbox or the data plane failed.
    #[error("{0}")]
    Sandbox(String),
    /// A local file.
    #[error("{context}: {source}")]
    Io {
        /// Which.
        context: String,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

impl CliError {
    pub(crate) fn io(context: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let context = context.into();
        move |source| Self::Io { context, source }
    }

    /// From an error envelope that stands within an answer.
    pub(crate) fn of_body(body: &Value) -> Self {
        Self::Api {
            status: body["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(500),
            message: body["message"].as_str().unwrap_or("it failed").to_owned(),
            code: body["error_code"].as_str().map(str::to_owned),
            retry_after: None,
        }
    }

    /// See the crate's documentation.
    pub(crate) fn exit_code(&self) -> i32 {
        match self {
            Self::Usage(_) => 2,
            Self::Unreachable { .. } => 3,
            Self::Api { status: 404, .. } => 4,
            Self::NoKey | Self::Api { status: 401 | 403, .. } => 5,
            Self::Api { status: 429 | 503, .. } => 6,
            Self::Api { .. } | Self::NoAnswer(_) | Self::Sandbox(_) | Self::Io { .. } => 1,
        }
    }
}
