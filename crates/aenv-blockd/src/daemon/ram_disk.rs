//! Devices in memory, for tests of what lies above devices.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use aenv_store::{BlockDevice, DeviceError};
use parking_lot::{Mutex, RwLock};

use super::backend::{Backend, Disk};
use crate::exports::{DiskExport, ExportError, Sealed};

/// A disk whose bytes are a vector. A "seal" writes them all to the target.
pub(crate) struct RamDisk {
    bytes: RwLock<Vec<u8>>,
    pub(crate) flushes: AtomicUsize,
    pub(crate) full: AtomicBool,
}

impl RamDisk {
    pub(crate) fn new(size: usize) -> Self {
        Self { bytes: RwLock::new(vec![0; size]), flushes: AtomicUsize::new(0), full: AtomicBool::new(false) }
    }

    fn range(&self, offset: u64, len: usize) -> Result<std::ops::Range<usize>, DeviceError> {
        let size = self.size();
        if !offset.is_multiple_of(512) || !len.is_multiple_of(512) || offset + len as u64 > size {
            return Err(DeviceError::OutOfRange { offset, len: len as u64, size });
        }
        Ok(offset as usize..offset as usize + len)
    }
}

impl BlockDevice for RamDisk {
    fn size(&self) -> u64 {
        self.bytes.read().len() as u64
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, buf.len())?;
        buf.copy_from_slice(&self.bytes.read()[range]);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, buf.len())?;
        if self.full.load(Ordering::Relaxed) {
            return Err(DeviceError::NoSpace);
        }
        self.bytes.write()[range].copy_from_slice(buf);
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let range = self.range(offset, len as usize)?;
        self.bytes.write()[range].fill(0);
        Ok(())
    }
}

impl Disk for RamDisk {
    fn seal(&self, target: &Path) -> Result<Sealed, ExportError> {
        let bytes = self.bytes.read();
        std::fs::write(target, &*bytes).map_err(|error| ExportError::Io { message: error.to_string() })?;
        Ok(Sealed { layer: Some(target.to_owned()), size: bytes.len() as u64 })
    }
}

/// Keeps each disk by its name, so that a daemon that is started again finds the same bytes.
#[derive(Default)]
pub(crate) struct RamBackend {
    pub(crate) disks: Mutex<HashMap<String, Arc<RamDisk>>>,
    pub(crate) memory_opens: AtomicUsize,
}

impl Backend for RamBackend {
    fn disk(&self, export: &DiskExport) -> Result<Arc<dyn Disk>, ExportError> {
        let mut disks = self.disks.lock();
        let disk =
            disks.entry(export.name.clone()).or_insert_with(|| Arc::new(RamDisk::new(export.size as usize)));
        Ok(Arc::clone(disk) as Arc<dyn Disk>)
    }

    fn memory(&self, layers: &[PathBuf], size: u64) -> Result<Arc<dyn BlockDevice>, ExportError> {
        self.memory_opens.fetch_add(1, Ordering::Relaxed);
        let image = RamDisk::new(size as usize);
        for layer in layers {
            let bytes = std::fs::read(layer)
                .map_err(|error| ExportError::Layer { path: layer.clone(), message: error.to_string() })?;
            image.bytes.write()[..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(Arc::new(image))
    }
}
