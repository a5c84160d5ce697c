//! The shape of a machine.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// vCPUs, memory and root disk of a sandbox. A checkpoint can only be launched with the shape that it was captured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MachineShape {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Size of the root disk in MiB, as the guest sees it.
    pub disk_mib: u32,
}

/// Why a shape is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ShapeError {
    /// vCPUs are 1 or an even number up to 32.
    #[error("cpuCount is {0}: it must be 1 or an even number up to 32")]
    Vcpus(u32),
    /// Memory is an even number of MiB from 128 up to 65536.
    #[error("memoryMB is {0}: it must be an even number from 128 to 65536")]
    Memory(u32),
    /// The disk is 64 MiB to 1 TiB.
    #[error("diskSizeMB is {0}: it must be from 64 to 1048576")]
    Disk(u32),
}

impl MachineShape {
    /// The default machine: 2 vCPUs, 1024 MiB, a 10 GiB disk (sparse).
    pub const DEFAULT: Self = Self { vcpus: 2, memory_mib: 1024, disk_mib: 10_240 };

    /// Checks the limits of every engine.
    pub fn checked(self) -> Result<Self, ShapeError> {
        if self.vcpus == 0 || self.vcpus > 32 || (self.vcpus > 1 && self.vcpus % 2 == 1) {
            return Err(ShapeError::Vcpus(self.vcpus));
        }
        if !(128..=65_536).contains(&self.memory_mib) || self.memory_mib % 2 == 1 {
            return Err(ShapeError::Memory(self.memory_mib));
        }
        if !(64..=1_048_576).contains(&self.disk_mib) {
            return Err(ShapeError::Disk(self.disk_mib));
        }
        Ok(self)
    }

    /// Guest memory in bytes.
    pub fn memory_bytes(self) -> u64 {
        u64::from(self.memory_mib) << 20
    }

    /// Root disk in bytes.
    pub fn disk_bytes(self) -> u64 {
        u64::from(self.disk_mib) << 20
    }
}
