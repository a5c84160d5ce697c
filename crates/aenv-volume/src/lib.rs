//! Volumes: folders under `<home>/volumes` that outlive sandboxes, and that several sandboxes mount at once.
//!
//! ```text
//!   content API ──► content ─┐                         <home>/volumes/<id>/volume.json   document (0600)
//!                            ├─► Volume ─► descriptors                    data/          the files
//!   guests ──► nfs ──────────┘                                            staging/       uploads, removals
//! ```
//!
//! Both ways in work on descriptors, from a volume's open root downwards, and never on a path of the host: `openat2` with
//! `RESOLVE_BENEATH` for paths of the API, single components and authenticated file handles for guests. Links that a guest made are
//! data here.
//!
//! It knows no HTTP and no sandbox: the server parses requests, the orchestrator decides which guest is given which volume.

pub mod content;
mod nfs;
mod path;
mod store;
mod sys;
mod tree;
mod upload;
mod volume;

use aenv_types::VolumeId;
use serde::{Deserialize, Serialize};

pub use nfs::{PORT, Serving};
pub use path::{MountPoint, NameError, PathError, VolumeName, VolumePath};
pub use store::{StoreError, Volumes};
pub use volume::Volume;

/// How much volumes may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Volumes of one team.
    pub count: usize,
    /// Bytes in one volume.
    pub quota: u64,
    /// Bytes that stay free on the host's filesystem.
    pub disk_reserve: u64,
}

/// A volume in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// The volume.
    pub volume: VolumeId,
    /// Its name when the sandbox was made.
    pub name: VolumeName,
    /// Where it is mounted.
    pub path: MountPoint,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aenv_types::{Home, TeamId};

    use super::*;

    /// A volume in a folder of its own, with 1 MiB.
    pub(crate) fn volume() -> (tempfile::TempDir, Arc<Volume>) {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path(), folder.path());
        home.create().unwrap();
        let limits = Limits { count: 2, quota: 1 << 20, disk_reserve: 0 };
        let volumes = Volumes::open(&home, limits).unwrap();
        let volume = volumes.create(&TeamId::default_team(), "one".parse().unwrap()).unwrap();
        (folder, volume)
    }
}
