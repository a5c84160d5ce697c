//! [`Orchestrator`]: the handle that the server and the template builder hold.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use aenv_blockd::Exports;
use aenv_net::Network;
use aenv_repository::Repository;
use aenv_types::{
    CacheRecord, Checkpoint, CheckpointId, Digest, EgressPolicy, EngineStamp, Home, LayerName, SandboxId,
    TeamId, Token,
};
use aenv_vmm::Engine;
use aenv_volume::Volumes;
use thiserror::Error;
use tokio::sync::mpsc;

use crate::{
    CaptureMode, ChildResult, CreateRequest, Expiry, Gate, HomeLock, MetricSample, NodeMemory, PauseMode,
    Route, SandboxError, SandboxView, Timeout,
    admission::Claim,
    collector,
    crash::CrashPoints,
    guest::Envd,
    images::LayerImages,
    metrics,
    node::Node,
    pressure::{self, ThisHost},
    reconcile,
    sandbox::{Command, NetworkChange, Published, Stage, spawn_new},
    seams::Seams,
    shared, standby,
};

/// Children of one fork.
const MAX_CHILDREN: u32 = 100;
/// How often a sandbox that other nodes have, too, is brought here for one request.
const BROUGHT: u32 = 3;
/// How long a shutdown waits for what is under way.
const SHUTDOWN: Duration = Duration::from_secs(60);

/// What a node is made of.
pub struct Parts {
    /// Where things lie.
    pub home: Home,
    /// Its lock, for which its folders had to be there.
    pub lock: HomeLock,
    /// The data plane.
    pub exports: Arc<dyn Exports>,
    /// Network slots.
    pub network: Arc<dyn Network>,
    /// The engine for new sandboxes.
    pub engine: Arc<dyn Engine>,
    /// Guest kernel for cold boots (ELF vmlinux).
    pub kernel: PathBuf,
    /// Initramfs for cold boots.
    pub initramfs: PathBuf,
    /// What caches keep on this node.
    pub caches: Vec<CacheListing>,
    /// Kernel modules for network filesystems; without them no sandbox can have volumes.
    pub modules: Option<PathBuf>,
    /// The node's volumes.
    pub volumes: Volumes,
    /// Limits and times.
    pub settings: Settings,
    /// The repository that other nodes may have in common with this one.
    pub sharing: Option<Sharing>,
}

/// How paused sandboxes are shared with other nodes.
pub struct Sharing {
    /// Where.
    pub repository: Repository,
    /// This node's name, for people.
    pub node: String,
    /// Whether its paused sandboxes are published, and those of others brought here. What was published before is respected either way.
    pub publish: bool,
}

/// Lists a cache's records; may block.
pub type CacheListing = Arc<dyn Fn() -> std::io::Result<Vec<CacheRecord>> + Send + Sync>;

/// Limits and times of an orchestrator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Sandboxes that may run at once.
    pub max_running: u32,
    /// Guest memory that running sandboxes may really take, in MiB.
    pub memory_mib: u64,
    /// So many times that may be promised to them; 1 or more. Above 1 the host must also have what a sandbox is likely to take: its
    /// memory divided by this.
    pub memory_overcommit: f64,
    /// Memory of the host that is kept available, in MiB: below it standbys go and idle guests give memory back. 0: nothing is done.
    pub memory_reserve_mib: u64,
    /// Guests without traffic for so long may be asked to give memory back.
    pub memory_idle: Duration,
    /// How long the VMM of a sandbox that was paused at its deadline stands, so that a resume goes on in place.
    pub stand_after_deadline: Duration,
    /// Whether guests of different teams share the pages of a memory image that both were launched from.
    pub share_memory_across_teams: bool,
    /// Least timeout after an auto-resume.
    pub auto_resume_min_timeout: Duration,
    /// Free bytes on the home's filesystem below which new work is refused.
    pub disk_reserve_bytes: u64,
    /// Launches and boots that may be under way at once.
    pub parallel_launches: usize,
    /// Bytes that caches and copies of committed blobs may take on this node.
    pub cache_bytes: u64,
    /// Where committed blobs lie, beside the copies on this node.
    pub blobs: Blobs,
    /// Sandboxes that are launched ahead.
    pub standby: StandbySettings,
}

/// Which checkpoints are launched ahead of creates. Zero of anything: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbySettings {
    /// For each checkpoint.
    pub count: usize,
    /// Checkpoints, those that were used last.
    pub templates: usize,
    /// From the last create on.
    pub keep: Duration,
}

