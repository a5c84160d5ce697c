//! Upkeep of the repository.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /admin/repository/gc`; may be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CollectRepository {
    /// Whether to say only what would go.
    pub dry_run: bool,
    /// What is younger stays; the server's own setting when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_secs: Option<u64>,
}

/// Body of `POST /admin/repository/fsck`; may be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckRepository {
    /// Whether to read every byte. Takes as long as reading the whole repository.
    pub deep: bool,
}

/// What a team has in the repository.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TeamUsage {
    /// The team.
    pub team: String,
    /// Templates.
    pub templates: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Paused sandboxes that were published.
    #[serde(default)]
    pub paused: u64,
    /// Their checkpoints.
    pub checkpoints: u64,
    /// Bytes of their blobs, each counted once. What teams share counts for each of them.
    pub bytes: u64,
}

/// What the repository holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RepositoryUsage {
    /// Committed checkpoints.
    pub checkpoints: u64,
    /// Blobs.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What the checkpoints would take without sharing.
    pub bytes_unshared: u64,
    /// What a garbage collection can give back.
    pub bytes_unreferenced: u64,
    /// By team.
    pub teams: Vec<TeamUsage>,
}
