//! Paused sandboxes that any node may resume, and the fence between those nodes.
//!
//! Each has one document, `teams/<team>/paused/<sandbox>.json`, that is only ever replaced by conditional puts:
//!
//! ```text
//!    announce            offer                  claim
//!  (none) ──> held by A ──────> paused, for all ──────> held by B ──> ...
//!                 │                  claim │ (to end it)   │
//!                 └── end ──> ended <──────┴──── end ──────┘     stays until nobody can have an old copy of it
//! ```
//!
//! * **held**: one node has it, running or paused; nobody else may. Its checkpoint, if it names one, is what that node reads from.
//! * **paused**: whoever claims it first has it. A node that had it before and comes later has lost it, and forgets its copy.
//! * **ended**: it was removed. A node that was away meanwhile learns here that its copy is of no use.
//!
//! A document that is missing takes nothing away: whoever has the sandbox goes on to have it. A pause is known by its generation, which
//! counts pauses on all nodes.

use aenv_types::{CheckpointId, SandboxId, TeamId};
use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use crate::{Repository, RepositoryError, Versioned};

/// Version of the document.
const FORMAT: u32 = 1;
/// Where the documents are among a team's.
const FOLDER: &str = "paused/";
/// Writers that meet look again so many times.
const TRIES: u32 = 8;
/// That a sandbox was ended is told for so long.
const ENDED_FOR: TimeDelta = TimeDelta::days(30);

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// No two nodes have the same.
    pub id: Uuid,
    /// For people.
    pub name: String,
}

/// Who may have a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PausedState {
    /// The holder, and nobody else.
    Held,
    /// Whoever claims it.
    Paused,
    /// Nobody: it was removed.
    Ended,
}

/// The document of a sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PausedSandbox {
    format: u32,
    /// Which.
    pub sandbox: SandboxId,
    /// Who may have it.
    pub state: PausedState,
    /// Who has it, or had it last.
    pub holder: Holder,
    /// Counts its pauses.
    pub generation: u64,
    /// The committed checkpoint that it is paused in, or was launched from.
    pub checkpoint: Option<CheckpointId>,
    /// When it was written.
    pub at: DateTime<Utc>,
    /// All that a node needs to resume it besides, in the orchestrator's own form.
    pub record: serde_json::Value,
}

impl PausedSandbox {
    /// Whether nobody asks for it any more.
    pub fn is_over(&self) -> bool {
        self.state == PausedState::Ended && Utc::now().signed_duration_since(self.at) > ENDED_FOR
    }
}

/// A pause that others may take.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Counts the sandbox's pauses.
    pub generation: u64,
    /// As committed.
    pub checkpoint: CheckpointId,
    /// See [`PausedSandbox::record`].
    pub record: serde_json::Value,
}

/// Why a node does not get, or keep, a sandbox.
#[derive(Debug, Error)]
pub enum PausedError {
    /// Somebody else has it, has had it since, or has ended it.
    #[error("it is {state:?} by node {}", holder.name)]
    Lost {
        /// What became of it.
        state: PausedState,
        /// Who did.
        holder: Holder,
    },
    /// The repository did not do it.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
}

/// The paused sandboxes of a repository, as one node sees them. Cheap to clone.
#[derive(Clone)]
pub struct PausedSandboxes {
    repository: Repository,
    own: Holder,
}

impl PausedSandboxes {
    /// Those of `repository`, for the node `own`.
    pub fn new(repository: Repository, own: Holder) -> Self {
        Self { repository, own }
    }

    /// The repository that they are in.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// This node.
    pub fn own(&self) -> &Holder {
        &self.own
    }

    /// What is known of a sandbox.
    pub async fn find(
        &self,
        team: &TeamId,
        id: &SandboxId,
    ) -> Result<Option<PausedSandbox>, RepositoryError> {
        Ok(self.read(team, id).await?.map(|found| found.value))
    }

    /// Says that this node has a sandbox. No other one may have it then.
    pub async fn announce(&self, team: &TeamId, id: &SandboxId) -> Result<(), PausedError> {
        self.change(team, id, |found| match found {
            None => Ok(Some(self.held(id, None))),
            Some(found) => self.kept(found).map(|()| None),
        })
        .await
    }

    /// Lets any node have a sandbox of this one's. It was announced before.
    pub async fn offer(&self, team: &TeamId, id: &SandboxId, offer: &Offer) -> Result<(), PausedError> {
        let offered = || PausedSandbox {
            state: PausedState::Paused,
            generation: offer.generation,
            checkpoint: Some(offer.checkpoint.clone()),
            record: offer.record.clone(),
            ..self.held(id, None)
        };
        self.change(team, id, |found| match found {
            Some(found) if found.state == PausedState::Paused && found.generation == offer.generation => {
                Ok(None)
            }
            Some(found) => self.kept(found).map(|()| Some(offered())),
            None => Ok(Some(offered())),
        })
        .await
    }

