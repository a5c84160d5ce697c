//! ZFile: a file compressed in blocks of equal size, each of which can be read on its own. A table of the blocks' compressed
//! lengths says where each one lies.

mod table;
mod writer;

use std::{cell::RefCell, sync::Arc};

use aenv_store::{BlockSource, SourceError};
use thiserror::Error;
use zstd::bulk::Decompressor;

pub use writer::{CompressError, CompressOptions, compress_zfile};

use table::Table;

/// Bytes of a header and of a trailer.
const HEADER_SIZE: u64 = 512;
const MAGIC0: &[u8; 8] = b"ZFile\0\x01\0";
const MAGIC1: &[u8; 16] = b"tuji.yyf@Alibaba";
const STRUCT_SIZE: u32 = 96;
/// Start value of the checksum after each block.
const BLOCK_SALT: u32 = 100_007;
/// The largest block, as other readers have it.
const MAX_BLOCK: u32 = 64 << 10;
/// Blocks that a file may have: at 4 KiB each, a terabyte.
const MAX_BLOCKS: u64 = 1 << 28;
/// Compressed bytes that one read takes at most.
const BATCH: u64 = 1 << 20;

const FLAG_HEADER: u64 = 1;
const FLAG_DATA: u64 = 1 << 1;
const FLAG_SEALED: u64 = 1 << 2;
const FLAG_HEADER_COMPLETE: u64 = 1 << 3;
const FLAG_DIGEST: u64 = 1 << 4;
const FLAG_TABLE_COMPRESSED: u64 = 1 << 5;

/// How the blocks of a ZFile are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// LZ4 blocks: fast to read.
    Lz4,
    /// Zstandard: smaller.
    Zstd,
}

impl Compression {
    fn code(self) -> u8 {
        match self {
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }
}

/// Why bytes are not a ZFile that can be read.
#[derive(Debug, Error)]
pub enum OpenZFileError {
    /// The bytes could not be read.
    #[error("it cannot be read: {0}")]
    Source(#[from] SourceError),
    /// Its parts contradict each other.
    #[error("it is corrupt: {0}")]
    Corrupt(String),
    /// Its jump table is larger than its reader allows.
    #[error("its jump table of {bytes} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// Bytes of the table.
        bytes: u64,
        /// Bytes that it may have.
        limit: u64,
    },
    /// It uses what is not supported.
    #[error("it uses {0}, which is not supported; compress it again without")]
    Unsupported(String),
}

/// A ZFile, shown as what was compressed. Any number of threads may read.
pub struct ZFileSource {
    source: Arc<dyn BlockSource>,
    table: Table,
    size: u64,
    block_size: u64,
    compression: Compression,
    checksums: bool,
}

impl ZFileSource {
    /// Opens a ZFile; `None` when the bytes do not begin like one.
    pub fn open(source: &Arc<dyn BlockSource>) -> Result<Option<Self>, OpenZFileError> {
        Self::open_within(source, u64::MAX)
    }

    /// As [`Self::open`], and refuses a jump table of more than `table_limit` bytes before any of it is read: all of it is
    /// kept in memory (and 3 % more).
    pub fn open_within(
        source: &Arc<dyn BlockSource>,
        table_limit: u64,
    ) -> Result<Option<Self>, OpenZFileError> {
        let size = source.size();
        if size < 2 * HEADER_SIZE {
            return Ok(None);
        }
        let mut block = [0; HEADER_SIZE as usize];
        source.read_at(&mut block, 0)?;
        if block[..8] != *MAGIC0 || block[8..24] != *MAGIC1 {
            return Ok(None);
        }
        let header = Header::decode(&block)?;
        if header.flags & (FLAG_HEADER | FLAG_DATA) != FLAG_HEADER | FLAG_DATA {
            return Err(OpenZFileError::Corrupt("its header is not marked as one of a data file".to_owned()));
        }
        let (trailer, limit) = if header.flags & FLAG_HEADER_COMPLETE == 0 {
            source.read_at(&mut block, size - HEADER_SIZE)?;
            let trailer = Header::decode(&block)?;
            if trailer.flags & (FLAG_HEADER | FLAG_DATA | FLAG_SEALED) != FLAG_DATA | FLAG_SEALED {
                return Err(OpenZFileError::Corrupt("it has no trailer: it is cut off".to_owned()));
            }
            (trailer, size - HEADER_SIZE)
        } else {
            (header, size)
        };
        Self::with_table(source, &trailer, limit, table_limit).map(Some)
    }

