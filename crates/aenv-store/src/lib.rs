//! Where bytes come from: [`BlockSource`] (read-only bytes: file, registry, object store, peer) and
//! [`BlockDevice`] (a disk or memory image), and stages that can be composed on them (cache, faults).
//!
//! This room never knows what the bytes mean. Both traits are synchronous: their callers are data-plane threads
//! that serve one request each, and a remote source bounds its own waits.

#![forbid(unsafe_code)]

mod fault;
mod file;
mod memory;
mod window;

use std::{io, time::Duration};

use thiserror::Error;

pub use fault::{Fault, FaultPlan, FaultSource};
pub use file::FileSource;
pub use memory::MemorySource;
pub use window::WindowSource;

/// Why bytes could not be had from a source.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The range reaches beyond the end.
    #[error("read of {len} bytes at {offset} reaches beyond the end at {size}")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes that the source has.
        size: u64,
    },
    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        /// What was being read.
        context: String,
        /// The refusal.
        #[source]
        source: io::Error,
    },
    /// A remote end answered, but not with the bytes.
    #[error("{context}: {message}")]
    Remote {
        /// What was being read.
        context: String,
        /// What it said.
        message: String,
    },
    /// A remote end cannot be reached, or is busy or broken, also after several attempts; later it may not be.
    #[error("{context}: {message}")]
    Away {
        /// What was being read.
        context: String,
        /// What happened at last.
        message: String,
    },
    /// A remote end wants to see (other) credentials.
    #[error("{context}: {message}")]
    Denied {
        /// What was being read.
        context: String,
        /// What it said.
        message: String,
    },
    /// No answer within the bound.
    #[error("{context}: no answer within {after:?}")]
    TimedOut {
        /// What was being read.
        context: String,
        /// The bound.
        after: Duration,
    },
    /// The bytes came and are wrong.
    #[error("{context}: {message}")]
    Corrupt {
        /// What was being read.
        context: String,
        /// What does not fit.
        message: String,
    },
}

/// Immutable bytes of known size. Stages (cache, P2P, fault injection) are sources over sources.
pub trait BlockSource: Send + Sync {
    /// Bytes in it.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`, wholly or not at all.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError>;

    /// Whether a read may have to wait for another machine.
    fn may_wait(&self) -> bool {
        false
    }
}

impl SourceError {
    /// Fails a range that reaches beyond `size`.
    pub fn check_range(offset: u64, len: u64, size: u64) -> Result<(), Self> {
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Self::OutOfRange { offset, len, size }),
        }
    }

    /// An error of the operating system, with what was being read.
    pub fn io(context: impl Into<String>, source: io::Error) -> Self {
        Self::Io { context: context.into(), source }
    }

    /// Bytes that are wrong, with what was being read.
    pub fn corrupt(context: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Corrupt { context: context.into(), message: message.into() }
    }
}

/// Why a device refused an operation. Becomes an errno at an export.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The range reaches beyond the end, or is not a multiple of 512 bytes.
    #[error("{len} bytes at {offset} do not fit a device of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Size of the device.
        size: u64,
    },
    /// Written to a device without an upper layer.
    #[error("the device is read-only")]
    ReadOnly,
    /// No room on the host's disk.
    #[error("no room left on the host's disk")]
    NoSpace,
    /// A layer's bytes could not be had.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        /// What was being done.
        context: String,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

impl DeviceError {
    /// Fails a range that reaches beyond `size` or is not made of whole 512-byte sectors.
    pub fn check_range(offset: u64, len: u64, size: u64) -> Result<(), Self> {
        match offset.checked_add(len) {
            Some(end) if end <= size && offset.is_multiple_of(512) && len.is_multiple_of(512) => Ok(()),
            _ => Err(Self::OutOfRange { offset, len, size }),
        }
    }

    /// An error of the operating system, with what was being done. A full disk becomes [`DeviceError::NoSpace`].
    pub fn io(context: impl Into<String>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace,
            _ => Self::Io { context: context.into(), source },
        }
    }
}

/// A disk or a memory image. Offsets and lengths are multiples of 512 bytes. Any number of threads may call at once;
/// overlapping writes in flight at once land in either order, as on a disk.
pub trait BlockDevice: Send + Sync {
    /// Bytes in it.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`. What was never written reads as zeros.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError>;

    /// Writes all of `buf` at `offset`. Survives a crash only after [`BlockDevice::flush`].
    fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError>;

    /// Makes everything that was acknowledged before the call durable on the host's disk.
    fn flush(&self) -> Result<(), DeviceError>;

    /// Makes a range read as zeros and gives its space back where possible.
    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError>;

    /// Whether a read may have to wait for another machine.
    fn may_wait(&self) -> bool {
        false
    }
}
