//! Making a generation, and taking one up after its process ended, in whatever way.

use std::{
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64},
};

use parking_lot::{Condvar, Mutex, RwLock};
use thiserror::Error;
use uuid::Uuid;

use super::{
    Generation, Live,
    files::{create_rw, open_rw},
    log::Log,
    recent::Recent,
};
use crate::{
    durable::sync_dir,
    format::{Block, HEADER_SIZE, Role},
    generation::GenerationName,
    mapping::{INVALID_OFFSET, Mapping, SECTOR, push_joined},
    segments::SegmentMap,
};

/// Records that are read at once.
const CHUNK: usize = 1 << 16;
/// An index file is written anew when it has this many records more than segments, four times over.
const SLACK: usize = 1024;

/// Why a generation cannot be taken up.
#[derive(Debug, Error)]
pub(crate) enum OpenGenerationError {
    /// It was being made when its process ended: there is nothing in it.
    #[error("{0} was never completed")]
    Unborn(PathBuf),
    #[error("{0} is in use by another process")]
    Busy(PathBuf),
    #[error("{path} is corrupt: {what}")]
    Corrupt { path: PathBuf, what: String },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

impl Generation {
    /// Makes an empty generation. Its files are durable only after a flush or [`Generation::sync_created`].
    pub fn create(
        name: GenerationName,
        virtual_size: u64,
        parent: Uuid,
    ) -> Result<Self, OpenGenerationError> {
        let made = Self::try_create(&name, virtual_size, parent);
        if made.is_err()
            && let Err(error) = name.remove()
        {
            tracing::warn!(dir = %name.dir.display(), %error, "an upper that could not be made was not removed");
        }
        made
    }

    fn try_create(
        name: &GenerationName,
        virtual_size: u64,
        parent: Uuid,
    ) -> Result<Self, OpenGenerationError> {
        let header = Block {
            role: Role::IndexHeader,
            index_offset: HEADER_SIZE,
            index_len: 0,
            virtual_size,
            uuid: Uuid::new_v4(),
            parent,
        };
        let at = |path: PathBuf| move |source| OpenGenerationError::Io { path, source };
        let index = create_rw(&name.index()).map_err(at(name.index()))?;
        index.write_all_at(&header.encode(), 0).map_err(at(name.index()))?;
        let data = create_rw(&name.data()).map_err(at(name.data()))?;
        lock(&data, name)?;
        let data_header = Block { role: Role::DataHeader, index_offset: 0, ..header };
        data.write_all_at(&data_header.encode(), 0).map_err(at(name.data()))?;
        let log = Log::new(index, HEADER_SIZE, false);
        let recent = Recent::create(name.recent(), data_header.uuid).map_err(at(name.recent()))?;
        Ok(Self::assemble(name.clone(), data, data_header, Live::default(), HEADER_SIZE, log, recent))
    }

    /// Takes a generation up. Every write that was flushed is there, and, if the machine has been running since, every other that was
    /// acknowledged; what a crash tore is cut off.
    pub fn open(name: GenerationName) -> Result<Self, OpenGenerationError> {
        let at = |path: PathBuf| move |source| OpenGenerationError::Io { path, source };
        let data = open_rw(&name.data()).map_err(at(name.data()))?;
        lock(&data, &name)?;
        let data_len = data.metadata().map_err(at(name.data()))?.len();
        let index = match open_rw(&name.index()) {
            Ok(index) => index,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(OpenGenerationError::Unborn(name.index()));
            }
            Err(error) => return Err(at(name.index())(error)),
        };
        let header = read_header(&data, Role::DataHeader, name.data())?;
        let index_header = read_header(&index, Role::IndexHeader, name.index())?;
        if index_header.uuid != header.uuid {
            let what = "it belongs to another data file".to_owned();
            return Err(OpenGenerationError::Corrupt { path: name.index(), what });
        }
        let records = Records::read(&index, data_len).map_err(at(name.index()))?;
        let end = data_len.next_multiple_of(HEADER_SIZE);
        let log = if records.clean && records.count <= 4 * records.segments.len() + SLACK {
            Log::new(index, HEADER_SIZE + (records.count * Mapping::SIZE) as u64, true)
        } else {
            rewrite(&name, &index_header, &records.segments).map_err(at(name.index()))?
        };
        let (recent, noted) = Recent::open(name.recent(), header.uuid, |mapping| has_data(mapping, data_len))
            .map_err(at(name.recent()))?;
        let mut live = Live { segments: records.segments, ..Live::default() };
        for mapping in noted {
            // What it replaces may be itself, from the log: nothing is dead for that.
            live.segments.insert(mapping, |_| {});
            push_joined(&mut live.pending, mapping);
        }
        Ok(Self::assemble(name, data, header, live, end, log, recent))
    }

