//! Several layers written as one.

use std::{path::Path, sync::Arc};

use aenv_store::{BlockSource, SourceError};
use thiserror::Error;

use crate::{
    generation::Generation,
    index::Index,
    layer::Layer,
    mapping::{Mapping, SECTOR},
    writer::{LayerSummary, LayerWriter, WriteLayerError},
};

/// Bytes read and written at once.
const COPY: usize = 4 << 20;

/// Why layers could not be written as one. Nothing is left behind.
#[derive(Debug, Error)]
pub enum CompactError {
    /// There are none.
    #[error("there are no layers to compact")]
    Empty,
    /// A layer's bytes could not be had.
    #[error("a layer cannot be read: {0}")]
    Read(#[from] SourceError),
    /// The new layer could not be written.
    #[error(transparent)]
    Write(#[from] WriteLayerError),
}

/// Writes layers that follow each other in a stack (base first) as one that reads the same in their place. It has the uuid of
/// the top one and the parent of the lowest one, so that what was stacked on them fits on it. Zeros stay, because what is
/// beneath the lowest one may need hiding.
pub fn compact(layers: &[Arc<Layer>], path: &Path) -> Result<LayerSummary, CompactError> {
    let (Some(base), Some(top)) = (layers.first(), layers.last()) else { return Err(CompactError::Empty) };
    let merged = Index::merge(&layers.iter().map(|layer| layer.index()).collect::<Vec<_>>());
    let virtual_size = layers.iter().map(|layer| layer.virtual_size()).max().unwrap_or_default();
    let mut writer = LayerWriter::create_with(path, virtual_size, top.uuid(), base.parent_uuid())?;
    copy(&merged, |tag| layers[usize::from(tag)].source(), &mut writer)?;
    Ok(writer.finish()?)
}

/// The same for uppers that were frozen, oldest first, after a seal that failed.
pub(crate) fn write_uppers(uppers: &[Arc<Generation>], path: &Path) -> Result<LayerSummary, CompactError> {
    let (Some(oldest), Some(newest)) = (uppers.first(), uppers.last()) else {
        return Err(CompactError::Empty);
    };
    let indexes: Vec<Index> = uppers.iter().map(|upper| Index::new(upper.mappings())).collect();
    let merged = Index::merge(&indexes.iter().collect::<Vec<_>>());
    let parent = Some(oldest.parent()).filter(|uuid| !uuid.is_nil());
    let mut writer = LayerWriter::create_with(path, newest.virtual_size(), newest.uuid(), parent)?;
    copy(&merged, |tag| &*uppers[usize::from(tag)], &mut writer)?;
    Ok(writer.finish()?)
}

/// Copies what an index maps, reading neighbours on the disk in one go where they are neighbours in a file.
fn copy<'a>(
    index: &Index,
    source: impl Fn(u8) -> &'a dyn BlockSource,
    writer: &mut LayerWriter,
) -> Result<(), CompactError> {
    let mut buf = vec![0; COPY];
    for &mapping in index.mappings() {
        let (offset, len) = (mapping.offset() * SECTOR, u64::from(mapping.len()) * SECTOR);
        if mapping.zeroed() {
            writer.append_zeroes(offset, len)?;
            continue;
        }
        copy_data(mapping, source(mapping.tag()), &mut buf, writer)?;
    }
    Ok(())
}

fn copy_data(
    mapping: Mapping,
    source: &dyn BlockSource,
    buf: &mut [u8],
    writer: &mut LayerWriter,
) -> Result<(), CompactError> {
    let (offset, from) = (mapping.offset() * SECTOR, mapping.moffset() * SECTOR);
    let len = u64::from(mapping.len()) * SECTOR;
    let mut done = 0;
    while done < len {
        let part_len = (len - done).min(buf.len() as u64) as usize;
        let part = &mut buf[..part_len];
        source.read_at(part, from + done)?;
        writer.append_sparse(offset + done, part)?;
        done += part_len as u64;
    }
    Ok(())
}
