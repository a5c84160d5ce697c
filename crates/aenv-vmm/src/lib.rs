//! Engines behind one small trait. Nothing above this room knows which engine runs.
//!
//! An engine boots a VM or loads it from a checkpoint, stops and continues its vCPUs, saves its vm state and ends it. Memory is
//! a private mapping of the file in [`VmSpec::ram`], or anonymous after a boot, when that file holds zeroes: so what a guest
//! changed is the anonymous pages of that mapping; capturing them is `aenv-memory`'s work, not the engine's.

mod cgroup;
mod choose;
mod console;
pub mod engine;
pub mod firecracker;
mod jail;
mod kernel;
mod maps;
mod process;
pub mod qemu;
mod stamp;
mod tap;
mod version;

pub use choose::{EngineSetting, choose};
pub use engine::{
    BootSpec, Drive, Engine, EngineError, EngineReport, LaunchSpec, MemoryOrder, Missing, RamMapping,
    UpperRam, Vm, VmRecord, VmSpec,
};
pub use firecracker::{Firecracker, FirecrackerConfig};
pub use jail::JailConfig;
pub use qemu::{Qemu, QemuConfig, VirtualizationSetting};
