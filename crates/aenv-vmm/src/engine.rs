//! The `Engine` trait: the seam between the orchestrator and VMMs.

use std::path::PathBuf;

use aenv_types::{EngineKind, EngineStamp, MachineShape, SandboxId, Virtualization};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A disk to attach. The first one is the root disk; their order is part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// File or block device.
    pub path: PathBuf,
    /// The guest cannot write to it.
    pub read_only: bool,
}

/// What every VM needs, cold or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// Whose VM it is; names its sockets, its cgroup and its processes.
    pub sandbox: SandboxId,
    /// The machine.
    pub shape: MachineShape,
    /// The file that becomes guest memory, by private mapping.
    pub ram: PathBuf,
    /// Disks, in order.
    pub drives: Vec<Drive>,
    /// The network namespace that the VMM is started in; it holds the tap `aenv_net::guest::TAP`.
    pub netns: PathBuf,
    /// Folder for its sockets, made by the caller, removed by the caller.
    pub runtime: PathBuf,
    /// Where the serial console goes, limited in size.
    pub serial_log: PathBuf,
}

/// A cold boot.
#[derive(Clone, Debug)]
pub struct BootSpec {
    /// The VM.
    pub vm: VmSpec,
    /// Guest kernel (ELF vmlinux).
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Appended to the engine's own kernel command line.
    pub cmdline: String,
}

/// A launch from a checkpoint.
#[derive(Clone, Debug)]
pub struct LaunchSpec {
    /// The VM; shape and number of drives as they were at the capture.
    pub vm: VmSpec,
    /// The vm state that [`Vm::save_state`] wrote.
    pub state: PathBuf,
    /// What made it.
    pub stamp: EngineStamp,
}

/// Guest memory in the VMM's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamMapping {
    /// The VMM.
    pub pid: i32,
    /// Address of its first byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Where the rest lies, if it does not follow.
    pub upper: Option<UpperRam>,
}

/// The second piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpperRam {
    /// Its first byte, from the beginning of guest memory.
    pub offset: u64,
    /// That byte's address.
    pub start: u64,
}

/// What must be remembered of a VM to find it again after the server was restarted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// The engine.
    pub kind: EngineKind,
    /// The VMM.
    pub pid: i32,
    /// Its start time in clock ticks since boot (field 22 of `/proc/<pid>/stat`), so that a reused pid is noticed.
    pub start_time: u64,
    /// What it was started with.
    pub spec: VmSpec,
}

/// What an engine can do on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineReport {
    /// The engine.
    pub kind: EngineKind,
    /// Its version, if its binary is there.
    pub version: Option<String>,
    /// What would run the guest's instructions.
    pub virtualization: Option<Virtualization>,
    /// Why it cannot be used here; empty when it can.
    pub missing: Vec<Missing>,
}

/// Something that a host lacks, and the command that mends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// What is missing and what for.
    pub what: String,
    /// A command that mends it, or what to do.
    pub mend: String,
}

/// Why an engine operation failed.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The engine cannot be used on this host.
    #[error("{0}")]
    Unusable(String),
    /// The checkpoint was made by something that this engine cannot continue.
    #[error("the checkpoint cannot be launched here: {0}")]
    Incompatible(String),
    /// The guest kernel cannot run on this host.
    #[error("the guest kernel cannot run here: {0}")]
    Kernel(String),
    /// The VMM could not be started.
    #[error("the VMM could not be started: {0}")]
    Start(String),
    /// The VMM ended by itself.
    #[error("the VMM ended: {0}")]
    Exited(String),
    /// The VMM answered a command with an error.
    #[error("{command} was refused: {message}")]
    Refused {
        /// The command.
        command: String,
        /// What the VMM said.
        message: String,
    },
    /// The VMM did not answer within the bound.
    #[error("{command} was not answered within {secs} s")]
    TimedOut {
        /// The command.
        command: String,
        /// The bound.
        secs: u64,
    },
    /// The VMM that a record names is gone (its process ended or its pid belongs to another).
    #[error("the VMM is gone")]
    Gone,
    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        /// What was being done.
        context: String,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

/// When guest memory and disks may be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOrder {
    /// While the vCPUs stand, also while the vm state is being saved.
    Any,
    /// After the vm state was saved: before, devices may still change them. They stand until [`Vm::resume`].
    AfterState,
}

/// A kind of VMM.
#[async_trait]
pub trait Engine: Send + Sync {
    /// Which one.
    fn kind(&self) -> EngineKind;

    /// What it can do here, and what is missing.
    async fn probe(&self) -> EngineReport;

    /// The stamp for checkpoints that are captured from now on. `kernel` is the file of the guest kernel.
    async fn stamp(&self, kernel: &std::path::Path) -> Result<EngineStamp, EngineError>;

    /// Boots a VM; returns when the VMM runs (not when the guest is up).
    async fn boot(&self, spec: BootSpec) -> Result<Box<dyn Vm>, EngineError>;

    /// Loads a VM from a checkpoint; returns when its state is there. Its vCPUs stand until [`Vm::resume`].
    async fn launch(&self, spec: LaunchSpec) -> Result<Box<dyn Vm>, EngineError>;

    /// Takes over a VM that outlived the server.
    async fn adopt(&self, record: &VmRecord) -> Result<Box<dyn Vm>, EngineError>;

    /// Ends every VMM of this server (also of an earlier run of it) that is in none of these records, and tells how many.
    /// VMs that are just being started are in no record yet: call it before the first one.
    async fn sweep(&self, keep: &[VmRecord]) -> Result<u32, EngineError>;
}

/// A running VM. Dropping it leaves it running: the process belongs to the node, not to the server.
#[async_trait]
pub trait Vm: Send + Sync {
    /// What to write into the journal.
    fn record(&self) -> VmRecord;

    /// Where guest memory lies.
    fn ram(&self) -> Result<RamMapping, EngineError>;

    /// Stops the vCPUs.
    async fn pause(&self) -> Result<(), EngineError>;

    /// Lets the vCPUs go on.
    async fn resume(&self) -> Result<(), EngineError>;

    /// When memory and disks may be captured.
    fn memory_order(&self) -> MemoryOrder {
        MemoryOrder::Any
    }

    /// Writes device and CPU state (not memory) to `path`, with the vCPUs stopped; they may go on afterwards.
    async fn save_state(&self, path: &std::path::Path) -> Result<(), EngineError>;

    /// Asks the guest to give memory back until it has `target_mib` left; needs the balloon device.
    async fn set_balloon(&self, target_mib: u32) -> Result<(), EngineError>;

    /// Memory that the guest has given back, in MiB: part of the vm state, so that a guest goes on without it. Firecracker tells what
    /// was asked for.
    async fn balloon(&self) -> Result<u32, EngineError>;

    /// Whether the guest takes such memory back by itself rather than end a process for lack of it. Guests of QEMU have agreed to
    /// that when they booted, or have not.
    async fn balloon_gives_way(&self) -> Result<bool, EngineError>;

    /// Ends the VMM at once (SIGKILL) and waits until the process is gone. Idempotent.
    async fn end(&self) -> Result<(), EngineError>;

    /// Resolves when the process has ended, with what is known of why.
    async fn exited(&self) -> String;
}