    /// Has a paused sandbox from here on, in the pause of this generation, or has lost it.
    pub async fn claim(&self, team: &TeamId, id: &SandboxId, generation: u64) -> Result<(), PausedError> {
        self.change(team, id, |found| match found {
            Some(found) if found.state == PausedState::Paused && found.generation == generation => {
                Ok(Some(self.held(id, Some(found))))
            }
            Some(found) => self.kept(found).map(|()| None),
            None => Ok(Some(self.held(id, None))),
        })
        .await
    }

    /// Tells everybody that a sandbox of this node's was removed.
    pub async fn end(&self, team: &TeamId, id: &SandboxId) -> Result<(), PausedError> {
        let ended = || PausedSandbox { state: PausedState::Ended, ..self.held(id, None) };
        self.change(team, id, |found| match found {
            None => Ok(None),
            Some(found) if found.state == PausedState::Ended => Ok(None),
            Some(found) => self.kept(found).map(|()| Some(ended())),
        })
        .await
    }

    /// All of a team's.
    pub async fn list(&self, team: &TeamId) -> Result<Vec<PausedSandbox>, RepositoryError> {
        let mut all = Vec::new();
        for key in self.repository.list(team, FOLDER).await? {
            match self.repository.get::<PausedSandbox>(team, &key).await {
                Ok(found) => all.push(found.value),
                // It was over, and a collection took it.
                Err(RepositoryError::NotFound(_)) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(all)
    }

    /// Whether what is known of a sandbox leaves it to this node.
    fn kept(&self, found: &PausedSandbox) -> Result<(), PausedError> {
        match found.state {
            PausedState::Held if found.holder.id == self.own.id => Ok(()),
            state => Err(PausedError::Lost { state, holder: found.holder.clone() }),
        }
    }

    fn held(&self, id: &SandboxId, from: Option<&PausedSandbox>) -> PausedSandbox {
        PausedSandbox {
            format: FORMAT,
            sandbox: id.clone(),
            state: PausedState::Held,
            holder: self.own.clone(),
            generation: from.map_or(0, |from| from.generation),
            checkpoint: from.and_then(|from| from.checkpoint.clone()),
            at: Utc::now(),
            record: serde_json::Value::Null,
        }
    }

    /// Replaces the document by what `decide` makes of it. `decide` may be asked again.
    async fn change(
        &self,
        team: &TeamId,
        id: &SandboxId,
        decide: impl Fn(Option<&PausedSandbox>) -> Result<Option<PausedSandbox>, PausedError>,
    ) -> Result<(), PausedError> {
        let key = key(id);
        for _ in 0..TRIES {
            let found = self.read(team, id).await?;
            let Some(next) = decide(found.as_ref().map(|found| &found.value))? else { return Ok(()) };
            let version = found.as_ref().map(|found| &found.version);
            match self.repository.put(team, &key, &next, version).await {
                Err(RepositoryError::Conflict(_)) => {}
                written => return Ok(written.map(drop)?),
            }
        }
        Err(RepositoryError::Conflict(key).into())
    }

    async fn read(
        &self,
        team: &TeamId,
        id: &SandboxId,
    ) -> Result<Option<Versioned<PausedSandbox>>, RepositoryError> {
        let key = key(id);
        let found = match self.repository.get::<PausedSandbox>(team, &key).await {
            // In a folder that is not mounted nothing is known of any sandbox.
            Err(RepositoryError::NotFound(_)) => return self.repository.still_there().await.map(|()| None),
            found => found?,
        };
        let PausedSandbox { format, sandbox, .. } = &found.value;
        if *format > FORMAT {
            return Err(RepositoryError::Format { what: key, found: *format, known: FORMAT });
        }
        if sandbox != id {
            let message = format!("it is the document of {sandbox}");
            return Err(RepositoryError::Corrupt { what: key, message });
        }
        Ok(Some(found))
    }
}

impl Repository {
    /// Keys of a team's documents of paused sandboxes.
    pub async fn paused_keys(&self, team: &TeamId) -> Result<Vec<String>, RepositoryError> {
        self.list(team, FOLDER).await
    }

    /// Removes the document of a sandbox that is [over](PausedSandbox::is_over).
    pub async fn forget_paused(&self, team: &TeamId, id: &SandboxId) -> Result<(), RepositoryError> {
        match self.delete(team, &key(id)).await {
            Err(RepositoryError::NotFound(_)) => Ok(()),
            removed => removed,
        }
    }
}

fn key(id: &SandboxId) -> String {
    format!("{FOLDER}{id}")
}
