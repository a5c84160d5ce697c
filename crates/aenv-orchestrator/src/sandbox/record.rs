//! What the journal keeps of a sandbox.

use std::{collections::BTreeMap, time::Duration};

use aenv_types::{
    CheckpointId, DiskImage, EgressPolicy, LayerName, LayerRef, MachineShape, SandboxId, TeamId, TemplateId,
    Token,
};
use aenv_volume::VolumeMount;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    CreateRequest, Lifecycle, ProxyOptions, SandboxState, SandboxView, TeamLimits, Timings, deadline,
    shared::Shared,
};

/// A sandbox's durable state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub id: SandboxId,
    pub team: TeamId,
    pub template: TemplateId,
    pub alias: Option<String>,
    pub phase: Phase,
    /// Counts launches; a route, a VM and a slot belong to one generation.
    pub generation: u64,
    pub started_at: DateTime<Utc>,
    pub end_at: DateTime<Utc>,
    /// As it was asked for at the create.
    pub timeout: Duration,
    pub lifecycle: Lifecycle,
    pub metadata: BTreeMap<String, String>,
    pub env: BTreeMap<String, String>,
    pub envd_token: Option<Token>,
    pub traffic_token: Option<Token>,
    pub egress: EgressPolicy,
    pub network: serde_json::Value,
    pub allow_internet_access: Option<bool>,
    #[serde(default)]
    pub mcp: serde_json::Value,
    pub proxy: ProxyOptions,
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    pub hidden: bool,
    /// Of the key that created it.
    #[serde(default)]
    pub limits: TeamLimits,
    pub shape: MachineShape,
    /// 32 hex digits; the same for the sandbox's whole life.
    pub machine_id: String,
    /// Of the last launch: envd does the work of `/init` once for each.
    pub lifecycle_id: String,
    /// The checkpoint that it was last launched from, or is paused in.
    pub checkpoint: CheckpointId,
    /// Paused with its memory: traffic may wake it.
    pub keeps_memory: bool,
    /// What runs; `None` while it is paused.
    pub launched: Option<Launched>,
    pub unresponsive_at_pause: bool,
    pub envd_version: String,
    pub timings: Timings,
    /// What other nodes know of it.
    #[serde(default)]
    pub shared: Shared,
    /// Counts pauses, on all nodes: a resume in place begins no generation.
    #[serde(default)]
    pub pauses: u64,
}

/// What the next capture builds on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Launched {
    /// It was booted, not continued: memory began as zeros.
    pub cold: bool,
    /// Memory layers beneath the private mapping. A capture that counts from the launch adds one of all that changed since.
    pub memory: Vec<LayerRef>,
    /// Memory as of the last capture, if all that was written after it, and no more, is told by the marks of that capture.
    #[serde(default)]
    pub captured: Option<Vec<LayerRef>>,
    /// Layers of each disk, those included that were sealed since the launch.
    pub disks: Vec<DiskImage>,
}

impl Launched {
    /// All layers of it.
    pub(crate) fn layers(&self) -> impl Iterator<Item = LayerName> {
        let disks = self.disks.iter().flat_map(|disk| &disk.layers);
        let captured = self.captured.iter().flatten();
        self.memory.iter().chain(captured).chain(disks).map(|layer| layer.name)
    }

    /// Lets one layer stand for layers that were merged into it, wherever they lie upon each other. Tells whether they did.
    pub(crate) fn merge(&mut self, upper: &[LayerRef], merged: LayerRef) -> bool {
        let disks = self.disks.iter_mut().map(|disk| &mut disk.layers);
        let mut changed = false;
        for layers in std::iter::once(&mut self.memory).chain(&mut self.captured).chain(disks) {
            let Some(at) = layers.windows(upper.len()).position(|window| window == upper) else { continue };
            layers.splice(at..at + upper.len(), [merged]);
            changed = true;
        }
        changed
    }
}

/// The durable shadow of the state machine: what a server that comes back has to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub(crate) enum Phase {
    /// Not acknowledged yet.
    Creating,
    /// Acknowledged, or about to be.
    Running,
    /// On the way into this checkpoint.
    Pausing { into: CheckpointId },
    /// In [`Record::checkpoint`].
    Paused,
    /// On the way out of [`Record::checkpoint`].
    Resuming,
    /// On the way to this checkpoint.
    RollingBack { to: CheckpointId },
    /// On the way out.
    Killing,
    /// Ended by itself.
    Failed { reason: String },
}

impl Phase {
    /// One word, for the journal's own column.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing { .. } => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::RollingBack { .. } => "rolling_back",
            Self::Killing => "killing",
            Self::Failed { .. } => "failed",
        }
    }
}

impl Record {
    /// A sandbox that is about to be created.
    pub(crate) fn new(request: &CreateRequest) -> Self {
        let checkpoint = &request.checkpoint;
        let shape = if checkpoint.has_memory() {
            checkpoint.shape
        } else {
            request.shape.unwrap_or(checkpoint.shape)
        };
        Self {
            id: SandboxId::random(),
            team: request.team.clone(),
            template: request.template.clone(),
            alias: request.alias.clone(),
            phase: Phase::Creating,
            generation: 0,
            started_at: deadline::after(Duration::ZERO),
            end_at: deadline::after(request.timeout),
            timeout: request.timeout,
            lifecycle: request.lifecycle,
            metadata: request.metadata.clone(),
            env: request.env.clone(),
            envd_token: request.secure.then(Token::random),
            traffic_token: request.proxy.private_traffic.then(Token::random),
            egress: request.egress.clone(),
            network: request.network.clone(),
            allow_internet_access: request.allow_internet_access,
            mcp: request.mcp.clone(),
            proxy: request.proxy.clone(),
            volumes: request.volumes.clone(),
            hidden: request.hidden,
            limits: request.limits,
            shape,
            machine_id: uuid::Uuid::new_v4().simple().to_string(),
            lifecycle_id: String::new(),
            checkpoint: checkpoint.id.clone(),
            keeps_memory: false,
            launched: None,
            unresponsive_at_pause: false,
            envd_version: aenv_envd_api::ENVD_VERSION.to_owned(),
            timings: Timings::default(),
            shared: Shared::No,
            pauses: 0,
        }
    }

    /// What a client is shown.
    pub(crate) fn view(&self, state: SandboxState) -> SandboxView {
        SandboxView {
            id: self.id.clone(),
            team: self.team.clone(),
            template: self.template.clone(),
            alias: self.alias.clone(),
            state,
            started_at: self.started_at,
            end_at: self.end_at,
            shape: self.shape,
            metadata: self.metadata.clone(),
            envd_token: self.envd_token.clone(),
            traffic_token: self.traffic_token.clone(),
            lifecycle: self.lifecycle,
            network: self.network.clone(),
            allow_internet_access: self.allow_internet_access,
            mcp: self.mcp.clone(),
            envd_version: self.envd_version.clone(),
            unresponsive_at_pause: self.unresponsive_at_pause,
            checkpoint: self.checkpoint.clone(),
            volumes: self.volumes.clone(),
            timings: self.timings,
            publication: None,
        }
    }

    /// Checkpoints whose manifests must stay.
    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = &CheckpointId> {
        let other = match &self.phase {
            Phase::Pausing { into } => Some(into),
            Phase::RollingBack { to } => Some(to),
            _ => None,
        };
        std::iter::once(&self.checkpoint).chain(other)
    }

    /// Layers that run or that the next capture builds on, whether or not a manifest names them.
    pub(crate) fn launched_layers(&self) -> impl Iterator<Item = LayerName> {
        self.launched.iter().flat_map(Launched::layers)
    }
}
