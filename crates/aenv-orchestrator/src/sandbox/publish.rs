//! Publication of a paused sandbox, and the question whether it is still this node's.
//!
//! The upload goes on beside the actor, as long as it takes and again until it succeeds; the offer itself is the actor's, so that none
//! is made of a sandbox that was resumed meanwhile.

use std::{sync::Arc, time::Duration};

use aenv_repository::{Offer, PausedError, PausedState, RepositoryError};
use aenv_types::{Checkpoint, CheckpointId};
use rand::Rng;
use tokio::task::JoinHandle;

use super::{Record, Stage, actor::Actor};
use crate::{
    SandboxError,
    deadline::retry_after,
    journal::Survives,
    node::Node,
    shared::{Shared, not_ours},
};

/// How long a removal waits until others are told of it; what takes longer is told later.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

/// Why a publication failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PublishError {
    #[error(transparent)]
    Paused(#[from] PausedError),
    #[error("{0}")]
    Broken(String),
}

impl From<RepositoryError> for PublishError {
    fn from(error: RepositoryError) -> Self {
        Self::Paused(error.into())
    }
}

/// What a publication has prepared.
pub(super) struct Ready {
    /// Of the pause.
    generation: u64,
    next: Next,
}

enum Next {
    /// It is offered already.
    Nothing,
    /// Others are told where it is, and cannot have it.
    Stay,
    /// It is offered in this committed checkpoint.
    Offer(CheckpointId),
}

/// A publication that goes on beside the actor; pending for ever when there is none.
#[derive(Default)]
pub(super) struct Publishing {
    task: Option<JoinHandle<Result<Ready, PublishError>>>,
    failures: u32,
    /// The offer of this pause is known to be there.
    confirmed: bool,
    /// It is about to be removed.
    condemned: bool,
}

impl Publishing {
    /// Waits for its end. May be cancelled.
    pub(super) async fn done(&mut self) -> Result<Ready, PublishError> {
        let Some(task) = &mut self.task else { return std::future::pending().await };
        let outcome = task.await;
        self.task = None;
        outcome.unwrap_or_else(|error| Err(PublishError::Broken(error.to_string())))
    }
}

impl Actor {
    /// Begins to publish what was paused, unless that is done or under way.
    pub(super) fn publish_if_due(&mut self) {
        let offered = self.record.shared == Shared::Offered && self.publishing.confirmed;
        let stays = self.record.shared == Shared::Held && !self.record.volumes.is_empty();
        let publishes = self.node.shares.as_ref().is_some_and(|shares| shares.publish);
        if self.stage != Stage::Paused
            || self.record.hidden
            || offered
            || stays
            || !publishes
            || self.publishing.condemned
            || self.publishing.task.is_some()
        {
            return;
        }
        let wait = match self.publishing.failures {
            0 => Duration::ZERO,
            more => retry_after(more - 1).mul_f64(rand::rng().random_range(0.75..1.25)),
        };
        let (node, record) = (Arc::clone(&self.node), self.record.clone());
        // What is uploaded stays, also when it is resumed and paused again meanwhile.
        let pin = self.node.checkpoints.pin(&record.checkpoint);
        self.publishing.task = Some(self.node.tasks.spawn(async move {
            let work = async {
                tokio::time::sleep(wait).await;
                prepare(&node, &record).await
            };
            let outcome = tokio::select! {
                outcome = work => outcome,
                () = node.closing.cancelled() => Err(PublishError::Broken("the server ends".to_owned())),
            };
            drop(pin);
            outcome
        }));
    }

    /// Offers what was uploaded, if it is still paused.
    pub(super) async fn published(&mut self, outcome: Result<Ready, PublishError>) {
        let ready = match outcome {
            Ok(ready) => ready,
            Err(error) => return self.not_published(error),
        };
        if let Err(error) = self.note_announced(&ready).await {
            return self.not_published(error);
        }
        if self.stage != Stage::Paused || self.record.pauses != ready.generation || self.publishing.condemned
        {
            // A garbage collection takes what was committed.
            return;
        }
        if let Err(error) = self.offer(ready).await {
            self.not_published(error);
        }
    }

    /// Others know of it from here on, also if it does not come to an offer.
    async fn note_announced(&mut self, ready: &Ready) -> Result<(), PublishError> {
        if self.record.shared != Shared::No || matches!(ready.next, Next::Nothing) {
            return Ok(());
        }
        let record = Record { shared: Shared::Held, ..self.record.clone() };
        let noted = self.node.journal.put(&record, Survives::Crash).await;
        noted.map_err(|error| PublishError::Broken(error.to_string()))?;
        self.record = record;
        self.publish();
        Ok(())
    }

    async fn offer(&mut self, ready: Ready) -> Result<(), PublishError> {
        let Some(shares) = &self.node.shares else { return Ok(()) };
        let (shared, checkpoint) = match ready.next {
            Next::Nothing => {
                self.publishing.confirmed = true;
                return Ok(());
            }
            Next::Stay => (Shared::Held, None),
            Next::Offer(checkpoint) => (Shared::Offered, Some(checkpoint)),
        };
        // First here: from the put on others may have it, and this node must not forget that.
        let record = Record { shared, ..self.record.clone() };
        let noted = self.node.journal.put(&record, Survives::PowerLoss).await;
        noted.map_err(|error| PublishError::Broken(error.to_string()))?;
        self.record = record;
        self.node.crash.pass("share.noted").await;
        if let Some(checkpoint) = checkpoint {
            let given = Record { checkpoint: checkpoint.clone(), ..self.record.clone() };
            let record =
                serde_json::to_value(&given).map_err(|error| PublishError::Broken(error.to_string()))?;
            let offer = Offer { generation: ready.generation, checkpoint, record };
            shares.paused.offer(&self.record.team, &self.record.id, &offer).await?;
            self.node.crash.pass("share.offered").await;
            self.publishing.confirmed = true;
            metrics::counter!("aenv_paused_published_total").increment(1);
            tracing::info!(sandbox = %self.record.id, "published; any node may resume it");
        }
        self.publishing.failures = 0;
        self.publish();
        Ok(())
    }

