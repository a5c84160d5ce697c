use std::{path::Path, sync::Arc};

use aenv_store::{BlockSource, FileSource, SourceError};
use thiserror::Error;
use uuid::Uuid;

use crate::{
    format::{Block, HEADER_SIZE, MAX_INDEX, Role, has_magic},
    index::Index,
    mapping::{INVALID_OFFSET, Mapping, SECTOR},
    tarball,
    zfile::{OpenZFileError, ZFileSource},
};

/// Entries of an index that are read at once, so that a lying length fails before much memory is taken.
const CHUNK: u64 = 1 << 16;

/// Why bytes are not a layer that can be used.
#[derive(Debug, Error)]
pub enum OpenLayerError {
    /// The bytes could not be read.
    #[error("the layer cannot be read: {0}")]
    Source(#[from] SourceError),
    /// It is something else.
    #[error("not an overlaybd layer: {0}")]
    NotALayer(String),
    /// It was an upper, and was never sealed.
    #[error("the layer has no trailer: it is cut off, or was never sealed ({0})")]
    Trailer(String),
    /// It is compressed, and the compressed file is not right.
    #[error("the layer is a ZFile, and {0}")]
    ZFile(#[from] OpenZFileError),
    /// Its index is larger than its reader allows.
    #[error("the layer's index of {bytes} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// Bytes of the index.
        bytes: u64,
        /// Bytes that it may have.
        limit: u64,
    },
    /// Its index contradicts itself or the file.
    #[error("the layer's index is corrupt: {0}; get the layer again from where it came from")]
    Index(String),
}

/// A sealed layer: immutable data and the index that says where each part belongs on the disk. All of it was checked when
/// it was opened; its data is read only when asked for.
pub struct Layer {
    source: Arc<dyn BlockSource>,
    index: Index,
    virtual_size: u64,
    uuid: Uuid,
    parent: Option<Uuid>,
}

impl Layer {
    /// Opens a layer from bytes anywhere: a plain LSMT file, one that is compressed to a ZFile, or either inside a tar. What it
    /// is shows in its first bytes.
    pub fn open(source: Arc<dyn BlockSource>) -> Result<Self, OpenLayerError> {
        Self::open_within(source, u64::MAX)
    }

    /// As [`Self::open`], and refuses a layer whose index or jump table has more than `table_limit` bytes before any of it
    /// is read: they are kept in memory as long as the layer is open. For layers that strangers made.
    pub fn open_within(source: Arc<dyn BlockSource>, table_limit: u64) -> Result<Self, OpenLayerError> {
        let source = match tarball::inside(&source)? {
            Some(file) => Arc::new(file),
            None => source,
        };
        let source = match ZFileSource::open_within(&source, table_limit)? {
            Some(file) => Arc::new(file),
            None => source,
        };
        Self::open_lsmt(source, table_limit)
    }

    /// Opens a layer in a local file.
    pub fn open_file(path: &Path) -> Result<Self, OpenLayerError> {
        Self::open(Arc::new(FileSource::open(path)?))
    }

    /// Takes parts that this process has just written and knows to be right.
    pub(crate) fn from_parts(source: Arc<dyn BlockSource>, index: Index, trailer: &Block) -> Self {
        let parent = Some(trailer.parent).filter(|uuid| !uuid.is_nil());
        Self { source, index, virtual_size: trailer.virtual_size, uuid: trailer.uuid, parent }
    }

    fn open_lsmt(source: Arc<dyn BlockSource>, table_limit: u64) -> Result<Self, OpenLayerError> {
        let size = source.size();
        if size < 2 * HEADER_SIZE {
            return Err(OpenLayerError::NotALayer(format!(
                "it has {size} bytes, less than header and trailer"
            )));
        }
        let mut block = [0; HEADER_SIZE as usize];
        source.read_at(&mut block, 0)?;
        if !has_magic(&block) {
            return Err(OpenLayerError::NotALayer(
                "it begins neither as LSMT nor as a ZFile or tar of it".to_owned(),
            ));
        }
        let header = Block::decode(&block).map_err(|what| OpenLayerError::NotALayer(what.to_owned()))?;
        if !matches!(header.role, Role::SealedHeader | Role::DataHeader) {
            return Err(OpenLayerError::NotALayer("it is the index file of an upper".to_owned()));
        }
        let trailer_at = size - HEADER_SIZE;
        source.read_at(&mut block, trailer_at)?;
        let trailer = Block::decode(&block).map_err(|what| OpenLayerError::Trailer(what.to_owned()))?;
        if trailer.role != Role::Trailer {
            return Err(OpenLayerError::Trailer("its last block is not marked as one".to_owned()));
        }
        let bytes = trailer.index_len.saturating_mul(Mapping::SIZE as u64);
        if bytes > table_limit {
            return Err(OpenLayerError::TooLarge { bytes, limit: table_limit });
        }
        let mappings = read_index(&*source, &trailer, trailer_at)?;
        Ok(Self::from_parts(source, Index::new(mappings), &trailer))
    }

