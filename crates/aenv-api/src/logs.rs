//! What a sandbox and its envd did.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How much it matters. The order is that of importance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Detail.
    Debug,
    /// Ordinary.
    #[default]
    Info,
    /// Perhaps wrong.
    Warn,
    /// Wrong.
    Error,
}

/// In which order a page of logs goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogsDirection {
    /// Newest first.
    Backward,
    /// Oldest first.
    #[default]
    Forward,
}

/// A line, as v1 shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLog {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// A JSON object with `level`, `logger`, `message` and more.
    pub line: String,
}

/// A structured line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLogEntry {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// What.
    pub message: String,
    /// How much it matters.
    pub level: LogLevel,
    /// More about it.
    pub fields: BTreeMap<String, String>,
}

/// Answer of `GET /sandboxes/{id}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLogs {
    /// Lines.
    pub logs: Vec<SandboxLog>,
    /// The same, structured.
    pub log_entries: Vec<SandboxLogEntry>,
}

/// Answer of `GET /v2/sandboxes/{id}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = SandboxLogsV2Response)]
pub struct SandboxLogsV2 {
    /// Lines.
    pub logs: Vec<SandboxLogEntry>,
}
