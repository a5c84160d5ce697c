//! What callers ask for.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use aenv_types::{Checkpoint, EgressPolicy, MachineShape, TeamId, TemplateId};
use aenv_volume::VolumeMount;
use serde::{Deserialize, Serialize};

/// A new sandbox.
#[derive(Clone, Debug)]
pub struct CreateRequest {
    /// Whose.
    pub team: TeamId,
    /// What to launch. One that has only disks boots cold.
    pub checkpoint: Arc<Checkpoint>,
    /// Used when `checkpoint` has only disks: the machine to boot. Otherwise the checkpoint's own shape holds.
    pub shape: Option<MachineShape>,
    /// Shown as `templateID`.
    pub template: TemplateId,
    /// Shown as `alias`.
    pub alias: Option<String>,
    /// Time until `on_timeout` happens.
    pub timeout: Duration,
    /// What happens then, and what wakes it.
    pub lifecycle: Lifecycle,
    /// Free-form, returned unchanged.
    pub metadata: BTreeMap<String, String>,
    /// Added to the environment of every process in the guest.
    pub env: BTreeMap<String, String>,
    /// Whether envd asks for a token.
    pub secure: bool,
    /// What it may reach.
    pub egress: EgressPolicy,
    /// The API's own form of the network options, given back unchanged by get.
    pub network: serde_json::Value,
    /// `allowInternetAccess` as it was sent (`None`: unset).
    pub allow_internet_access: Option<bool>,
    /// The MCP servers that its client starts in it, given back unchanged by get; null: none.
    pub mcp: serde_json::Value,
    /// How the data plane treats requests to it.
    pub proxy: ProxyOptions,
    /// Volumes to mount.
    pub volumes: Vec<VolumeMount>,
    /// Not listed and not counted: the sandbox of a template build.
    pub hidden: bool,
    /// What its team may have running, by the key that asks. They hold for its forks and resumes too.
    pub limits: TeamLimits,
}

/// What a team may have running; `None`: as much as the node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeamLimits {
    /// Sandboxes.
    pub running: Option<u32>,
    /// Their memory together, in MiB.
    pub memory_mib: Option<u64>,
}

/// What ends or wakes a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifecycle {
    /// At the deadline.
    pub on_timeout: OnTimeout,
    /// How it is paused at the deadline.
    pub pause_mode: PauseMode,
    /// Traffic resumes it.
    pub auto_resume: bool,
}

/// What happens at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is paused.
    Pause,
    /// It is removed.
    Kill,
}

/// What a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Memory, processes and disk.
    Full,
    /// The disk only; a resume boots.
    Filesystem,
}

/// What a capture takes.
pub type CaptureMode = PauseMode;

/// A change of the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// now + this, sooner or later than before.
    Set(Duration),
    /// max(the deadline, now + this).
    Extend(Duration),
}

/// How the data plane treats requests to a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProxyOptions {
    /// User ports need the traffic token.
    pub private_traffic: bool,
    /// Host header that the guest is shown; `${PORT}` is replaced.
    pub mask_request_host: Option<String>,
    /// Ports to which the proxy speaks TLS.
    pub https_ports: Vec<u16>,
}
