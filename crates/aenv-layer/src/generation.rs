//! One generation of an upper: a data file that only grows, an index file that only grows, notes of what the latter does not have
//! yet, and the index in memory.
//!
//! A write takes its place at the end of the data (an atomic addition), writes there, and then maps the place, so that a
//! reader never finds a mapping without its data. A flush makes the data durable first and logs its mappings second, so that
//! a crash leaves mappings of durable data only. Data that nothing maps any more is punched out of the file, once the log
//! that says so is durable. Sealing appends the sorted index and a trailer to the data file: it then is a layer.

mod files;
mod log;
mod recent;
mod recover;

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use aenv_store::{BlockSource, DeviceError, FileSource, SourceError};
use parking_lot::{Condvar, Mutex, RwLock};
use uuid::Uuid;

pub(crate) use files::{GenerationName, list};
pub(crate) use recover::OpenGenerationError;

use crate::{
    durable::{parent_of, sync_dir},
    format::{Block, HEADER_SIZE, Role},
    index::Index,
    layer::Layer,
    mapping::{Mapping, SECTOR, pieces, push_joined},
    segments::{SegmentMap, Span},
    writer::tail,
};
use log::Log;
use recent::Recent;

/// Sectors of dead data, and mappings, that no flush has taken yet at most. A disk that is written for ever and never flushed would
/// otherwise grow for ever, and with it the memory of who serves it.
const UNFLUSHED: (u64, usize) = ((32 << 20) / SECTOR, 1 << 16);

/// Set in `writers` when no write may begin any more.
const CLOSED: u64 = 1 << 63;

/// One generation of an upper.
pub(crate) struct Generation {
    name: GenerationName,
    data: File,
    label: String,
    uuid: Uuid,
    parent: Uuid,
    virtual_size: AtomicU64,
    /// Where the next write's data goes.
    end: AtomicU64,
    live: RwLock<Live>,
    log: Mutex<Log>,
    /// Taken while `live` is held, so that notes are in the order of what happened.
    recent: Mutex<Recent>,
    /// Writes in flight, and [`CLOSED`].
    writers: AtomicU64,
    drained: (Mutex<()>, Condvar),
    /// Punches begun so far; a read that saw it change looks its mappings up again.
    punches: AtomicU64,
    /// Held to punch, and by a reader that lost that race too often.
    punching: RwLock<()>,
    /// A flush failed: what is durable is unknown, so nothing is acknowledged any more.
    broken: AtomicBool,
}

#[derive(Default)]
struct Live {
    segments: SegmentMap,
    /// Mappings not yet in the log, in order.
    pending: Vec<Mapping>,
    /// Data that nothing maps any more.
    dead: Vec<Mapping>,
    /// How much of it there is.
    dead_sectors: u64,
}

/// A write in flight; a seal waits for it.
pub(crate) struct WriteGuard<'a>(&'a Generation);

impl Generation {
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    pub fn parent(&self) -> Uuid {
        self.parent
    }

    pub fn name(&self) -> &GenerationName {
        &self.name
    }

    pub fn virtual_size(&self) -> u64 {
        self.virtual_size.load(Ordering::Relaxed)
    }

    /// Sets the size that a seal will state.
    pub fn set_virtual_size(&self, size: u64) {
        self.virtual_size.store(size, Ordering::Relaxed);
    }

    /// Whether nothing was ever mapped in it.
    pub fn is_empty(&self) -> bool {
        self.live.read().segments.is_empty()
    }

    /// Segments in its index.
    pub fn segments(&self) -> usize {
        self.live.read().segments.len()
    }

    /// All mappings of the disk's sectors, sorted.
    pub fn mappings(&self) -> Vec<Mapping> {
        let end = self.virtual_size() / SECTOR;
        let live = self.live.read();
        let inside = live.segments.iter().take_while(|mapping| mapping.offset() < end);
        inside.map(|mapping| mapping.clip(0, end)).collect()
    }

