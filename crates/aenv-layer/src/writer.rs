use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, IoSlice, Write},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use thiserror::Error;
use uuid::Uuid;

use crate::{
    durable::{check_replaceable, parent_of, sync_dir},
    format::{Block, HEADER_SIZE, MAX_INDEX, Role},
    mapping::{Mapping, SECTOR, pieces, push_joined},
    segments::SegmentMap,
};

/// Appends below this size are gathered before they are written.
const DIRECT: usize = 64 << 10;
/// Bytes gathered at most.
const GATHER: usize = 1 << 20;

/// Why a layer could not be written. Nothing is left behind.
#[derive(Debug, Error)]
pub enum WriteLayerError {
    /// A range is not made of whole sectors, or reaches beyond the disk.
    #[error("{len} bytes at {offset} do not fit a disk of {virtual_size} bytes in 512-byte sectors")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the disk.
        virtual_size: u64,
    },
    /// The layer has more segments than a reader takes.
    #[error("the layer has {0} segments, more than its format's readers take")]
    TooFragmented(usize),
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSummary {
    /// Bytes of the file.
    pub size: u64,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// The layer's uuid.
    pub uuid: Uuid,
    /// Bytes of data in it.
    pub data_bytes: u64,
    /// Segments in its index.
    pub segments: usize,
}

/// Writes a layer in one pass: data goes straight to the file in the order in which it is appended, the index follows. It
/// is written as `<path>.tmp` and gets its name when it is whole and durable; dropped before, it leaves nothing.
pub struct LayerWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    /// Where the next appended byte goes, gathered ones included.
    end: u64,
    gathered: Vec<u8>,
    mappings: Vec<Mapping>,
    sorted: bool,
    header: Block,
    finished: bool,
}

impl LayerWriter {
    /// Begins a layer of a disk of `virtual_size` bytes.
    pub fn create(path: &Path, virtual_size: u64) -> Result<Self, WriteLayerError> {
        Self::create_with(path, virtual_size, Uuid::new_v4(), None)
    }

    /// Begins a layer with a given uuid, on a given layer.
    pub fn create_with(
        path: &Path,
        virtual_size: u64,
        uuid: Uuid,
        parent: Option<Uuid>,
    ) -> Result<Self, WriteLayerError> {
        check_replaceable(path).map_err(|source| WriteLayerError::Io { path: path.to_owned(), source })?;
        let mut name: OsString = path.as_os_str().to_owned();
        name.push(".tmp");
        let temporary = PathBuf::from(name);
        let open = OpenOptions::new().write(true).create(true).truncate(true).open(&temporary);
        let file = open.map_err(|source| WriteLayerError::Io { path: temporary.clone(), source })?;
        let header = Block {
            role: Role::SealedHeader,
            index_offset: 0,
            index_len: 0,
            virtual_size,
            uuid,
            parent: parent.unwrap_or_default(),
        };
        Ok(Self {
            path: path.to_owned(),
            temporary,
            file,
            end: HEADER_SIZE,
            gathered: header.encode(),
            mappings: Vec::new(),
            sorted: true,
            header,
            finished: false,
        })
    }

