//! Nodes.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineInfo {
    /// Family number of the CPU.
    pub cpu_family: String,
    /// Model number of the CPU.
    pub cpu_model: String,
    /// Name of the CPU.
    pub cpu_model_name: String,
    /// `x86_64` or `aarch64`.
    pub cpu_architecture: String,
}

/// What runs its sandboxes. AgentENV's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeEngine {
    /// `qemu` or `firecracker`.
    pub name: String,
    /// Its version, as it reports it.
    pub version: String,
    /// What runs the guests' instructions: `kvm`, `pvm` or `tcg` (emulation).
    pub virtualization: String,
}

/// How disks are shown to the engine. AgentENV's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeExport {
    /// `ublk` or `fuse`.
    pub kind: String,
    /// Why so.
    pub why: String,
}

/// Guest memory that a node has promised, builds and standbys included, and what it does so that it has it. AgentENV's own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// What is promised; the operator's to see.
    pub promised_bytes: u64,
    /// The most that is.
    pub limit_bytes: u64,
    /// How many times what sandboxes may really take that is.
    pub overcommit: f64,
    /// Memory of the host that is kept available.
    pub reserve_bytes: u64,
    /// What idle guests have given back; the operator's to see.
    pub given_back_bytes: u64,
}

/// Whether a node takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeStatus {
    /// It does.
    Ready,
    /// It lets its sandboxes end and takes no new ones.
    Draining,
    /// It is starting.
    Connecting,
    /// It has failed.
    Unhealthy,
    /// It is kept in reserve.
    Standby,
}

/// A filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskMetrics {
    /// Where it is mounted.
    pub mount_point: String,
    /// Device.
    pub device: String,
    /// Such as `ext4`.
    pub filesystem_type: String,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// What a node has, has promised and uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMetrics {
    /// vCPUs of running sandboxes.
    #[serde(rename = "allocatedCPU")]
    pub allocated_cpu: u32,
    /// Percent of all cores in use.
    pub cpu_percent: u32,
    /// Cores.
    pub cpu_count: u32,
    /// Guest memory of running sandboxes.
    pub allocated_memory_bytes: u64,
    /// Memory in use.
    pub memory_used_bytes: u64,
    /// Memory in all.
    pub memory_total_bytes: u64,
    /// Huge pages in all.
    pub huge_pages_total: u64,
    /// Huge pages in use.
    pub huge_pages_used: u64,
    /// Filesystems that the node works on.
    pub disks: Vec<DiskMetrics>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Version of the server.
    pub version: String,
    /// The same, with the commit where it is known.
    pub commit: String,
    /// Its id.
    pub id: String,
    /// Changes with each start of the server.
    #[serde(rename = "serviceInstanceID")]
    pub service_instance_id: String,
    /// The cluster.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// The machine.
    pub machine_info: MachineInfo,
    /// What runs its sandboxes.
    #[serde(default)]
    pub engine: NodeEngine,
    /// How disks are shown to it.
    #[serde(default)]
    pub export: NodeExport,
    /// What is promised of its memory.
    #[serde(default)]
    pub memory: NodeMemory,
    /// Whether it takes work.
    pub status: NodeStatus,
    /// Since when.
    pub status_changed_at: DateTime<Utc>,
    /// Running sandboxes.
    pub sandbox_count: u32,
    /// What it has, has promised and uses.
    pub metrics: NodeMetrics,
    /// Creates that worked, since the start of the server.
    pub create_successes: u64,
    /// Creates that did not.
    pub create_fails: u64,
    /// Creates under way.
    pub sandbox_starting_count: u32,
}
