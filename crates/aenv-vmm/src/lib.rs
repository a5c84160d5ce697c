//! Engines behind one small trait. Nothing above this room knows which engine runs.
//!
//! An engine boots a VM or loads it from a checkpoint, stops and continues its vCPUs, saves its vm state and ends it. Memory is
//! always a private mapping of the file in [`VmSpec::ram`], so that what a guest changed is the anonymous pages of that
//! mapping; capturing them is `aenv-memory`'s work, not the engine's.

mod cgroup;
mod choose;
pub mod engine;
mod jail;
mod maps;
mod process;
pub mod qemu;
mod tap;

pub use choose::{EngineSetting, choose};
pub use engine::{
    BootSpec, Drive, Engine, EngineError, EngineReport, LaunchSpec, Missing, RamMapping, Vm, VmRecord, VmSpec,
};
pub use jail::JailConfig;
pub use qemu::{Qemu, QemuConfig, VirtualizationSetting};
