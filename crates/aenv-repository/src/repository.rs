//! The repository handle.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_remote::{Location, Place, S3Config, StoreConfig};
use aenv_types::{Checkpoint, CheckpointId, Digest, Home, LayerName, TeamId, checkpoint::CHECKPOINT_FORMAT};
use chrono::{DateTime, Utc};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::{
    backend::{self, Opened},
    blobs::{self, store_error},
    collect, documents, elsewhere, layout,
    traces::{self, Traces},
};

/// Blobs of one commit or fetch that are under way at the same time.
const BLOBS_AT_ONCE: usize = 4;
/// Digests of local layers that are remembered, at some 100 bytes each.
const KNOWN_DIGESTS: usize = 50_000;
/// A node does not wait longer for its repository when it starts.
const OPENED_WITHIN: Duration = Duration::from_secs(10);
/// A commit waits this long for a garbage collection that is deleting; those stop by themselves before.
const COLLECTION_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Where the repository lies.
#[derive(Clone, Debug)]
pub enum Backend {
    /// A folder on any POSIX filesystem, shared or not.
    PosixFs {
        /// The folder.
        root: std::path::PathBuf,
    },
    /// An S3-compatible object store.
    Oss(OssConfig),
}

/// How to reach an S3-compatible object store.
#[derive(Clone, Debug)]
pub struct OssConfig {
    /// URL; the provider's own when `None`.
    pub endpoint: Option<String>,
    /// Bucket.
    pub bucket: String,
    /// Prefix of every key.
    pub prefix: String,
    /// Region; required.
    pub region: String,
    /// `true`: `bucket.host`, `false`: `host/bucket`.
    pub virtual_hosted: bool,
    /// Static key; environment and instance roles when `None`.
    pub access_key: Option<(String, aenv_types::Token)>,
}

impl OssConfig {
    /// The same, as it is told to who reads blobs by ranges.
    pub(crate) fn reached(&self) -> S3Config {
        S3Config {
            endpoint: self.endpoint.clone(),
            bucket: self.bucket.clone(),
            prefix: self.prefix.clone(),
            region: self.region.clone(),
            virtual_hosted: self.virtual_hosted,
            access_key: self.access_key.as_ref().map(|(id, secret)| (id.clone(), secret.expose().to_owned())),
        }
    }
}

impl Backend {
    /// How whoever reads blobs by ranges reaches it.
    pub fn reached(&self) -> StoreConfig {
        match self {
            Self::PosixFs { root } => StoreConfig::Folder(root.clone()),
            Self::Oss(config) => StoreConfig::S3(config.reached()),
        }
    }
}

/// Why a repository operation failed.
#[derive(Debug, Error)]
pub enum RepositoryError {
    /// Nothing of this name.
    #[error("{0} is not in the repository")]
    NotFound(String),
    /// Somebody else wrote the document since it was read.
    #[error("{0} was changed by another writer")]
    Conflict(String),
    /// A blob or a document is damaged.
    #[error("{what}: {message}")]
    Corrupt {
        /// Which.
        what: String,
        /// What does not fit.
        message: String,
    },
    /// Written by a newer version.
    #[error("{what} has format {found}; this version knows {known}")]
    Format {
        /// Which.
        what: String,
        /// Its format.
        found: u32,
        /// The newest that is known.
        known: u32,
    },
    /// The configuration is wrong.
    #[error("{0}")]
    Config(String),
    /// The store did not do it.
    #[error("{context}: {message}")]
    Store {
        /// What was being done.
        context: String,
        /// What the store said.
        message: String,
    },
}

/// A document with the version that a conditional write needs.
#[derive(Clone, Debug)]
pub struct Versioned<T> {
    /// The document.
    pub value: T,
    /// Its version in the store.
    pub version: object_store::UpdateVersion,
}

/// The committed repository. Cheap to clone.
#[derive(Clone)]
pub struct Repository {
    backend: Opened,
    /// Set once the format is known to be this version's.
    checked: Arc<OnceCell<()>>,
    home: Home,
    layers: Layers,
    /// Of local layers that were hashed: they never change, and each checkpoint of a sandbox names those of the one before.
    known: Arc<Mutex<HashMap<LayerName, Digest>>>,
    traces: Option<Traces>,
}

/// How the layers of a checkpoint come to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Whole, before a launch.
    Whole,
    /// By ranges, when a guest reads them: a fetch only notes where they are.
    OnDemand,
}

/// What the format marker holds.
#[derive(Serialize, Deserialize)]
struct Marker {
    format: u32,
}

