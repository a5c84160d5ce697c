//! Exports made of stacks of layers.

use std::{
    collections::HashMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use aenv_cache::CachedSource;
use aenv_layer::{Layer, OpenLayerError, OpenUpperError, OpenZFileError, Stack, StackError, Upper};
use aenv_store::{BlockDevice, DeviceError, SourceError};
use parking_lot::Mutex;

use super::{
    backend::{Backend, Disk},
    remotes::{Remote, Remotes, layer_file},
    trace::Recording,
};
use crate::exports::{DiskExport, ExportError, Sealed};

/// The product's backend. An open layer is shared by all exports that stand on it, so that its index is in memory once.
#[derive(Default)]
pub struct Stacks {
    remotes: Option<Remotes>,
    layers: Mutex<HashMap<LayerKey, Known>>,
}

/// A layer's file: another file under the same name is another layer.
#[derive(Clone, PartialEq, Eq, Hash)]
struct LayerKey {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// A layer that is, or was, open.
struct Known {
    layer: Weak<Layer>,
    /// Its bytes, where they come through the cache.
    cached: Option<CachedSource>,
}

/// A layer that was found and need not be open yet.
struct Found {
    path: PathBuf,
    key: LayerKey,
    is: Is,
}

enum Is {
    Open(Arc<Layer>, Option<CachedSource>),
    Here,
    Elsewhere(Remote),
}

impl Found {
    fn cached(&self) -> Option<CachedSource> {
        match &self.is {
            Is::Open(_, cached) => cached.clone(),
            Is::Here => None,
            Is::Elsewhere(remote) => remote.cached.clone(),
        }
    }
}

/// Open layers, and who watches what is read of them first.
type Launch = (Vec<Arc<Layer>>, Option<Arc<Recording>>);

impl Stacks {
    /// With layers that are elsewhere.
    pub fn with_remotes(remotes: Remotes) -> Self {
        Self { remotes: Some(remotes), ..Self::default() }
    }

    /// Reads nothing of the layer.
    fn find(&self, path: &Path) -> Result<Found, ExportError> {
        let failed = |message: String| ExportError::Layer { path: path.to_owned(), message };
        let (place, file) = layer_file(path).map_err(|error| failed(error.to_string()))?;
        let key = LayerKey { path: place.clone(), device: file.dev(), inode: file.ino() };
        let open = self
            .layers
            .lock()
            .get(&key)
            .and_then(|known| Some((known.layer.upgrade()?, known.cached.clone())));
        let is = match open {
            Some((layer, cached)) => Is::Open(layer, cached),
            None if place.extension().is_none_or(|extension| extension != "remote") => Is::Here,
            None => {
                let nowhere = "it is elsewhere, and this blockd reads nothing from elsewhere";
                let remotes = self.remotes.as_ref().ok_or_else(|| failed(nowhere.to_owned()))?;
                Is::Elsewhere(remotes.open(&place).map_err(failed)?)
            }
        };
        Ok(Found { path: path.to_owned(), key, is })
    }

    fn open(&self, found: Found) -> Result<Arc<Layer>, ExportError> {
        let (opened, cached) = match found.is {
            Is::Open(layer, _) => return Ok(layer),
            Is::Here => (Layer::open_file(&found.key.path), None),
            Is::Elsewhere(remote) => (Layer::open_within(remote.bytes, remote.table_bytes), remote.cached),
        };
        // Opened without the lock; two that open one layer at once end up with one, the other is dropped.
        let opened = Arc::new(opened.map_err(|error| of_layer(found.path, &error))?);
        let mut layers = self.layers.lock();
        if let Some(layer) = layers.get(&found.key).and_then(|known| known.layer.upgrade()) {
            return Ok(layer);
        }
        layers.retain(|_, known| known.layer.strong_count() > 0);
        layers.insert(found.key, Known { layer: Arc::downgrade(&opened), cached });
        Ok(opened)
    }

    fn layers(&self, paths: &[PathBuf]) -> Result<Launch, ExportError> {
        let found = paths.iter().map(|path| self.find(path)).collect::<Result<Vec<_>, _>>()?;
        let cached: Vec<CachedSource> = found.iter().filter_map(Found::cached).collect();
        let recording = self.remotes.as_ref().and_then(|remotes| remotes.launch(cached));
        let _watching = recording.as_ref().map(Recording::watch);
        let layers = found.into_iter().map(|found| self.open(found)).collect::<Result<_, _>>()?;
        Ok((layers, recording))
    }
}

impl Backend for Stacks {
    fn disk(&self, export: &DiskExport) -> Result<Arc<dyn Disk>, ExportError> {
        let (layers, recording) = self.layers(&export.layers)?;
        let upper = match &export.upper {
            Some(folder) => Some(Upper::open_or_create(folder, export.size).map_err(of_upper)?),
            None => None,
        };
        let stack = Stack::new(layers, upper, export.size).map_err(of_stack)?;
        Ok(Arc::new(StackDisk { stack, recording }))
    }

    fn memory(&self, layers: &[PathBuf], size: u64) -> Result<Arc<dyn BlockDevice>, ExportError> {
        let (layers, recording) = self.layers(layers)?;
        let stack = Stack::new(layers, None, size).map_err(of_stack)?;
        Ok(match recording {
            Some(_) => Arc::new(StackDisk { stack, recording }),
            None => Arc::new(stack),
        })
    }
}

fn of_layer(path: PathBuf, error: &OpenLayerError) -> ExportError {
    let message = error.to_string();
    match error {
        OpenLayerError::Source(source) | OpenLayerError::ZFile(OpenZFileError::Source(source))
            if matches!(source, SourceError::Away { .. } | SourceError::TimedOut { .. }) =>
        {
            ExportError::Away { path, message }
        }
        _ => ExportError::Layer { path, message },
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

/// A stack, and the launch that it is read by.
struct StackDisk {
    stack: Stack,
    recording: Option<Arc<Recording>>,
}

impl Drop for StackDisk {
    fn drop(&mut self) {
        if let Some(recording) = &self.recording {
            recording.finish();
        }
    }
}

impl BlockDevice for StackDisk {
    fn size(&self) -> u64 {
        self.stack.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        let _watching = self.recording.as_ref().map(Recording::watch);
        self.stack.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError> {
        self.stack.write_at(buf, offset)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.stack.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.stack.discard(offset, len)
    }

    fn may_wait(&self) -> bool {
        self.stack.may_wait()
    }
}

impl Disk for StackDisk {
    fn seal(&self, target: &Path) -> Result<Sealed, ExportError> {
        match self.stack.seal(target) {
            Ok(Some(sealed)) => Ok(Sealed { layer: Some(target.to_owned()), size: sealed.size }),
            Ok(None) => Ok(Sealed { layer: None, size: 0 }),
            Err(error) => Err(ExportError::Io { message: error.to_string() }),
        }
    }
}
