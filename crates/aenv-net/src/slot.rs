//! Network slots: the seam between the orchestrator and namespaces.

use std::{path::PathBuf, sync::Arc};

use aenv_types::{Dial, EgressPolicy};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::net::TcpListener;

/// What must be remembered of a slot to find it again after the server was restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRecord {
    /// Number of the slot; names and addresses follow from it.
    pub index: u32,
    /// The namespace, such as `/run/netns/aenv-7`.
    pub netns: PathBuf,
}

/// Why a network operation failed.
#[derive(Debug, Error)]
pub enum NetworkError {
    /// All slots are taken.
    #[error("no network slot is free: all {limit} are in use")]
    Exhausted {
        /// The limit.
        limit: u32,
    },
    /// The slot that a record names is gone or damaged.
    #[error("network slot {index} cannot be taken over: {message}")]
    Gone {
        /// Its number.
        index: u32,
        /// What is missing.
        message: String,
    },
    /// A policy needs the egress gate, and its sockets could not be made.
    #[error("the egress gate cannot be opened: {message}")]
    Gate {
        /// What is missing.
        message: String,
    },
    /// The kernel refused.
    #[error("{step}: {message}")]
    Kernel {
        /// What was being done.
        step: &'static str,
        /// The refusal.
        message: String,
    },
}

/// One sandbox's network. The way into its guest is its [`Dial`].
#[async_trait]
pub trait Slot: Dial {
    /// What to write into the journal.
    fn record(&self) -> SlotRecord;

    /// Replaces the egress rules atomically, on the running sandbox; connections that are no longer allowed end. A slot that was
    /// isolated is opened afterwards.
    async fn set_policy(&self, policy: &EgressPolicy) -> Result<(), NetworkError>;

    /// Lets nothing of the guest leave its namespace until rules are set: what it sends is lost as on a cable that is unplugged,
    /// without a refusal that its programs would take for an answer. The server can still be answered.
    async fn isolate(&self) -> Result<(), NetworkError>;

    /// Listens on a TCP port of the guest's gateway, for this guest only. One port for each slot.
    async fn listen(&self, port: u16) -> Result<TcpListener, NetworkError>;

    /// Bytes that the guest has received and sent since the slot was taken.
    async fn traffic(&self) -> Result<(u64, u64), NetworkError>;
}

/// The node's slots.
#[async_trait]
pub trait Network: Send + Sync {
    /// Takes a clean slot (from the pool if one is ready) with the default policy.
    async fn acquire(&self) -> Result<Arc<dyn Slot>, NetworkError>;

    /// Takes over the slot of a sandbox that outlived the server.
    async fn adopt(&self, record: &SlotRecord) -> Result<Arc<dyn Slot>, NetworkError>;

    /// Gives a slot back; its namespace is cleaned or removed.
    async fn release(&self, slot: Arc<dyn Slot>);

    /// Removes every namespace, veth and rule of this node that is in no adopted or acquired slot and not in the pool.
    async fn sweep(&self) -> Result<u32, NetworkError>;

    /// PEM of the CA that a guest has to trust when its policy has header rules.
    fn ca_bundle(&self) -> Option<&str> {
        None
    }

    /// Removes everything, at the end of a server that leaves nothing running.
    async fn close(&self);
}
