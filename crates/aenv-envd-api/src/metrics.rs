//! The body of `GET /metrics`.

use serde::{Deserialize, Serialize};

/// What a guest uses right now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// When it was measured, seconds since the epoch by the guest's clock.
    pub ts: i64,
    /// Number of vCPUs.
    pub cpu_count: u32,
    /// Share of all vCPUs that was busy since the measurement before (since boot for the first), 0 to 100.
    pub cpu_used_pct: f64,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes of memory that are in use and cannot be given up.
    pub mem_used: u64,
    /// Bytes of page cache and reclaimable kernel memory.
    pub mem_cache: u64,
    /// Bytes of the root filesystem in use.
    pub disk_used: u64,
    /// Bytes of the root filesystem.
    pub disk_total: u64,
}
