//! The actor: one task that owns a sandbox and does one thing at a time.

use std::{
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use aenv_types::Checkpoint;
use chrono::{DateTime, Utc};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{
    Cell, Command, Phase, Record, Reply, Stage,
    cell::{Published, QUEUE},
    merge::Merging,
    publish::{PublishError, Publishing, Ready},
    standing::Standing,
};
use crate::{
    CreateRequest, Route, SandboxError, SandboxState, SandboxView,
    admission::{Claim, Permit},
    capture::compact::Merged,
    checkpoints::Pin,
    deadline::Deadline,
    journal::{Change, Survives},
    launch::{self, Ahead, Awake, Generation, Start},
    node::Node,
    pressure::Gauge,
};

/// How long the reason of a failed sandbox is kept.
const FAILED_FOR: Duration = Duration::from_secs(600);

/// The owner of a sandbox.
pub(super) struct Actor {
    pub(super) node: Arc<Node>,
    pub(super) cell: Arc<Cell>,
    pub(super) record: Record,
    pub(super) stage: Stage,
    pub(super) generation: Option<Generation>,
    pub(super) deadline: Deadline,
    pub(super) standing: Option<Standing>,
    pub(super) merging: Merging,
    pub(super) publishing: Publishing,
    state: watch::Sender<Published>,
    commands: mpsc::Receiver<Command>,
}

/// What comes next.
enum Event {
    Close,
    Kill,
    Exited(String),
    Command(Command),
    Expired,
    StoodLongEnough,
    Merged(Result<Merged, SandboxError>),
    Published(Result<Ready, PublishError>),
}

/// A sandbox that was found alive or paused at start.
pub(crate) struct Adopted {
    pub record: Record,
    pub stage: Stage,
    pub generation: Option<Generation>,
}

/// Starts the actor of a new sandbox; the answer comes when its guest has answered. With a standby it takes the id of that; one
/// that turns out to be of no use is launched anew.
pub(crate) fn spawn_new(
    node: &Arc<Node>,
    request: CreateRequest,
    permit: Permit,
    standby: Option<Ahead>,
    pin: Pin,
) -> oneshot::Receiver<Result<SandboxView, SandboxError>> {
    let (reply, answer) = oneshot::channel();
    let owner = Arc::clone(node);
    node.tasks.spawn(async move {
        let mut record = Record::new(&request);
        let awake = match standby {
            Some(standby) => standby.wake(&owner, &record.egress).await,
            None => None,
        };
        if let Some(awake) = &awake {
            record.id = awake.id.clone();
        }
        let actor = Actor::new(&owner, Adopted { record, stage: Stage::Creating, generation: None });
        let actor = actor.create(&request.checkpoint, permit, awake, reply).await;
        drop(pin);
        if let Some(actor) = actor {
            actor.run().await;
        }
    });
    answer
}

/// Starts the actor of a sandbox that outlived the server.
pub(crate) fn restore(node: &Arc<Node>, adopted: Adopted) {
    let actor = Actor::new(node, adopted);
    node.tasks.spawn(actor.run());
}

impl Actor {
    fn new(node: &Arc<Node>, adopted: Adopted) -> Box<Self> {
        let Adopted { record, stage, generation } = adopted;
        let route = generation.as_ref().map(|generation| route(&record, generation));
        let published = Published { stage: stage.clone(), record: Arc::new(record.clone()), route };
        let (state, watched) = watch::channel(published);
        let (sender, commands) = mpsc::channel(QUEUE);
        let cell = Arc::new(Cell {
            id: record.id.clone(),
            team: record.team.clone(),
            kill: CancellationToken::new(),
            wake: tokio::sync::Mutex::default(),
            samples: parking_lot::Mutex::default(),
            misses: AtomicU32::new(0),
            gauge: parking_lot::Mutex::new(Gauge::new()),
            stands: parking_lot::Mutex::default(),
            commands: sender,
            state: watched,
        });
        node.registry.insert(Arc::clone(&cell));
        Box::new(Self {
            node: Arc::clone(node),
            cell,
            record,
            stage,
            generation,
            deadline: Deadline::default(),
            standing: None,
            merging: Merging::default(),
            publishing: Publishing::default(),
            state,
            commands,
        })
    }

    /// The first launch. `None` when it did not succeed: nothing is left then.
    async fn create(
        mut self: Box<Self>,
        checkpoint: &Checkpoint,
        permit: Permit,
        awake: Option<Awake>,
        reply: Reply<SandboxView>,
    ) -> Option<Box<Self>> {
        match self.try_create(checkpoint, permit, awake).await {
            Ok(()) => {
                tracing::info!(sandbox = %self.record.id, timings = ?self.record.timings, "created");
                self.node.crash.pass("create.published").await;
                let _ = reply.send(Ok(self.record.view(SandboxState::Running)));
                Some(self)
            }
            Err(error) => {
                tracing::warn!(sandbox = %self.record.id, ?error, "could not be created");
                self.vanish().await;
                let _ = reply.send(Err(error));
                None
            }
        }
    }

    async fn try_create(
        &mut self,
        checkpoint: &Checkpoint,
        permit: Permit,
        awake: Option<Awake>,
    ) -> Result<(), SandboxError> {
        // What there is of a standby is noted, and without a record it is removed.
        if awake.is_none() {
            self.node.journal.put(&self.record, Survives::Crash).await?;
            self.node.crash.pass("create.noted").await;
        }
        let (start, timeout, claimed) = (Start::of(checkpoint), self.record.timeout, awake.is_some());
        match self.launch(checkpoint, start, permit, timeout, awake).await {
            Err(error @ SandboxError::GuestUnresponsive { .. }) if claimed => {
                tracing::warn!(sandbox = %self.record.id, ?error, "a claimed standby failed; it is launched anew");
                metrics::counter!("aenv_standby_failures_total").increment(1);
            }
            launched => return launched,
        }
        let permit = self.node.reserve(&Claim::of(&self.record)).await?;
        self.node.journal.put(&self.record, Survives::Crash).await?;
        self.launch(checkpoint, start, permit, timeout, None).await
    }

    /// Launches the next generation and becomes Running. If it fails, the record is as it was; the caller
    /// decides what the sandbox is then, and writes that into the journal.
    pub(super) async fn launch(
        &mut self,
        checkpoint: &Checkpoint,
        start: Start,
        permit: Permit,
        timeout: Duration,
        awake: Option<Awake>,
    ) -> Result<(), SandboxError> {
        let (record, stop) = (&self.record, &self.cell.kill);
        let order = launch::Order { record, checkpoint, start, timeout, permit, stop, awake };
        let (record, generation) = Box::pin(launch::launch(&self.node, order)).await?;
        self.record = record;
        self.generation = Some(generation);
        self.deadline.clear();
        self.cell.misses.store(0, std::sync::atomic::Ordering::Relaxed);
        *self.cell.gauge.lock() = Gauge::new();
        self.enter(Stage::Running);
        Ok(())
    }

    /// The loop.
    async fn run(mut self: Box<Self>) {
        loop {
            self.publish_if_due();
            match self.next().await {
                Event::Close => return,
                Event::Kill => return self.kill().await,
                Event::Exited(reason) => self.vmm_ended(reason).await,
                Event::Expired => self.expire().await,
                Event::StoodLongEnough => self.end_standing().await,
                Event::Merged(outcome) => self.merged(outcome).await,
                Event::Published(outcome) => self.published(outcome).await,
                Event::Command(command) => self.handle(command).await,
            }
        }
    }

    async fn next(&mut self) -> Event {
        let Self {
            node,
            cell,
            record,
            generation,
            deadline,
            standing,
            merging,
            publishing,
            stage,
            commands,
            ..
        } = self;
        let exited = async {
            match generation {
                Some(generation) => generation.vm.exited().await,
                None => std::future::pending().await,
            }
        };
        let expired = async {
            match stage {
                Stage::Running => deadline.passed(record.end_at).await,
                Stage::Failed(_) => tokio::time::sleep(FAILED_FOR).await,
                _ => std::future::pending().await,
            }
        };
        let over = async {
            match standing {
                Some(standing) => standing.over().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = cell.kill.cancelled() => Event::Kill,
            () = node.closing.cancelled() => Event::Close,
            reason = exited => Event::Exited(reason),
            Some(command) = commands.recv() => Event::Command(command),
            () = expired => Event::Expired,
            () = over => Event::StoodLongEnough,
            outcome = merging.done() => Event::Merged(outcome),
            outcome = publishing.done() => Event::Published(outcome),
        }
    }

    async fn handle(&mut self, command: Command) {
        // A caller that has gone away meanwhile changes nothing: the answer is dropped, the work is done.
        match command {
            Command::Pause { mode, reply } => drop(reply.send(self.pause(mode, Duration::ZERO).await)),
            Command::EndStanding { reply } => {
                self.end_standing().await;
                let _ = reply.send(Ok(()));
            }
            Command::Resume { timeout, mode, reply } => drop(reply.send(self.resume(timeout, mode).await)),
            Command::SetTimeout { timeout, reply } => drop(reply.send(self.set_timeout(timeout).await)),
            Command::SetNetwork { change, reply } => drop(reply.send(self.set_network(*change).await)),
            Command::Capture { mode, reply } => drop(reply.send(self.snapshot(mode).await)),
            Command::Fork { places, timeout, reply } => self.fork(places, timeout, reply).await,
            Command::Condemn { reply } => drop(reply.send(self.condemn().await)),
            Command::Check { reply } => drop(reply.send(self.check().await)),
            Command::Balloon { held_mib, reply } => drop(reply.send(self.balloon(held_mib).await)),
            Command::Rollback { checkpoint, reply } => drop(reply.send(self.rollback(&checkpoint).await)),
        }
    }

    /// Shows a state to everybody.
    pub(super) fn enter(&mut self, stage: Stage) {
        debug_assert!(self.stage.may_become(&stage), "{:?} does not lead to {stage:?}", self.stage);
        tracing::debug!(sandbox = %self.record.id, from = ?self.stage, to = ?stage, "state");
        self.stage = stage;
        self.publish();
    }

    /// Shows the record as it is now.
    pub(super) fn publish(&self) {
        let route = self.generation.as_ref().map(|generation| route(&self.record, generation));
        let record = Arc::new(self.record.clone());
        self.state.send_replace(Published { stage: self.stage.clone(), record, route });
    }

    /// Writes a phase into the journal. The record changes only if that worked.
    pub(super) async fn note(&mut self, phase: Phase, survives: Survives) -> Result<(), SandboxError> {
        let record = Record { phase, ..self.record.clone() };
        self.node.journal.commit(vec![Change::Put(Box::new(record.clone()))], survives).await?;
        self.record = record;
        Ok(())
    }

    /// The answer to a request that needs a running sandbox.
    pub(super) fn running(&self) -> Result<(), SandboxError> {
        match &self.stage {
            Stage::Running => Ok(()),
            Stage::Paused => Err(SandboxError::Paused(self.record.id.clone())),
            other => Err(self.unfit(other)),
        }
    }

    /// The answer to a request in a state that it does not fit.
    pub(super) fn unfit(&self, stage: &Stage) -> SandboxError {
        let id = self.record.id.clone();
        match stage {
            Stage::Failed(reason) => SandboxError::Failed { id, reason: reason.clone() },
            Stage::Running => SandboxError::Running(id),
            _ => SandboxError::Deleted(id),
        }
    }

    /// The deadline of the running sandbox.
    pub(super) fn end_at(&self) -> DateTime<Utc> {
        self.record.end_at
    }
}

fn route(record: &Record, generation: &Generation) -> Route {
    let dial: Arc<dyn aenv_types::Dial> = Arc::clone(&generation.slot) as _;
    Route {
        id: record.id.clone(),
        team: record.team.clone(),
        dial,
        ended: generation.ended.clone(),
        envd_token: record.envd_token.clone(),
        proxy: record.proxy.clone(),
    }
}