impl StandbySettings {
    /// None at all.
    pub const OFF: Self = Self { count: 0, templates: 0, keep: Duration::ZERO };
}

/// Where committed blobs lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blobs {
    /// On the home's own filesystem: a copy is a second name of the blob, and one that lost the other name is garbage.
    Beside,
    /// Elsewhere: a copy saves fetching it again.
    Elsewhere,
}

/// Why an orchestrator does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// Another server runs on this home.
    #[error("another server (pid {pid}) runs on {home}; stop it first, or use another home_path")]
    Locked {
        /// Its pid.
        pid: i32,
        /// The home.
        home: PathBuf,
    },
    /// The journal cannot be read.
    #[error("the journal {path} cannot be used: {message}")]
    Journal {
        /// The file.
        path: PathBuf,
        /// Why.
        message: String,
    },
    /// A part does not work.
    #[error("{0}")]
    Part(String),
}

/// The node's sandboxes. Cheap to clone.
#[derive(Clone)]
pub struct Orchestrator {
    pub(crate) node: Arc<Node>,
}

impl Orchestrator {
    /// Opens the journal, looks at what is really there, re-adopts live sandboxes, removes what belongs to none.
    pub async fn start(parts: Parts) -> Result<Self, StartError> {
        let seams = Seams {
            agent: Arc::new(Envd { modules: parts.modules.clone() }),
            images: Arc::new(LayerImages::new()),
            host: Arc::new(ThisHost),
        };
        Self::start_with(parts, seams, CrashPoints::from_env()).await
    }

    /// As [`Self::start`], with other seams to the guest.
    pub(crate) async fn start_with(
        parts: Parts,
        seams: Seams,
        crash: CrashPoints,
    ) -> Result<Self, StartError> {
        let node = Box::pin(reconcile::start(parts, seams, crash)).await?;
        node.tasks.spawn(metrics::run(Arc::clone(&node)));
        node.tasks.spawn(collector::run(Arc::clone(&node)));
        node.tasks.spawn(standby::keep(Arc::clone(&node)));
        node.tasks.spawn(shared::run(Arc::clone(&node)));
        node.tasks.spawn(pressure::run(Arc::clone(&node)));
        Ok(Self { node })
    }

    /// Launches (or boots) a sandbox; returns when envd inside has answered.
    pub async fn create(&self, request: CreateRequest) -> Result<SandboxView, SandboxError> {
        self.open()?;
        let checkpoint = Arc::clone(&request.checkpoint);
        let shape = match request.shape {
            Some(shape) if !checkpoint.has_memory() => shape,
            _ => checkpoint.shape,
        };
        let shape = shape.checked().map_err(|error| SandboxError::Invalid(error.to_string()))?;
        if checkpoint.disks.is_empty() {
            let reason = "it has no root disk".to_owned();
            return Err(SandboxError::BadCheckpoint { id: checkpoint.id.clone(), reason });
        }
        self.node.disk_room()?;
        let claim = Claim {
            team: request.team.clone(),
            memory_mib: shape.memory_mib,
            hidden: request.hidden,
            limits: request.limits,
        };
        // From here on the work belongs to a task: a caller that goes away cancels nothing.
        let node = Arc::clone(&self.node);
        let work = self.node.tasks.spawn(async move {
            let _awaited = node.admission.awaited();
            let pin = node.checkpoints.pin(&checkpoint.id);
            let usual = node.standbys.serves(&request);
            let claimed = if usual { node.standbys.claim(&node, &checkpoint.id, &claim)? } else { None };
            let (permit, standby) = match claimed {
                Some((permit, standby)) => (permit, Some(standby)),
                None => (node.reserve(&claim).await?, None),
            };
            if let Err(error) = node.checkpoints.put(&checkpoint).await {
                if let Some(standby) = standby {
                    standby.discard(&node).await;
                }
                let text = "the checkpoint's manifest could not be written";
                return Err(node.explain(SandboxError::internal(text, error)));
            }
            let answer = spawn_new(&node, request, permit, standby, pin);
            let answer = answer.await.unwrap_or(Err(SandboxError::ShuttingDown));
            if usual && answer.is_ok() {
                node.standbys.want(&node, &checkpoint, &claim.team);
            }
            answer.map_err(|error| node.explain(error))
        });
        work.await.unwrap_or(Err(SandboxError::ShuttingDown))
    }

