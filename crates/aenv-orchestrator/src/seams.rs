//! Seams to the guest (its agent and its memory) and to the host. Production has one implementation of each; tests have another.

use std::{path::PathBuf, sync::Arc, time::Duration};

use aenv_envd_api::InitRequest;
use aenv_memory::Since;
use aenv_types::{Dial, Token};
use aenv_vmm::RamMapping;
use async_trait::async_trait;

use crate::{MetricSample, capture::After, pressure::HostMemory};

/// Why the guest agent did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AgentError {
    /// Nothing listened, or no answer came in time.
    Silent(String),
    /// It answered, and said no.
    Refused(String),
}

/// envd in a guest.
#[async_trait]
pub(crate) trait GuestAgent: Send + Sync {
    /// Sends `/init` until it is answered, with the time of the sending; fails when `bound` has passed or envd refuses.
    async fn init(
        &self,
        dial: Arc<dyn Dial>,
        request: &InitRequest,
        bound: Duration,
    ) -> Result<(), AgentError>;

    /// Has the guest do once what a create will ask of it, with its clock left as it is; fails when it has not answered within
    /// `bound`, or refuses.
    async fn warm_up(
        &self,
        dial: Arc<dyn Dial>,
        request: &InitRequest,
        bound: Duration,
    ) -> Result<(), AgentError>;

    /// Writes the guest's page cache to its disks.
    async fn sync(
        &self,
        dial: Arc<dyn Dial>,
        token: Option<&Token>,
        bound: Duration,
    ) -> Result<(), AgentError>;

    /// What the guest uses now.
    async fn metrics(
        &self,
        dial: Arc<dyn Dial>,
        token: Option<&Token>,
        bound: Duration,
    ) -> Result<MetricSample, AgentError>;
}

/// Memory of running guests, and stacks of layers.
#[async_trait]
pub(crate) trait Images: Send + Sync {
    /// Takes what changed, with the vCPUs stopped; the layer will be at `target`. If the guest is to go on, it may do so as soon
    /// as this returns, and what was taken is marked. `since` may only be [`Since::Mark`] if all that was taken with the marks was
    /// kept.
    async fn take(
        &self,
        ram: RamMapping,
        target: PathBuf,
        after: After,
        since: Since,
    ) -> Result<Box<dyn TakenMemory>, String>;

    /// Merges adjacent layers of a stack, base first, into one at `target`, durable; returns its size.
    async fn merge(&self, layers: Vec<PathBuf>, target: PathBuf) -> Result<u64, String>;

    /// Gives memory that was kept for the next capture back, if there was none for a while.
    fn trim(&self) {}
}

/// Changed pages that were taken.
#[async_trait]
pub(crate) trait TakenMemory: Send {
    /// What it holds: changes since then.
    fn since(&self) -> Since;

    /// From when on the next capture can count, if this one is kept.
    fn next(&self) -> Since;

    /// Makes the layer durable; returns its size.
    async fn write(self: Box<Self>) -> Result<u64, String>;
}

/// The host's memory.
pub(crate) trait Host: Send + Sync {
    /// As it is now; `None` where the kernel does not tell.
    fn memory(&self) -> Option<HostMemory>;

    /// Memory of a process, in MiB, that is its own and that no file stands behind.
    fn anonymous_mib(&self, pid: i32) -> Option<u64>;
}

/// All of them.
#[derive(Clone)]
pub(crate) struct Seams {
    pub agent: Arc<dyn GuestAgent>,
    pub images: Arc<dyn Images>,
    pub host: Arc<dyn Host>,
}
