//! Pause: capture, then end.

use std::{sync::Arc, time::Duration};

use aenv_types::CheckpointId;

use super::{Phase, Record, Stage, actor::Actor};
use crate::{
    PauseMode, SandboxError,
    capture::{After, Shot, capture},
    checkpoints::Fresh,
    journal::{Change, Survives},
    timeline::Timeline,
};

impl Actor {
    /// `stand`: how long its VMM stands then.
    pub(super) async fn pause(&mut self, mode: PauseMode, stand: Duration) -> Result<(), SandboxError> {
        self.running()?;
        self.enter(Stage::Pausing);
        let before = self.record.clone();
        // Layers stay until the record that names them is shown.
        let mut held = Vec::new();
        match self.try_pause(mode, stand, &mut held).await {
            Ok(()) => {
                self.node.garbage.notify_one();
                Ok(())
            }
            Err(error) => {
                // Layers that were sealed meanwhile are part of the running disks now.
                let launched = self.record.launched.clone();
                self.record = Record { launched, ..before };
                self.back_to_running().await;
                Err(self.node.explain(error))
            }
        }
    }

    /// After a verb that left the guest running.
    pub(super) async fn back_to_running(&mut self) {
        if let Err(error) = self.note(Phase::Running, Survives::Crash).await {
            tracing::error!(sandbox = %self.record.id, ?error, "a running sandbox could not be journaled");
        }
        self.enter(Stage::Running);
    }

    async fn try_pause(
        &mut self,
        mode: PauseMode,
        stand: Duration,
        held: &mut Vec<Fresh>,
    ) -> Result<(), SandboxError> {
        let into = CheckpointId::random();
        let _pin = self.node.checkpoints.pin(&into);
        // With the note, so that a pause that the next start finishes counts.
        self.record.pauses += 1;
        self.note(Phase::Pausing { into: into.clone() }, Survives::Crash).await?;
        self.node.crash.pass("pause.noted").await;
        let node = Arc::clone(&self.node);
        let Some(generation) = &self.generation else { return Err(self.unfit(&self.stage)) };
        let shot = Shot { id: into.clone(), mode, after: After::End };
        Box::pin(capture(&node, &mut self.record, generation, shot, held)).await?;
        node.crash.pass("pause.captured").await;

        let mut timeline = Timeline::new();
        let paused = Record {
            phase: Phase::Paused,
            checkpoint: into,
            launched: None,
            keeps_memory: mode == PauseMode::Full,
            unresponsive_at_pause: self.cell.is_silent(),
            ..self.record.clone()
        };
        let journaled =
            node.journal.commit(vec![Change::Put(Box::new(paused.clone()))], Survives::PowerLoss).await;
        if let Err(error) = journaled {
            generation.go_on(&self.record.id).await;
            return Err(error.into());
        }
        let launched = self.record.launched.take().filter(|_| mode == PauseMode::Full);
        self.record = paused;
        node.crash.pass("pause.journaled").await;
        timeline.step("journaled");
        self.let_stand(launched, stand).await;
        node.crash.pass("pause.ended").await;
        timeline.step("ended");
        tracing::debug!(sandbox = %self.record.id, timeline = timeline.told(), "paused");
        self.enter(Stage::Paused);
        Ok(())
    }
}
