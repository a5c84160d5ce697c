//! Teams and API keys.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A team, as the clients' `auth login` reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// Its id.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// Its name.
    pub name: String,
    /// The key that the caller came with.
    pub api_key: String,
    /// Whether it is the one to use when the caller names none.
    pub is_default: bool,
}

/// What may be shown of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKeyMask {
    /// `e2b_`.
    pub prefix: String,
    /// Characters after the prefix.
    pub value_length: u32,
    /// The first of them.
    pub masked_value_prefix: String,
    /// The last of them.
    pub masked_value_suffix: String,
}

/// Limits of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKeyLimits {
    /// Sandboxes that its team may have running when it creates another; the server's own limit, if it has one, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_running_sandboxes: Option<u32>,
    /// Longest timeout in seconds that it may ask for; the server's own limit when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_timeout_secs: Option<u32>,
    /// Memory in MiB that running sandboxes of its team may have together. Here and below, the server's own limit holds when
    /// absent, if it has one.
    #[serde(default, rename = "maxMemoryMiB", skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u32>,
    /// Sandboxes of its team that may be starting at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_starting_sandboxes: Option<u32>,
    /// Calls of the API that its team may make in a second, and as many at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_requests_per_second: Option<u32>,
    /// Templates that its team may have when it asks for another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_templates: Option<u32>,
    /// Snapshots that its team may have when it takes another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u32>,
    /// MiB that templates and snapshots of its team may take when it makes another.
    #[serde(default, rename = "maxRepositoryMiB", skip_serializing_if = "Option::is_none")]
    pub max_repository_mib: Option<u32>,
}

/// A key, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKey {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its team.
    pub team: String,
    /// What may be shown of the secret.
    pub mask: ApiKeyMask,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was last used, to the minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<DateTime<Utc>>,
    /// Its limits.
    #[serde(default)]
    pub limits: ApiKeyLimits,
}

/// Body of `POST /api-keys`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct NewApiKey {
    /// Its name.
    pub name: String,
    /// Its team; the caller's own when absent. Only the server's first key may name another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// Its limits.
    #[serde(default)]
    pub limits: ApiKeyLimits,
}

/// Body of `PATCH /api-keys/{id}`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ApiKeyUpdate {
    /// Its new name.
    pub name: String,
}

/// A new key. The only time that its secret is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreatedApiKey {
    /// The key.
    #[serde(flatten)]
    pub info: ApiKey,
    /// The secret.
    pub key: String,
}