    /// Bytes of the disk that it is a layer of.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Its uuid; nil when its writer gave it none.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// The uuid of the layer that it was written on, where its writer knew it.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        self.parent
    }

    /// Segments in its index.
    pub fn segments(&self) -> usize {
        self.index.mappings().len()
    }

    /// Bytes of the disk for which it has data (zeros not counted).
    pub fn data_bytes(&self) -> u64 {
        let data = self.index.mappings().iter().filter(|mapping| !mapping.zeroed());
        data.map(|mapping| u64::from(mapping.len()) * SECTOR).sum()
    }

    /// The ranges of the disk that it defines, in order, as `(offset, length)` in bytes; zeros are included.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let mappings = self.index.mappings().iter();
        mappings.map(|mapping| (mapping.offset() * SECTOR, u64::from(mapping.len()) * SECTOR))
    }

    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) fn source(&self) -> &dyn BlockSource {
        &*self.source
    }
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer")
            .field("uuid", &self.uuid)
            .field("virtual_size", &self.virtual_size)
            .field("segments", &self.segments())
            .finish_non_exhaustive()
    }
}

/// Reads and checks an index: inside the file, sorted, without overlaps, its data between header and index.
fn read_index(source: &dyn BlockSource, trailer: &Block, limit: u64) -> Result<Vec<Mapping>, OpenLayerError> {
    let wrong = |what: String| Err(OpenLayerError::Index(what));
    let (start, entries) = (trailer.index_offset, trailer.index_len);
    if entries > MAX_INDEX {
        return wrong(format!("it claims {entries} entries, more than {MAX_INDEX}"));
    }
    if start < HEADER_SIZE || start.checked_add(entries * 16).is_none_or(|end| end > limit) {
        return wrong(format!("{entries} entries at {start} do not fit before the trailer at {limit}"));
    }
    let data_end = start / SECTOR;
    let disk_end = trailer.virtual_size.div_ceil(SECTOR);
    let mut mappings = Vec::new();
    let mut buf = vec![0; (entries.min(CHUNK) as usize) * Mapping::SIZE];
    let mut last_end = 0;
    for first in (0..entries).step_by(CHUNK as usize) {
        let bytes = (entries - first).min(CHUNK) as usize * Mapping::SIZE;
        source.read_at(&mut buf[..bytes], start + first * Mapping::SIZE as u64)?;
        for entry in buf[..bytes].as_chunks().0 {
            let mapping = Mapping::from_bytes(*entry).with_tag(0);
            if mapping.offset() == INVALID_OFFSET || mapping.len() == 0 {
                continue;
            }
            if mapping.offset() < last_end {
                return wrong(format!("{mapping:?} comes after an entry that ends at {last_end}"));
            }
            if mapping.end() > disk_end {
                return wrong(format!("{mapping:?} ends beyond the disk's {disk_end} sectors"));
            }
            let in_file = mapping.moffset() >= HEADER_SIZE / SECTOR
                && mapping.moffset() + u64::from(mapping.len()) <= data_end;
            if !mapping.zeroed() && !in_file {
                return wrong(format!("{mapping:?} lies outside the data, which ends at {data_end}"));
            }
            last_end = mapping.end();
            mappings.push(mapping);
        }
    }
    Ok(mappings)
}

#[cfg(test)]
mod tests {
    use aenv_store::MemorySource;

    use super::*;
    use crate::{CompressOptions, Compression, compress_zfile, tarball};

    /// A layer with two segments of data and one of zeros, byte by byte.
    fn sample(mappings: &[Mapping]) -> Vec<u8> {
        let uuid = Uuid::from_u128(7);
        let mut block = Block {
            role: Role::SealedHeader,
            index_offset: 0,
            index_len: 0,
            virtual_size: 1 << 20,
            uuid,
            parent: Uuid::nil(),
        };
        let mut bytes = block.encode();
        bytes.extend([1; 4096]);
        bytes.extend([2; 4096]);
        block.role = Role::Trailer;
        block.index_offset = bytes.len() as u64;
        block.index_len = mappings.len() as u64;
        bytes.extend(mappings.iter().flat_map(|mapping| mapping.to_bytes()));
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        bytes.extend(block.encode());
        bytes
    }

