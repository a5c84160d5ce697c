//! The index file of a generation: a header, then every mapping in the order in which it was made.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use crate::{
    durable::sync_dir,
    format::HEADER_SIZE,
    mapping::{Mapping, SECTOR, push_joined},
};

/// Dead bytes are punched out when there are this many, or a quarter of the data.
const PUNCH_AT: u64 = 64 << 20;
/// Ranges punched in one flush at most, so that no flush is late.
const PUNCH_RANGES: usize = 512;

pub(super) struct Log {
    index: File,
    /// Where the next record goes.
    end: u64,
    /// Records that are not durable yet.
    batch: Vec<Mapping>,
    /// Whether the files' names are durable.
    created: bool,
    /// Dead data that no durable record refers to.
    dead: Vec<Mapping>,
    dead_sectors: u64,
}

/// Why a commit failed.
pub(super) struct CommitError {
    pub source: io::Error,
    /// Whether a sync failed: the kernel may have dropped pages, so that trying again proves nothing.
    pub lost: bool,
}

impl Log {
    /// Takes an index file whose records end at `end`; `created` says that its name is durable.
    pub fn new(index: File, end: u64, created: bool) -> Self {
        Self { index, end, batch: Vec::new(), created, dead: Vec::new(), dead_sectors: 0 }
    }

    /// Takes mappings that were made since the last commit.
    pub fn take(&mut self, pending: &mut Vec<Mapping>) {
        self.batch.append(pending);
    }

    /// Makes the data durable, then the records of what was taken. What fails for want of room stays taken.
    pub fn commit(&mut self, data: &File, dir: &Path) -> Result<(), CommitError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let lost = |source| CommitError { source, lost: true };
        data.sync_data().map_err(lost)?;
        let records: Vec<u8> = self.batch.iter().flat_map(|mapping| mapping.to_bytes()).collect();
        let write = self.index.write_all_at(&records, self.end);
        write.map_err(|source| CommitError { source, lost: false })?;
        self.index.sync_data().map_err(lost)?;
        if !self.created {
            sync_dir(dir).map_err(lost)?;
            self.created = true;
        }
        self.end += records.len() as u64;
        self.batch.clear();
        Ok(())
    }

    /// Makes headers and names durable.
    pub fn sync_created(&mut self, data: &File, dir: &Path) -> io::Result<()> {
        if !self.created {
            data.sync_all()?;
            self.index.sync_all()?;
            sync_dir(dir)?;
            self.created = true;
        }
        Ok(())
    }

    /// Takes data that nothing refers to, now that the log says so.
    pub fn bury(&mut self, dead: Vec<Mapping>) {
        self.dead_sectors += dead.iter().map(|mapping| u64::from(mapping.len())).sum::<u64>();
        if self.dead.is_empty() {
            self.dead = dead;
        } else {
            self.dead.extend(dead);
        }
    }

    /// Ranges of bytes to punch now, whole blocks of the file, when there are enough of them.
    pub fn ranges_to_punch(&mut self, data_end: u64) -> Option<Vec<(u64, u64)>> {
        let bytes = self.dead_sectors * SECTOR;
        if bytes == 0 || bytes < PUNCH_AT.min(data_end / 4) {
            return None;
        }
        self.dead.sort_unstable_by_key(|mapping| mapping.moffset());
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for mapping in self.dead.drain(..) {
            let (start, len) = (mapping.moffset() * SECTOR, u64::from(mapping.len()) * SECTOR);
            match runs.last_mut() {
                Some(last) if last.0 + last.1 == start => last.1 += len,
                _ => runs.push((start, len)),
            }
        }
        let later = runs.split_off(runs.len().min(PUNCH_RANGES));
        for (start, len) in later {
            let (mut sector, mut sectors) = (start / SECTOR, len / SECTOR);
            while sectors > 0 {
                let part = sectors.min(u64::from(crate::mapping::MAX_LEN));
                push_joined(&mut self.dead, Mapping::data(0, part as u32, sector));
                sector += part;
                sectors -= part;
            }
        }
        self.dead_sectors = self.dead.iter().map(|mapping| u64::from(mapping.len())).sum();
        Some(runs.into_iter().filter_map(whole_blocks).collect())
    }
}

/// The whole blocks within a range. What a write did not fill of its last block belongs to it as well.
fn whole_blocks((start, len): (u64, u64)) -> Option<(u64, u64)> {
    let first = start.next_multiple_of(HEADER_SIZE);
    let end = (start + len) / HEADER_SIZE * HEADER_SIZE;
    (first < end).then(|| (first, end - first))
}