    /// Appends data that belongs at `offset` of the disk; both are multiples of 512 bytes. A later append of the same place
    /// replaces an earlier one. Slices of 64 KiB and more are written without a copy.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> Result<(), WriteLayerError> {
        self.map(offset, data.len() as u64)?;
        self.write(data)
    }

    /// Appends several pieces of data, each `(offset, bytes)`, with as few system calls as possible and without a copy.
    pub fn append_vectored(&mut self, pieces: &[(u64, &[u8])]) -> Result<(), WriteLayerError> {
        for &(offset, data) in pieces {
            self.map(offset, data.len() as u64)?;
        }
        self.flush_gathered()?;
        let mut slices: Vec<IoSlice> =
            pieces.iter().filter(|piece| !piece.1.is_empty()).map(|piece| IoSlice::new(piece.1)).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            match (&self.file).write_vectored(rest) {
                Ok(0) => return Err(self.io(io::ErrorKind::WriteZero.into())),
                Ok(written) => IoSlice::advance_slices(&mut rest, written),
                Err(source) if source.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.io(source)),
            }
        }
        Ok(())
    }

    /// Appends data, with each run of 4 KiB blocks that are all zero stored as zeros without data.
    pub fn append_sparse(&mut self, offset: u64, data: &[u8]) -> Result<(), WriteLayerError> {
        self.check(offset, data.len() as u64)?;
        let mut start = 0;
        while start < data.len() {
            let zero = is_zero(block(data, start));
            let mut end = start;
            while end < data.len() && is_zero(block(data, end)) == zero {
                end += block(data, end).len();
            }
            let at = offset + start as u64;
            if zero {
                self.append_zeroes(at, (end - start) as u64)?;
            } else {
                self.append(at, &data[start..end])?;
            }
            start = end;
        }
        Ok(())
    }

    /// Defines a range of the disk as zeros, whatever the layers beneath have there.
    pub fn append_zeroes(&mut self, offset: u64, len: u64) -> Result<(), WriteLayerError> {
        self.check(offset, len)?;
        for (sector, sectors) in pieces(offset / SECTOR, len / SECTOR) {
            self.push(Mapping::zeros(sector, sectors));
        }
        Ok(())
    }

    /// Writes index and trailer, makes the file durable and gives it its name.
    pub fn finish(mut self) -> Result<LayerSummary, WriteLayerError> {
        let mappings = self.take_index();
        if mappings.len() as u64 > MAX_INDEX {
            return Err(WriteLayerError::TooFragmented(mappings.len()));
        }
        let index_offset = self.end.next_multiple_of(HEADER_SIZE);
        let padding = (index_offset - self.end) as usize;
        self.write(&[0; HEADER_SIZE as usize][..padding])?;
        let trailer =
            Block { role: Role::Trailer, index_offset, index_len: mappings.len() as u64, ..self.header };
        let tail = tail(&mappings, &trailer);
        self.write(&tail)?;
        self.flush_gathered()?;
        self.file.sync_all().map_err(|source| self.io(source))?;
        fs::rename(&self.temporary, &self.path).map_err(|source| self.io(source))?;
        self.finished = true;
        sync_dir(parent_of(&self.path)).map_err(|source| self.io(source))?;
        let data = mappings.iter().filter(|mapping| !mapping.zeroed());
        Ok(LayerSummary {
            size: index_offset + tail.len() as u64,
            virtual_size: self.header.virtual_size,
            uuid: self.header.uuid,
            data_bytes: data.map(|mapping| u64::from(mapping.len()) * SECTOR).sum(),
            segments: mappings.len(),
        })
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), WriteLayerError> {
        let virtual_size = self.header.virtual_size;
        let fits = offset.checked_add(len).is_some_and(|end| end <= virtual_size);
        if fits && offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR) {
            return Ok(());
        }
        Err(WriteLayerError::OutOfRange { offset, len, virtual_size })
    }

    /// Notes where data that is written next belongs.
    fn map(&mut self, offset: u64, len: u64) -> Result<(), WriteLayerError> {
        self.check(offset, len)?;
        let mut moffset = self.end / SECTOR;
        for (sector, sectors) in pieces(offset / SECTOR, len / SECTOR) {
            self.push(Mapping::data(sector, sectors, moffset));
            moffset += u64::from(sectors);
        }
        self.end += len;
        Ok(())
    }

    fn push(&mut self, mapping: Mapping) {
        self.sorted &= self.mappings.last().is_none_or(|last| last.end() <= mapping.offset());
        push_joined(&mut self.mappings, mapping);
    }

    /// The mappings sorted, later ones over earlier ones.
    fn take_index(&mut self) -> Vec<Mapping> {
        let mappings = std::mem::take(&mut self.mappings);
        if self.sorted {
            return mappings;
        }
        let mut segments = SegmentMap::default();
        for mapping in mappings {
            segments.insert(mapping, |_| {});
        }
        segments.iter().collect()
    }

    fn write(&mut self, data: &[u8]) -> Result<(), WriteLayerError> {
        if data.len() < DIRECT {
            self.gathered.extend_from_slice(data);
            return if self.gathered.len() >= GATHER { self.flush_gathered() } else { Ok(()) };
        }
        self.flush_gathered()?;
        self.file.write_all(data).map_err(|source| self.io(source))
    }

    fn flush_gathered(&mut self) -> Result<(), WriteLayerError> {
        let result = self.file.write_all(&self.gathered);
        self.gathered.clear();
        result.map_err(|source| self.io(source))
    }

    fn io(&self, source: io::Error) -> WriteLayerError {
        WriteLayerError::Io { path: self.temporary.clone(), source }
    }
}

/// The file, which has what was appended but for a little that is gathered.
impl AsFd for LayerWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for LayerWriter {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = fs::remove_file(&self.temporary)
        {
            tracing::warn!(path = %self.temporary.display(), %error, "an unfinished layer could not be removed");
        }
    }
}

/// An index, padded, and the trailer after it.
pub(crate) fn tail(mappings: &[Mapping], trailer: &Block) -> Vec<u8> {
    let bytes = (mappings.len() * Mapping::SIZE).next_multiple_of(HEADER_SIZE as usize);
    let mut out = Vec::with_capacity(bytes + HEADER_SIZE as usize);
    for mapping in mappings {
        out.extend_from_slice(&mapping.to_bytes());
    }
    out.resize(bytes, 0);
    out.extend_from_slice(&trailer.encode());
    out
}

/// The 4 KiB block (shorter at the end) that begins at `start`.
fn block(data: &[u8], start: usize) -> &[u8] {
    &data[start..data.len().min(start + 4096)]
}

fn is_zero(block: &[u8]) -> bool {
    let (words, rest) = block.as_chunks::<32>();
    words.iter().all(|word| *word == [0; 32]) && rest.iter().all(|&byte| byte == 0)
}
