//! What a VM needs before it starts: a slot, its memory image, its disks, its folders.

use std::{path::PathBuf, sync::Arc, time::Duration};

use aenv_blockd::{DiskExport, ExportError, MemoryExport};
use aenv_net::{NetworkError, Slot};
use aenv_types::{Checkpoint, DiskImage, EgressPolicy, Home, LayerRef, SandboxId};
use aenv_vmm::Drive;
use aenv_volume::{Serving, VolumeMount};
use futures::future::join_all;

use super::{Machine, Parts, SLOT_NOTE, Start, disk_size, generation::remove_uppers, note, policy_error};
use crate::{
    SandboxError, files,
    journal::{Change, Survives},
    node::Node,
};

/// When to ask again for what was not shown in time: blockd goes on with what was asked of it, and keeps what it has read.
const STORAGE_AGAIN: Duration = Duration::from_secs(5);

/// Where things are.
pub(super) struct Placed {
    pub ram: PathBuf,
    pub drives: Vec<Drive>,
    pub netns: PathBuf,
}

/// The name of a drive's export.
pub(crate) fn drive_export(id: &SandboxId, drive: &str) -> String {
    format!("{id}-{drive}")
}

/// Makes all of it, side by side. What was made is in `parts`, whether or not the rest succeeded.
pub(super) async fn place(
    node: &Node,
    machine: &Machine<'_>,
    parts: &mut Parts,
) -> Result<Placed, SandboxError> {
    let (home, id) = (node.home.clone(), machine.id.clone());
    let folders = files::blocking(move || {
        remove_uppers(&home, &id)?;
        std::fs::create_dir_all(home.sandbox(&id))?;
        files::remove_folder(&home.sandbox_runtime(&id))?;
        std::fs::create_dir_all(home.sandbox_runtime(&id))
    });
    folders
        .await
        .map_err(|error| SandboxError::internal("the sandbox's folders could not be made", error))?;
    let images = &machine.checkpoint.disks;
    parts.disks = images.iter().map(|disk| drive_export(machine.id, &disk.drive)).collect();
    let exports = async {
        let memory = open_memory(node, machine);
        let disks = images.iter().enumerate();
        let disks = join_all(disks.map(|(index, disk)| open_disk(node, machine, index, disk)));
        let (memory, disks) = tokio::join!(memory, disks);
        node.crash.pass("launch.exports").await;
        let disks: Result<Vec<_>, SandboxError> = disks.into_iter().collect();
        memory.and_then(|ram| Ok((ram, disks?)))
    };
    // All run to their end: what one has made must be known even if another fails.
    let (slot, exports) = tokio::join!(take_slot(node, machine), exports);
    let (slot, ready) = slot?;
    parts.slot = Some(Arc::clone(&slot));
    ready?;
    parts.volumes = serve_volumes(node, machine.volumes, &*slot).await?;
    let (ram, drives) = exports?;
    Ok(Placed { ram, drives, netns: slot.record().netns })
}

/// Serves a sandbox's volumes to its guest, if it has any. A guest that goes on looks for them as soon as its vCPUs run.
pub(crate) async fn serve_volumes(
    node: &Node,
    volumes: &[VolumeMount],
    slot: &dyn Slot,
) -> Result<Option<Serving>, SandboxError> {
    if volumes.is_empty() {
        return Ok(None);
    }
    let find = |mount: &VolumeMount| {
        let missing =
            || SandboxError::Invalid(format!("there is no volume {:?} any more", mount.name.as_str()));
        node.volumes.any(&mount.volume).ok_or_else(missing)
    };
    let volumes = volumes.iter().map(find).collect::<Result<_, _>>()?;
    let listener = slot.listen(aenv_volume::PORT).await;
    let listener = listener
        .map_err(|error| SandboxError::internal("the sandbox's volumes could not be shown to it", error))?;
    Ok(Some(Serving::start(listener, volumes)))
}

type Taken = (Arc<dyn Slot>, Result<(), SandboxError>);

