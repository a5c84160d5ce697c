//! What callers are shown.

use std::{collections::BTreeMap, sync::Arc};

use aenv_types::{CheckpointId, Dial, MachineShape, SandboxId, TeamId, TemplateId, Token};
use aenv_volume::VolumeMount;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::{Lifecycle, ProxyOptions, SandboxError};

/// What a client is told of the state. (The state machine has more: transitions count as the state they lead to.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Running, or about to.
    Running,
    /// Paused, or about to be.
    Paused,
}

/// What other nodes can do with a paused sandbox, where paused sandboxes are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Publication {
    /// Nothing yet: it is on its way.
    Pending,
    /// Resume it.
    Published,
    /// Nothing: it has something that only its node has.
    Stays,
}

/// A sandbox as it is now.
#[derive(Clone, Debug)]
pub struct SandboxView {
    /// Its id.
    pub id: SandboxId,
    /// Whose.
    pub team: TeamId,
    /// Its template.
    pub template: TemplateId,
    /// The template's name at creation.
    pub alias: Option<String>,
    /// Running or paused.
    pub state: SandboxState,
    /// When it was created.
    pub started_at: DateTime<Utc>,
    /// Its deadline.
    pub end_at: DateTime<Utc>,
    /// The machine.
    pub shape: MachineShape,
    /// As it was given.
    pub metadata: BTreeMap<String, String>,
    /// envd's token (`None`: not secure).
    pub envd_token: Option<Token>,
    /// The token for user ports (`None`: public traffic is on).
    pub traffic_token: Option<Token>,
    /// As it was given.
    pub lifecycle: Lifecycle,
    /// As it was given.
    pub network: serde_json::Value,
    /// As it was given.
    pub allow_internet_access: Option<bool>,
    /// As it was given.
    pub mcp: serde_json::Value,
    /// Version of the envd inside.
    pub envd_version: String,
    /// The guest did not answer when it was paused.
    pub unresponsive_at_pause: bool,
    /// The checkpoint that it was last launched from, or is paused in.
    pub checkpoint: CheckpointId,
    /// Its volumes.
    pub volumes: Vec<VolumeMount>,
    /// What its last launch took.
    pub timings: Timings,
    /// What other nodes can do with it.
    pub publication: Option<Publication>,
}

/// What a launch took, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Waiting for its turn.
    pub queue_ms: f64,
    /// Network slot, exports, warm VMM.
    pub place_ms: f64,
    /// Loading the state until the vCPUs run.
    pub restore_ms: f64,
    /// Until envd has answered `/init`.
    pub ready_ms: f64,
}

/// One fork's or batch's outcome, in the order of the request.
pub type ChildResult = Result<SandboxView, SandboxError>;

/// A sample of what a guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricSample {
    /// When.
    pub at: DateTime<Utc>,
    /// vCPUs.
    pub cpu_count: u32,
    /// Percent of all vCPUs, 0 to 100.
    pub cpu_used_pct: f64,
    /// Bytes in use.
    pub mem_used: u64,
    /// Bytes in all.
    pub mem_total: u64,
    /// Bytes of page cache.
    pub mem_cache: u64,
    /// Bytes in use on the root disk.
    pub disk_used: u64,
    /// Bytes of the root disk.
    pub disk_total: u64,
}

/// Memory of a node, in MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeMemory {
    /// Guest memory of all that runs, builds and standbys included.
    pub promised_mib: u64,
    /// The most that is promised.
    pub limit_mib: u64,
    /// How many times what may really be taken that is.
    pub overcommit: f64,
    /// What is kept available of the host's.
    pub reserve_mib: u64,
    /// What idle guests have given back.
    pub given_back_mib: u64,
}

/// The way to a running sandbox, for the data plane. Valid for one generation: until the next pause, kill or rollback.
#[derive(Clone)]
pub struct Route {
    /// The sandbox.
    pub id: SandboxId,
    /// Whose.
    pub team: TeamId,
    /// The way in.
    pub dial: Arc<dyn Dial>,
    /// Cancelled when this generation ends: connections break at once.
    pub ended: CancellationToken,
    /// envd's token.
    pub envd_token: Option<Token>,
    /// How requests are treated.
    pub proxy: ProxyOptions,
}

/// What traffic to a sandbox's user ports has to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Nothing.
    Open,
    /// This token; where there is none, nothing passes.
    Token(Option<Token>),
}