    fn with_table(
        source: &Arc<dyn BlockSource>,
        header: &Header,
        limit: u64,
        table_limit: u64,
    ) -> Result<Self, OpenZFileError> {
        let unsupported = |what: &str| Err(OpenZFileError::Unsupported(what.to_owned()));
        if header.flags & FLAG_TABLE_COMPRESSED != 0 {
            return unsupported("a compressed jump table");
        }
        if header.uses_dictionary {
            return unsupported("a dictionary");
        }
        let compression = match header.algorithm {
            1 => Compression::Lz4,
            2 => Compression::Zstd,
            other => return unsupported(&format!("compression algorithm {other}")),
        };
        if header.block_size < 512 || header.block_size > MAX_BLOCK {
            return Err(OpenZFileError::Corrupt(format!("blocks of {} bytes", header.block_size)));
        }
        let bytes = header.blocks.saturating_mul(4);
        if bytes > table_limit {
            return Err(OpenZFileError::TooLarge { bytes, limit: table_limit });
        }
        let block_size = u64::from(header.block_size);
        let table = Table::read(&**source, header, limit)?;
        let checksums = header.checksums;
        Ok(Self { source: source.clone(), table, size: header.size, block_size, compression, checksums })
    }

    /// Decompresses block `number` into `out`, which has its exact length.
    fn unpack(&self, number: u64, packed: &[u8], out: &mut [u8]) -> Result<(), SourceError> {
        let wrong = |what: String| SourceError::corrupt(format!("ZFile block {number}"), what);
        let packed = if self.checksums {
            let Some((packed, stored)) = packed.split_last_chunk() else {
                return Err(wrong("it is shorter than its checksum".to_owned()));
            };
            if raw_crc32c(BLOCK_SALT, packed) != u32::from_le_bytes(*stored) {
                return Err(wrong("its checksum does not match".to_owned()));
            }
            packed
        } else {
            packed
        };
        let len = match self.compression {
            Compression::Lz4 => {
                lz4_flex::block::decompress_into(packed, out).map_err(|error| wrong(error.to_string()))?
            }
            Compression::Zstd => unpack_zstd(packed, out).map_err(|error| wrong(error.to_string()))?,
        };
        if len == out.len() { Ok(()) } else { Err(wrong(format!("it has {len} bytes, not {}", out.len()))) }
    }
}

fn unpack_zstd(packed: &[u8], out: &mut [u8]) -> std::io::Result<usize> {
    thread_local! {
        static CONTEXT: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    }
    CONTEXT.with_borrow_mut(|context| {
        let context = match context {
            Some(context) => context,
            None => context.insert(Decompressor::new()?),
        };
        context.decompress_to_buffer(packed, out)
    })
}

impl BlockSource for ZFileSource {
    fn may_wait(&self) -> bool {
        self.source.may_wait()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size)?;
        if buf.is_empty() {
            return Ok(());
        }
        let end = offset + buf.len() as u64;
        let blocks = offset / self.block_size..end.div_ceil(self.block_size);
        let mut packed = Vec::new();
        let mut scratch = Vec::new();
        let mut number = blocks.start;
        while number < blocks.end {
            let batch_start = self.table.offset(number);
            let mut batch_end = number + 1;
            while batch_end < blocks.end && self.table.offset(batch_end + 1) - batch_start <= BATCH {
                batch_end += 1;
            }
            packed.resize((self.table.offset(batch_end) - batch_start) as usize, 0);
            self.source.read_at(&mut packed, batch_start)?;
            let mut at = 0;
            while number < batch_end {
                let len = self.table.len(number);
                let block = &packed[at..at + len];
                let first = number * self.block_size;
                let last = (first + self.block_size).min(self.size);
                if first >= offset && last <= end {
                    self.unpack(
                        number,
                        block,
                        &mut buf[(first - offset) as usize..(last - offset) as usize],
                    )?;
                } else {
                    scratch.resize((last - first) as usize, 0);
                    self.unpack(number, block, &mut scratch)?;
                    let (from, to) = (first.max(offset), last.min(end));
                    buf[(from - offset) as usize..(to - offset) as usize]
                        .copy_from_slice(&scratch[(from - first) as usize..(to - first) as usize]);
                }
                at += len;
                number += 1;
            }
        }
        Ok(())
    }
}

