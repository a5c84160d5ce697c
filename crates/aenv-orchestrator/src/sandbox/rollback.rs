//! Rollback: end, then launch an earlier checkpoint with the same identity.

use aenv_types::{Checkpoint, Origin};

use super::{Phase, Record, Stage, actor::Actor};
use crate::{
    SandboxError, SandboxState, SandboxView,
    admission::Claim,
    journal::{Change, Survives},
    launch::{Start, VM_NOTE},
};

impl Actor {
    pub(super) async fn rollback(&mut self, checkpoint: &Checkpoint) -> Result<SandboxView, SandboxError> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(self.unfit(&self.stage));
        }
        match &checkpoint.lineage.origin {
            Origin::Sandbox { sandbox, .. } if *sandbox == self.record.id => {}
            _ => {
                return Err(SandboxError::Invalid(format!(
                    "checkpoint {} was not taken of sandbox {}; create a new sandbox from it instead",
                    checkpoint.id, self.record.id
                )));
            }
        }
        let _pin = self.node.checkpoints.pin(&checkpoint.id);
        self.node.checkpoints.put(checkpoint).await.map_err(|error| {
            self.node.explain(SandboxError::internal("the checkpoint's manifest could not be written", error))
        })?;
        self.node.disk_room()?;
        let was_paused = self.stage == Stage::Paused;
        self.end_standing().await;
        let extra = match was_paused {
            true => {
                let permit = self.node.reserve(&Claim::of(&self.record)).await?;
                self.claim().await?;
                Some(permit)
            }
            false => None,
        };
        let left = (self.record.end_at - chrono::Utc::now()).to_std().unwrap_or_default();
        let timeout = if was_paused || left.is_zero() { self.record.timeout } else { left };

        self.enter(Stage::RollingBack);
        let noted = self.note(Phase::RollingBack { to: checkpoint.id.clone() }, Survives::Crash).await;
        if let Err(error) = noted {
            self.enter(if was_paused { Stage::Paused } else { Stage::Running });
            return Err(error);
        }
        self.node.crash.pass("rollback.noted").await;
        let permit = match self.generation.take() {
            Some(generation) => Some(generation.end_and_keep_permit(&self.node, &self.record.id).await),
            None => extra,
        };
        let ended = Record {
            launched: None,
            checkpoint: checkpoint.id.clone(),
            keeps_memory: checkpoint.has_memory(),
            ..self.record.clone()
        };
        self.record = ended;
        self.publish();
        let forget = Change::Forget { sandbox: self.record.id.clone(), key: VM_NOTE.into() };
        if let Err(error) = self.node.journal.commit(vec![forget], Survives::Crash).await {
            tracing::warn!(sandbox = %self.record.id, %error, "an ended VMM stays noted");
        }
        self.node.crash.pass("rollback.ended").await;

        let before = self.record.clone();
        let launched = match permit {
            Some(permit) => self.launch(checkpoint, Start::of(checkpoint), permit, timeout, None).await,
            None => Err(self.unfit(&self.stage)),
        };
        self.node.garbage.notify_one();
        match launched {
            Ok(()) => {
                self.node.crash.pass("rollback.launched").await;
                Ok(self.record.view(SandboxState::Running))
            }
            Err(error) => {
                self.back_to_paused(before).await;
                Err(self.node.explain(error))
            }
        }
    }
}
