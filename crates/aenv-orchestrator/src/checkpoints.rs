//! Manifests of the checkpoints that sandboxes of this node were launched from or are paused in, and who still needs them.
//!
//! A manifest stays as long as a sandbox's record names it or somebody holds a [`Pin`]; a layer stays as long as a manifest or
//! a record names it or it is [`Fresh`]. [`crate::collector`] removes the rest. Pins live in memory only: no caller survives
//! the server, so that at start a manifest without a record has nobody left to need it.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_types::{Checkpoint, CheckpointId, Home, LayerName, checkpoint::CHECKPOINT_FORMAT};
use parking_lot::Mutex;

use crate::files;

/// The manifests in `<home>/checkpoints`.
#[derive(Clone)]
pub(crate) struct Checkpoints {
    home: Home,
    held: Arc<Mutex<Held>>,
}

#[derive(Default)]
struct Held {
    pins: HashMap<CheckpointId, usize>,
    until: HashMap<CheckpointId, Instant>,
    fresh: HashMap<LayerName, usize>,
}

/// Keeps a manifest while it is held.
pub(crate) struct Pin {
    id: CheckpointId,
    held: Arc<Mutex<Held>>,
}

/// Keeps a layer that no manifest names yet.
pub(crate) struct Fresh {
    name: LayerName,
    held: Arc<Mutex<Held>>,
}

impl Checkpoints {
    pub(crate) fn new(home: Home) -> Self {
        Self { home, held: Arc::default() }
    }

    /// Writes a manifest, durable. One of the same id that says the same is left as it is.
    pub(crate) async fn put(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        let target = self.home.checkpoint(&checkpoint.id);
        let beside = self.home.staging().join(format!("{}-{}", checkpoint.id, uuid::Uuid::new_v4()));
        let bytes = serde_json::to_vec(checkpoint)?;
        files::blocking(move || match std::fs::read(&target) {
            Ok(there) if there == bytes => Ok(()),
            _ => aenv_durable::write_through(&target, &beside, &bytes),
        })
        .await
    }

    /// Reads a manifest.
    pub(crate) async fn get(&self, id: &CheckpointId) -> io::Result<Arc<Checkpoint>> {
        let path = self.home.checkpoint(id);
        files::blocking(move || read(&path)).await.map(Arc::new)
    }

    /// Every manifest that is there; blocking.
    pub(crate) fn list(&self) -> io::Result<Vec<CheckpointId>> {
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(self.home.checkpoints())? {
            let name = entry?.file_name();
            if let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok()) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// Reads one; blocking.
    pub(crate) fn read(&self, id: &CheckpointId) -> io::Result<Checkpoint> {
        read(&self.home.checkpoint(id))
    }

    /// Keeps a manifest until the pin is dropped.
    pub(crate) fn pin(&self, id: &CheckpointId) -> Pin {
        *self.held.lock().pins.entry(id.clone()).or_default() += 1;
        Pin { id: id.clone(), held: Arc::clone(&self.held) }
    }

    /// Keeps a manifest for a while: somebody was given it and will publish it or launch it.
    pub(crate) fn keep_for(&self, id: &CheckpointId, time: Duration) {
        self.held.lock().until.insert(id.clone(), Instant::now() + time);
    }

    /// Keeps it no longer for whoever was given it.
    pub(crate) fn release(&self, id: &CheckpointId) {
        self.held.lock().until.remove(id);
    }

    /// Manifests that somebody holds.
    pub(crate) fn pinned(&self) -> HashSet<CheckpointId> {
        let mut held = self.held.lock();
        held.until.retain(|_, until| *until > Instant::now());
        held.pins.keys().chain(held.until.keys()).cloned().collect()
    }

    /// Removes a manifest that nobody holds and that `named` does not know; blocking. Nobody can begin to hold it meanwhile.
    pub(crate) fn remove_unless(
        &self,
        id: &CheckpointId,
        named: impl FnOnce(&CheckpointId) -> bool,
    ) -> io::Result<()> {
        let held = self.held.lock();
        if held.pins.contains_key(id) || held.until.contains_key(id) || named(id) {
            return Ok(());
        }
        files::remove_file(&self.home.checkpoint(id))
    }

    /// Keeps a layer that is being made.
    pub(crate) fn fresh(&self, name: LayerName) -> Fresh {
        *self.held.lock().fresh.entry(name).or_default() += 1;
        Fresh { name, held: Arc::clone(&self.held) }
    }

    /// Layers that are being made.
    pub(crate) fn fresh_layers(&self) -> Vec<LayerName> {
        self.held.lock().fresh.keys().copied().collect()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        release(&mut self.held.lock().pins, &self.id);
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        release(&mut self.held.lock().fresh, &self.name);
    }
}

fn release<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

fn read(path: &std::path::Path) -> io::Result<Checkpoint> {
    let checkpoint: Checkpoint = serde_json::from_slice(&std::fs::read(path)?)?;
    if checkpoint.format != CHECKPOINT_FORMAT {
        return Err(io::Error::other(format!(
            "it has format {}; this version knows {CHECKPOINT_FORMAT}",
            checkpoint.format
        )));
    }
    Ok(checkpoint)
}

/// Names of all blobs of a checkpoint: layers and the vm state.
pub(crate) fn blobs(checkpoint: &Checkpoint) -> impl Iterator<Item = LayerName> {
    let state = checkpoint.vm_state.iter().map(|state| state.name);
    checkpoint.layers().map(|layer| layer.name).chain(state)
}