/// What a header or trailer says.
#[derive(Clone, Copy, Debug)]
struct Header {
    flags: u64,
    table_offset: u64,
    blocks: u64,
    size: u64,
    table_crc: u32,
    block_size: u32,
    algorithm: u8,
    uses_dictionary: bool,
    dictionary_size: u32,
    checksums: bool,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_SIZE as usize] {
        let mut out = [0; HEADER_SIZE as usize];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC0);
        put(8, MAGIC1);
        put(24, &STRUCT_SIZE.to_le_bytes());
        put(32, &(self.flags | FLAG_DIGEST).to_le_bytes());
        put(40, &self.table_offset.to_le_bytes());
        put(48, &self.blocks.to_le_bytes());
        put(56, &self.size.to_le_bytes());
        put(64, &self.table_crc.to_le_bytes());
        put(72, &self.block_size.to_le_bytes());
        put(76, &[self.algorithm, 0, u8::from(self.uses_dictionary)]);
        put(84, &self.dictionary_size.to_le_bytes());
        put(88, &[u8::from(self.checksums)]);
        let digest = raw_crc32c(0, &out);
        out[28..32].copy_from_slice(&digest.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER_SIZE as usize]) -> Result<Self, OpenZFileError> {
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != *MAGIC0 || bytes[8..24] != *MAGIC1 {
            return Err(OpenZFileError::Corrupt("its trailer is missing: it is cut off".to_owned()));
        }
        let header = Self {
            flags: u64_at(32),
            table_offset: u64_at(40),
            blocks: u64_at(48),
            size: u64_at(56),
            table_crc: u32_at(64),
            block_size: u32_at(72),
            algorithm: bytes[76],
            uses_dictionary: bytes[78] != 0,
            dictionary_size: u32_at(84),
            checksums: bytes[88] != 0,
        };
        if header.flags & FLAG_DIGEST != 0 {
            let mut zeroed = *bytes;
            zeroed[28..32].fill(0);
            if raw_crc32c(0, &zeroed) != u32_at(28) {
                return Err(OpenZFileError::Corrupt("the digest of its header does not match".to_owned()));
            }
        }
        Ok(header)
    }
}

/// CRC-32C as ZFile has it: from a start value as it is, without the inversions of the usual one.
fn raw_crc32c(start: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!start, bytes)
}

#[cfg(test)]
mod tests {
    use aenv_store::{Fault, FaultPlan, FaultSource, FileSource, MemorySource};
    use proptest::prelude::*;

    use super::*;

