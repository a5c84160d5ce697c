//! A sandbox that was paused at its deadline and whose VMM stands for a while beside that, so that a resume goes on in place.
//!
//! It is paused like any other: its checkpoint is durable and in the journal, and a server that comes back ends what stands. It takes
//! memory and a network slot, counts for no team, and gives way after standbys.

use std::time::Duration;

use tokio::time::Instant;

use super::{Launched, Phase, Stage, actor::Actor};
use crate::{
    SandboxError, admission::Claim, checkpoints::Fresh, journal::Survives, launch, launch::Generation,
    pressure::Gauge,
};

/// What stands.
pub(super) struct Standing {
    generation: Generation,
    /// What the next capture builds on, should it go on.
    launched: Launched,
    /// Of which the checkpoint may name others.
    _layers: Vec<Fresh>,
    /// Who shows its memory and disks.
    exports: u32,
    until: Instant,
}

impl Standing {
    /// Returns when it is of no use any more.
    pub(super) async fn over(&self) {
        tokio::select! {
            () = tokio::time::sleep_until(self.until) => {}
            _ = self.generation.vm.exited() => {}
        }
    }
}

impl Actor {
    /// Lets what ran stand for a while, or ends it if it is not to. The sandbox is paused in its checkpoint.
    pub(super) async fn let_stand(&mut self, launched: Option<Launched>, time: Duration) {
        let Some(launched) = launched.filter(|_| !time.is_zero()) else { return self.end_generation().await };
        let Ok(exports) = self.node.exports.instance().await else { return self.end_generation().await };
        let Some(mut generation) = self.generation.take() else { return };
        generation.pass_to_nobody();
        let layers = launched.layers().map(|name| self.node.checkpoints.fresh(name)).collect();
        let until = Instant::now() + time;
        *self.cell.stands.lock() = Some(until);
        self.standing = Some(Standing { generation, launched, _layers: layers, exports, until });
    }

    /// Ends what stands, if anything does.
    pub(super) async fn end_standing(&mut self) {
        *self.cell.stands.lock() = None;
        if let Some(standing) = self.standing.take() {
            standing.generation.end(&self.node, &self.record.id).await;
        }
    }

    /// Goes on in place. `false`, and nothing stands any more, where the checkpoint has to be launched.
    pub(super) async fn go_on_in_place(&mut self, timeout: Duration) -> Result<bool, SandboxError> {
        let Some(mut standing) = self.standing.take() else { return Ok(false) };
        let permit = &mut standing.generation.permit;
        if let Err(error) = self.node.admission.promote(permit, &Claim::of(&self.record)) {
            self.standing = Some(standing);
            return Err(error);
        }
        *self.cell.stands.lock() = None;
        let before = self.record.clone();
        self.enter(Stage::Resuming);
        let Standing { generation, launched, exports, .. } = &standing;
        let went = async {
            match self.node.exports.instance().await {
                Ok(instance) if instance == *exports => {}
                _ => return Err(SandboxError::internal("it cannot go on in place", "its blockd is gone")),
            }
            let checkpoint = self.manifest().await?;
            self.note(Phase::Resuming, Survives::Crash).await?;
            self.node.crash.pass("resume.noted").await;
            let order = launch::InPlace { record: &self.record, checkpoint: &checkpoint, launched, timeout };
            launch::in_place(&self.node, order, generation, &self.cell.kill).await
        };
        match went.await {
            Ok(record) => {
                self.record = record;
                self.generation = Some(standing.generation);
                self.deadline.clear();
                self.cell.misses.store(0, std::sync::atomic::Ordering::Relaxed);
                *self.cell.gauge.lock() = Gauge::new();
                self.enter(Stage::Running);
                Ok(true)
            }
            Err(error) => {
                tracing::warn!(sandbox = %self.record.id, ?error, "it does not go on in place; its checkpoint is launched");
                standing.generation.end(&self.node, &self.record.id).await;
                self.back_to_paused(before).await;
                Ok(false)
            }
        }
    }
}