/// What a commit under way relies on.
#[derive(Serialize, Deserialize)]
pub(crate) struct Intent {
    pub format: u32,
    pub created_at: DateTime<Utc>,
    pub checkpoint: CheckpointId,
    pub blobs: Vec<Digest>,
}

/// What a fetch did for one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brought {
    /// The node had it, or has it whole now.
    Known,
    /// It is elsewhere, and the node knows that now.
    Noted,
}

/// A blob of a checkpoint, as it is found on the node.
struct Part {
    name: LayerName,
    size: u64,
    digest: Digest,
    bytes: Bytes,
}

/// Where the bytes of a part are.
enum Bytes {
    /// In a file of this node.
    Here(PathBuf),
    /// In a registry, where they stay.
    Elsewhere(Location),
}

/// Reads the format marker, or makes it.
async fn check_format(backend: &Opened) -> Result<(), RepositoryError> {
    let path = layout::marker();
    let bytes = match documents::read(backend, &path).await? {
        Some((bytes, _)) => bytes,
        None => {
            let fresh = documents::encode("format.json", &Marker { format: layout::FORMAT })?;
            match documents::write(backend, &path, fresh.clone(), PutMode::Create).await {
                Ok(_) => fresh,
                // Another node was faster.
                Err(RepositoryError::Conflict(_)) => {
                    let found = documents::read(backend, &path).await?;
                    found.ok_or_else(|| RepositoryError::NotFound("format.json".to_owned()))?.0
                }
                Err(error) => return Err(error),
            }
        }
    };
    documents::parse::<Marker>("the repository", &bytes, layout::FORMAT).map(drop)
}

impl Repository {
    /// Opens (and, if empty, marks with a format version) a repository. One that is away is looked at when it is first needed: what runs
    /// on a node, and what is paused there, does not depend on it.
    pub async fn open(backend: Backend, home: Home) -> Result<Self, RepositoryError> {
        let opened = blobs::blocking(move || backend::open(&backend));
        let opened = tokio::time::timeout(OPENED_WITHIN, opened).await;
        let opened =
            opened.map_err(|_| store_error("opening the repository")("its folder does not answer"))??;
        Self::over(opened, home).await
    }

    /// The same in a store that is open already, such as one in memory. It needs conditional puts.
    pub async fn open_store(store: Arc<dyn ObjectStore>, home: Home) -> Result<Self, RepositoryError> {
        Self::over(Opened { store, folder: None }, home).await
    }

