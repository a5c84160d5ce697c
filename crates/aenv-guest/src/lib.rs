//! Host side of the guest: unpacks a distribution's kernel package and assembles the initramfs.
//!
//! The kernel is the distribution's own, unpacked and never installed: its bzImage's payload (an ELF vmlinux, which every
//! engine boots directly) and its module tree. The initramfs holds our static init, envd and the few modules that a
//! microVM needs, in load order. Both are named by what they were made from, so that a second setup finds them made.
//!
//! This room runs on the host only and never opens a disk image; what happens inside the guest is `aenv-init`'s work.

#![forbid(unsafe_code)]

mod bundle;
mod bzimage;
mod cpio;
mod initramfs;
mod kernel;
mod modules;
mod package;
mod pvm;

pub use bundle::build_bundle;
pub use bzimage::ExtractError;
pub use initramfs::{Initramfs, InitramfsError, InitramfsSpec, build_initramfs};
pub use kernel::{GuestKernel, KernelError, unpack_kernel};
pub use modules::{MODULES, ModuleError, VOLUME_MODULES, WantedModule};
pub use package::{PackageError, cached_kernel_package, download_kernel_package};
pub use pvm::supports_pvm;