    /// Walks a range of sectors: its mappings, and gaps.
    pub fn walk(&self, start: u64, end: u64, visit: impl FnMut(Span)) {
        self.live.read().segments.walk(start, end, visit);
    }

    /// Punches begun so far.
    pub fn punches(&self) -> u64 {
        self.punches.load(Ordering::Acquire)
    }

    /// Keeps punches away while it is held.
    pub fn hold_punches(&self) -> parking_lot::RwLockReadGuard<'_, ()> {
        self.punching.read()
    }

    /// Begins a write, unless the generation is closed.
    pub fn begin_write(&self) -> Option<WriteGuard<'_>> {
        if self.writers.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            drop(WriteGuard(self));
            return None;
        }
        Some(WriteGuard(self))
    }

    /// Lets no write begin any more, and waits until those in flight have ended. `false`: some did not within `bound`.
    pub fn close(&self, bound: Duration) -> bool {
        self.writers.fetch_or(CLOSED, Ordering::AcqRel);
        let mut guard = self.drained.0.lock();
        let mut expired = false;
        while self.writers.load(Ordering::Acquire) != CLOSED {
            if expired {
                return false;
            }
            expired = self.drained.1.wait_for(&mut guard, bound).timed_out();
        }
        true
    }

    /// Makes everything durable that was written before the call.
    pub fn flush(&self) -> Result<(), DeviceError> {
        let mut log = self.log.lock();
        self.check_broken()?;
        let (mut dead, sectors, noted) = {
            let mut live = self.live.write();
            log.take(&mut live.pending);
            let noted = self.recent.lock().end();
            (std::mem::take(&mut live.dead), std::mem::take(&mut live.dead_sectors), noted)
        };
        if let Err(error) = log.commit(&self.data, &self.name.dir) {
            if error.lost {
                self.broken.store(true, Ordering::Release);
            }
            let mut live = self.live.write();
            live.dead.append(&mut dead);
            live.dead_sectors += sectors;
            return Err(DeviceError::io(format!("flush of {}", self.label), error.source));
        }
        if let Err(error) = self.recent.lock().forget(noted) {
            tracing::debug!(file = %self.label, %error, "notes of what is durable stay");
        }
        log.bury(dead);
        if let Some(ranges) = log.ranges_to_punch(self.end.load(Ordering::Relaxed)) {
            self.punch(&ranges);
        }
        Ok(())
    }

    /// Gives ranges of the data file back to the filesystem. Failing to is no error: the data is only not needed.
    fn punch(&self, ranges: &[(u64, u64)]) {
        let _alone = self.punching.write();
        self.punches.fetch_add(1, Ordering::AcqRel);
        for &(start, len) in ranges {
            if let Err(error) = files::punch(&self.data, start, len) {
                tracing::debug!(file = %self.label, %error, "space of dead data is not given back");
                return;
            }
        }
    }

    fn check_broken(&self) -> Result<(), DeviceError> {
        if self.broken.load(Ordering::Acquire) {
            let source = io::Error::other("an earlier flush failed, and what it lost is unknown");
            return Err(DeviceError::io(&self.label, source));
        }
        Ok(())
    }

    /// Makes the files themselves durable, empty as they may be.
    pub fn sync_created(&self) -> io::Result<()> {
        self.log.lock().sync_created(&self.data, &self.name.dir)
    }

    /// Turns a closed generation into a layer at `target`: sorted index and trailer after the data, durable, then renamed.
    /// O(index). A crash before the rename leaves a generation with some bytes too many at the end of its data.
    pub fn seal(&self, target: &Path) -> Result<(Layer, u64), SealFileError> {
        debug_assert!(self.writers.load(Ordering::Relaxed) & CLOSED != 0);
        let _log = self.log.lock();
        if self.broken.load(Ordering::Acquire) {
            let source = io::Error::other("an earlier flush failed, and what it lost is unknown");
            return Err(SealFileError { path: self.name.data(), source });
        }
        let mappings = self.mappings();
        let index_offset = self.end.load(Ordering::Relaxed).next_multiple_of(HEADER_SIZE);
        let trailer = Block {
            role: Role::Trailer,
            index_offset,
            index_len: mappings.len() as u64,
            virtual_size: self.virtual_size(),
            uuid: self.uuid,
            parent: self.parent,
        };
        let tail = tail(&mappings, &trailer);
        let size = index_offset + tail.len() as u64;
        let at_data = |source| SealFileError { path: self.name.data(), source };
        self.data.set_len(size).map_err(at_data)?;
        self.data.write_all_at(&tail, index_offset).map_err(at_data)?;
        self.data.sync_all().map_err(at_data)?;
        let file = self.data.try_clone().map_err(at_data)?;
        let at_target = |source| SealFileError { path: target.to_owned(), source };
        std::fs::rename(self.name.data(), target).map_err(at_target)?;
        sync_dir(parent_of(target)).map_err(at_target)?;
        let label = target.display().to_string();
        let source =
            FileSource::from_file(file, label).map_err(|error| at_target(io::Error::other(error)))?;
        Ok((Layer::from_parts(Arc::new(source), Index::new(mappings), &trailer), size))
    }

    /// Removes its files.
    pub fn remove(&self) -> io::Result<()> {
        self.name.remove()
    }
}