    /// Captures once and launches `count` children; the source goes on.
    pub async fn fork(
        &self,
        team: &TeamId,
        id: &SandboxId,
        count: u32,
        timeout: Duration,
    ) -> Result<Vec<ChildResult>, SandboxError> {
        self.open()?;
        if !(1..=MAX_CHILDREN).contains(&count) {
            return Err(SandboxError::Invalid(format!(
                "count is {count}: a fork has 1 to {MAX_CHILDREN} children"
            )));
        }
        let cell = self.node.registry.of_team(team, id)?;
        let now = cell.now();
        match now.stage {
            Stage::Paused => return Err(SandboxError::Paused(id.clone())),
            Stage::Failed(reason) => return Err(SandboxError::Failed { id: id.clone(), reason }),
            _ => {}
        }
        let record = now.record;
        let claim = Claim::of(&record);
        let mut places = Vec::new();
        for _ in 0..count {
            places.push(self.node.reserve(&claim).await);
        }
        if places.iter().all(Result::is_err) {
            return Ok(places.into_iter().filter_map(Result::err).map(Err).collect());
        }
        cell.ask(|reply| Command::Fork { places, timeout, reply }).await
    }

    /// Captures and ends. `Err(Paused)` when it was paused already.
    pub async fn pause(&self, team: &TeamId, id: &SandboxId, mode: PauseMode) -> Result<(), SandboxError> {
        self.open()?;
        self.node.registry.of_team(team, id)?.ask(|reply| Command::Pause { mode, reply }).await
    }

    /// Makes sure that it runs, and applies `timeout`. Also tells whether it was paused before.
    /// `mode: Filesystem` boots from the disk instead of continuing the memory image.
    pub async fn resume(
        &self,
        team: &TeamId,
        id: &SandboxId,
        timeout: Timeout,
        mode: PauseMode,
    ) -> Result<(SandboxView, bool), SandboxError> {
        self.open()?;
        for _ in 0..BROUGHT {
            let cell = match self.node.registry.of_team(team, id) {
                Ok(cell) => cell,
                Err(_) => shared::bring(&self.node, team, id).await?,
            };
            match cell.ask(|reply| Command::Resume { timeout, mode, reply }).await {
                // Another node has had it since; it may be paused again by now.
                Err(SandboxError::Elsewhere { .. }) => cell.gone().await?,
                Err(SandboxError::Deleted(id)) => {
                    cell.gone().await?;
                    return Err(SandboxError::Deleted(id));
                }
                answer => return answer,
            }
        }
        Err(SandboxError::NotFound(id.clone()))
    }

    /// Removes it, running or paused.
    pub async fn kill(&self, team: &TeamId, id: &SandboxId) -> Result<(), SandboxError> {
        let Ok(cell) = self.node.registry.of_team(team, id) else {
            self.open()?;
            return shared::end(&self.node, team, id).await;
        };
        self.open()?;
        if self.node.shares.is_some() && cell.now().stage == Stage::Paused {
            match cell.ask(|reply| Command::Condemn { reply }).await {
                Err(SandboxError::Elsewhere { .. }) => {
                    cell.gone().await?;
                    return shared::end(&self.node, team, id).await;
                }
                Err(SandboxError::Deleted(id)) => {
                    cell.gone().await?;
                    return Err(SandboxError::Deleted(id));
                }
                condemned => condemned?,
            }
        }
        cell.kill.cancel();
        cell.gone().await
    }

    /// Moves the deadline of a running sandbox.
    pub async fn set_timeout(
        &self,
        team: &TeamId,
        id: &SandboxId,
        timeout: Timeout,
    ) -> Result<(), SandboxError> {
        self.open()?;
        self.node.registry.of_team(team, id)?.ask(|reply| Command::SetTimeout { timeout, reply }).await
    }

    /// Replaces the egress rules of a running sandbox.
    pub async fn set_network(
        &self,
        team: &TeamId,
        id: &SandboxId,
        egress: EgressPolicy,
        network: serde_json::Value,
        allow_internet_access: Option<bool>,
    ) -> Result<(), SandboxError> {
        self.open()?;
        let change = Box::new(NetworkChange { egress, network, allow_internet_access });
        self.node.registry.of_team(team, id)?.ask(|reply| Command::SetNetwork { change, reply }).await
    }

