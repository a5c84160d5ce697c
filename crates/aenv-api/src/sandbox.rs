//! Sandboxes: requests and answers.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ErrorBody, NetworkConfig};

/// Body of `POST /sandboxes` and `POST /v2/sandboxes`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Template id, `name`, `name:tag`, `namespace/name[:tag]`, or a snapshot id.
    #[serde(rename = "templateID")]
    #[schema(example = "base")]
    pub template_id: String,
    /// Seconds until the deadline; the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub timeout: Option<i64>,
    /// At the deadline: pause (`true`) or kill (`false`); the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// `false`: the pause at the deadline keeps the disk only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic resumes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// v1 only: `false` makes a sandbox whose envd asks for no token. v2 sandboxes always have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// `false`: no egress at all, DNS included.
    #[serde(
        default,
        rename = "allow_internet_access",
        alias = "allowInternetAccess",
        skip_serializing_if = "Option::is_none"
    )]
    pub allow_internet_access: Option<bool>,
    /// Network options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Free-form, returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// MCP servers. Kept and given back by get; the client starts the gateway itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub mcp: Option<serde_json::Value>,
    /// Workload identity. Not offered here: anything but absent is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub iam: Option<serde_json::Value>,
    /// Volumes to mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<VolumeMount>>,
}

/// Whether traffic resumes a paused sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxAutoResumeConfig)]
pub struct AutoResume {
    /// It does.
    pub enabled: bool,
}

/// A volume in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxVolumeMount)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Where it is mounted.
    pub path: String,
}

/// A further drive of a cold start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachedDrive {
    /// Its name, unique in the sandbox.
    pub name: String,
    /// An image whose filesystem it holds; empty when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Its size.
    #[serde(rename = "diskSizeMB", default, skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
}

/// Body of `POST /sandboxes-cold`: straight from an OCI image.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ColdSandbox {
    /// `registry/name:tag[@digest]`, `oci:DIR[:tag]`, `oci-archive:FILE` or `docker-archive:FILE`.
    pub image: String,
    /// vCPUs; the configured default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Guest memory in MiB.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB", default, skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
    /// Further drives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached_drives: Vec<AttachedDrive>,
    /// Seconds until the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Pause or kill at the deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether traffic resumes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// Whether envd asks for a token; `true` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// `false`: no egress at all.
    #[serde(default, alias = "allow_internet_access", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Network options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Free-form, returned unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
}

/// Body of `POST /sandboxes/batch`: many sandboxes from one template.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct BatchRequest {
    /// How many, 1 to 100.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 100)]
    pub count: i64,
    /// What each is created with.
    #[serde(flatten)]
    pub sandbox: NewSandbox,
}

fn one() -> i64 {
    1
}

/// A sandbox, as create, connect, resume and fork answer it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Its template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// A constant that the clients require.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Version of the envd inside.
    pub envd_version: String,
    /// The template's name at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// What envd asks for as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// What user ports ask for as `e2b-traffic-access-token`; null when public traffic is on.
    #[serde(default)]
    pub traffic_access_token: Option<String>,
    /// Domain of host names; null: the client keeps its own.
    #[serde(default)]
    pub domain: Option<String>,
}

/// What a client is told of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Running, or about to.
    Running,
    /// Paused, or about to be.
    Paused,
}

/// What happens at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxOnTimeout)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is removed.
    Kill,
    /// It is paused.
    Pause,
}

/// What a pause keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxPauseMode)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// The disk only.
    Filesystem,
    /// Memory, processes and disk.
    Full,
}

/// What ends or wakes a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxLifecycle)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Traffic resumes it.
    pub auto_resume: bool,
    /// At the deadline.
    pub on_timeout: OnTimeout,
}

/// A sandbox in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Its template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// A constant that the clients require.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it was created.
    pub started_at: DateTime<Utc>,
    /// Its deadline.
    pub end_at: DateTime<Utc>,
    /// vCPUs.
    pub cpu_count: u32,
    /// Guest memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Running or paused.
    pub state: SandboxState,
    /// Version of the envd inside.
    pub envd_version: String,
    /// The template's name at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// As it was given.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The guest did not answer when it was paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_unresponsive_at_pause: Option<bool>,
    /// Mounted volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Of a paused one, where they are published: what other nodes can do with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publication: Option<Publication>,
}

/// What other nodes can do with a paused sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Publication {
    /// Nothing yet: it is on its way to the repository.
    Pending,
    /// Resume it.
    Published,
    /// Nothing: it has volumes, which only its node has.
    Stays,
}

/// One sandbox, with all there is to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What a list shows of it.
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// What envd asks for as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// As it was given; null when it was not.
    #[serde(default)]
    pub allow_internet_access: Option<bool>,
    /// As it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub mcp: Option<serde_json::Value>,
    /// Domain of host names; null: the client keeps its own.
    #[serde(default)]
    pub domain: Option<String>,
    /// As it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<NetworkConfig>)]
    pub network: Option<serde_json::Value>,
    /// What ends or wakes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
    /// What the pause at its deadline keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<PauseMode>,
}

/// Body of `POST /sandboxes/{id}/connect`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ConnectSandbox)]
pub struct ConnectRequest {
    /// The deadline becomes at least now plus this many seconds.
    pub timeout: i64,
    /// `false`: a paused sandbox boots from its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// Body of `POST /v2/sandboxes/{id}/connect`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ConnectSandboxV2)]
pub struct ConnectRequestV2 {
    /// The deadline becomes at least now plus this many seconds; the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// `false`: a paused sandbox boots from its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/resume`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResumedSandbox)]
#[serde(rename_all = "camelCase")]
pub struct ResumeRequest {
    /// Seconds until the deadline; the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Ignored: what a sandbox does at its deadline was said when it was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// `false`: it boots from its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/pause`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxPauseRequest)]
#[serde(rename_all = "camelCase")]
pub struct PauseRequest {
    /// `false`: keep the disk only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Refuse when the guest does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_healthy_guest: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/timeout`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxTimeoutRequest)]
pub struct TimeoutRequest {
    /// The deadline becomes now plus this many seconds; 0 or less: now.
    pub timeout: i64,
}

/// Body of `POST /sandboxes/{id}/refreshes`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxRefreshRequest)]
pub struct RefreshRequest {
    /// The deadline becomes at least now plus this many seconds, 0 to 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 3600)]
    pub duration: Option<i64>,
}

/// Body of `POST /sandboxes/{id}/fork`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxForkRequest)]
pub struct ForkRequest {
    /// Seconds until the children's deadline; the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// How many, 1 to 100; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100)]
    pub count: Option<i64>,
}

/// One child of a fork or a batch: one of the two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxForkResult)]
pub struct ForkResult {
    /// It runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// It does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Body of `POST /sandboxes/{id}/snapshots`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxSnapshotRequest)]
pub struct SnapshotRequest {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `false`: the disk only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// A snapshot. The clients know the first two fields, the rest is AgentENV's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotInfo {
    /// What `templateID` of a create takes.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Its names, without tags.
    pub names: Vec<String>,
    /// vCPUs.
    pub cpu_count: u32,
    /// Guest memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// When it was taken.
    pub created_at: DateTime<Utc>,
    /// The checkpoint before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The sandbox that it was taken of.
    #[serde(rename = "sandboxID", default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
}

/// Body of `POST /sandboxes/{id}/rollback`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RollbackRequest {
    /// A snapshot of this sandbox, by id or name.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
}
