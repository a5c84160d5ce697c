//! What runs between a launch and the next end, and how it is taken down.

use std::sync::Arc;

use aenv_net::Slot;
use aenv_types::{Dial, SandboxId};
use aenv_vmm::Vm;
use aenv_volume::Serving;
use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use super::{SLOT_NOTE, VM_NOTE};
use crate::{
    admission::Permit,
    files,
    journal::{Change, Survives},
    node::Node,
};

/// A running generation.
pub(crate) struct Generation {
    pub vm: Arc<dyn Vm>,
    pub slot: Arc<dyn Slot>,
    /// Its volumes are served as long as it lives.
    pub volumes: Option<Serving>,
    /// Names of the disk exports, in the order of the drives.
    pub disks: Vec<String>,
    /// Cancelled when it ends: connections break.
    pub ended: CancellationToken,
    /// Its place on the node.
    pub permit: Permit,
}

/// A generation that is being made: whatever is there has to be taken down again.
#[derive(Default)]
pub(crate) struct Parts {
    pub(super) vm: Option<Arc<dyn Vm>>,
    pub(super) slot: Option<Arc<dyn Slot>>,
    pub(super) volumes: Option<Serving>,
    pub(super) disks: Vec<String>,
}

impl Parts {
    /// Remembers a VM that was started.
    pub(super) fn started(&mut self, vm: Box<dyn Vm>) -> Arc<dyn Vm> {
        let vm: Arc<dyn Vm> = Arc::from(vm);
        self.vm = Some(Arc::clone(&vm));
        vm
    }

    /// The VM, if there is one yet.
    pub(super) fn vm(&self) -> Option<Arc<dyn Vm>> {
        self.vm.clone()
    }

    /// The way into the guest.
    pub(super) fn dial(&self) -> Option<Arc<dyn Dial>> {
        self.slot.clone().map(|slot| slot as Arc<dyn Dial>)
    }

    /// All steps are done.
    pub(super) fn into_generation(self, permit: Permit) -> Option<Generation> {
        let (vm, slot) = (self.vm?, self.slot?);
        let volumes = self.volumes;
        Some(Generation { vm, slot, volumes, disks: self.disks, ended: CancellationToken::new(), permit })
    }

    /// Takes down what is there: the VMM first, then what it used. Nothing here may fail for good: what cannot be removed
    /// now is found and removed at the next start.
    pub(super) async fn take_down(self, node: &Node, id: &SandboxId) {
        if let Some(vm) = &self.vm
            && let Err(error) = vm.end().await
        {
            tracing::error!(sandbox = %id, %error, "a VMM could not be ended");
        }
        drop(self.volumes);
        let disks = join_all(self.disks.iter().map(|name| async move {
            if let Err(error) = node.exports.close_disk(name).await {
                tracing::error!(sandbox = %id, disk = %name, %error, "a disk export could not be closed");
            }
        }));
        let memory = async {
            if let Err(error) = node.exports.close_memory(id.as_str()).await {
                tracing::error!(sandbox = %id, %error, "a memory export could not be let go");
            }
        };
        let slot = async {
            if let Some(slot) = self.slot {
                node.network.release(slot).await;
            }
        };
        tokio::join!(disks, memory, slot);
        let home = node.home.clone();
        let owner = id.clone();
        let removal = files::blocking(move || {
            files::remove_folder(&home.sandbox_runtime(&owner))?;
            remove_uppers(&home, &owner)
        });
        if let Err(error) = removal.await {
            tracing::error!(sandbox = %id, %error, "folders of an ended VM could not be removed");
        }
        let forget = |key: &str| Change::Forget { sandbox: id.clone(), key: key.into() };
        let forgotten = node.journal.commit(vec![forget(VM_NOTE), forget(SLOT_NOTE)], Survives::Crash);
        if let Err(error) = forgotten.await {
            tracing::warn!(sandbox = %id, %error, "notes of an ended VM stay in the journal");
        }
    }
}

impl Generation {
    /// Breaks connections, ends the VMM, gives everything back.
    pub(crate) async fn end(self, node: &Node, id: &SandboxId) {
        drop(self.end_and_keep_permit(node, id).await);
    }

    /// As [`Self::end`], for a launch that follows at once in the same place.
    pub(crate) async fn end_and_keep_permit(self, node: &Node, id: &SandboxId) -> Permit {
        let Self { vm, slot, volumes, disks, ended, permit } = self;
        ended.cancel();
        Parts { vm: Some(vm), slot: Some(slot), volumes, disks }.take_down(node, id).await;
        permit
    }

    /// Its sandbox is paused, and its vCPUs stand: connections break, and it counts for no team.
    pub(crate) fn pass_to_nobody(&mut self) {
        std::mem::take(&mut self.ended).cancel();
        self.permit.demote();
    }

    /// Lets the vCPUs go on after something that stopped them did not succeed.
    pub(crate) async fn go_on(&self, id: &SandboxId) {
        if let Err(error) = self.vm.resume().await {
            tracing::error!(sandbox = %id, %error, "the vCPUs could not be let go on");
        }
    }
}

/// Removes all that a sandbox has on disk but its checkpoints.
pub(crate) async fn remove_folders(node: &Node, id: &SandboxId) {
    let folders = [node.home.sandbox_runtime(id), node.home.sandbox(id)];
    let removal = files::blocking(move || folders.iter().try_for_each(|folder| files::remove_folder(folder)));
    if let Err(error) = removal.await {
        tracing::error!(sandbox = %id, %error, "folders of a removed sandbox could not be removed");
    }
}

/// Removes the uppers of all drives; the serial log stays.
pub(crate) fn remove_uppers(home: &aenv_types::Home, id: &SandboxId) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(home.sandbox(id)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files::remove_folder(&entry.path())?;
        }
    }
    Ok(())
}