    fn open(bytes: Vec<u8>) -> Result<Layer, OpenLayerError> {
        Layer::open(Arc::new(MemorySource::new(bytes)))
    }

    fn good() -> Vec<Mapping> {
        vec![Mapping::data(0, 8, 8), Mapping::zeros(8, 8), Mapping::data(32, 8, 16)]
    }

    #[test]
    fn opens_plain_and_in_either_tar() {
        let plain = sample(&good());
        for bytes in [plain.clone(), tarball::tests::plain(&plain), tarball::tests::pax(&plain)] {
            let layer = open(bytes).unwrap();
            assert_eq!((layer.virtual_size(), layer.uuid()), (1 << 20, Uuid::from_u128(7)));
            assert_eq!((layer.segments(), layer.data_bytes()), (3, 8192));
            assert_eq!(layer.index().mappings(), good());
            assert_eq!(layer.ranges().last(), Some((16384, 4096)));
        }
    }

    #[test]
    fn padding_is_skipped() {
        let mut mappings = good();
        mappings.push(Mapping::data(INVALID_OFFSET, 0, 0));
        assert_eq!(open(sample(&mappings)).unwrap().segments(), 3);
    }

    #[test]
    fn a_lying_index_is_refused() {
        let bad = [
            vec![Mapping::data(8, 8, 8), Mapping::data(0, 8, 16)],
            vec![Mapping::data(0, 8, 8), Mapping::data(7, 8, 16)],
            vec![Mapping::data(0, 8, 7)],
            vec![Mapping::data(0, 8, 17)],
            vec![Mapping::data(0, 8, (1 << 55) - 1)],
            vec![Mapping::zeros(2047, 2)],
        ];
        for mappings in bad {
            assert!(matches!(open(sample(&mappings)), Err(OpenLayerError::Index(_))), "{mappings:?}");
        }
    }

    #[test]
    fn tables_above_the_limit_are_refused() {
        let within = |bytes: Vec<u8>, limit| Layer::open_within(Arc::new(MemorySource::new(bytes)), limit);
        assert_eq!(within(sample(&good()), 48).unwrap().segments(), 3);
        let refused = within(sample(&good()), 47);
        assert!(matches!(refused, Err(OpenLayerError::TooLarge { bytes: 48, limit: 47 })));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("z");
        let options = CompressOptions::new(Compression::Lz4);
        compress_zfile(&MemorySource::new(sample(&good())), &path, options).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert!(within(bytes.clone(), 48).is_ok());
        // Five blocks: what it claims counts, and nothing of the table is read.
        let refused = within(bytes, 19);
        let found = OpenZFileError::TooLarge { bytes: 20, limit: 19 }.to_string();
        assert!(matches!(refused, Err(OpenLayerError::ZFile(error)) if error.to_string() == found));
    }

    #[test]
    fn what_is_cut_or_foreign_is_refused() {
        let bytes = sample(&good());
        for len in (0..bytes.len()).step_by(97) {
            assert!(open(bytes[..len].to_vec()).is_err(), "{len}");
        }
        assert!(matches!(open(vec![7; 20_000]), Err(OpenLayerError::NotALayer(_))));
        let mut huge = bytes.clone();
        let at = huge.len() - 4096 + 40;
        huge[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(open(huge), Err(OpenLayerError::Index(_))));
    }

    /// Layers whose header, index or trailer was changed in any way: all that is said to be there can be read, or they are refused.
    #[test]
    fn changed_layers_are_read_or_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut corpus = vec![sample(&good())];
        for (name, compression) in [("lz4", Compression::Lz4), ("zstd", Compression::Zstd)] {
            let (path, plain) = (dir.path().join(name), MemorySource::new(sample(&good())));
            compress_zfile(&plain, &path, CompressOptions::new(compression)).unwrap();
            corpus.push(std::fs::read(path).unwrap());
        }
        aenv_testkit::mutate("layers", &corpus, |input| {
            let Ok(layer) = open(input.to_vec()) else { return false };
            let data = layer.index().mappings().iter().filter(|mapping| !mapping.zeroed());
            for mapping in data {
                let mut bytes = vec![0; mapping.len() as usize * SECTOR as usize];
                // A block of a ZFile may be refused. What is plain is there.
                let _ = layer.source().read_at(&mut bytes, mapping.moffset() * SECTOR);
            }
            true
        });
    }
}
