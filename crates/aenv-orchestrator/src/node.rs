//! What all actors of a node share.

use std::{collections::HashMap, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use aenv_blockd::Exports;
use aenv_net::Network;
use aenv_types::{EngineStamp, Home, SandboxId, TeamId};
use aenv_vmm::Engine;
use aenv_volume::Volumes;
use parking_lot::RwLock;
use tokio::sync::{Notify, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    CacheListing, HomeLock, Publication, SandboxError, SandboxState, SandboxView, Settings,
    admission::{Admission, Claim, Permit, Refusal},
    checkpoints::Checkpoints,
    crash::CrashPoints,
    expiries::Expiries,
    host,
    journal::Journal,
    pressure::Pressure,
    sandbox::{Cell, Command, Record},
    seams::Seams,
    shared::{Shared, Shares},
    standby::Standbys,
};

/// When a client may ask again on a host that has run out of processes or open files.
const HOST_AGAIN: Duration = Duration::from_secs(5);

/// A sandbox whose VMM stands may take so long to end it.
const GIVE_UP: Duration = Duration::from_secs(10);

/// A node.
pub(crate) struct Node {
    pub home: Home,
    pub exports: Arc<dyn Exports>,
    pub network: Arc<dyn Network>,
    pub engine: Arc<dyn Engine>,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub volumes: Volumes,
    pub settings: Settings,
    /// Of checkpoints of sandboxes that were booted here.
    pub stamp: EngineStamp,
    /// Of guests whose rules name none.
    pub resolvers: Vec<IpAddr>,
    pub seams: Seams,
    pub caches: Vec<CacheListing>,
    pub journal: Journal,
    pub checkpoints: Checkpoints,
    pub admission: Arc<Admission>,
    pub standbys: Standbys,
    pub pressure: Pressure,
    /// Turns of sandboxes whose deadline has passed.
    pub expiries: Semaphore,
    /// What was done to them.
    pub expired: Expiries,
    /// Turns of merges of deep stacks.
    pub merges: Semaphore,
    pub crash: CrashPoints,
    pub registry: Registry,
    /// Takes no new work.
    pub closing: CancellationToken,
    /// Actors and launches of children.
    pub tasks: TaskTracker,
    /// What other nodes have to do with this one's sandboxes.
    pub shares: Option<Shares>,
    /// Tells the collector that something may have become garbage.
    pub garbage: Notify,
    /// Held as long as the node lives.
    pub _lock: HomeLock,
}

impl Node {
    /// Reserves a place, or says at once what has run out. Where it is the node's memory, or what the host has for processes,
    /// standbys are given up first.
    pub(crate) async fn reserve(self: &Arc<Self>, claim: &Claim) -> Result<Permit, SandboxError> {
        while let Some(reason) = host::lacking(&self.home) {
            if !self.standbys.give_up_slot(self).await {
                tracing::warn!(reason, "the host has no room for another launch");
                return Err(SandboxError::Full { reason, retry_after: HOST_AGAIN });
            }
        }
        loop {
            match self.admission.reserve(claim) {
                Ok(permit) => return Ok(permit),
                Err(Refusal::Memory { missing_mib, error }) => {
                    if !self.standbys.give_up_memory(self, missing_mib).await
                        && !self.give_up_standing().await
                    {
                        return Err(error);
                    }
                }
                Err(Refusal::Other(error)) => return Err(error),
            }
        }
    }

    /// Paused sandboxes whose VMM stands.
    pub(crate) fn standing(&self) -> Vec<Arc<Cell>> {
        let cells = self.registry.all();
        cells.into_iter().filter(|cell| cell.stands.lock().is_some()).collect()
    }

    /// Ends the VMM that was to end next of those. `false` where there is none.
    pub(crate) async fn give_up_standing(&self) -> bool {
        let standing = self.standing();
        let Some(cell) = standing.into_iter().min_by_key(|cell| *cell.stands.lock()) else { return false };
        let ended = cell.ask(|reply| Command::EndStanding { reply });
        matches!(tokio::time::timeout(GIVE_UP, ended).await, Ok(Ok(())))
    }

    /// Whose guests may share the pages of a memory image, if not all may.
    pub(crate) fn sharing_group<'a>(&self, team: &'a TeamId) -> Option<&'a TeamId> {
        (!self.settings.share_memory_across_teams).then_some(team)
    }

    /// Refuses new work when the disk is nearly full.
    pub(crate) fn disk_room(&self) -> Result<(), SandboxError> {
        let path = self.home.path();
        let free = self.disk_free().map_err(|error| {
            SandboxError::internal(
                "the host's disk cannot be looked at",
                format!("{}: {error}", path.display()),
            )
        })?;
        if free < self.settings.disk_reserve_bytes {
            // Caches give way before the next one asks.
            self.garbage.notify_one();
            return Err(SandboxError::DiskFull(format!(
                "{} MiB are free on the filesystem of {} and {} MiB are kept in reserve; remove sandboxes or templates",
                free >> 20,
                path.display(),
                self.settings.disk_reserve_bytes >> 20
            )));
        }
        Ok(())
    }

    /// Turns an error into `DiskFull` when the disk has no room left, and into `Full` when the host has not: that is what the user can
    /// do something about.
    pub(crate) fn explain(&self, error: SandboxError) -> SandboxError {
        const NOTHING: u64 = 16 << 20;
        match (self.disk_free(), &error) {
            (Ok(free), SandboxError::Internal { detail, .. }) if free < NOTHING => {
                tracing::error!(%detail, "a step failed on a full disk");
                SandboxError::DiskFull(format!(
                    "no room is left on the filesystem of {}",
                    self.home.path().display()
                ))
            }
            (_, SandboxError::Internal { detail, .. }) => match host::lacking(&self.home) {
                None => error,
                Some(reason) => {
                    tracing::error!(%detail, reason, "a step failed on a host that has run out");
                    SandboxError::Full { reason, retry_after: HOST_AGAIN }
                }
            },
            _ => error,
        }
    }

    /// What a client is shown.
    pub(crate) fn view(&self, record: &Record, state: SandboxState) -> SandboxView {
        let publishes = self.shares.as_ref().is_some_and(|shares| shares.publish);
        let publication = match record.shared {
            _ if state != SandboxState::Paused => None,
            Shared::Offered => Some(Publication::Published),
            _ if !publishes => None,
            _ if !record.volumes.is_empty() => Some(Publication::Stays),
            _ => Some(Publication::Pending),
        };
        SandboxView { publication, ..record.view(state) }
    }

    /// Free bytes on the home's filesystem.
    pub(crate) fn disk_free(&self) -> nix::Result<u64> {
        let found = nix::sys::statvfs::statvfs(self.home.path())?;
        Ok(found.blocks_available().saturating_mul(found.fragment_size()))
    }
}

