//! What is taken while the vCPUs stand still.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_blockd::Sealed;
use aenv_memory::Since;
use aenv_types::{LayerName, LayerRef};
use aenv_vmm::MemoryOrder;
use futures::future::join_all;

use super::{NewBlob, Shot, engine_error, not_running};
use crate::{
    CaptureMode, SandboxError,
    checkpoints::Fresh,
    launch::{Generation, drive_export},
    node::Node,
    sandbox::Record,
    seams::TakenMemory,
};

/// A drive whose upper is to be sealed.
pub(super) struct Seal {
    pub drive: String,
    pub layer: LayerName,
    export: String,
    path: PathBuf,
}

/// What is taken, and where it goes.
pub(super) struct Plan<'a> {
    pub seals: &'a [Seal],
    /// The vm state, beside its final name.
    pub state: &'a Path,
    /// The layer of changed pages.
    pub memory: &'a Path,
    /// Changes of when it holds, where that can be told.
    pub since: Since,
}

/// One seal for each disk.
pub(super) fn plan_seals(
    node: &Node,
    record: &Record,
    held: &mut Vec<Fresh>,
) -> Result<Vec<Seal>, SandboxError> {
    let launched = record.launched.as_ref().ok_or_else(|| not_running(&record.id))?;
    let seals = launched.disks.iter().map(|disk| {
        let blob = NewBlob::new(node, held);
        let export = drive_export(&record.id, &disk.drive);
        Seal { drive: disk.drive.clone(), layer: blob.name, export, path: blob.path }
    });
    Ok(seals.collect())
}

/// Seals disks and, for a full capture, writes the vm state and takes memory. All run to their end, and
/// sealed layers go into the record whatever the others did.
pub(super) async fn take(
    node: &Node,
    record: &mut Record,
    generation: &Generation,
    shot: &Shot,
    plan: Plan<'_>,
) -> Result<Option<Box<dyn TakenMemory>>, SandboxError> {
    let save = || async { generation.vm.save_state(plan.state).await.map_err(engine_error) };
    let with_memory = shot.mode != CaptureMode::Filesystem;
    let state_first = with_memory && generation.vm.memory_order() == MemoryOrder::AfterState;
    if state_first {
        save().await?;
    }
    let disks = join_all(plan.seals.iter().map(|seal| node.exports.seal(&seal.export, seal.path.clone())));
    let vm = Arc::clone(&generation.vm);
    let machine = async {
        if !with_memory {
            return Ok(None);
        }
        let state = async { if state_first { Ok(()) } else { save().await } };
        let memory = async {
            let ram = vm.ram().map_err(engine_error)?;
            let taken = node.seams.images.take(ram, plan.memory.to_owned(), shot.after, plan.since).await;
            taken.map_err(|error| SandboxError::internal("guest memory could not be read", error))
        };
        let (state, memory) = tokio::join!(state, memory);
        state.and(memory).map(Some)
    };
    let (sealed, machine) = tokio::join!(disks, machine);
    for (seal, outcome) in plan.seals.iter().zip(&sealed) {
        if let Ok(Sealed { layer: Some(_), size }) = outcome {
            append(record, seal, *size);
        }
    }
    if let Some(error) = sealed.into_iter().find_map(Result::err) {
        return Err(SandboxError::internal("a disk could not be sealed", error));
    }
    machine
}

fn append(record: &mut Record, seal: &Seal, size: u64) {
    let disks = record.launched.iter_mut().flat_map(|launched| &mut launched.disks);
    for disk in disks.filter(|disk| disk.drive == seal.drive) {
        disk.layers.push(LayerRef { name: seal.layer, size });
    }
}
