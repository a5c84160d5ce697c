use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use aenv_store::{BlockSource, SourceError};
use thiserror::Error;
use zstd::bulk::Compressor;

use super::{BLOCK_SALT, Compression, FLAG_DATA, FLAG_HEADER, FLAG_SEALED, HEADER_SIZE, Header, raw_crc32c};
use crate::durable::{check_replaceable, parent_of, sync_dir};

/// Level that overlaybd uses for zstd.
const ZSTD_LEVEL: i32 = 3;
/// Blocks that are read at once.
const READ_BLOCKS: u64 = 64;

/// Why a ZFile could not be written. Nothing is left behind.
#[derive(Debug, Error)]
pub enum CompressError {
    /// What was to be compressed could not be read.
    #[error("what is to be compressed cannot be read: {0}")]
    Source(#[from] SourceError),
    /// Other readers would not take such blocks.
    #[error("blocks of {0} bytes are not possible: use a power of two from 4096 to 32768")]
    BlockSize(u32),
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

/// How to compress.
#[derive(Clone, Copy, Debug)]
pub struct CompressOptions {
    compression: Compression,
    block_size: u32,
}

impl CompressOptions {
    /// With blocks of 4 KiB, so that a small read needs no more than it asks for.
    pub fn new(compression: Compression) -> Self {
        Self { compression, block_size: 4096 }
    }

    /// With blocks of this many bytes: a power of two from 4096 to 32768.
    pub fn block_size(self, block_size: u32) -> Self {
        Self { block_size, ..self }
    }
}

/// Compresses a source to a ZFile with checksums, and returns its size. It is written as `<path>.tmp`, made durable, and
/// renamed.
pub fn compress_zfile(
    source: &dyn BlockSource,
    path: &Path,
    options: CompressOptions,
) -> Result<u64, CompressError> {
    if !options.block_size.is_power_of_two() || !(4096..=32_768).contains(&options.block_size) {
        return Err(CompressError::BlockSize(options.block_size));
    }
    check_replaceable(path).map_err(|source| CompressError::Io { path: path.to_owned(), source })?;
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".tmp");
    let temporary = PathBuf::from(name);
    let written = write_file(source, &temporary, options).and_then(|size| {
        let at = |source| CompressError::Io { path: path.to_owned(), source };
        fs::rename(&temporary, path).map_err(at)?;
        sync_dir(parent_of(path)).map_err(at)?;
        Ok(size)
    });
    if written.is_err()
        && let Err(error) = fs::remove_file(&temporary)
    {
        tracing::warn!(path = %temporary.display(), %error, "an unfinished ZFile could not be removed");
    }
    written
}

fn write_file(source: &dyn BlockSource, path: &Path, options: CompressOptions) -> Result<u64, CompressError> {
    let at = |source| CompressError::Io { path: path.to_owned(), source };
    let file = File::create(path).map_err(at)?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let mut header = Header {
        flags: FLAG_HEADER | FLAG_DATA,
        table_offset: 0,
        blocks: 0,
        size: 0,
        table_crc: 0,
        block_size: options.block_size,
        algorithm: options.compression.code(),
        uses_dictionary: false,
        dictionary_size: 0,
        checksums: true,
    };
    out.write_all(&header.encode()).map_err(at)?;
    let mut packer = Packer::new(options).map_err(at)?;
    let block_size = u64::from(options.block_size);
    let mut table = Vec::new();
    let mut end = HEADER_SIZE;
    let mut buf = vec![0; (block_size * READ_BLOCKS) as usize];
    for start in (0..source.size()).step_by(buf.len()) {
        let part = &mut buf[..(source.size() - start).min(block_size * READ_BLOCKS) as usize];
        source.read_at(part, start)?;
        for block in part.chunks(options.block_size as usize) {
            let packed = packer.pack(block).map_err(at)?;
            out.write_all(packed).map_err(at)?;
            out.write_all(&raw_crc32c(BLOCK_SALT, packed).to_le_bytes()).map_err(at)?;
            let len = packed.len() as u32 + 4;
            table.extend_from_slice(&len.to_le_bytes());
            end += u64::from(len);
        }
    }
    header.flags = FLAG_DATA | FLAG_SEALED;
    header.table_offset = end;
    header.blocks = table.len() as u64 / 4;
    header.size = source.size();
    header.table_crc = raw_crc32c(0, &table);
    out.write_all(&table).map_err(at)?;
    out.write_all(&header.encode()).map_err(at)?;
    out.flush().map_err(at)?;
    drop(out);
    file.sync_all().map_err(at)?;
    Ok(end + table.len() as u64 + HEADER_SIZE)
}

struct Packer {
    zstd: Option<Compressor<'static>>,
    out: Vec<u8>,
}

impl Packer {
    fn new(options: CompressOptions) -> io::Result<Self> {
        let block = options.block_size as usize;
        Ok(match options.compression {
            Compression::Lz4 => {
                Self { zstd: None, out: vec![0; lz4_flex::block::get_maximum_output_size(block)] }
            }
            Compression::Zstd => Self {
                zstd: Some(Compressor::new(ZSTD_LEVEL)?),
                out: vec![0; zstd::zstd_safe::compress_bound(block)],
            },
        })
    }

    fn pack(&mut self, block: &[u8]) -> io::Result<&[u8]> {
        let len = match &mut self.zstd {
            Some(zstd) => zstd.compress_to_buffer(block, &mut self.out)?,
            None => lz4_flex::block::compress_into(block, &mut self.out).map_err(io::Error::other)?,
        };
        Ok(&self.out[..len])
    }
}