    fn assemble(
        name: GenerationName,
        data: File,
        header: Block,
        live: Live,
        end: u64,
        log: Log,
        recent: Recent,
    ) -> Self {
        Self {
            label: name.data().display().to_string(),
            name,
            data,
            uuid: header.uuid,
            parent: header.parent,
            virtual_size: AtomicU64::new(header.virtual_size),
            end: AtomicU64::new(end),
            live: RwLock::new(live),
            log: Mutex::new(log),
            recent: Mutex::new(recent),
            writers: AtomicU64::new(0),
            drained: (Mutex::new(()), Condvar::new()),
            punches: AtomicU64::new(0),
            punching: RwLock::new(()),
            broken: AtomicBool::new(false),
        }
    }
}

/// Two processes that append to one upper would destroy it.
fn lock(data: &File, name: &GenerationName) -> Result<(), OpenGenerationError> {
    data.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => OpenGenerationError::Busy(name.data()),
        TryLockError::Error(source) => OpenGenerationError::Io { path: name.data(), source },
    })
}

/// A header, which is durable before the first record is. Missing or all zeros, nothing was ever flushed.
fn read_header(file: &File, role: Role, path: PathBuf) -> Result<Block, OpenGenerationError> {
    let mut bytes = [0; HEADER_SIZE as usize];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(OpenGenerationError::Unborn(path));
        }
        Err(source) => return Err(OpenGenerationError::Io { path, source }),
        Ok(()) if bytes == [0; HEADER_SIZE as usize] => return Err(OpenGenerationError::Unborn(path)),
        Ok(()) => {}
    }
    match Block::decode(&bytes) {
        Ok(block) if block.role == role => Ok(block),
        Ok(_) => Err(OpenGenerationError::Corrupt { path, what: "its header is of another kind".to_owned() }),
        Err(what) => Err(OpenGenerationError::Corrupt { path, what: what.to_owned() }),
    }
}

struct Records {
    segments: SegmentMap,
    /// Whole records in the file.
    count: usize,
    /// Whether nothing had to be left out.
    clean: bool,
}

impl Records {
    /// Replays an index file. Left out, as never flushed: a torn record at the end, records that are blank, and records
    /// of data that the data file does not have.
    fn read(index: &File, data_len: u64) -> io::Result<Self> {
        let bytes = index.metadata()?.len().saturating_sub(HEADER_SIZE);
        let count = (bytes / Mapping::SIZE as u64) as usize;
        let mut records = Self {
            segments: SegmentMap::default(),
            count,
            clean: bytes.is_multiple_of(Mapping::SIZE as u64),
        };
        let mut buf = vec![0; count.min(CHUNK) * Mapping::SIZE];
        for first in (0..count).step_by(CHUNK) {
            let part = &mut buf[..(count - first).min(CHUNK) * Mapping::SIZE];
            index.read_exact_at(part, HEADER_SIZE + (first * Mapping::SIZE) as u64)?;
            for bytes in part.as_chunks().0 {
                let mapping = Mapping::from_bytes(*bytes).with_tag(0);
                if has_data(&mapping, data_len) {
                    records.segments.insert(mapping, |_| {});
                } else {
                    records.clean = false;
                }
            }
        }
        Ok(records)
    }
}

/// Whether it is a mapping, of zeros or of data that a file of this length has.
fn has_data(mapping: &Mapping, data_len: u64) -> bool {
    let blank = mapping.len() == 0 || mapping.offset() == INVALID_OFFSET;
    let inside = mapping.moffset() >= HEADER_SIZE / SECTOR
        && mapping.moffset() + u64::from(mapping.len()) <= data_len / SECTOR;
    !blank && mapping.end() < INVALID_OFFSET && (mapping.zeroed() || inside)
}

/// Replaces an index file by one that has each segment once.
fn rewrite(name: &GenerationName, header: &Block, segments: &SegmentMap) -> io::Result<Log> {
    let path = name.index();
    let temporary = path.with_extension("index.tmp");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let index = create_rw(&temporary)?;
    let mut bytes = header.encode();
    bytes.extend(segments.iter().flat_map(Mapping::to_bytes));
    index.write_all_at(&bytes, 0)?;
    index.sync_all()?;
    fs::rename(&temporary, &path)?;
    sync_dir(&name.dir)?;
    Ok(Log::new(index, bytes.len() as u64, true))
}