/// Why a generation could not be sealed.
#[derive(Debug)]
pub(crate) struct SealFileError {
    pub path: PathBuf,
    pub source: io::Error,
}

impl WriteGuard<'_> {
    /// Writes data and maps it.
    pub fn write(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError> {
        let generation = self.0;
        generation.check_broken()?;
        let len = buf.len() as u64;
        let at = generation.end.fetch_add(len.next_multiple_of(HEADER_SIZE), Ordering::Relaxed);
        let write = generation.data.write_all_at(buf, at);
        write.map_err(|source| DeviceError::io(format!("write to {}", generation.label), source))?;
        let mut moffset = at / SECTOR;
        let mappings = pieces(offset / SECTOR, len / SECTOR).map(|(sector, sectors)| {
            let mapping = Mapping::data(sector, sectors, moffset);
            moffset += u64::from(sectors);
            mapping
        });
        self.map(mappings)
    }

    /// Maps a range as zeros.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.0.check_broken()?;
        self.map(
            pieces(offset / SECTOR, len / SECTOR).map(|(sector, sectors)| Mapping::zeros(sector, sectors)),
        )
    }

    /// Flushes as well when whoever writes has not asked for it for too long.
    fn map(&self, mappings: impl Iterator<Item = Mapping>) -> Result<(), DeviceError> {
        let mappings: Vec<Mapping> = mappings.collect();
        let overdue = {
            let mut live = self.0.live.write();
            let noted = self.0.recent.lock().note(&mappings);
            noted.map_err(|source| DeviceError::io(format!("notes of {}", self.0.label), source))?;
            let Live { segments, pending, dead, dead_sectors } = &mut *live;
            for mapping in mappings {
                segments.insert(mapping, |old| {
                    *dead_sectors += u64::from(old.len());
                    push_joined(dead, old);
                });
                push_joined(pending, mapping);
            }
            *dead_sectors >= UNFLUSHED.0 || pending.len() >= UNFLUSHED.1
        };
        if overdue { self.0.flush() } else { Ok(()) }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        let before = self.0.writers.fetch_sub(1, Ordering::Release);
        if before == CLOSED + 1 {
            let _guard = self.0.drained.0.lock();
            self.0.drained.1.notify_all();
        }
    }
}

impl BlockSource for Generation {
    /// Bytes of the data file that writes have taken so far.
    fn size(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        self.data.read_exact_at(buf, offset).map_err(|source| SourceError::io(&self.label, source))
    }
}
