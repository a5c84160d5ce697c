//! Volumes and their files.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /volumes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    /// Unique in the team: 1 to 128 letters, digits, `-` and `_`.
    pub name: String,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Its id.
    #[serde(rename = "volumeID")]
    pub volume_id: String,
    /// Its name.
    pub name: String,
}

/// A volume and the token of its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAndToken {
    /// Its id.
    #[serde(rename = "volumeID")]
    pub volume_id: String,
    /// Its name.
    pub name: String,
    /// Bearer token of `/volumecontent/{id}`.
    pub token: String,
}

/// What an entry of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeEntryType {
    /// A file.
    File,
    /// A folder.
    Directory,
    /// A link.
    Symlink,
    /// Anything else.
    Unknown,
}

/// An entry of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeEntryStat {
    /// Its last component; `/` for the root.
    pub name: String,
    /// What it is.
    #[serde(rename = "type")]
    pub kind: VolumeEntryType,
    /// From the volume's root.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Read last.
    pub atime: DateTime<Utc>,
    /// Written last.
    pub mtime: DateTime<Utc>,
    /// Changed last.
    pub ctime: DateTime<Utc>,
    /// Where a link leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// Body of `PATCH /volumecontent/{id}/path`; what is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeEntryUpdate {
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Permission bits.
    pub mode: Option<u32>,
}