    fn not_published(&mut self, error: PublishError) {
        if self.stage == Stage::Paused
            && self.record.shared == Shared::Offered
            && matches!(error, PublishError::Paused(PausedError::Lost { .. }))
        {
            return self.lose();
        }
        self.publishing.failures = self.publishing.failures.saturating_add(1);
        if self.node.closing.is_cancelled() {
            return;
        }
        metrics::counter!("aenv_paused_publish_failures_total").increment(1);
        tracing::warn!(sandbox = %self.record.id, %error, failures = self.publishing.failures, "a paused sandbox is not published yet");
    }

    /// Makes sure that no other node has a sandbox that was offered, nor gets it from here on.
    pub(super) async fn claim(&mut self) -> Result<(), SandboxError> {
        if self.record.shared != Shared::Offered {
            return Ok(());
        }
        let Some(shares) = &self.node.shares else { return Ok(()) };
        let claimed = shares.paused.claim(&self.record.team, &self.record.id, self.record.pauses).await;
        if let Err(error) = claimed {
            let lost = matches!(error, PausedError::Lost { .. });
            let error = not_ours(&self.record.id, error);
            if lost {
                self.lose();
            }
            return Err(error);
        }
        self.publishing.confirmed = false;
        self.node.crash.pass("share.claimed").await;
        let record = Record { shared: Shared::Held, ..self.record.clone() };
        self.node.journal.put(&record, Survives::Crash).await?;
        self.record = record;
        self.publish();
        Ok(())
    }

    /// Before a removal: claims it, and offers it no more.
    pub(super) async fn condemn(&mut self) -> Result<(), SandboxError> {
        if self.stage == Stage::Paused {
            self.claim().await?;
            self.publishing.condemned = true;
        }
        Ok(())
    }

    /// Forgets a sandbox that another node has taken.
    pub(super) async fn check(&mut self) -> Result<(), SandboxError> {
        let (Stage::Paused, Shared::Offered, Some(shares)) =
            (&self.stage, self.record.shared, &self.node.shares)
        else {
            return Ok(());
        };
        let found = shares.paused.find(&self.record.team, &self.record.id).await;
        let found = found.map_err(|error| not_ours(&self.record.id, error.into()))?;
        let Some(found) = found else { return Ok(()) };
        let still = match found.state {
            PausedState::Paused => found.generation == self.record.pauses,
            PausedState::Held => found.holder.id == shares.paused.own().id,
            PausedState::Ended => false,
        };
        if !still {
            self.lose();
        }
        Ok(())
    }

    /// It is another node's now: nothing of it stays here, and nobody is told that it ended.
    fn lose(&mut self) {
        tracing::info!(sandbox = %self.record.id, "another node has it; its copy here goes");
        self.record.shared = Shared::No;
        self.publishing = Publishing { condemned: true, ..Publishing::default() };
        self.cell.kill.cancel();
    }

    /// Tells other nodes that it was removed.
    pub(super) async fn tell_end(&mut self) {
        // Others may have been told of it without its being noted here.
        let begun = self.publishing.task.is_some() || self.publishing.failures > 0;
        let known = self.record.shared != Shared::No || begun;
        let (true, Some(shares)) = (known, &self.node.shares) else { return };
        if begun {
            shares.untold.notify_one();
        }
        let (team, id) = (&self.record.team, &self.record.id);
        let told = async {
            if self.record.shared == Shared::Offered {
                shares.paused.claim(team, id, self.record.pauses).await?;
            }
            shares.paused.end(team, id).await
        };
        match tokio::time::timeout(TOLD_WITHIN, told).await {
            Ok(Ok(())) => {}
            Ok(Err(PausedError::Lost { .. })) => {
                tracing::warn!(sandbox = %id, "a sandbox that was removed here goes on on another node");
            }
            Ok(Err(PausedError::Repository(error))) => {
                tracing::warn!(sandbox = %id, %error, "that a sandbox was removed is told later");
                shares.untold.notify_one();
            }
            Err(_) => shares.untold.notify_one(),
        }
    }
}

/// Uploads, as long as it takes.
async fn prepare(node: &Node, record: &Record) -> Result<Ready, PublishError> {
    let Some(shares) = &node.shares else { return Err(PublishError::Broken("nothing is shared".to_owned())) };
    let generation = record.pauses;
    let ready = |next| Ok(Ready { generation, next });
    if record.shared == Shared::Offered
        && let Some(found) = shares.paused.find(&record.team, &record.id).await?
        && found.state == PausedState::Paused
        && found.generation == generation
    {
        return ready(Next::Nothing);
    }
    let _turn = shares.uploads.acquire().await;
    shares.paused.announce(&record.team, &record.id).await?;
    node.crash.pass("share.announced").await;
    if !record.volumes.is_empty() {
        return ready(Next::Stay);
    }
    let local = node.checkpoints.get(&record.checkpoint).await;
    let local =
        local.map_err(|error| PublishError::Broken(format!("its manifest cannot be read: {error}")))?;
    // Each try has a manifest of its own: a collection takes one that was not named in time.
    let mut copy = Checkpoint::clone(&local);
    copy.lineage.parent = Some(copy.id);
    copy.id = CheckpointId::random();
    let committed = shares.paused.repository().commit(&copy).await?;
    node.crash.pass("share.committed").await;
    ready(Next::Offer(committed.id))
}
