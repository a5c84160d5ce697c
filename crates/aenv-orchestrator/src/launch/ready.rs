//! Waiting for envd: `/init` is sent until it is answered, the VMM ends, somebody removes the sandbox, or time is up.

use std::{sync::Arc, time::Duration};

use aenv_envd_api::InitRequest;
use aenv_types::{Dial, SandboxId};
use aenv_vmm::Vm;
use tokio_util::sync::CancellationToken;

use super::Start;
use crate::{SandboxError, identity::init_request, node::Node, sandbox::Record, seams::AgentError};

/// Bound for a guest whose processes go on.
const CONTINUED: Duration = Duration::from_secs(30);
/// Bound for one that has answered before, as a standby. An ordinary launch follows.
const CLAIMED: Duration = Duration::from_secs(10);
/// Bound for a guest that boots; under pure emulation a boot takes seconds.
const BOOTED: Duration = Duration::from_secs(60);
/// Bound for a guest that outlived the server.
const INIT_ADOPTED: Duration = Duration::from_secs(5);

/// From where a guest comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Up {
    /// Its processes go on.
    Continued,
    /// They go on, and have done so before.
    Claimed,
    /// Its kernel boots.
    Booted,
}

impl Up {
    pub(super) fn of(start: Start) -> Self {
        match start {
            Start::Continue => Self::Continued,
            Start::Boot => Self::Booted,
        }
    }
}

/// Sends `/init` to a guest that runs: `change` makes of the whole request what is to be said.
pub(crate) async fn greet(
    node: &Node,
    record: &Record,
    dial: Arc<dyn Dial>,
    change: impl FnOnce(InitRequest) -> InitRequest,
) -> Result<(), SandboxError> {
    let base = node.checkpoints.get(&record.checkpoint).await;
    let base = base.map_err(|error| SandboxError::internal("its origin is lost", error))?;
    let request = change(init_request(node, record, &base.guest)?);
    let answered = node.seams.agent.init(dial, &request, INIT_ADOPTED).await;
    answered.map_err(|error| SandboxError::internal("the guest does not answer", format!("{error:?}")))
}

/// Returns when envd has answered.
pub(super) async fn wait(
    node: &Node,
    id: &SandboxId,
    dial: Arc<dyn Dial>,
    vm: &dyn Vm,
    request: InitRequest,
    up: Up,
    stop: &CancellationToken,
) -> Result<(), SandboxError> {
    let bound = match up {
        Up::Continued => CONTINUED,
        Up::Claimed => CLAIMED,
        Up::Booted => BOOTED,
    };
    let silent = |reason: String| SandboxError::GuestUnresponsive { id: id.clone(), reason };
    tokio::select! {
        answered = node.seams.agent.init(dial, &request, bound) => answered.map_err(|error| silent(match error {
            AgentError::Refused(reason) => format!("/init was refused: {reason}"),
            AgentError::Silent(reason) => format!("/init was not answered within {} s: {reason}", bound.as_secs()),
        })),
        reason = vm.exited() => Err(silent(format!("the VMM ended before the guest was up: {reason}"))),
        () = stop.cancelled() => Err(SandboxError::Deleted(id.clone())),
    }
}
