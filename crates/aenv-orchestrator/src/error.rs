//! What a sandbox operation can fail with. The API turns each into a status, a message and a stable code.

use std::{fmt, time::Duration};

use aenv_types::{CheckpointId, SandboxId};
use thiserror::Error;

/// Why an operation on a sandbox failed.
#[derive(Clone, Debug, Error)]
pub enum SandboxError {
    /// No such sandbox (or it belongs to another team).
    #[error("Sandbox \"{0}\" doesn't exist or you don't have access to it")]
    NotFound(SandboxId),
    /// The operation needs a running sandbox.
    #[error("sandbox {0} is paused; resume it first")]
    Paused(SandboxId),
    /// The operation needs a paused sandbox.
    #[error("sandbox {0} is running")]
    Running(SandboxId),
    /// The sandbox was deleted while the operation waited.
    #[error("sandbox {0} was deleted")]
    Deleted(SandboxId),
    /// Another node has it.
    #[error("sandbox {id} is on another node, {node}; ask there")]
    Elsewhere {
        /// Which.
        id: SandboxId,
        /// The node's name.
        node: String,
    },
    /// It cannot be known whether another node has it.
    #[error(
        "the repository, which says whether another node has sandbox {id}, does not answer; try again in {retry_after:?}"
    )]
    RepositoryAway {
        /// Which.
        id: SandboxId,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The sandbox failed and can only be deleted.
    #[error("sandbox {id} has failed: {reason}")]
    Failed {
        /// Which.
        id: SandboxId,
        /// Why.
        reason: String,
    },
    /// The node is full.
    #[error("no capacity for another sandbox: {reason}; try again in {retry_after:?}")]
    Full {
        /// What has run out: `memory`, `slots`, `disk`, ...
        reason: String,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The team has all that it may have.
    #[error("this API key may have {limit} {what}, and {used} are taken; delete or pause a sandbox first")]
    TeamFull {
        /// Of what.
        what: TeamResource,
        /// How much.
        limit: u64,
        /// How much is taken.
        used: u64,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The disk of the host has no room for this.
    #[error("the host's disk is full: {0}")]
    DiskFull(String),
    /// The guest did not come up or does not answer.
    #[error("the guest agent of sandbox {id} does not answer: {reason}")]
    GuestUnresponsive {
        /// Which.
        id: SandboxId,
        /// What was tried.
        reason: String,
    },
    /// The checkpoint cannot be launched here.
    #[error("checkpoint {id} cannot be launched: {reason}")]
    BadCheckpoint {
        /// Which.
        id: CheckpointId,
        /// Layer missing, other engine, other kernel, ...
        reason: String,
    },
    /// What the checkpoint's disks and memory are read from does not answer in time.
    #[error("checkpoint {id} cannot be launched now: {reason}; try again in {retry_after:?}")]
    StorageAway {
        /// Which.
        id: CheckpointId,
        /// What does not answer.
        reason: String,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The server is ending.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Something broke inside; the log has the detail under the request id.
    #[error("{public}")]
    Internal {
        /// What the user may read.
        public: String,
        /// What the log gets.
        detail: String,
    },
}

/// What a team has a limit of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TeamResource {
    /// Running sandboxes.
    Running,
    /// Their memory.
    Memory,
}

impl fmt::Display for TeamResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "sandboxes running",
            Self::Memory => "MiB of memory in running sandboxes",
        })
    }
}

impl SandboxError {
    /// Something broke inside: `public` is what the user reads, `detail` what the log gets.
    pub(crate) fn internal(public: impl Into<String>, detail: impl std::fmt::Display) -> Self {
        Self::Internal { public: public.into(), detail: detail.to_string() }
    }
}

impl From<crate::journal::JournalError> for SandboxError {
    fn from(error: crate::journal::JournalError) -> Self {
        Self::internal("the node's journal could not be written; nothing was changed", error)
    }
}
