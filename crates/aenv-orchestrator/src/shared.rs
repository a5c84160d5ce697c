//! Sandboxes that other nodes may resume: those that are paused in a repository that several nodes share.
//!
//! A node says in the repository that it has a sandbox, and after a pause it may *offer* it. From then on whoever *claims* it first has
//! it, the node that paused it included: it asks before each resume. One that comes too late forgets its copy. What may happen to the
//! document is [`aenv_repository::paused`]'s to say; here are the sandboxes that come, go, and are cleared away. An actor's own part
//! is [`crate::sandbox`]'s.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use aenv_repository::{
    Holder, PausedError, PausedSandbox, PausedSandboxes, PausedState, Repository, RepositoryError,
};
use aenv_types::{Checkpoint, Home, SandboxId, TeamId};
use parking_lot::Mutex;
use rand::Rng;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, OwnedMutexGuard, Semaphore};

use crate::{
    SandboxError, SandboxState, SandboxView,
    handle::Sharing,
    journal::Survives,
    node::Node,
    sandbox::{Adopted, Cell, Command, Phase, Record, Stage, restore},
};

/// Checkpoints that are uploaded at once.
const UPLOADS: usize = 2;
/// Between two looks at all documents.
const SWEEP: Duration = Duration::from_secs(3600);
/// After one that failed, or an end that could not be told.
const SWEEP_AGAIN: Duration = Duration::from_secs(30);
/// When a client may ask again while the repository is away.
const REPOSITORY_AGAIN: Duration = Duration::from_secs(5);

/// What other nodes know of a sandbox, as the journal keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Shared {
    /// Nothing, or that this node has it.
    #[default]
    No,
    /// That this node has it.
    Held,
    /// Maybe that they may have it: this node asks before it does anything with it.
    Offered,
}

/// A node's part in sharing.
pub(crate) struct Shares {
    pub paused: PausedSandboxes,
    /// Whether paused sandboxes are offered, and those of others brought here.
    pub publish: bool,
    /// Turns of uploads.
    pub uploads: Semaphore,
    /// An end could not be told.
    pub untold: Notify,
    /// One caller at a time brings or ends a sandbox that this node does not have.
    turns: Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>,
}

impl Shares {
    /// Of a node whose own id is in its home, or is made now.
    pub(crate) fn open(home: &Home, sharing: Sharing) -> io::Result<Self> {
        let path = home.node_id();
        let id = match std::fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().map_err(io::Error::other)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let id = uuid::Uuid::new_v4();
                aenv_durable::write(&path, format!("{id}\n").as_bytes())?;
                id
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            paused: PausedSandboxes::new(sharing.repository, Holder { id, name: sharing.node }),
            publish: sharing.publish,
            uploads: Semaphore::new(UPLOADS),
            untold: Notify::new(),
            turns: Mutex::default(),
        })
    }

    fn repository(&self) -> &Repository {
        self.paused.repository()
    }

    async fn turn(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        let turn = Arc::clone(self.turns.lock().entry(id.clone()).or_default());
        let held = turn.lock_owned().await;
        // Those that nobody holds or waits for.
        self.turns.lock().retain(|_, turn| Arc::strong_count(turn) > 1);
        held
    }
}

/// A sandbox that this node does not have, brought here paused. Whoever resumes it claims it.
pub(crate) async fn bring(
    node: &Arc<Node>,
    team: &TeamId,
    id: &SandboxId,
) -> Result<Arc<Cell>, SandboxError> {
    let missing = || SandboxError::NotFound(id.clone());
    let shares = node.shares.as_ref().filter(|shares| shares.publish).ok_or_else(missing)?;
    let _turn = shares.turn(id).await;
    if let Ok(cell) = node.registry.of_team(team, id) {
        return Ok(cell);
    }
    node.disk_room()?;
    loop {
        let found = available(shares, team, id).await?;
        let record = record_of(team, &found)?;
        match fetch(shares, &record).await {
            Ok(checkpoint) => return adopt(node, record, &checkpoint).await,
            Err(error @ RepositoryError::Store { .. }) => return Err(away(id, error)),
            Err(error) => {
                // Resumed and paused again meanwhile, it is in another checkpoint, and the one of before may be gone.
                if available(shares, team, id).await?.generation != found.generation {
                    continue;
                }
                tracing::error!(sandbox = %id, %error, "a paused sandbox cannot be had from the repository");
                let reason = "it is missing or damaged in the repository".to_owned();
                return Err(SandboxError::BadCheckpoint { id: record.checkpoint, reason });
            }
        }
    }
}

/// The document of a sandbox that may be claimed.
async fn available(shares: &Shares, team: &TeamId, id: &SandboxId) -> Result<PausedSandbox, SandboxError> {
    let found = shares.paused.find(team, id).await.map_err(|error| away(id, error))?;
    let found = found.ok_or_else(|| SandboxError::NotFound(id.clone()))?;
    match found.state {
        PausedState::Paused => Ok(found),
        PausedState::Ended => Err(SandboxError::NotFound(id.clone())),
        // Nothing of it is here: its end was not told yet.
        PausedState::Held if found.holder.id == shares.paused.own().id => {
            Err(SandboxError::NotFound(id.clone()))
        }
        PausedState::Held => Err(SandboxError::Elsewhere { id: id.clone(), node: found.holder.name }),
    }
}

