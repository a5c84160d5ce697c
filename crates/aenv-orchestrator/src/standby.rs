//! *Standbys*: checkpoints that are in demand, launched ahead of the next create, warmed up where they reach nobody, and stopped.
//!
//! A checkpoint is in demand for a while after a sandbox was created from it. The [`keeper`](keep) makes its standbys when
//! nobody launches, and ends them when the demand is over. A standby belongs to nobody: no team, no list and no record knows
//! it, only notes in the journal, so that the next start of the server removes it. The create that claims it takes its id.
//!
//! It counts as memory of the node, and is the first thing that is given up when a sandbox needs that, or a network slot.

mod keeper;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_types::{Checkpoint, CheckpointId, SandboxId, TeamId};
use aenv_vmm::Vm;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    CreateRequest, SandboxError, StandbySettings,
    admission::{Claim, Permit},
    checkpoints::Pin,
    host,
    launch::Ahead,
    node::Node,
};

pub(crate) use keeper::keep;

/// The standbys of a node.
pub(crate) struct Standbys {
    settings: StandbySettings,
    shelf: Mutex<Shelf>,
    /// Tells the keeper that something is to be done.
    changed: Notify,
    /// Held while one is made.
    making: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Shelf {
    /// Oldest first.
    ready: VecDeque<Standby>,
    /// Used last first.
    wanted: Vec<Wanted>,
    under_way: Option<UnderWay>,
}

struct Standby {
    kind: Kind,
    ahead: Ahead,
    permit: Permit,
    _pin: Pin,
}

/// What is given up for a sandbox.
enum GivenUp {
    Ready(Box<Standby>),
    /// It is gone when it is not being made any more.
    UnderWay,
}

struct Wanted {
    checkpoint: Arc<Checkpoint>,
    /// Of the create.
    team: TeamId,
    kind: Kind,
    until: Instant,
    /// No more are made before the next create: the last one failed.
    rests: bool,
}

/// Which creates one is for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kind {
    checkpoint: CheckpointId,
    /// Of this team only, where teams do not share memory.
    group: Option<TeamId>,
}

impl Kind {
    fn of(node: &Node, checkpoint: &CheckpointId, team: &TeamId) -> Self {
        Self { checkpoint: checkpoint.clone(), group: node.sharing_group(team).cloned() }
    }
}

/// What is to be made.
struct Order {
    checkpoint: Arc<Checkpoint>,
    team: TeamId,
    kind: Kind,
}

/// One that is being made.
struct UnderWay {
    checkpoint: CheckpointId,
    memory_mib: u64,
    stop: CancellationToken,
}

impl Standbys {
    pub(crate) fn new(settings: StandbySettings) -> Self {
        Self {
            settings,
            shelf: Mutex::default(),
            changed: Notify::new(),
            making: tokio::sync::Mutex::default(),
        }
    }

    fn is_off(&self) -> bool {
        self.settings.count == 0 || self.settings.templates == 0 || self.settings.keep.is_zero()
    }

    /// Whether a standby could serve this create.
    pub(crate) fn serves(&self, request: &CreateRequest) -> bool {
        !self.is_off() && !request.hidden && request.volumes.is_empty() && request.checkpoint.has_memory()
    }

    /// How many wait.
    pub(crate) fn ready(&self) -> usize {
        self.shelf.lock().ready.len()
    }

    /// How many take memory: those that are being made as well.
    pub(crate) fn held(&self) -> usize {
        let shelf = self.shelf.lock();
        shelf.ready.len() + usize::from(shelf.under_way.is_some())
    }

    /// Takes the oldest standby of a checkpoint, if there is one and the claim is admitted.
    pub(crate) fn claim(
        &self,
        node: &Node,
        checkpoint: &CheckpointId,
        claim: &Claim,
    ) -> Result<Option<(Permit, Ahead)>, SandboxError> {
        let kind = Kind::of(node, checkpoint, &claim.team);
        let mut shelf = self.shelf.lock();
        let Some(at) = shelf.ready.iter().position(|standby| standby.kind == kind) else {
            metrics::counter!("aenv_standby_misses_total").increment(1);
            return Ok(None);
        };
        node.admission.promote(&mut shelf.ready[at].permit, claim)?;
        let claimed = shelf.ready.remove(at);
        Ok(claimed.map(|standby| (standby.permit, standby.ahead)))
    }

    /// A sandbox of this team was created from this checkpoint.
    pub(crate) fn want(&self, node: &Node, checkpoint: &Arc<Checkpoint>, team: &TeamId) {
        let kind = Kind::of(node, &checkpoint.id, team);
        let mut shelf = self.shelf.lock();
        shelf.wanted.retain(|wanted| wanted.kind != kind);
        let until = Instant::now() + self.settings.keep;
        let (checkpoint, team) = (Arc::clone(checkpoint), team.clone());
        shelf.wanted.insert(0, Wanted { checkpoint, team, kind, until, rests: false });
        shelf.wanted.truncate(self.settings.templates);
        self.changed.notify_one();
    }

    /// Nobody will ask for this checkpoint again.
    pub(crate) fn forget(&self, checkpoint: &CheckpointId) {
        let mut shelf = self.shelf.lock();
        shelf.wanted.retain(|wanted| wanted.checkpoint.id != *checkpoint);
        if let Some(under_way) = &shelf.under_way
            && under_way.checkpoint == *checkpoint
        {
            under_way.stop.cancel();
        }
        self.changed.notify_one();
    }

