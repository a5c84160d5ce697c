//! Stacks stay shallow: what grew above a limit is merged into one layer.
//!
//! Only the upper part of a stack is merged: the layers beneath are shared with the template and its other sandboxes. The files
//! that were merged stay until nobody shows them any more.

use aenv_types::{DiskImage, LayerRef};

use super::NewBlob;
use crate::{SandboxError, checkpoints::Fresh, launch::files, node::Node, sandbox::Launched};

/// Layers of a memory image.
const MEMORY_LIMIT: usize = 16;
/// Layers of a disk.
const DISK_LIMIT: usize = 64;

/// The disks' stacks for a checkpoint. A merged stack also becomes the record's own, so that the next capture does not
/// have to merge the same layers again.
pub(super) async fn disks(
    node: &Node,
    launched: &mut Launched,
    held: &mut Vec<Fresh>,
) -> Result<Vec<DiskImage>, SandboxError> {
    for disk in &mut launched.disks {
        disk.layers = shallow(node, disk.layers.clone(), DISK_LIMIT, held).await?;
    }
    Ok(launched.disks.clone())
}

/// A memory stack for a checkpoint.
pub(super) async fn memory(
    node: &Node,
    layers: Vec<LayerRef>,
    held: &mut Vec<Fresh>,
) -> Result<Vec<LayerRef>, SandboxError> {
    shallow(node, layers, MEMORY_LIMIT, held).await
}

async fn shallow(
    node: &Node,
    mut layers: Vec<LayerRef>,
    limit: usize,
    held: &mut Vec<Fresh>,
) -> Result<Vec<LayerRef>, SandboxError> {
    if layers.len() <= limit {
        return Ok(layers);
    }
    // Layers that are read from elsewhere stay as they are: merging would fetch them whole.
    let here = |layer: &LayerRef| node.home.layer(&layer.name).exists();
    let fixed = layers.iter().rposition(|layer| !here(layer)).map_or(0, |place| place + 1);
    let upper = layers.split_off(fixed.max(limit / 2));
    if upper.len() < 2 {
        layers.extend(upper);
        return Ok(layers);
    }
    let blob = NewBlob::new(node, held);
    let merged = node.seams.images.merge(files(&node.home, &upper), blob.path.clone()).await;
    let merged = merged.map_err(|error| SandboxError::internal("layers could not be merged", error))?;
    layers.push(LayerRef { name: blob.name, size: merged });
    Ok(layers)
}
