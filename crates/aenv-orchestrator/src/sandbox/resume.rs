//! Resume: launch with the same identity.

use aenv_types::Checkpoint;

use super::{Phase, Record, Stage, actor::Actor};
use crate::{
    PauseMode, SandboxError, SandboxState, SandboxView, Timeout, admission::Claim, journal::Survives,
    launch::Start,
};

impl Actor {
    /// Makes sure that it runs. Running already, its deadline is extended at most.
    pub(super) async fn resume(
        &mut self,
        timeout: Timeout,
        mode: PauseMode,
    ) -> Result<(SandboxView, bool), SandboxError> {
        let (Timeout::Set(time) | Timeout::Extend(time)) = timeout;
        match &self.stage {
            Stage::Running => {
                self.apply_timeout(Timeout::Extend(time)).await?;
                return Ok((self.record.view(SandboxState::Running), false));
            }
            Stage::Paused => {}
            other => return Err(self.unfit(other)),
        }
        self.node.disk_room()?;
        if self.standing.is_some() {
            self.claim().await?;
        }
        match mode {
            PauseMode::Full if self.go_on_in_place(time).await? => {
                self.merge_if_deep();
                self.node.crash.pass("resume.launched").await;
                return Ok((self.record.view(SandboxState::Running), true));
            }
            PauseMode::Full => {}
            PauseMode::Filesystem => self.end_standing().await,
        }
        let permit = self.node.reserve(&Claim::of(&self.record)).await?;
        self.claim().await?;
        let checkpoint = self.manifest().await?;
        let start = match mode {
            PauseMode::Full => Start::of(&checkpoint),
            PauseMode::Filesystem => Start::Boot,
        };
        let before = self.record.clone();
        self.enter(Stage::Resuming);
        let launched = async {
            self.note(Phase::Resuming, Survives::Crash).await?;
            self.node.crash.pass("resume.noted").await;
            self.launch(&checkpoint, start, permit, time, None).await
        };
        match launched.await {
            Ok(()) => {
                self.merge_if_deep();
                self.node.crash.pass("resume.launched").await;
                Ok((self.record.view(SandboxState::Running), true))
            }
            Err(error) => {
                self.back_to_paused(before).await;
                Err(self.node.explain(error))
            }
        }
    }

    /// After a launch that failed: paused as before.
    pub(super) async fn back_to_paused(&mut self, before: Record) {
        self.record = before;
        if let Err(error) = self.note(Phase::Paused, Survives::Crash).await {
            tracing::error!(sandbox = %self.record.id, ?error, "a paused sandbox could not be journaled");
        }
        self.enter(Stage::Paused);
    }

    /// The checkpoint that the sandbox is in, or was launched from.
    pub(super) async fn manifest(&self) -> Result<std::sync::Arc<Checkpoint>, SandboxError> {
        let id = &self.record.checkpoint;
        self.node.checkpoints.get(id).await.map_err(|error| SandboxError::BadCheckpoint {
            id: id.clone(),
            reason: format!("its manifest cannot be read: {error}"),
        })
    }
}
