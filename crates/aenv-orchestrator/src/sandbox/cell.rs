//! What others hold of a sandbox: its queue, its published state, its samples.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use aenv_types::{Checkpoint, EgressPolicy, SandboxId, TeamId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{Record, Stage};
use crate::{
    CaptureMode, ChildResult, MetricSample, PauseMode, Route, SandboxError, SandboxView, Timeout,
    admission::Permit,
    pressure::{Balloon, Gauge},
};

/// Requests that may wait for one sandbox.
pub(super) const QUEUE: usize = 64;

/// How long anybody waits for a transition to end.
pub(crate) const TRANSITION: Duration = Duration::from_secs(180);

/// Where an answer goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, SandboxError>>;

/// What can be asked of a sandbox, but for kill, which does not wait in the queue.
pub(crate) enum Command {
    Pause {
        mode: PauseMode,
        reply: Reply<()>,
    },
    Resume {
        timeout: Timeout,
        mode: PauseMode,
        reply: Reply<(SandboxView, bool)>,
    },
    SetTimeout {
        timeout: Timeout,
        reply: Reply<()>,
    },
    SetNetwork {
        change: Box<NetworkChange>,
        reply: Reply<()>,
    },
    Capture {
        mode: CaptureMode,
        reply: Reply<Checkpoint>,
    },
    /// One place for each child, in order; a child whose place could not be had fails with that.
    Fork {
        places: Vec<Result<Permit, SandboxError>>,
        timeout: Duration,
        reply: Reply<Vec<ChildResult>>,
    },
    /// It is about to be removed.
    Condemn {
        reply: Reply<()>,
    },
    /// Another node may have taken it.
    Check {
        reply: Reply<()>,
    },
    Rollback {
        checkpoint: Arc<Checkpoint>,
        reply: Reply<SandboxView>,
    },
    /// Its VMM is not to stand any longer while it is paused.
    EndStanding {
        reply: Reply<()>,
    },
    /// What its guest is to give back, in MiB; `None` only looks.
    Balloon {
        held_mib: Option<u32>,
        reply: Reply<Balloon>,
    },
}

/// New egress rules.
pub(crate) struct NetworkChange {
    pub egress: EgressPolicy,
    pub network: serde_json::Value,
    pub allow_internet_access: Option<bool>,
}

/// What an actor shows.
#[derive(Clone)]
pub(crate) struct Published {
    pub stage: Stage,
    pub record: Arc<Record>,
    /// While a generation runs.
    pub route: Option<Route>,
}

/// A sandbox as others see it.
pub(crate) struct Cell {
    pub id: SandboxId,
    pub team: TeamId,
    /// Told when the sandbox is to be removed, whatever it is doing.
    pub kill: CancellationToken,
    /// One caller at a time wakes a paused sandbox; the others wait for it.
    pub wake: tokio::sync::Mutex<()>,
    /// Samples of what it used.
    pub samples: Mutex<VecDeque<MetricSample>>,
    /// Samplings in a row that the guest did not answer.
    pub misses: AtomicU32,
    /// What is known of its guest's memory.
    pub gauge: Mutex<Gauge>,
    /// Until when its VMM stands, while it is paused.
    pub stands: Mutex<Option<tokio::time::Instant>>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) state: watch::Receiver<Published>,
}

impl Cell {
    /// The state as it was published last.
    pub(crate) fn now(&self) -> Published {
        self.state.borrow().clone()
    }

    /// Puts a request into the queue and waits for the answer. The work goes on if the caller goes away.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, SandboxError> {
        let (reply, answer) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(self.unanswered());
        }
        answer.await.unwrap_or_else(|_| Err(self.unanswered()))
    }

    /// Waits until the published state fits.
    pub(crate) async fn wait_for(
        &self,
        fits: impl FnMut(&Published) -> bool,
    ) -> Result<Published, SandboxError> {
        let mut state = self.state.clone();
        match tokio::time::timeout(TRANSITION, state.wait_for(fits)).await {
            Ok(Ok(published)) => Ok(published.clone()),
            Ok(Err(_)) => Err(self.unanswered()),
            Err(_) => Err(SandboxError::internal(
                format!("sandbox {} is busy; try again", self.id),
                format!("it stayed in {:?} for {TRANSITION:?}", self.now().stage),
            )),
        }
    }

    /// Waits until nothing of it is there.
    pub(crate) async fn gone(&self) -> Result<(), SandboxError> {
        self.wait_for(|now| now.stage == Stage::Gone).await.map(drop)
    }

    /// Whether the guest has stopped answering.
    pub(crate) fn is_silent(&self) -> bool {
        self.misses.load(Ordering::Relaxed) >= 2
    }

    /// Why an actor is gone without an answer.
    fn unanswered(&self) -> SandboxError {
        match self.now().stage {
            Stage::Gone | Stage::Killing => SandboxError::Deleted(self.id.clone()),
            _ => SandboxError::ShuttingDown,
        }
    }
}
