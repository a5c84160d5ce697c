//! A launch in two halves: up to where the vCPUs would run for somebody, before it is known for whom; and from there on, when it
//! is.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_types::{Checkpoint, EgressPolicy, SandboxId, TeamId};
use aenv_vmm::Vm;
use tokio_util::sync::CancellationToken;

use super::{Machine, Parts, Start, assemble, milliseconds, remove_folders};
use crate::{SandboxError, Timings, node::Node};

/// The generation that a standby becomes.
const FIRST: u64 = 1;

/// A standby takes milliseconds to go on; who waits for it should not pay for one that has stopped answering.
const WAKE: Duration = Duration::from_secs(3);

/// A machine whose vCPUs stand, and whose guest reaches nobody.
pub(crate) struct Ahead {
    id: SandboxId,
    pub(super) parts: Parts,
    /// Who shows its memory and disks.
    exports: u32,
}

/// One whose vCPUs run, under the rules of its sandbox. Its guest does not know yet who it is.
pub(crate) struct Awake {
    pub id: SandboxId,
    pub(super) parts: Parts,
    pub(super) timings: Timings,
}

/// The first half, for a sandbox of this team (of any, where all share memory). Nothing is left of one that fails.
pub(crate) async fn ahead(
    node: &Node,
    team: &TeamId,
    checkpoint: &Checkpoint,
    stop: &CancellationToken,
) -> Result<Ahead, SandboxError> {
    let exports = node.exports.instance().await;
    let exports = exports.map_err(|error| SandboxError::internal("the data plane cannot be used", error))?;
    let (id, mut parts) = (SandboxId::random(), Parts::default());
    let machine = Machine {
        id: &id,
        team,
        generation: FIRST,
        shape: checkpoint.shape,
        checkpoint,
        start: Start::Continue,
        egress: None,
        volumes: &[],
    };
    let assembled = assemble(node, &machine, &mut parts, &mut Timings::default(), stop).await;
    let ahead = Ahead { id, parts, exports };
    match assembled {
        Ok(_) => Ok(ahead),
        Err(error) => {
            ahead.discard(node).await;
            Err(error)
        }
    }
}

impl Ahead {
    /// Its VM, to see it end.
    pub(crate) fn vm(&self) -> Option<Arc<dyn Vm>> {
        self.parts.vm()
    }

    /// The id that its sandbox will have.
    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    /// The second half, as far as no guest is asked: the rules first, then the vCPUs. `None`, and nothing of it is left, when it
    /// turns out to be of no use.
    pub(crate) async fn wake(self, node: &Node, egress: &EgressPolicy) -> Option<Awake> {
        let mut timings = Timings::default();
        let woken = tokio::time::timeout(WAKE, self.go_on(node, egress, &mut timings)).await;
        let error = match woken {
            Ok(Ok(())) => {
                metrics::counter!("aenv_standby_claims_total").increment(1);
                return Some(Awake { id: self.id, parts: self.parts, timings });
            }
            Ok(Err(error)) => error,
            Err(_) => format!("it did not go on within {} s", WAKE.as_secs()),
        };
        tracing::warn!(sandbox = %self.id, error, "a standby is of no use; the sandbox is launched without it");
        metrics::counter!("aenv_standby_failures_total").increment(1);
        self.discard(node).await;
        None
    }

    async fn go_on(&self, node: &Node, egress: &EgressPolicy, timings: &mut Timings) -> Result<(), String> {
        let (Some(vm), Some(slot)) = (&self.parts.vm, &self.parts.slot) else {
            return Err("a part of it is missing".into());
        };
        let begun = Instant::now();
        match node.exports.instance().await {
            Ok(instance) if instance == self.exports => {}
            Ok(_) => return Err("its memory and disks went with the blockd that showed them".into()),
            Err(error) => return Err(error.to_string()),
        }
        // The default ones as well: they end its isolation.
        slot.set_policy(egress).await.map_err(|error| error.to_string())?;
        timings.place_ms = milliseconds(begun);
        node.crash.pass("standby.claimed").await;
        let begun = Instant::now();
        vm.resume().await.map_err(|error| error.to_string())?;
        timings.restore_ms = milliseconds(begun);
        node.crash.pass("standby.continued").await;
        Ok(())
    }

    /// Ends it and removes every trace.
    pub(crate) async fn discard(self, node: &Node) {
        self.parts.take_down(node, &self.id).await;
        remove_folders(node, &self.id).await;
    }
}