/// Takes a slot, notes it and sets its rules. A slot that was taken is returned even if the rest failed.
async fn take_slot(node: &Node, machine: &Machine<'_>) -> Result<Taken, SandboxError> {
    let slot = acquire(node, machine).await.map_err(|error| match error {
        NetworkError::Exhausted { limit } => SandboxError::Full {
            reason: format!("all {limit} network slots are taken"),
            retry_after: std::time::Duration::from_secs(2),
        },
        error => SandboxError::internal("the sandbox's network could not be made", error),
    })?;
    node.crash.pass("launch.slot").await;
    let ready = async {
        let note = note(machine.id, machine.generation, SLOT_NOTE, &slot.record())?;
        node.journal.commit(vec![Change::Note(note)], Survives::Crash).await?;
        match machine.egress {
            None => slot.isolate().await.map_err(policy_error),
            // What a fresh slot has.
            Some(egress) if *egress == EgressPolicy::default() => Ok(()),
            Some(egress) => slot.set_policy(egress).await.map_err(policy_error),
        }
    };
    let ready = ready.await;
    Ok((slot, ready))
}

/// A fresh slot. Where none is left, standbys give theirs up, but not for another standby.
async fn acquire(node: &Node, machine: &Machine<'_>) -> Result<Arc<dyn Slot>, NetworkError> {
    loop {
        match node.network.acquire().await {
            Err(NetworkError::Exhausted { .. })
                if machine.egress.is_some()
                    && (node.standbys.give_up_slot(node).await || node.give_up_standing().await) => {}
            answer => return answer,
        }
    }
}

async fn open_memory(node: &Node, machine: &Machine<'_>) -> Result<PathBuf, SandboxError> {
    let (size, layers) = match (&machine.checkpoint.memory, machine.start) {
        (Some(image), Start::Continue) => (image.size, files(&node.home, &image.layers)),
        _ => (machine.shape.memory_bytes(), Vec::new()),
    };
    let export = MemoryExport {
        holder: machine.id.to_string(),
        size,
        layers,
        group: node.sharing_group(machine.team).map(|team| team.to_string()),
    };
    node.exports.open_memory(export).await.map_err(|error| export_error(machine.checkpoint, error))
}

async fn open_disk(
    node: &Node,
    machine: &Machine<'_>,
    index: usize,
    disk: &DiskImage,
) -> Result<Drive, SandboxError> {
    let Machine { id, checkpoint, .. } = *machine;
    let export = DiskExport {
        name: drive_export(id, &disk.drive),
        size: disk_size(machine.shape, index, disk),
        layers: files(&node.home, &disk.layers),
        upper: Some(node.home.sandbox(id).join(&disk.drive)),
    };
    let opened = match node.exports.open_disk(export.clone()).await {
        // Left behind by a generation whose export could not be closed then.
        Err(ExportError::Exists { name }) => {
            tracing::warn!(sandbox = %id, disk = %name, "a disk export of an earlier generation is closed");
            node.exports.close_disk(&name).await.map_err(|error| export_error(checkpoint, error))?;
            node.exports.open_disk(export).await
        }
        opened => opened,
    };
    let path = opened.map_err(|error| export_error(checkpoint, error))?;
    Ok(Drive { path, read_only: false })
}

/// Files of layers.
pub(crate) fn files(home: &Home, layers: &[LayerRef]) -> Vec<PathBuf> {
    layers.iter().map(|layer| home.layer(&layer.name)).collect()
}

fn export_error(checkpoint: &Checkpoint, error: ExportError) -> SandboxError {
    match error {
        ExportError::Layer { .. } => {
            tracing::error!(checkpoint = %checkpoint.id, %error, "a layer cannot be used");
            SandboxError::BadCheckpoint {
                id: checkpoint.id.clone(),
                reason: "one of its layers is missing or damaged on this node".into(),
            }
        }
        ExportError::Away { .. } | ExportError::Unreachable { .. } => {
            tracing::warn!(checkpoint = %checkpoint.id, %error, "a launch cannot have its disks now");
            SandboxError::StorageAway {
                id: checkpoint.id.clone(),
                reason: match error {
                    ExportError::Away { .. } => {
                        "a layer that is read on demand does not arrive in time".into()
                    }
                    _ => "its disks were not shown in time".into(),
                },
                retry_after: STORAGE_AGAIN,
            }
        }
        error => SandboxError::internal("the sandbox's disks could not be shown", error),
    }
}