    /// Captures a sandbox that goes on (or takes the checkpoint of a paused one). Its layers are on this node and durable.
    /// They stay for an hour, or as long as a sandbox is based on it.
    pub async fn capture(
        &self,
        team: &TeamId,
        id: &SandboxId,
        mode: CaptureMode,
    ) -> Result<Checkpoint, SandboxError> {
        self.open()?;
        self.node.registry.of_team(team, id)?.ask(|reply| Command::Capture { mode, reply }).await
    }

    /// Whoever was given a checkpoint by [`Self::capture`] has published it, or will not: it goes when nothing else needs it. One that
    /// nobody releases goes after an hour.
    pub fn release(&self, checkpoint: &CheckpointId) {
        self.node.checkpoints.release(checkpoint);
        self.node.garbage.notify_one();
    }

    /// Goes on from an earlier checkpoint of the same sandbox, with the same id.
    pub async fn rollback(
        &self,
        team: &TeamId,
        id: &SandboxId,
        checkpoint: Arc<Checkpoint>,
    ) -> Result<SandboxView, SandboxError> {
        self.open()?;
        self.node.registry.of_team(team, id)?.ask(|reply| Command::Rollback { checkpoint, reply }).await
    }

    /// One sandbox.
    pub fn get(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxView, SandboxError> {
        let now = self.node.registry.of_team(team, id)?.now();
        match (now.stage.shown(), now.stage) {
            (Some(state), _) => Ok(self.node.view(&now.record, state)),
            (None, Stage::Failed(reason)) => Err(SandboxError::Failed { id: id.clone(), reason }),
            (None, _) => Err(SandboxError::NotFound(id.clone())),
        }
    }

    /// One sandbox, also one that is not here but may be brought here.
    pub async fn find(&self, team: &TeamId, id: &SandboxId) -> Result<SandboxView, SandboxError> {
        match self.get(team, id) {
            Err(SandboxError::NotFound(_)) if self.node.registry.any(id).is_err() => {
                shared::look(&self.node, team, id).await
            }
            found => found,
        }
    }

    /// The engine that runs this node's sandboxes.
    pub fn engine(&self) -> &EngineStamp {
        &self.node.stamp
    }

    /// What happens at deadlines, from the start of this orchestrator on. `None` after the first call.
    pub fn expiries(&self) -> Option<mpsc::Receiver<Expiry>> {
        self.node.expired.take()
    }

    /// All sandboxes (of a team) but hidden ones, in no order.
    pub fn list(&self, team: Option<&TeamId>) -> Vec<SandboxView> {
        let cells = self.node.registry.all();
        let cells = cells.iter().filter(|cell| team.is_none_or(|team| cell.team == *team));
        let shown = cells.filter_map(|cell| {
            let now = cell.now();
            let state = now.stage.shown().filter(|_| !now.record.hidden)?;
            Some(self.node.view(&now.record, state))
        });
        shown.collect()
    }

    /// Samples, oldest first, every 5 s while it runs, of the last hours.
    pub fn metrics(&self, team: &TeamId, id: &SandboxId) -> Result<Vec<MetricSample>, SandboxError> {
        let cell = self.node.registry.of_team(team, id)?;
        let samples = cell.samples.lock();
        Ok(samples.iter().copied().collect())
    }

    /// The way to a running sandbox, for the data plane. A sandbox in transition is waited for.
    /// `wake`: an auto-resume sandbox that is paused is resumed first (once, for any number of callers).
    pub async fn route(&self, id: &SandboxId, wake: Wake) -> Result<Route, SandboxError> {
        let cell = self.node.registry.any(id)?;
        let mut woken = None;
        loop {
            let fits = |now: &Published| now.stage.carries_traffic() || !now.stage.is_transition();
            let now = cell.wait_for(fits).await?;
            match (now.stage, now.route) {
                (stage, Some(route)) if stage.carries_traffic() => {
                    self.node.pressure.traffic(&cell);
                    return Ok(route);
                }
                (Stage::Failed(reason), _) => return Err(SandboxError::Failed { id: id.clone(), reason }),
                (Stage::Paused, _) => {
                    let wakes = wake == Wake::IfAutoResume
                        && now.record.lifecycle.auto_resume
                        && now.record.keeps_memory;
                    if !wakes {
                        return Err(SandboxError::Paused(id.clone()));
                    }
                    // Whoever comes second waits here and finds it running, or tries in turn.
                    if woken.is_none() {
                        woken = Some(cell.wake.lock().await);
                        continue;
                    }
                    self.open()?;
                    let least = self.node.settings.auto_resume_min_timeout;
                    let timeout = Timeout::Set(now.record.timeout.max(least));
                    let mode = PauseMode::Full;
                    cell.ask(|reply| Command::Resume { timeout, mode, reply }).await?;
                }
                _ => return Err(SandboxError::NotFound(id.clone())),
            }
        }
    }

    /// What traffic to a sandbox has to show, whether it runs or not; `None` when there is no such sandbox. Wakes nobody.
    pub fn gate(&self, id: &SandboxId) -> Option<Gate> {
        let record = self.node.registry.any(id).ok()?.now().record;
        Some(match (record.proxy.private_traffic, &record.traffic_token) {
            (false, _) => Gate::Open,
            (true, token) => Gate::Token(token.clone()),
        })
    }

    /// Tokens of the running sandboxes, for the search by signature.
    pub fn envd_tokens(&self) -> Vec<(SandboxId, Token)> {
        let cells = self.node.registry.all();
        let tokens = cells.iter().filter_map(|cell| {
            let now = cell.now();
            let token = now.record.envd_token.clone().filter(|_| now.stage.carries_traffic())?;
            Some((cell.id.clone(), token))
        });
        tokens.collect()
    }

    /// Every local layer that a sandbox or a local checkpoint needs; what is not here may be collected.
    pub fn layers_in_use(&self) -> Vec<LayerName> {
        match collector::needed(&self.node) {
            Ok(needed) => needed.into_iter().collect(),
            Err(error) => {
                tracing::error!(%error, "manifests cannot be read; every layer that is there counts as used");
                collector::all_layers(&self.node)
            }
        }
    }

    /// Refuses what would take much room (a pull, a build) while the disk is nearly full, as create, resume, fork, snapshot and
    /// rollback do by themselves. A pause is never refused: it has the reserve.
    pub fn disk_room(&self) -> Result<(), SandboxError> {
        self.node.disk_room()
    }

    /// What is promised and what there is.
    pub fn memory(&self) -> NodeMemory {
        let Settings { memory_overcommit, memory_reserve_mib, .. } = self.node.settings;
        NodeMemory {
            promised_mib: self.node.admission.promised_mib(),
            limit_mib: self.node.admission.limit_mib(),
            overcommit: memory_overcommit,
            reserve_mib: memory_reserve_mib,
            given_back_mib: self.node.pressure.held_mib(),
        }
    }

    /// Sandboxes that were launched ahead and wait for a create.
    pub fn standbys(&self) -> usize {
        self.node.standbys.ready()
    }

    /// Ends the standbys of a checkpoint that nobody will ask for again.
    pub fn forget_standbys(&self, checkpoint: &CheckpointId) {
        self.node.standbys.forget(checkpoint);
    }

    /// Lets the collector look at once instead of at its time.
    pub fn collect_soon(&self) {
        self.node.garbage.notify_one();
    }

    /// Layers that are elsewhere of which nothing on this node needs the note (`<layer>.remote`), nor has for so long.
    pub async fn unneeded_notes(&self, unused: Duration) -> io::Result<Vec<Digest>> {
        collector::notes::unneeded(&self.node, unused).await
    }

    /// Removes notes of layers that are elsewhere, but those that are needed by now. Returns how many went.
    pub async fn remove_notes(&self, notes: Vec<Digest>, unused: Duration) -> io::Result<usize> {
        collector::notes::remove(&self.node, notes, unused).await
    }

    /// Takes no new work, waits for what is under way, leaves running sandboxes running.
    pub async fn shutdown(&self) {
        self.node.closing.cancel();
        self.node.tasks.close();
        if tokio::time::timeout(SHUTDOWN, self.node.tasks.wait()).await.is_err() {
            tracing::warn!(
                "work was still under way after {SHUTDOWN:?}; the next start finishes or undoes it"
            );
        }
    }

    fn open(&self) -> Result<(), SandboxError> {
        if self.node.closing.is_cancelled() { Err(SandboxError::ShuttingDown) } else { Ok(()) }
    }
}

/// Whether a look-up may resume a paused sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Resume it if it is an auto-resume sandbox.
    IfAutoResume,
    /// Only look.
    Never,
}
