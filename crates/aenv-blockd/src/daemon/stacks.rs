//! Exports made of stacks of layers.

use std::{
    collections::HashMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use aenv_layer::{Layer, OpenUpperError, Stack, StackError, Upper};
use aenv_store::{BlockDevice, DeviceError};
use parking_lot::Mutex;

use super::{
    backend::{Backend, Disk},
    remotes::{Remotes, layer_file},
};
use crate::exports::{DiskExport, ExportError, Sealed};

/// The product's backend. An open layer is shared by all exports that stand on it, so that its index is in memory once.
#[derive(Default)]
pub struct Stacks {
    remotes: Option<Remotes>,
    layers: Mutex<HashMap<LayerKey, Weak<Layer>>>,
}

/// A layer's file: another file under the same name is another layer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct LayerKey {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Stacks {
    /// With layers that are elsewhere.
    pub fn with_remotes(remotes: Remotes) -> Self {
        Self { remotes: Some(remotes), ..Self::default() }
    }

    fn open(&self, path: &Path) -> Result<Layer, String> {
        if path.extension().is_none_or(|extension| extension != "remote") {
            return Layer::open_file(path).map_err(|error| error.to_string());
        }
        let remotes =
            self.remotes.as_ref().ok_or("it is elsewhere, and this blockd reads nothing from elsewhere")?;
        Layer::open(remotes.open(path)?).map_err(|error| error.to_string())
    }

    fn layer(&self, path: &Path) -> Result<Arc<Layer>, ExportError> {
        let failed = |message: String| ExportError::Layer { path: path.to_owned(), message };
        let (place, file) = layer_file(path).map_err(|error| failed(error.to_string()))?;
        let key = LayerKey { path: place.clone(), device: file.dev(), inode: file.ino() };
        if let Some(layer) = self.layers.lock().get(&key).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        // Opened without the lock; two that open one layer at once end up with one, the other is dropped.
        let opened = Arc::new(self.open(&place).map_err(failed)?);
        let mut layers = self.layers.lock();
        if let Some(layer) = layers.get(&key).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        layers.retain(|_, layer| layer.strong_count() > 0);
        layers.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }

    fn layers(&self, paths: &[PathBuf]) -> Result<Vec<Arc<Layer>>, ExportError> {
        paths.iter().map(|path| self.layer(path)).collect()
    }
}

impl Backend for Stacks {
    fn disk(&self, export: &DiskExport) -> Result<Arc<dyn Disk>, ExportError> {
        let layers = self.layers(&export.layers)?;
        let upper = match &export.upper {
            Some(folder) => Some(Upper::open_or_create(folder, export.size).map_err(of_upper)?),
            None => None,
        };
        let stack = Stack::new(layers, upper, export.size).map_err(of_stack)?;
        Ok(Arc::new(StackDisk(stack)))
    }

    fn memory(&self, layers: &[PathBuf], size: u64) -> Result<Arc<dyn BlockDevice>, ExportError> {
        let stack = Stack::new(self.layers(layers)?, None, size).map_err(of_stack)?;
        Ok(Arc::new(stack))
    }
}

fn of_upper(error: OpenUpperError) -> ExportError {
    match error {
        OpenUpperError::Corrupt { path, what } => ExportError::Layer { path, message: what },
        other => ExportError::Io { message: other.to_string() },
    }
}

fn of_stack(error: StackError) -> ExportError {
    ExportError::Invalid { message: error.to_string() }
}

struct StackDisk(Stack);

impl BlockDevice for StackDisk {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        self.0.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError> {
        self.0.write_at(buf, offset)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.0.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.0.discard(offset, len)
    }

    fn may_wait(&self) -> bool {
        self.0.may_wait()
    }
}

impl Disk for StackDisk {
    fn seal(&self, target: &Path) -> Result<Sealed, ExportError> {
        match self.0.seal(target) {
            Ok(Some(sealed)) => Ok(Sealed { layer: Some(target.to_owned()), size: sealed.size }),
            Ok(None) => Ok(Sealed { layer: None, size: 0 }),
            Err(error) => Err(ExportError::Io { message: error.to_string() }),
        }
    }
}