    /// Makes no more of a checkpoint until it is used again: what fails once may fail again and again.
    fn rest(&self, kind: &Kind) {
        let mut shelf = self.shelf.lock();
        let of = shelf.wanted.iter_mut().filter(|wanted| wanted.kind == *kind);
        of.for_each(|wanted| wanted.rests = true);
    }

    /// Gives the oldest one up, and returns when its memory is free. `false`, and none is given up, where all of them together
    /// hold less than is missing.
    pub(crate) async fn give_up_memory(&self, node: &Arc<Node>, missing_mib: u64) -> bool {
        match self.give_up(missing_mib) {
            None => return false,
            Some(GivenUp::UnderWay) => drop(self.making.lock().await),
            Some(GivenUp::Ready(standby)) => {
                let owner = Arc::clone(node);
                // In a task, so that it ends also if nobody waits any more.
                let ended = node.tasks.spawn(async move { standby.end(&owner).await });
                if let Err(error) = ended.await {
                    tracing::error!(%error, "a standby could not be ended");
                }
            }
        }
        true
    }

    /// Gives the oldest one up, and returns when its network slot goes back. `false` where there is none. For launches, which
    /// nobody drops.
    pub(crate) async fn give_up_slot(&self, node: &Node) -> bool {
        match self.give_up(0) {
            None => return false,
            Some(GivenUp::UnderWay) => drop(self.making.lock().await),
            Some(GivenUp::Ready(standby)) => standby.end(node).await,
        }
        true
    }

    /// The oldest one; where none is ready, the one that is being made is stopped.
    fn give_up(&self, missing_mib: u64) -> Option<GivenUp> {
        let mut shelf = self.shelf.lock();
        let under_way = shelf.under_way.as_ref().map_or(0, |under_way| under_way.memory_mib);
        let held: u64 = shelf.ready.iter().map(|standby| standby.permit.memory_mib()).sum();
        if held + under_way < missing_mib {
            return None;
        }
        let given_up = match shelf.ready.pop_front() {
            Some(standby) => {
                tracing::info!(sandbox = %standby.ahead.id(), "a standby is given up");
                GivenUp::Ready(Box::new(standby))
            }
            None => {
                shelf.under_way.as_ref()?.stop.cancel();
                GivenUp::UnderWay
            }
        };
        metrics::counter!("aenv_standbys_given_up_total").increment(1);
        Some(given_up)
    }

    /// Removes those that nobody wants any more.
    fn unwanted(&self) -> Vec<Standby> {
        let mut shelf = self.shelf.lock();
        shelf.wanted.retain(|wanted| wanted.until > Instant::now());
        let all = std::mem::take(&mut shelf.ready);
        let (kept, unwanted): (Vec<_>, Vec<_>) = all.into_iter().partition(|s| shelf.wants(&s.kind));
        shelf.ready = kept.into();
        unwanted
    }

    /// The checkpoint that was used last of those that lack a standby.
    fn missing(&self) -> Option<Order> {
        let shelf = self.shelf.lock();
        let count = |kind: &Kind| shelf.ready.iter().filter(|standby| standby.kind == *kind).count();
        let mut active = shelf.wanted.iter().filter(|wanted| !wanted.rests);
        let lacking = active.find(|wanted| count(&wanted.kind) < self.settings.count);
        lacking.map(|wanted| Order {
            checkpoint: Arc::clone(&wanted.checkpoint),
            team: wanted.team.clone(),
            kind: wanted.kind.clone(),
        })
    }

    /// When the next demand is over.
    fn next_end(&self) -> Option<Duration> {
        let shelf = self.shelf.lock();
        let ends = shelf.wanted.iter().map(|wanted| wanted.until.saturating_duration_since(Instant::now()));
        ends.min()
    }

    /// Begins to make one, if there is memory for it; at no moment that is held without being told of here.
    fn begin(&self, node: &Node, checkpoint: &Checkpoint, stop: &CancellationToken) -> Option<Permit> {
        if host::lacking(&node.home).is_some() {
            return None;
        }
        let mut shelf = self.shelf.lock();
        let permit = node.admission.reserve_ahead(checkpoint.shape.memory_mib)?;
        let (checkpoint, memory_mib) = (checkpoint.id.clone(), permit.memory_mib());
        shelf.under_way = Some(UnderWay { checkpoint, memory_mib, stop: stop.clone() });
        Some(permit)
    }

    /// Puts the one that was made, if it was, on the shelf. One that is not wanted any more comes back.
    fn finish(&self, made: Option<Standby>) -> Option<Standby> {
        let mut shelf = self.shelf.lock();
        shelf.under_way = None;
        let made = made?;
        if !shelf.wants(&made.kind) {
            return Some(made);
        }
        shelf.ready.push_back(made);
        None
    }

    fn remove(&self, id: &SandboxId) -> Option<Standby> {
        let mut shelf = self.shelf.lock();
        let at = shelf.ready.iter().position(|standby| standby.ahead.id() == id)?;
        shelf.ready.remove(at)
    }

    fn take_all(&self) -> Vec<Standby> {
        self.shelf.lock().ready.drain(..).collect()
    }

    fn vms(&self) -> Vec<(SandboxId, Arc<dyn Vm>)> {
        let shelf = self.shelf.lock();
        let vms = shelf.ready.iter().filter_map(|s| Some((s.ahead.id().clone(), s.ahead.vm()?)));
        vms.collect()
    }
}

impl Shelf {
    fn wants(&self, kind: &Kind) -> bool {
        self.wanted.iter().any(|wanted| wanted.kind == *kind)
    }
}

impl Standby {
    async fn end(self, node: &Node) {
        let Self { ahead, permit, .. } = self;
        ahead.discard(node).await;
        drop(permit);
    }
}
