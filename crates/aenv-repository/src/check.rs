//! Checking and accounting. Reads only.

use std::collections::HashMap;

use aenv_types::{CheckpointId, Digest};
use futures::TryStreamExt;
use object_store::{ObjectStoreExt, path::Path};
use serde::Serialize;

use crate::{
    DryRun, Progress, Repository, RepositoryError, Watcher, blobs::store_error, layout, repository::digests,
};

/// How closely a check looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Every manifest; of blobs, whether they are there and have the right size.
    Names,
    /// Every byte as well. Takes as long as reading the whole repository.
    Bytes,
}

/// What a check found wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Damage {
    /// A blob that manifests name is not there.
    Missing {
        /// The blob.
        blob: Digest,
        /// Checkpoints that cannot be launched without it.
        checkpoints: Vec<CheckpointId>,
    },
    /// A blob's bytes are not its digest's.
    Damaged {
        /// The blob.
        blob: Digest,
        /// Checkpoints that cannot be launched with it.
        checkpoints: Vec<CheckpointId>,
    },
    /// A blob that nothing names. The next garbage collection takes it.
    Unreferenced {
        /// The blob.
        blob: Digest,
        /// Its size in bytes.
        size: u64,
    },
    /// A manifest that cannot be read.
    Manifest {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// Why not.
        message: String,
    },
}

/// What the repository holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Committed checkpoints.
    pub checkpoints: u64,
    /// Blobs.
    pub blobs: u64,
    /// Bytes of all blobs, each counted once.
    pub bytes: u64,
    /// Bytes of all checkpoints, blobs counted for each checkpoint that names them: what they would take without sharing.
    pub bytes_unshared: u64,
    /// Bytes of blobs that neither a checkpoint nor a commit under way names: what a garbage collection can give back.
    pub bytes_unreferenced: u64,
}

impl Repository {
    /// Says what is wrong with manifests and blobs, worst first.
    pub async fn fsck(&self, depth: Depth, watcher: Watcher<'_>) -> Result<Vec<Damage>, RepositoryError> {
        let mut damage = Vec::new();
        let mut users: HashMap<Digest, (u64, Vec<CheckpointId>)> = HashMap::new();
        for id in self.checkpoints().await? {
            match self.checkpoint(&id).await.and_then(|checkpoint| digests(&checkpoint)) {
                Ok(blobs) => blobs.into_iter().for_each(|(blob, size)| {
                    users.entry(blob).or_insert((size, Vec::new())).1.push(id.clone());
                }),
                Err(RepositoryError::NotFound(_)) => {}
                Err(error @ RepositoryError::Store { .. }) => return Err(error),
                Err(error) => damage.push(Damage::Manifest { checkpoint: id, message: error.to_string() }),
            }
        }
        let intents = self.intents(DryRun::Yes).await?;
        let stored = self.stored().await?;
        for (blob, (_, checkpoints)) in &users {
            if !stored.contains_key(blob) {
                damage.push(Damage::Missing { blob: *blob, checkpoints: checkpoints.clone() });
            }
        }
        let (mut unreferenced, mut done, total) = (Vec::new(), 0, stored.len() as u64);
        for (blob, found) in stored {
            let user = users.remove(&blob);
            let elsewhere = found.is_elsewhere();
            let fits = elsewhere || user.as_ref().is_none_or(|(size, _)| *size == found.size);
            if !fits || (depth == Depth::Bytes && !elsewhere && !self.whole(&blob).await?) {
                let checkpoints = user.map(|(_, checkpoints)| checkpoints).unwrap_or_default();
                damage.push(Damage::Damaged { blob, checkpoints });
            } else if user.is_none() && !intents.contains(&blob) {
                unreferenced.push(Damage::Unreferenced { blob, size: found.size });
            }
            done += 1;
            watcher(Progress { step: "reading blobs", done, total });
        }
        damage.append(&mut unreferenced);
        Ok(damage)
    }

    /// What the repository holds.
    pub async fn du(&self) -> Result<Usage, RepositoryError> {
        let mut usage = Usage::default();
        let mut named = self.intents(DryRun::Yes).await?;
        for id in self.checkpoints().await? {
            match self.checkpoint(&id).await {
                Ok(checkpoint) => {
                    let blobs = digests(&checkpoint)?;
                    usage.checkpoints += 1;
                    usage.bytes_unshared += blobs.values().sum::<u64>();
                    named.extend(blobs.into_keys());
                }
                Err(RepositoryError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        for (digest, blob) in self.stored().await? {
            usage.blobs += u64::from(!blob.is_elsewhere());
            usage.bytes += blob.size;
            if !named.contains(&digest) {
                usage.bytes_unreferenced += blob.size;
            }
        }
        Ok(usage)
    }

    /// The distinct blobs of a committed checkpoint, with their sizes.
    pub async fn blobs(&self, id: &CheckpointId) -> Result<HashMap<Digest, u64>, RepositoryError> {
        digests(&self.checkpoint(id).await?)
    }

    async fn whole(&self, digest: &Digest) -> Result<bool, RepositoryError> {
        let context = format!("reading blob {digest}");
        let path: Path = layout::blob(digest);
        match self.opened().await?.store.get(&path).await {
            // Collected since it was listed.
            Err(object_store::Error::NotFound { .. }) => Ok(true),
            Err(error) => Err(store_error(context)(error)),
            Ok(found) => {
                let mut hasher = <sha2::Sha256 as sha2::Digest>::new();
                let mut stream = found.into_stream();
                while let Some(bytes) = stream.try_next().await.map_err(store_error(context.clone()))? {
                    sha2::Digest::update(&mut hasher, &bytes);
                }
                Ok(Digest::from_bytes(sha2::Digest::finalize(hasher).into()) == *digest)
            }
        }
    }
}
