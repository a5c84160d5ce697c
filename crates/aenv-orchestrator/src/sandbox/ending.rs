//! Ends: kill, a VMM that ended by itself, a deadline.

use super::{Phase, Stage, actor::Actor};
use crate::{
    Expiry, OnTimeout, SandboxError,
    journal::{Change, Survives},
    launch,
};

impl Actor {
    /// Removes the sandbox. Whoever waits for it waits for the state Gone.
    pub(super) async fn kill(mut self: Box<Self>) {
        self.enter(Stage::Killing);
        if let Err(error) = self.note(Phase::Killing, Survives::Crash).await {
            // Without the note a crash brings the sandbox back; the kill was not acknowledged then.
            tracing::error!(sandbox = %self.record.id, ?error, "a kill could not be noted");
        }
        self.node.crash.pass("kill.noted").await;
        self.tell_end().await;
        self.vanish().await;
        tracing::info!(sandbox = %self.record.id, "removed");
    }

    /// Ends what runs, removes every trace, and is Gone.
    pub(super) async fn vanish(&mut self) {
        self.end_standing().await;
        self.end_generation().await;
        self.node.crash.pass("kill.ended").await;
        launch::remove_folders(&self.node, &self.record.id).await;
        let removal = vec![Change::Remove(self.record.id.clone())];
        if let Err(error) = self.node.journal.commit(removal, Survives::PowerLoss).await {
            tracing::error!(sandbox = %self.record.id, %error, "a removed sandbox stays in the journal until the next start");
        }
        self.node.crash.pass("kill.journaled").await;
        self.node.registry.remove(&self.record.id);
        self.enter(Stage::Gone);
        self.node.garbage.notify_one();
    }

    /// Breaks connections and takes down VMM, exports and slot, if there are any.
    pub(super) async fn end_generation(&mut self) {
        if let Some(generation) = self.generation.take() {
            generation.end(&self.node, &self.record.id).await;
        }
    }

    /// The VMM ended by itself: the guest powered off, panicked, or the VMM broke.
    pub(super) async fn vmm_ended(&mut self, reason: String) {
        tracing::warn!(sandbox = %self.record.id, reason, "the VMM ended by itself");
        self.end_generation().await;
        self.record.launched = None;
        if let Err(error) = self.note(Phase::Failed { reason: reason.clone() }, Survives::PowerLoss).await {
            tracing::error!(sandbox = %self.record.id, ?error, "a failure could not be journaled");
        }
        self.enter(Stage::Failed(reason));
        self.node.garbage.notify_one();
    }

    /// The deadline has passed (or, for a failed sandbox, the time for which its reason is kept).
    pub(super) async fn expire(&mut self) {
        if matches!(self.stage, Stage::Failed(_)) {
            self.cell.kill.cancel();
            return;
        }
        if self.record.lifecycle.on_timeout == OnTimeout::Kill {
            tracing::info!(sandbox = %self.record.id, end_at = %self.end_at(), "expired");
            self.report_expiry(OnTimeout::Kill);
            self.cell.kill.cancel();
            return;
        }
        let node = std::sync::Arc::clone(&self.node);
        let _turn = tokio::select! {
            turn = node.expiries.acquire() => turn,
            () = self.cell.kill.cancelled() => return,
            () = node.closing.cancelled() => return,
        };
        match self.pause(self.record.lifecycle.pause_mode, self.node.settings.stand_after_deadline).await {
            Ok(()) => {
                tracing::info!(sandbox = %self.record.id, end_at = %self.end_at(), "paused at its deadline");
                self.report_expiry(OnTimeout::Pause);
            }
            Err(SandboxError::Failed { .. }) => {}
            Err(error) => {
                tracing::error!(sandbox = %self.record.id, ?error, "could not be paused at its deadline");
                self.deadline.failed();
            }
        }
    }

    fn report_expiry(&self, done: OnTimeout) {
        let (sandbox, team) = (self.record.id.clone(), self.record.team.clone());
        self.node.expired.report(Expiry { sandbox, team, done });
    }
}