    async fn over(backend: Opened, home: Home) -> Result<Self, RepositoryError> {
        let repository = Self {
            backend,
            checked: Arc::default(),
            home,
            layers: Layers::Whole,
            known: Arc::default(),
            traces: None,
        };
        match tokio::time::timeout(OPENED_WITHIN, repository.opened()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error @ RepositoryError::Store { .. })) => {
                tracing::error!(%error, "the repository cannot be reached; it is tried again when it is needed");
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                tracing::error!("the repository does not answer; it is tried again when it is needed");
            }
        }
        Ok(repository)
    }

    /// The backend, which holds a repository of this version's format.
    pub(crate) async fn opened(&self) -> Result<&Opened, RepositoryError> {
        self.checked.get_or_try_init(|| check_format(&self.backend)).await?;
        Ok(&self.backend)
    }

    /// Fails when the format marker, which every repository has, is not there now.
    pub(crate) async fn still_there(&self) -> Result<(), RepositoryError> {
        match documents::read(self.opened().await?, &layout::marker()).await? {
            Some(_) => Ok(()),
            None => Err(store_error("looking at the repository")("its format marker is not there")),
        }
    }

    /// The same repository, whose fetches bring layers in this way.
    pub fn with_layers(self, layers: Layers) -> Self {
        Self { layers, ..self }
    }

    /// The same repository, through which nodes share the boot traces that blockd keeps in `folder`.
    pub fn with_traces(self, folder: PathBuf) -> Self {
        Self { traces: Some(Traces::new(folder)), ..self }
    }

    /// Uploads the blobs that are missing, then the manifest. Returns the checkpoint as committed: every layer and the
    /// vm state by digest. Blobs come from `<home>/layers`; afterwards they are there under their digest names too (hard links).
    ///
    /// Committing the same checkpoint again is no error and changes nothing.
    pub async fn commit(&self, checkpoint: &Checkpoint) -> Result<Checkpoint, RepositoryError> {
        let parts = self.parts(checkpoint).await?;
        let committed = renamed(checkpoint, &parts);
        let intent = self.announce(&committed.id, &parts).await?;
        let stored = self.store(&committed, &parts).await;
        // An intent that stays is only a reason for the collection to keep blobs a while longer.
        if let Err(error) = documents::remove(self.opened().await?, &intent).await {
            tracing::warn!(%error, "the intent of a commit stays until a garbage collection finds it old");
        }
        stored.map(|()| committed)
    }

    async fn store(&self, committed: &Checkpoint, parts: &[Part]) -> Result<(), RepositoryError> {
        let uploads = parts.iter().map(|part| async move {
            let file = match &part.bytes {
                Bytes::Here(file) => file,
                Bytes::Elsewhere(location) => {
                    return elsewhere::keep(self.opened().await?, &part.digest, location).await;
                }
            };
            if !blobs::present(self.opened().await?, &part.digest, part.size).await? {
                if elsewhere::known(self.opened().await?, &part.digest).await? {
                    return Ok(());
                }
                let hashed = matches!(part.name, LayerName::Local(_)) && *file == self.home.layer(&part.name);
                blobs::upload(self.opened().await?, part.digest, part.size, file.clone(), hashed).await?;
            }
            if *file != self.home.layer(&part.name) {
                return Ok(());
            }
            blobs::link_locally(&self.home, part.name, part.digest).await
        });
        // All of them are waited for, even after an error: nothing goes on when this returns.
        let uploads = stream::iter(uploads.collect::<Vec<_>>()).buffer_unordered(BLOBS_AT_ONCE);
        uploads.collect::<Vec<_>>().await.into_iter().collect::<Result<(), _>>()?;
        let path = layout::checkpoint(&committed.id);
        let bytes = documents::encode("a checkpoint", committed)?;
        match documents::write(self.opened().await?, &path, bytes, PutMode::Create).await {
            Err(RepositoryError::Conflict(_)) if self.checkpoint(&committed.id).await? == *committed => {
                Ok(())
            }
            written => written.map(drop),
        }
    }

    /// Writes the intent and waits until no collection deletes. Returns where the intent is.
    async fn announce(
        &self,
        id: &CheckpointId,
        parts: &[Part],
    ) -> Result<object_store::path::Path, RepositoryError> {
        let path = layout::commit(Uuid::new_v4());
        let blobs = parts.iter().map(|part| part.digest).collect();
        let intent = Intent { format: layout::FORMAT, created_at: Utc::now(), checkpoint: id.clone(), blobs };
        let bytes = documents::encode("an intent", &intent)?;
        documents::write(self.opened().await?, &path, bytes, PutMode::Create).await?;
        let deadline = Instant::now() + COLLECTION_LIMIT;
        while collect::deleting(self.opened().await?).await? {
            if Instant::now() > deadline {
                let message =
                    "a garbage collection has been deleting for too long; see collections/ in the repository"
                        .to_owned();
                return Err(RepositoryError::Store { context: format!("committing {id}"), message });
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(path)
    }

    /// The checkpoint's distinct blobs, with digests computed where the node has none yet.
    async fn parts(&self, checkpoint: &Checkpoint) -> Result<Vec<Part>, RepositoryError> {
        let mut named: HashMap<LayerName, u64> =
            checkpoint.layers().map(|layer| (layer.name, layer.size)).collect();
        named.extend(checkpoint.vm_state.map(|state| (state.name, state.size)));
        let hashed = named.into_iter().map(|(name, size)| async move {
            let here = Bytes::Here(self.home.layer(&name));
            let digest = match name {
                LayerName::Digest(digest) => digest,
                LayerName::Local(_) => self.digest(name, size).await?,
            };
            let (digest, bytes) = match elsewhere::noted(&self.home, &name).await? {
                Some(location @ Location { place: Place::Registry { .. }, .. }) => {
                    (digest, Bytes::Elsewhere(location))
                }
                // A file of this machine is of no use to others: it becomes a blob like any other.
                Some(Location { place: Place::File { path }, digest, .. }) => {
                    let found = digest.parse().map_err(store_error(format!("the note of layer {name}")))?;
                    (found, Bytes::Here(path))
                }
                Some(Location { place: Place::Repository { .. }, .. }) | None => (digest, here),
            };
            Ok(Part { name, size, digest, bytes })
        });
        stream::iter(hashed.collect::<Vec<_>>()).buffer_unordered(BLOBS_AT_ONCE).try_collect().await
    }

    /// The digest of a local layer, computed once.
    async fn digest(&self, name: LayerName, size: u64) -> Result<Digest, RepositoryError> {
        if let Some(digest) = self.known.lock().get(&name) {
            return Ok(*digest);
        }
        let (digest, found) = blobs::hash(self.home.layer(&name)).await?;
        if found != size {
            let message = format!("the file has {found} bytes, the checkpoint says {size}");
            return Err(RepositoryError::Corrupt { what: format!("layer {name}"), message });
        }
        let mut known = self.known.lock();
        if known.len() >= KNOWN_DIGESTS {
            known.clear();
        }
        known.insert(name, digest);
        Ok(digest)
    }

    /// Reads a manifest.
    pub async fn checkpoint(&self, id: &CheckpointId) -> Result<Checkpoint, RepositoryError> {
        let what = format!("checkpoint {id}");
        let found = documents::read(self.opened().await?, &layout::checkpoint(id)).await?;
        let (bytes, _) = found.ok_or_else(|| RepositoryError::NotFound(what.clone()))?;
        let checkpoint: Checkpoint = documents::parse(&what, &bytes, CHECKPOINT_FORMAT)?;
        if checkpoint.id != *id {
            return Err(RepositoryError::Corrupt {
                what,
                message: format!("it is the manifest of {}", checkpoint.id),
            });
        }
        Ok(checkpoint)
    }

    /// Makes sure that every blob of a committed checkpoint is in `<home>/layers`, verified by digest. With [`Layers::OnDemand`]
    /// that is so for the vm state only; of layers that are not there a note is made that says where they are.
    pub async fn fetch(&self, checkpoint: &Checkpoint) -> Result<(), RepositoryError> {
        let blobs = digests(checkpoint)?;
        let state = checkpoint.vm_state.map(|state| state.name);
        let downloads = blobs.into_iter().map(|(digest, size)| async move {
            let whole = self.layers == Layers::Whole || state == Some(LayerName::Digest(digest));
            self.bring(digest, size, if whole { Layers::Whole } else { Layers::OnDemand }).await
        });
        // As in a commit, nothing goes on when this returns.
        let downloads = stream::iter(downloads.collect::<Vec<_>>()).buffer_unordered(BLOBS_AT_ONCE);
        let brought: Vec<Brought> =
            downloads.collect::<Vec<_>>().await.into_iter().collect::<Result<_, _>>()?;
        if let Some(traces) = &self.traces {
            if brought.contains(&Brought::Noted) {
                traces.take(self.opened().await?, &self.home, checkpoint).await;
            } else {
                traces.give(self.opened().await?, &self.home, checkpoint);
            }
        }
        Ok(())
    }

    /// One layer of a fetch.
    async fn bring(&self, digest: Digest, size: u64, how: Layers) -> Result<Brought, RepositoryError> {
        if !blobs::here(&self.home, &digest, size) {
            let noted = elsewhere::noted(&self.home, &LayerName::Digest(digest)).await?;
            match noted.map(|location| location.place) {
                Some(Place::Registry { .. }) => return Ok(Brought::Known),
                Some(_) if how == Layers::OnDemand => return Ok(Brought::Known),
                _ => {}
            }
            if !blobs::present(self.opened().await?, &digest, size).await? {
                let known = elsewhere::refer(self.opened().await?, &self.home, &digest).await?;
                return if known { Ok(Brought::Noted) } else { Err(blobs::missing(&digest)) };
            }
        }
        match how {
            Layers::OnDemand if blobs::here(&self.home, &digest, size) => Ok(Brought::Known),
            Layers::OnDemand => blobs::refer(&self.home, digest, size).await.map(|()| Brought::Noted),
            Layers::Whole => {
                blobs::download(self.opened().await?, &self.home, digest, size).await.map(|()| Brought::Known)
            }
        }
    }

    /// Whether the repository has a layer's bytes, or knows where they are.
    pub async fn knows(&self, layer: &Digest) -> Result<bool, RepositoryError> {
        let opened = self.opened().await?;
        Ok(elsewhere::known(opened, layer).await? || blobs::exists(opened, layer).await?)
    }

    /// Removes a manifest. Its blobs go with the next garbage collection.
    pub async fn remove(&self, id: &CheckpointId) -> Result<(), RepositoryError> {
        let path = layout::checkpoint(id);
        match self.opened().await?.store.head(&path).await {
            Ok(_) => {
                documents::remove(self.opened().await?, &path).await?;
                traces::remove(self.opened().await?, id).await
            }
            Err(object_store::Error::NotFound { .. }) => {
                Err(RepositoryError::NotFound(format!("checkpoint {id}")))
            }
            Err(error) => Err(store_error(format!("looking for checkpoint {id}"))(error)),
        }
    }

    /// Ids of all committed checkpoints.
    pub async fn checkpoints(&self) -> Result<Vec<CheckpointId>, RepositoryError> {
        let mut ids = Vec::new();
        let mut found = self.opened().await?.store.list(Some(&layout::checkpoints()));
        while let Some(meta) = found.try_next().await.map_err(store_error("listing checkpoints"))? {
            let name = meta.location.filename().and_then(|name| name.strip_suffix(".json"));
            ids.extend(name.and_then(|name| name.parse::<CheckpointId>().ok()));
        }
        Ok(ids)
    }

    /// When a manifest was committed; `None` when it is not there.
    pub async fn committed_at(&self, id: &CheckpointId) -> Result<Option<DateTime<Utc>>, RepositoryError> {
        match self.opened().await?.store.head(&layout::checkpoint(id)).await {
            Ok(meta) => Ok(Some(meta.last_modified)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(store_error(format!("looking for checkpoint {id}"))(error)),
        }
    }

    /// Teams that have documents, sorted.
    pub async fn teams(&self) -> Result<Vec<TeamId>, RepositoryError> {
        let found = self.opened().await?.store.list_with_delimiter(Some(&layout::teams())).await;
        let folders = found.map_err(store_error("listing teams"))?.common_prefixes;
        let mut teams: Vec<TeamId> =
            folders.iter().filter_map(|folder| folder.filename()?.parse().ok()).collect();
        teams.sort();
        Ok(teams)
    }

    /// Reads a document of a team, such as `templates/<id>` or `names/<name>`.
    pub async fn get<T: DeserializeOwned>(
        &self,
        team: &TeamId,
        key: &str,
    ) -> Result<Versioned<T>, RepositoryError> {
        documents::get(self.opened().await?, team, key).await
    }

    /// Writes a document: `expected: None` only if there is none, else only if its version is still this one.
    pub async fn put<T: Serialize + Sync>(
        &self,
        team: &TeamId,
        key: &str,
        value: &T,
        expected: Option<&object_store::UpdateVersion>,
    ) -> Result<object_store::UpdateVersion, RepositoryError> {
        documents::put(self.opened().await?, team, key, value, expected).await
    }

    /// Removes a document.
    pub async fn delete(&self, team: &TeamId, key: &str) -> Result<(), RepositoryError> {
        documents::delete(self.opened().await?, team, key).await
    }

    /// Keys of a team's documents below a prefix, sorted.
    pub async fn list(&self, team: &TeamId, prefix: &str) -> Result<Vec<String>, RepositoryError> {
        let mut keys = Vec::new();
        let folder = layout::team(team);
        let mut found = self.opened().await?.store.list(Some(&folder));
        while let Some(meta) = found.try_next().await.map_err(store_error(format!("listing {folder}")))? {
            keys.extend(layout::key_of(team, &meta.location).filter(|key| key.starts_with(prefix)));
        }
        keys.sort();
        Ok(keys)
    }
}

/// The distinct blobs of a committed checkpoint, with their sizes.
pub(crate) fn digests(checkpoint: &Checkpoint) -> Result<HashMap<Digest, u64>, RepositoryError> {
    let layers = checkpoint.layers().map(|layer| (layer.name, layer.size));
    let state = checkpoint.vm_state.map(|state| (state.name, state.size));
    let named = layers.chain(state).map(|(name, size)| match name {
        LayerName::Digest(digest) => Ok((digest, size)),
        LayerName::Local(_) => Err(RepositoryError::Corrupt {
            what: format!("checkpoint {}", checkpoint.id),
            message: format!("it names {name}, which only one node has"),
        }),
    });
    named.collect()
}

/// The checkpoint with every blob by digest.
fn renamed(checkpoint: &Checkpoint, parts: &[Part]) -> Checkpoint {
    let names: HashMap<LayerName, LayerName> =
        parts.iter().map(|part| (part.name, LayerName::Digest(part.digest))).collect();
    let mut committed = checkpoint.clone();
    let memory = committed.memory.iter_mut().flat_map(|image| &mut image.layers);
    let disks = committed.disks.iter_mut().flat_map(|disk| &mut disk.layers);
    for layer in memory.chain(disks) {
        layer.name = names[&layer.name];
    }
    if let Some(state) = &mut committed.vm_state {
        state.name = names[&state.name];
    }
    committed
}
