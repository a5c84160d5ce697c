//! The checkpoint: what a sandbox is made of when it is not running. Immutable once written.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{BuildId, CheckpointId, Digest, LayerName, MachineShape, SandboxId, TemplateId};

/// Version of the manifest's form. A reader refuses what it does not know.
pub const CHECKPOINT_FORMAT: u32 = 1;

/// A checkpoint's manifest. Layers and the vm state are blobs that it names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// [`CHECKPOINT_FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: CheckpointId,
    /// When the vCPUs were stopped.
    pub created_at: DateTime<Utc>,
    /// The machine it runs on.
    pub shape: MachineShape,
    /// What captured it; `None` for a checkpoint that has only disks and boots cold.
    pub engine: Option<EngineStamp>,
    /// Device and CPU state; `None` for a checkpoint that has only disks.
    pub vm_state: Option<VmState>,
    /// Guest memory; `None` for a checkpoint that has only disks.
    pub memory: Option<MemoryImage>,
    /// The root disk first, then each further drive.
    pub disks: Vec<DiskImage>,
    /// What processes in the guest are started with.
    pub guest: GuestContext,
    /// Where it comes from.
    pub lineage: Lineage,
}

impl Checkpoint {
    /// Whether a launch continues the processes (otherwise it boots from the disk).
    pub fn has_memory(&self) -> bool {
        self.vm_state.is_some() && self.memory.is_some()
    }

    /// Every layer that it names: memory first, then the disks; base first within a stack.
    pub fn layers(&self) -> impl Iterator<Item = &LayerRef> {
        let memory = self.memory.iter().flat_map(|image| &image.layers);
        memory.chain(self.disks.iter().flat_map(|disk| &disk.layers))
    }
}

/// Which engine made a vm state, so that a launch elsewhere can be refused before anything starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStamp {
    /// The engine.
    pub kind: EngineKind,
    /// Its version, as it reports it, such as `7.2.22`.
    pub version: String,
    /// What runs the guest's instructions.
    pub virtualization: Virtualization,
    /// The CPU model or template that the guest was shown, such as `max,cx16=off`.
    pub cpu_baseline: String,
    /// Digest of the guest kernel.
    pub kernel: Digest,
}

/// The engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// QEMU's `microvm` machine.
    Qemu,
    /// Firecracker.
    Firecracker,
}

impl EngineKind {
    /// Its word, as it is in manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
        }
    }
}

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Virtualization {
    /// Hardware virtualization.
    Kvm,
    /// A paravirtual guest kernel on a host with `kvm_pvm`.
    Pvm,
    /// QEMU's emulation.
    Tcg,
}

impl Virtualization {
    /// Its word, as it is in manifests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Pvm => "pvm",
            Self::Tcg => "tcg",
        }
    }
}

/// The engine's device and CPU state: a blob of tens of kB in the node's `layers` folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// Name of the blob.
    pub name: LayerName,
    /// Its size in bytes.
    pub size: u64,
}

/// Guest memory: a stack of layers, base first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryImage {
    /// Bytes of guest memory.
    pub size: u64,
    /// Layers, base first.
    pub layers: Vec<LayerRef>,
}

/// A disk: a stack of layers, base first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskImage {
    /// `root`, or the name of an attached drive.
    pub drive: String,
    /// Bytes, as the guest sees it.
    pub size: u64,
    /// Layers, base first.
    pub layers: Vec<LayerRef>,
}

/// A sealed layer, by name and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerRef {
    /// Its name.
    pub name: LayerName,
    /// Size of the blob in bytes (not of the device that it describes).
    pub size: u64,
}

/// What processes in the guest are started with, and what the image said about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestContext {
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// Default user; `user` when empty.
    pub user: String,
    /// Default working folder; the user's home when empty.
    pub workdir: String,
    /// The command that was started before the capture and runs in it.
    pub start_cmd: Option<String>,
    /// The command that told when it was ready.
    pub ready_cmd: Option<String>,
    /// Ports that the image exposes, such as `8080/tcp`.
    pub exposed_ports: Vec<String>,
    /// Labels of the image.
    pub labels: BTreeMap<String, String>,
}

/// Where a checkpoint comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// The checkpoint that the captured sandbox was launched from.
    pub parent: Option<CheckpointId>,
    /// What was captured.
    pub origin: Origin,
}

/// What was captured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum Origin {
    /// The end of a template's build.
    Template {
        /// The template.
        template: TemplateId,
        /// The build.
        build: BuildId,
    },
    /// A sandbox that ran (or still runs) from some template.
    Sandbox {
        /// The sandbox.
        sandbox: SandboxId,
        /// Its template.
        template: TemplateId,
    },
    /// An OCI image that nothing has run in yet: disks only.
    Image {
        /// The reference that was resolved.
        reference: String,
        /// Digest of its manifest.
        manifest: Digest,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_manifests() {
        for kind in [EngineKind::Qemu, EngineKind::Firecracker] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
        for kind in [Virtualization::Kvm, Virtualization::Pvm, Virtualization::Tcg] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
    }
}
