//! Warming a standby up: its guest runs for a moment, where it reaches nobody, until it has answered.
//!
//! An emulator translates code when it first runs, and a guest's memory is mapped when it is first touched: what a create asks of
//! a guest takes much longer the first time than the second. So a standby's guest does it once, and its vCPUs stand again until
//! it is claimed. They stand, too, whenever somebody waits for a launch.

use std::time::Duration;

use aenv_types::Checkpoint;
use aenv_vmm::EngineError;
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use super::Ahead;
use crate::{identity::init_of_nobody, node::Node, seams::AgentError};

/// For all of it, the waiting for others included.
const BOUND: Duration = Duration::from_secs(30);
/// How long nobody may have waited for a launch before it goes on.
const QUIET: Duration = Duration::from_millis(100);

/// Why a standby was not warmed up.
#[derive(Debug, Error)]
pub(crate) enum WarmUpError {
    /// Nobody wants it any more.
    #[error("it was stopped")]
    Stopped,
    /// There was no time for it: somebody waited for a launch.
    #[error("others waited for launches")]
    NoTime,
    /// The guest did not answer, or the VMM failed.
    #[error("{0}")]
    Failed(String),
}

impl From<EngineError> for WarmUpError {
    fn from(error: EngineError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Ahead {
    /// Warms it up. One that fails is of no use any more.
    pub(crate) async fn warm_up(
        &self,
        node: &Node,
        checkpoint: &Checkpoint,
        stop: &CancellationToken,
    ) -> Result<(), WarmUpError> {
        let (Some(vm), Some(dial)) = (self.parts.vm(), self.parts.dial()) else {
            return Err(WarmUpError::Failed("a part of it is missing".into()));
        };
        let request = init_of_nobody(node, self.id(), &checkpoint.guest);
        let request = request.map_err(|error| WarmUpError::Failed(format!("{error:?}")))?;
        let mut work = node.seams.agent.warm_up(dial, &request, BOUND);
        let late = tokio::time::sleep(BOUND);
        tokio::pin!(late);
        let mut waited = false;
        let failed = |waited: bool, reason: String| match waited {
            true => WarmUpError::NoTime,
            false => WarmUpError::Failed(reason),
        };
        vm.resume().await?;
        node.crash.pass("standby.runs").await;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Err(WarmUpError::Stopped),
                reason = vm.exited() => return Err(WarmUpError::Failed(format!("its VMM ended: {reason}"))),
                () = &mut late => {
                    return Err(failed(waited, format!("its guest did not answer within {} s", BOUND.as_secs())));
                }
                answered = &mut work => {
                    answered.map_err(|error| match error {
                        AgentError::Silent(reason) | AgentError::Refused(reason) => failed(waited, reason),
                    })?;
                    return Ok(vm.pause().await?);
                }
                () = node.admission.busy() => {}
            }
            waited = true;
            vm.pause().await?;
            tokio::select! {
                () = stop.cancelled() => return Err(WarmUpError::Stopped),
                () = &mut late => return Err(WarmUpError::NoTime),
                () = node.admission.idle(QUIET) => {}
            }
            vm.resume().await?;
        }
    }
}
