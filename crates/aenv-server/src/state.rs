//! What every handler holds.

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64},
    },
};

use aenv_blockd::Export;
use aenv_image::Images;
use aenv_orchestrator::Orchestrator;
use aenv_template::Templates;
use aenv_types::Home;
use aenv_volume::Volumes;
use axum::extract::FromRef;
use chrono::{DateTime, Utc};
use tokio::sync::Semaphore;

use crate::{
    audit::Audit, config::Config, events::Events, idempotency::Idempotency, keys::Keys, limits::Limits,
    routes::nodes::CpuClock, secrets::Secrets, spawns::Spawns, upkeep::Upkeep,
};

/// The rooms that a handler may call. Cheap to clone.
#[derive(Clone)]
pub struct AppState(pub Arc<Shared>);

/// What [`AppState`] shares.
pub struct Shared {
    /// Sandboxes.
    pub orchestrator: Orchestrator,
    /// Names, builds and snapshots.
    pub templates: Templates,
    /// OCI images.
    pub images: Images,
    /// Images that may be published at the same time.
    pub publishing: Arc<Semaphore>,
    /// Who changed what.
    pub audit: Audit,
    /// What teams use of their limits.
    pub limits: Limits,
    /// Upkeep of the repository.
    pub upkeep: Upkeep,
    /// Volumes.
    pub volumes: Volumes,
    /// Secrets.
    pub secrets: Secrets,
    /// API keys.
    pub keys: Keys,
    /// What sandboxes did.
    pub events: Events,
    /// How often templates were used.
    pub spawns: Spawns,
    /// `Idempotency-Key`.
    pub idempotency: Idempotency,
    /// How disks are shown.
    pub export: Export,
    /// The effective configuration.
    pub config: Config,
    /// Where things lie.
    pub home: Home,
    /// Since when this server runs.
    pub started_at: DateTime<Utc>,
    /// Changes with each start.
    pub instance: uuid::Uuid,
    /// Counts of creates.
    pub counts: Counts,
    /// How busy the cores are.
    pub cpu: CpuClock,
}

/// Counts of creates since the start of the server.
#[derive(Debug, Default)]
pub struct Counts {
    /// That worked.
    pub created: AtomicU64,
    /// That did not.
    pub failed: AtomicU64,
    /// That are under way.
    pub starting: AtomicU32,
}

impl Deref for AppState {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl FromRef<AppState> for Keys {
    fn from_ref(state: &AppState) -> Self {
        state.keys.clone()
    }
}
