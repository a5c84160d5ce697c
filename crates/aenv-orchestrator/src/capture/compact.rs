//! Stacks stay shallow: what grew above a limit is merged into one layer.
//!
//! The upper part of a stack is merged, as far as its layers are small: the large ones are mostly the template's, whose other
//! sandboxes share them. The files that were merged stay until nobody shows them any more.
//!
//! A running sandbox's stacks are merged behind its back, after the capture that made them deep was answered. Only where that does not
//! keep up does a capture wait.

use aenv_types::{DiskImage, LayerRef};

use super::NewBlob;
use crate::{SandboxError, checkpoints::Fresh, launch::files, node::Node, sandbox::Launched};

/// How many layers a stack may have.
struct Limit {
    /// Above this it is merged in the background.
    soft: usize,
    /// Above this a capture merges it.
    hard: usize,
}

const MEMORY: Limit = Limit { soft: 16, hard: 48 };
const DISK: Limit = Limit { soft: 64, hard: 128 };

/// Layers that were merged.
pub(crate) struct Merged {
    /// What they were, base first.
    pub upper: Vec<LayerRef>,
    /// What stands for them.
    pub layer: LayerRef,
    /// Keeps all of them until the record says so.
    _held: Vec<Fresh>,
}

/// The layers that should be merged next.
pub(crate) fn due(node: &Node, launched: &Launched) -> Option<Vec<LayerRef>> {
    let memory = launched.captured.as_ref().unwrap_or(&launched.memory);
    let disks = launched.disks.iter().map(|disk| (&disk.layers, DISK.soft));
    let mut deep =
        std::iter::once((memory, MEMORY.soft)).chain(disks).filter(|(layers, soft)| layers.len() > *soft);
    deep.find_map(|(layers, _)| Some(layers[beneath(node, layers)?..].to_vec()))
}

/// Merges them.
pub(crate) async fn merge(node: &Node, upper: Vec<LayerRef>) -> Result<Merged, SandboxError> {
    let mut held = upper.iter().map(|layer| node.checkpoints.fresh(layer.name)).collect();
    let layer = merge_into_one(node, &upper, &mut held).await?;
    Ok(Merged { upper, layer, _held: held })
}

/// The disks' stacks for a checkpoint. A stack that had to be merged becomes the record's own as well.
pub(super) async fn disks(
    node: &Node,
    launched: &mut Launched,
    held: &mut Vec<Fresh>,
) -> Result<Vec<DiskImage>, SandboxError> {
    for disk in &mut launched.disks {
        disk.layers = shallow(node, disk.layers.clone(), DISK.hard, held).await?;
    }
    Ok(launched.disks.clone())
}

/// A memory stack for a checkpoint.
pub(super) async fn memory(
    node: &Node,
    layers: Vec<LayerRef>,
    held: &mut Vec<Fresh>,
) -> Result<Vec<LayerRef>, SandboxError> {
    shallow(node, layers, MEMORY.hard, held).await
}

async fn shallow(
    node: &Node,
    mut layers: Vec<LayerRef>,
    limit: usize,
    held: &mut Vec<Fresh>,
) -> Result<Vec<LayerRef>, SandboxError> {
    while layers.len() > limit {
        let Some(from) = beneath(node, &layers) else { break };
        let upper = layers.split_off(from);
        layers.push(merge_into_one(node, &upper, held).await?);
    }
    Ok(layers)
}

async fn merge_into_one(
    node: &Node,
    upper: &[LayerRef],
    held: &mut Vec<Fresh>,
) -> Result<LayerRef, SandboxError> {
    let blob = NewBlob::new(node, held);
    let merged = node.seams.images.merge(files(&node.home, upper), blob.path.clone()).await;
    let size = merged.map_err(|error| SandboxError::internal("layers could not be merged", error))?;
    Ok(LayerRef { name: blob.name, size })
}

/// How many layers lie beneath those that are merged. Layers that are read from elsewhere stay as they are: merging would
/// fetch them whole.
fn beneath(node: &Node, layers: &[LayerRef]) -> Option<usize> {
    let here = |layer: &LayerRef| node.home.layer(&layer.name).exists().then_some(layer.size);
    mergeable(&layers.iter().map(here).collect::<Vec<_>>())
}

/// Where the upper part begins that is merged: the two topmost layers, and those beneath as long as one is not larger than all above
/// it. `None` stands for a layer that stays as it is, and so does all beneath it.
///
/// So a layer is written again when about as much has come upon it, and a large one beneath small ones is left alone. With 16
/// layers allowed, a hundred captures of one size are written once more, and ten thousand four times.
fn mergeable(sizes: &[Option<u64>]) -> Option<usize> {
    let mut upper = sizes.iter().rev().map_while(|size| *size);
    let mut total = upper.next()? + upper.next()?;
    let mut count = 2;
    for size in upper {
        if size > total {
            break;
        }
        total += size;
        count += 1;
    }
    Some(sizes.len() - count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes written by merging for each byte captured, and what is left, when captures of these sizes come onto a base.
    fn captures(base: u64, sizes: impl Iterator<Item = u64>) -> (f64, Vec<Option<u64>>) {
        let (mut stack, mut captured, mut written) = (vec![Some(base)], 0, 0);
        for size in sizes {
            captured += size;
            stack.push(Some(size));
            if stack.len() > MEMORY.soft {
                let merged: u64 = stack.split_off(mergeable(&stack).unwrap()).into_iter().flatten().sum();
                written += merged;
                stack.push(Some(merged));
            }
        }
        (written as f64 / captured as f64, stack)
    }

    #[test]
    fn merging_costs_a_few_times_what_was_captured() {
        let (cost, stack) = captures(20_000, (0..100).map(|_| 100));
        assert!(cost <= 1.0, "{cost}");
        assert_eq!(stack[0], Some(20_000), "the base is not written again");
        let (cost, _) = captures(20_000, (0..10_000).map(|_| 100));
        assert!(cost < 4.0, "{cost}");
        let (cost, _) = captures(20_000, (0..10_000).map(|i| [1, 1000, 10, 100][i % 4]));
        assert!(cost < 4.5, "{cost}");
        // Small ones upon ever smaller ones.
        let (cost, _) = captures(20_000, (0..15).map(|i| 1000 - 50 * i).chain((0..2000).map(|_| 1)));
        assert!(cost < 3.0, "{cost}");
    }

    #[test]
    fn layers_that_are_elsewhere_stay() {
        assert_eq!(mergeable(&[Some(1), None, Some(9), Some(9)]), Some(2));
        assert_eq!(mergeable(&[Some(9), None, Some(1)]), None);
        assert_eq!(mergeable(&[Some(20), Some(3), Some(1), Some(2)]), Some(1));
    }
}
