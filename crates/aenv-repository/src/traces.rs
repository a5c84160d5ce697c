//! Boot traces of other nodes: what a launch of a checkpoint reads first, as blockd keeps it beside its cache. A node that has one gives it
//! to the repository, and a node that is new to the checkpoint takes it, so that already its first launch is fetched ahead.
//!
//! Only hints: whatever goes wrong with them is logged, and nothing else comes of it.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use aenv_types::{Checkpoint, CheckpointId, Digest, Home, LayerName, LayerRef};
use futures::TryStreamExt;
use object_store::PutMode;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use crate::{
    RepositoryError,
    backend::Opened,
    blobs::{blocking, store_error},
    documents, layout,
};

/// Bytes of a trace at most.
const LARGEST: usize = 1 << 20;
/// Traces that are known to be published.
const REMEMBERED: usize = 10_000;

/// Where the node's traces are, and which of them the repository has.
#[derive(Clone)]
pub(crate) struct Traces {
    folder: PathBuf,
    published: Arc<Mutex<HashSet<String>>>,
}

impl Traces {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, published: Arc::default() }
    }

    /// Takes what others have recorded, for a checkpoint that is new to the node.
    pub async fn take(&self, opened: &Opened, home: &Home, checkpoint: &Checkpoint) {
        for (key, file) in self.of(home, checkpoint) {
            if file.exists() {
                continue;
            }
            if let Err(error) = take(opened, &checkpoint.id, &key, file).await {
                tracing::warn!(checkpoint = %checkpoint.id, %error, "a boot trace is not taken over");
            }
        }
    }

    /// Gives what was recorded here, once, while nobody waits for it.
    pub fn give(&self, opened: &Opened, home: &Home, checkpoint: &Checkpoint) {
        for (key, file) in self.of(home, checkpoint) {
            if !file.exists() || !self.is_news(format!("{} {key}", checkpoint.id)) {
                continue;
            }
            let (opened, id) = (opened.clone(), checkpoint.id.clone());
            tokio::spawn(async move {
                if let Err(error) = give(&opened, &id, &key, file).await {
                    tracing::warn!(checkpoint = %id, %error, "a boot trace is not published");
                }
            });
        }
    }

    /// Names and files of the traces that a checkpoint's images have, or would have.
    fn of(&self, home: &Home, checkpoint: &Checkpoint) -> Vec<(String, PathBuf)> {
        let memory = checkpoint.memory.iter().map(|image| &image.layers);
        let stacks = memory.chain(checkpoint.disks.iter().map(|disk| &disk.layers));
        let keys = stacks.filter_map(|layers| key(home, layers));
        keys.map(|key| (key.clone(), self.folder.join(format!("{key}.json")))).collect()
    }

    fn is_news(&self, key: String) -> bool {
        let mut published = self.published.lock();
        if published.len() >= REMEMBERED {
            published.clear();
        }
        published.insert(key)
    }
}

/// What blockd calls the trace of a stack: a digest over the first half, in hex, of the name of each layer that is not here.
fn key(home: &Home, layers: &[LayerRef]) -> Option<String> {
    let elsewhere = layers.iter().filter(|layer| !home.layer(&layer.name).exists());
    let mut hasher = Sha256::new();
    let mut any = false;
    for layer in elsewhere {
        let LayerName::Digest(digest) = layer.name else { return None };
        hasher.update(&digest.hex()[..32]);
        any = true;
    }
    any.then(|| Digest::from_bytes(hasher.finalize().into()).hex())
}

async fn take(opened: &Opened, id: &CheckpointId, key: &str, file: PathBuf) -> Result<(), RepositoryError> {
    let Some((bytes, _)) = documents::read(opened, &layout::trace(id, key)).await? else { return Ok(()) };
    if bytes.len() > LARGEST {
        return Ok(());
    }
    let context = format!("keeping {}", file.display());
    blocking(move || {
        let folder = file.parent().unwrap_or(&file);
        std::fs::create_dir_all(folder)
            .and_then(|()| aenv_durable::write(&file, &bytes))
            .map_err(store_error(context))
    })
    .await
}

async fn give(opened: &Opened, id: &CheckpointId, key: &str, file: PathBuf) -> Result<(), RepositoryError> {
    let context = format!("reading {}", file.display());
    let bytes = blocking(move || std::fs::read(&file).map_err(store_error(context))).await?;
    if bytes.len() > LARGEST {
        return Ok(());
    }
    match documents::write(opened, &layout::trace(id, key), bytes, PutMode::Create).await {
        Ok(_) | Err(RepositoryError::Conflict(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes what was published for a checkpoint that goes.
pub(crate) async fn remove(opened: &Opened, id: &CheckpointId) -> Result<(), RepositoryError> {
    let mut found = opened.store.list(Some(&layout::traces(id)));
    while let Some(meta) = found.try_next().await.map_err(store_error("listing boot traces"))? {
        documents::remove(opened, &meta.location).await?;
    }
    Ok(())
}