    fn pack(content: &[u8], options: CompressOptions) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        let size = compress_zfile(&MemorySource::new(content.to_vec()), &path, options).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(size, bytes.len() as u64);
        bytes
    }

    fn open(bytes: Vec<u8>) -> Result<Option<ZFileSource>, OpenZFileError> {
        ZFileSource::open(&(Arc::new(MemorySource::new(bytes)) as Arc<dyn BlockSource>))
    }

    fn content(len: usize) -> Vec<u8> {
        (0..len)
            .map(|i| if (i / 5000) % 3 == 0 { ((i * i * 31) >> 7) as u8 } else { (i / 700) as u8 })
            .collect()
    }

    #[test]
    fn checksum_is_the_raw_one() {
        // CRC-32C of "123456789" is 0xe3069283; without the inversions it starts at 0 and is not inverted at the end.
        assert_eq!(!raw_crc32c(!0, b"123456789"), 0xe306_9283);
        assert_eq!(raw_crc32c(0, &[0; 32]), 0);
    }

    #[test]
    fn header_fields_are_where_the_format_says() {
        let bytes = pack(&content(10_000), CompressOptions::new(Compression::Zstd).block_size(8192));
        let trailer = &bytes[bytes.len() - 512..];
        assert_eq!(&trailer[..24], b"ZFile\0\x01\0tuji.yyf@Alibaba");
        assert_eq!(trailer[24..28], 96_u32.to_le_bytes());
        assert_eq!(trailer[32..40], 0b1_0110_u64.to_le_bytes());
        assert_eq!(bytes[32..40], 0b1_0011_u64.to_le_bytes());
        assert_eq!(trailer[48..56], 2_u64.to_le_bytes());
        assert_eq!(trailer[56..64], 10_000_u64.to_le_bytes());
        assert_eq!(trailer[72..76], 8192_u32.to_le_bytes());
        assert_eq!((trailer[76], trailer[88]), (2, 1));
        let table = u64::from_le_bytes(trailer[40..48].try_into().unwrap()) as usize;
        assert_eq!(table + 8 + 512, bytes.len());
        let first = u32::from_le_bytes(bytes[table..table + 4].try_into().unwrap()) as usize;
        let (block, crc) = bytes[512..512 + first].split_last_chunk::<4>().unwrap();
        assert_eq!(raw_crc32c(BLOCK_SALT, block), u32::from_le_bytes(*crc));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_range_reads_back(
            len in 0_usize..300_000,
            zstd in any::<bool>(),
            shift in 0_u32..4,
            at in 0.0..1.0_f64,
            part in 0.0..1.0_f64,
        ) {
            let content = content(len);
            let compression = if zstd { Compression::Zstd } else { Compression::Lz4 };
            let options = CompressOptions::new(compression).block_size(4096 << shift);
            let file = open(pack(&content, options)).unwrap().unwrap();
            prop_assert_eq!(file.size(), len as u64);
            let start = (len as f64 * at) as usize;
            let mut buf = vec![0; ((len - start) as f64 * part) as usize];
            file.read_at(&mut buf, start as u64).unwrap();
            prop_assert!(buf == content[start..start + buf.len()]);
            prop_assert!(file.read_at(&mut [0], len as u64).is_err());
        }

        /// A changed byte is noticed wherever it matters: nothing ever reads as something else.
        #[test]
        fn a_changed_byte_is_noticed(at in 0.0..1.0_f64, bit in 0_u8..8, zstd in any::<bool>()) {
            let content = content(50_000);
            let compression = if zstd { Compression::Zstd } else { Compression::Lz4 };
            let mut bytes = pack(&content, CompressOptions::new(compression));
            let at = (bytes.len() as f64 * at) as usize;
            bytes[at] ^= 1 << bit;
            if let Ok(Some(file)) = open(bytes) {
                let mut buf = vec![0; content.len()];
                let in_blocks = at >= 512 && (at as u64) < file.table.offset(file.table.count());
                prop_assert_eq!(file.size(), 50_000);
                let read = file.read_at(&mut buf, 0);
                prop_assert_eq!(read.is_err(), in_blocks);
                prop_assert!(in_blocks || buf == content);
            }
        }
    }

    #[test]
    fn a_source_that_lies_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        compress_zfile(&MemorySource::new(content(9000)), &path, CompressOptions::new(Compression::Lz4))
            .unwrap();
        let faulty =
            Arc::new(FaultSource::new(Arc::new(FileSource::open(&path).unwrap()), FaultPlan::none()));
        let file = ZFileSource::open(&(faulty.clone() as Arc<dyn BlockSource>)).unwrap().unwrap();
        let mut buf = vec![0; 9000];
        file.read_at(&mut buf, 0).unwrap();
        faulty.set_plan(FaultPlan::always(Fault::WrongByte));
        assert!(matches!(file.read_at(&mut buf, 0), Err(SourceError::Corrupt { .. })));
    }
}
