//! Secrets. A value goes in and is never shown.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /secrets`.
#[derive(Clone, Default, Deserialize, ToSchema)]
pub struct NewSecret {
    /// Unique in the team; kept in lower case.
    pub name: String,
    /// Its first value.
    #[schema(write_only)]
    pub value: String,
    /// Free-form.
    #[serde(default)]
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Body of `POST /secrets/{id or name}`.
#[derive(Clone, Default, Deserialize, ToSchema)]
pub struct SecretUpdate {
    /// Its next value.
    #[schema(write_only)]
    pub value: String,
    /// Replaces the metadata; what is there stays when absent.
    #[serde(default)]
    pub metadata: Option<BTreeMap<String, String>>,
}

/// A secret, without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    /// Its id.
    #[serde(rename = "secretID")]
    pub secret_id: String,
    /// Its name.
    pub name: String,
    /// Counts its values, from 1.
    pub current_version: u32,
    /// As it was given.
    pub metadata: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was changed last.
    pub updated_at: DateTime<Utc>,
}
