//! What caches of a node have in common: records that keep layers.

use std::{path::PathBuf, time::SystemTime};

use crate::LayerRef;

/// A record of a cache: as long as its file is there, the layers that it names stay. Both may go at any time: what the cache
/// held is then made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheRecord {
    /// The record's file. Removing it is how the record is forgotten. `None`: work under way, which nobody may forget.
    pub file: Option<PathBuf>,
    /// When it was last of use.
    pub last_used: SystemTime,
    /// Bytes of the file, where it is large by itself.
    pub own_bytes: u64,
    /// What it keeps.
    pub layers: Vec<LayerRef>,
}

/// Notes that a record was of use now.
pub fn touch(file: &std::path::Path) -> std::io::Result<()> {
    std::fs::File::options().append(true).open(file)?.set_modified(SystemTime::now())
}
