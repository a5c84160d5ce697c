//! Where an export's bytes come from.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_store::BlockDevice;

use crate::exports::{DiskExport, ExportError, Sealed};

/// A disk that can be sealed.
pub trait Disk: BlockDevice {
    /// Turns what was written since the last seal into a durable layer at `target`, with I/O in flight kept.
    fn seal(&self, target: &Path) -> Result<Sealed, ExportError>;
}

/// Opens what exports show. The product's one is made of stacks; tests put devices of their own here.
pub trait Backend: Send + Sync + 'static {
    /// A disk.
    fn disk(&self, export: &DiskExport) -> Result<Arc<dyn Disk>, ExportError>;

    /// A memory image of `size` bytes, never written to.
    fn memory(&self, layers: &[PathBuf], size: u64) -> Result<Arc<dyn BlockDevice>, ExportError>;
}