/// The sandboxes of a node, by id.
#[derive(Default)]
pub(crate) struct Registry {
    cells: RwLock<HashMap<SandboxId, Arc<Cell>>>,
}

impl Registry {
    pub(crate) fn insert(&self, cell: Arc<Cell>) {
        self.cells.write().insert(cell.id.clone(), cell);
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.cells.write().remove(id);
    }

    /// A sandbox of a team.
    pub(crate) fn of_team(&self, team: &TeamId, id: &SandboxId) -> Result<Arc<Cell>, SandboxError> {
        let found = self.cells.read().get(id).filter(|cell| cell.team == *team).cloned();
        found.ok_or_else(|| SandboxError::NotFound(id.clone()))
    }

    /// A sandbox of whichever team.
    pub(crate) fn any(&self, id: &SandboxId) -> Result<Arc<Cell>, SandboxError> {
        self.cells.read().get(id).cloned().ok_or_else(|| SandboxError::NotFound(id.clone()))
    }

    /// All.
    pub(crate) fn all(&self) -> Vec<Arc<Cell>> {
        self.cells.read().values().cloned().collect()
    }

    /// The records of all, as they were published last.
    pub(crate) fn records(&self) -> Vec<Arc<Record>> {
        self.all().iter().map(|cell| Arc::clone(&cell.now().record)).collect()
    }
}
