//! Sealing: the upper becomes a layer while I/O goes on.
//!
//! 1. A fresh generation is made, and swapped in on top. From here on new writes go there, and reads look there first.
//!    This is all that a writer can notice, and it takes no I/O.
//! 2. Writes that were in flight in the old generation end. One that overlaps a write to the new generation was in flight
//!    together with it, so either order is right.
//! 3. The fresh generation's files are made durable; then the old one gets its index and trailer, is made durable, and is
//!    renamed to the target. The rename is the moment of truth: before it, opening the upper's folder finds both
//!    generations and folds the newer into the older; after it, the layer is complete and the newer names it as its parent.
//! 4. The layer takes the place of the old generation.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_store::DeviceError;
use thiserror::Error;
use uuid::Uuid;

use super::{Merged, Stack, State};
use crate::{
    compact::{CompactError, write_uppers},
    durable::parent_of,
    format::MAX_STACK_LAYERS,
    generation::Generation,
    layer::{Layer, OpenLayerError},
    upper::{DRAIN, OpenUpperError},
};

/// Why an upper was not sealed. The disk goes on as it was.
#[derive(Debug, Error)]
pub enum SealError {
    /// There is no upper.
    #[error("the disk is read-only: there is nothing to seal")]
    ReadOnly,
    /// The stack is as deep as it may be.
    #[error("the disk has {MAX_STACK_LAYERS} layers already; compact them")]
    TooDeep,
    /// A file of that name is there.
    #[error("{0} exists already; choose another name")]
    TargetExists(PathBuf),
    /// A rename cannot reach the target.
    #[error("{0} is on another filesystem than the upper; seal beside it and copy")]
    OtherFilesystem(PathBuf),
    /// A write in flight does not end.
    #[error("writes in flight did not end within {}s; is the disk stuck?", DRAIN.as_secs())]
    Busy,
    /// The fresh upper could not be made.
    #[error("a fresh upper could not be made: {0}")]
    Fresh(#[source] OpenUpperError),
    /// The filesystem is full.
    #[error("no room for the index of {0}; free some space")]
    NoSpace(PathBuf),
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
    /// What an earlier, failed seal left could not be written together with the rest.
    #[error("the uppers of an earlier seal could not be merged: {0}")]
    Merge(#[from] CompactError),
    /// The merged layer cannot be read back.
    #[error("the sealed layer cannot be opened: {0}")]
    Reopen(#[from] OpenLayerError),
}

/// A layer that an upper became.
#[derive(Clone, Debug)]
pub struct SealedLayer {
    /// Bytes of the file.
    pub size: u64,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Its uuid.
    pub uuid: Uuid,
    /// The layer, open: the top one of the stack now.
    pub layer: Arc<Layer>,
}

pub(super) fn seal(stack: &Stack, target: &Path) -> Result<Option<SealedLayer>, SealError> {
    let _alone = stack.sealing.lock();
    let state = stack.snapshot();
    let old = state.top.clone().ok_or(SealError::ReadOnly)?;
    if state.frozen.is_empty() && old.is_empty() {
        return Ok(None);
    }
    if state.layers.len() >= MAX_STACK_LAYERS {
        return Err(SealError::TooDeep);
    }
    check_target(target, &old.name().dir)?;
    let fresh = Generation::create(old.name().next(), stack.size, old.uuid())
        .map_err(|error| SealError::Fresh(error.into()))?;
    let fresh = Arc::new(fresh);
    let mut frozen = state.frozen.clone();
    frozen.push(old.clone());
    stack.replace(State {
        layers: state.layers.clone(),
        merged: state.merged.clone(),
        frozen: frozen.clone(),
        top: Some(fresh.clone()),
    });
    drop(state);
    if !old.close(DRAIN) {
        return Err(SealError::Busy);
    }
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| match DeviceError::io("", source) {
            DeviceError::Io { source, .. } => SealError::Io { path, source },
            _ => SealError::NoSpace(path),
        }
    };
    fresh.sync_created().map_err(failed(&fresh.name().dir))?;
    let (layer, size) = match &frozen[..] {
        [only] => only.seal(target).map_err(|error| failed(&error.path)(error.source))?,
        several => {
            let summary = write_uppers(several, target)?;
            (Layer::open_file(target)?, summary.size)
        }
    };
    let layer = Arc::new(layer);
    adopt(stack, layer.clone());
    for generation in &frozen {
        if let Err(error) = generation.remove() {
            tracing::warn!(dir = %generation.name().dir.display(), %error, "files of a sealed upper are left");
        }
    }
    Ok(Some(SealedLayer { size, virtual_size: layer.virtual_size(), uuid: layer.uuid(), layer }))
}

/// Puts a layer in the place of all that is frozen.
fn adopt(stack: &Stack, layer: Arc<Layer>) {
    let state = stack.snapshot();
    let mut layers = state.layers.clone();
    let tag = layers.len() as u8;
    layers.push(layer.clone());
    let merged = match layers.len() {
        1 => Merged::Single(layer),
        _ => Merged::Several(state.merged.index().with_top(layer.index(), tag)),
    };
    stack.replace(State { layers, merged: Arc::new(merged), frozen: Vec::new(), top: state.top.clone() });
}

fn check_target(target: &Path, dir: &Path) -> Result<(), SealError> {
    let device_of = |path: &Path| {
        let meta = fs::metadata(path).map_err(|source| SealError::Io { path: path.to_owned(), source });
        meta.map(|meta| meta.dev())
    };
    if fs::symlink_metadata(target).is_ok() {
        return Err(SealError::TargetExists(target.to_owned()));
    }
    if device_of(parent_of(target))? != device_of(dir)? {
        return Err(SealError::OtherFilesystem(target.to_owned()));
    }
    Ok(())
}
