//! What a sandbox uses.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// When, in seconds since 1970.
    pub timestamp_unix: i64,
    /// vCPUs.
    pub cpu_count: u32,
    /// Percent of all vCPUs.
    pub cpu_used_pct: f64,
    /// Bytes of memory in use.
    pub mem_used: u64,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes of page cache.
    pub mem_cache: u64,
    /// Bytes of the root disk in use.
    pub disk_used: u64,
    /// Bytes of the root disk.
    pub disk_total: u64,
}

/// The latest sample of each of several sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxesWithMetrics {
    /// By sandbox id; one that has no sample is missing.
    pub sandboxes: BTreeMap<String, SandboxMetric>,
}
