use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aenv_store::{BlockSource, DeviceError};
use thiserror::Error;
use uuid::Uuid;

use crate::{
    durable::{parent_of, sync_dir},
    generation::{Generation, GenerationName, OpenGenerationError, list},
    mapping::SECTOR,
};

/// Bytes copied at once when an interrupted seal is undone.
const COPY: usize = 1 << 20;

/// Why an upper cannot be made or taken up.
#[derive(Debug, Error)]
pub enum OpenUpperError {
    /// The folder has no upper.
    #[error("{0} has no upper; make one")]
    NotFound(PathBuf),
    /// The folder has an upper already.
    #[error("{0} has an upper already; open it")]
    Exists(PathBuf),
    /// Another process has it.
    #[error("{0} is in use by another process; end that one first")]
    Busy(PathBuf),
    /// Its bytes cannot be what this program wrote.
    #[error("{path} is corrupt ({what}); go back to an earlier checkpoint")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An interrupted seal could not be undone.
    #[error("an interrupted seal in {path} could not be undone: {source}")]
    Undo {
        /// The folder.
        path: PathBuf,
        /// What failed.
        #[source]
        source: DeviceError,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

impl From<OpenGenerationError> for OpenUpperError {
    fn from(error: OpenGenerationError) -> Self {
        match error {
            OpenGenerationError::Unborn(path) => Self::NotFound(path),
            OpenGenerationError::Busy(path) => Self::Busy(path),
            OpenGenerationError::Corrupt { path, what } => Self::Corrupt { path, what },
            OpenGenerationError::Io { path, source } => Self::Io { path, source },
        }
    }
}

/// The writable end of a disk, in a folder of its own. Give it to a [`Stack`](crate::Stack) to write to it.
pub struct Upper {
    pub(crate) generation: Arc<Generation>,
}

impl Upper {
    /// Makes an empty upper for a disk of `virtual_size` bytes. The folder is made when it is missing.
    pub fn create(dir: &Path, virtual_size: u64) -> Result<Self, OpenUpperError> {
        let at = |source| OpenUpperError::Io { path: dir.to_owned(), source };
        if !dir.exists() {
            fs::create_dir_all(dir).map_err(at)?;
            sync_dir(parent_of(dir)).map_err(at)?;
        }
        let (found, orphans) = list(dir).map_err(at)?;
        if !found.is_empty() {
            return Err(OpenUpperError::Exists(dir.to_owned()));
        }
        remove_orphans(orphans).map_err(at)?;
        let name = GenerationName { dir: dir.to_owned(), number: 1 };
        let generation = Generation::create(name, virtual_size, Uuid::nil())?;
        generation.sync_created().map_err(at)?;
        Ok(Self { generation: Arc::new(generation) })
    }

    /// Takes up an upper where it was. What was acknowledged is there if only the process had ended; after a crash of the machine,
    /// everything that was flushed is, and what was not flushed may be.
    /// A seal that a crash interrupted either happened (its target is complete) or is undone here.
    pub fn open(dir: &Path) -> Result<Self, OpenUpperError> {
        let at = |source| OpenUpperError::Io { path: dir.to_owned(), source };
        let (found, orphans) = match list(dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(OpenUpperError::NotFound(dir.to_owned()));
            }
            other => other.map_err(at)?,
        };
        let mut chain = Vec::new();
        for name in found {
            match Generation::open(name.clone()) {
                Ok(generation) => chain.push(generation),
                Err(OpenGenerationError::Unborn(path)) => {
                    tracing::info!(path = %path.display(), "an upper that was never completed is removed");
                    name.remove().map_err(at)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        remove_orphans(orphans).map_err(at)?;
        let mut chain = chain.into_iter();
        let oldest = chain.next().ok_or_else(|| OpenUpperError::NotFound(dir.to_owned()))?;
        for newer in chain {
            fold(&oldest, &newer).map_err(|source| OpenUpperError::Undo { path: dir.to_owned(), source })?;
            newer.remove().map_err(at)?;
        }
        Ok(Self { generation: Arc::new(oldest) })
    }

    /// Takes up the upper in a folder, or makes one where there is none.
    pub fn open_or_create(dir: &Path, virtual_size: u64) -> Result<Self, OpenUpperError> {
        match Self::open(dir) {
            Err(OpenUpperError::NotFound(_)) => Self::create(dir, virtual_size),
            other => other,
        }
    }

    /// Bytes of the disk.
    pub fn virtual_size(&self) -> u64 {
        self.generation.virtual_size()
    }

    /// The uuid that the layer gets which it is sealed to.
    pub fn uuid(&self) -> Uuid {
        self.generation.uuid()
    }

    /// The uuid of the layer that was sealed from this upper last: it must be the top one of the layers beneath.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        Some(self.generation.parent()).filter(|uuid| !uuid.is_nil())
    }

    /// Whether nothing was written to it.
    pub fn is_empty(&self) -> bool {
        self.generation.is_empty()
    }
}

/// Files of a generation whose data became a layer.
fn remove_orphans(orphans: Vec<PathBuf>) -> io::Result<()> {
    orphans.into_iter().try_for_each(fs::remove_file)
}

/// Writes what `newer` maps to `older`, durably. Doing it twice does no harm, so a crash in the middle does none either.
fn fold(older: &Generation, newer: &Generation) -> Result<(), DeviceError> {
    let mut buf = vec![0; COPY];
    for mapping in newer.mappings() {
        let writer = older.begin_write().ok_or(DeviceError::ReadOnly)?;
        let (mut offset, len) = (mapping.offset() * SECTOR, u64::from(mapping.len()) * SECTOR);
        if mapping.zeroed() {
            writer.discard(offset, len)?;
            continue;
        }
        let mut from = mapping.moffset() * SECTOR;
        let end = from + len;
        while from < end {
            let part = &mut buf[..(end - from).min(COPY as u64) as usize];
            newer.read_at(part, from)?;
            writer.write(part, offset)?;
            from += part.len() as u64;
            offset += part.len() as u64;
        }
    }
    older.set_virtual_size(newer.virtual_size());
    older.flush()
}

/// How long a seal waits for writes in flight.
pub(crate) const DRAIN: Duration = Duration::from_secs(30);
