//! From when on a capture counts what changed in memory, and what its record says of that.
//!
//! A capture that lets the guest go on marks the pages that it takes, and the next one takes what was written since. The marks are
//! worth as much as the layer of that capture: from before they are set until the layer is durable, [`Launched::captured`] is
//! `None` in the journal, so that after any failure or crash in between the next capture counts from the launch again.

use aenv_memory::Since;
use aenv_types::{LayerRef, MemoryImage};

use super::{After, Shot, compact, not_running};
use crate::{
    CaptureMode, SandboxError,
    checkpoints::Fresh,
    journal::{Change, Survives},
    node::Node,
    sandbox::{Launched, Record},
};

/// The memory stack that the capture before has left, if there was one whose marks can be relied on.
pub(super) struct Known(Option<Vec<LayerRef>>);

impl Known {
    /// What the record knows. If the shot sets new marks, the record knows nothing from here on: it is to be journaled before.
    pub(super) fn take(launched: &mut Launched, shot: &Shot) -> Self {
        match (shot.mode, shot.after) {
            (CaptureMode::Filesystem, _) => Self(None),
            (CaptureMode::Full, After::End) => Self(launched.captured.clone()),
            (CaptureMode::Full, After::GoOn) => Self(launched.captured.take()),
        }
    }

    /// From when on changes can be counted.
    pub(super) fn since(&self) -> Since {
        if self.0.is_some() { Since::Mark } else { Since::Mapping }
    }

    /// What a layer of changes since then lies upon.
    fn beneath(self, since: Since, launched: &Launched) -> Vec<LayerRef> {
        match (since, self.0) {
            (Since::Mark, Some(captured)) => captured,
            _ => launched.memory.clone(),
        }
    }
}

/// A layer of changed pages, durable.
pub(super) struct Diff {
    pub layer: LayerRef,
    pub since: Since,
    pub next: Since,
}

/// The memory stack of a checkpoint. If the next capture can go on from it, the record and the journal know it afterwards.
pub(super) async fn stack(
    node: &Node,
    record: &mut Record,
    known: Known,
    diff: Diff,
    held: &mut Vec<Fresh>,
) -> Result<MemoryImage, SandboxError> {
    let size = record.shape.memory_bytes();
    let launched = record.launched.as_mut().ok_or_else(|| not_running(&record.id))?;
    let mut layers = known.beneath(diff.since, launched);
    layers.push(diff.layer);
    let layers = compact::memory(node, layers, held).await?;
    if diff.next == Since::Mark {
        launched.captured = Some(layers.clone());
        let change = Change::Put(Box::new(record.clone()));
        node.journal.commit(vec![change], Survives::Crash).await?;
    }
    Ok(MemoryImage { size, layers })
}