fn record_of(team: &TeamId, found: &PausedSandbox) -> Result<Record, SandboxError> {
    let broken = |detail: String| {
        SandboxError::internal(
            format!("sandbox {} was paused in a form that is not understood", found.sandbox),
            detail,
        )
    };
    let record: Record =
        serde_json::from_value(found.record.clone()).map_err(|error| broken(error.to_string()))?;
    let fits = record.id == found.sandbox
        && record.team == *team
        && record.pauses == found.generation
        && found.checkpoint.as_ref() == Some(&record.checkpoint);
    if !fits {
        return Err(broken("its record is another one's".to_owned()));
    }
    Ok(Record { phase: Phase::Paused, launched: None, shared: Shared::Offered, ..record })
}

async fn fetch(shares: &Shares, record: &Record) -> Result<Checkpoint, RepositoryError> {
    let checkpoint = shares.repository().checkpoint(&record.checkpoint).await?;
    shares.repository().fetch(&checkpoint).await?;
    Ok(checkpoint)
}

async fn adopt(node: &Arc<Node>, record: Record, checkpoint: &Checkpoint) -> Result<Arc<Cell>, SandboxError> {
    let _pin = node.checkpoints.pin(&checkpoint.id);
    node.checkpoints.put(checkpoint).await.map_err(|error| {
        node.explain(SandboxError::internal("the checkpoint's manifest could not be written", error))
    })?;
    node.journal.put(&record, Survives::PowerLoss).await?;
    node.crash.pass("share.brought").await;
    let (id, team) = (record.id.clone(), record.team.clone());
    tracing::info!(sandbox = %id, "brought here from the repository");
    restore(node, Adopted { record, stage: Stage::Paused, generation: None });
    node.registry.of_team(&team, &id)
}

/// Ends a paused sandbox that this node does not have.
pub(crate) async fn end(node: &Arc<Node>, team: &TeamId, id: &SandboxId) -> Result<(), SandboxError> {
    let missing = || SandboxError::NotFound(id.clone());
    let shares = node.shares.as_ref().filter(|shares| shares.publish).ok_or_else(missing)?;
    let _turn = shares.turn(id).await;
    let found = available(shares, team, id).await?;
    let claimed = shares.paused.claim(team, id, found.generation).await;
    claimed.map_err(|error| not_ours(id, error))?;
    node.crash.pass("share.claimed").await;
    // Should this fail, the sweep finds a sandbox that this node is to have, and has not.
    shares.paused.end(team, id).await.map_err(|error| not_ours(id, error))
}

/// What a sandbox that this node does not have looks like, if it may be brought here.
pub(crate) async fn look(
    node: &Arc<Node>,
    team: &TeamId,
    id: &SandboxId,
) -> Result<SandboxView, SandboxError> {
    let missing = || SandboxError::NotFound(id.clone());
    let shares = node.shares.as_ref().filter(|shares| shares.publish).ok_or_else(missing)?;
    let found = available(shares, team, id).await?;
    Ok(node.view(&record_of(team, &found)?, SandboxState::Paused))
}

/// Why a sandbox is not this node's.
pub(crate) fn not_ours(id: &SandboxId, error: PausedError) -> SandboxError {
    match error {
        PausedError::Lost { state: PausedState::Ended, .. } => SandboxError::Deleted(id.clone()),
        PausedError::Lost { holder, .. } => SandboxError::Elsewhere { id: id.clone(), node: holder.name },
        PausedError::Repository(error) => away(id, error),
    }
}

fn away(id: &SandboxId, error: RepositoryError) -> SandboxError {
    match error {
        RepositoryError::Store { .. } | RepositoryError::Conflict(_) => {
            tracing::warn!(sandbox = %id, %error, "it cannot be said whose a sandbox is");
            SandboxError::RepositoryAway { id: id.clone(), retry_after: REPOSITORY_AGAIN }
        }
        broken => {
            SandboxError::internal(format!("what the repository has of sandbox {id} cannot be read"), broken)
        }
    }
}

/// Runs until the node closes: tells ends that could not be told, and lets go of what other nodes have taken.
pub(crate) async fn run(node: Arc<Node>) {
    let Some(shares) = &node.shares else { return };
    if !shares.publish && node.registry.records().iter().all(|record| record.shared == Shared::No) {
        return;
    }
    loop {
        let next = match sweep(&node, shares).await {
            Ok(()) => SWEEP.mul_f64(rand::rng().random_range(0.75..1.25)),
            Err(error) => {
                tracing::warn!(%error, "the repository's paused sandboxes cannot be looked at");
                SWEEP_AGAIN
            }
        };
        tokio::select! {
            () = node.closing.cancelled() => return,
            () = tokio::time::sleep(next) => {}
            () = async { shares.untold.notified().await; tokio::time::sleep(SWEEP_AGAIN).await } => {}
        }
    }
}

async fn sweep(node: &Arc<Node>, shares: &Shares) -> Result<(), RepositoryError> {
    for team in shares.repository().teams().await? {
        for found in shares.paused.list(&team).await? {
            let id = &found.sandbox;
            let held = found.state == PausedState::Held && found.holder.id == shares.paused.own().id;
            match node.registry.any(id) {
                Ok(cell) => {
                    let record = cell.now().record;
                    let same = found.state == PausedState::Paused && found.generation == record.pauses;
                    if record.shared == Shared::Offered && !same {
                        // It looks again by itself.
                        cell.ask(|reply| Command::Check { reply }).await.ok();
                    }
                }
                Err(_) if held => {
                    let _turn = shares.turn(id).await;
                    if node.registry.any(id).is_err() {
                        match shares.paused.end(&team, id).await {
                            Ok(()) => tracing::info!(sandbox = %id, "the end of a sandbox was told late"),
                            Err(PausedError::Lost { .. }) => {}
                            Err(PausedError::Repository(error)) => return Err(error),
                        }
                    }
                }
                Err(_) => {}
            }
        }
    }
    Ok(())
}
