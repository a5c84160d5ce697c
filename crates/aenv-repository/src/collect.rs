//! Garbage collection: mark and sweep, in short rounds. See the crate's documentation for why it is safe beside commits.
//!
//! ```text
//! list blobs, read manifests and intents            nobody waits; what is named here or young is no candidate
//! repeat while candidates are left
//!   mark                                            from here on commits wait
//!   read intents, and manifests that are new
//!   remove candidates that are still not named      at most `Pace::round`
//!   unmark                                          commits go on
//! ```

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use aenv_types::{CheckpointId, Digest};
use chrono::{DateTime, TimeDelta, Utc};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStore, PutMode, path::Path};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    Repository, RepositoryError,
    backend::{Folder, Opened},
    blobs::{blocking, store_error},
    documents, layout,
    repository::{Intent, digests},
};

/// Intents that are younger are always respected: no commit takes longer.
const LONGEST_COMMIT: Duration = Duration::from_secs(24 * 3600);
/// Manifests that are read, and blobs that are removed, at the same time.
const AT_ONCE: usize = 8;

#[derive(Serialize, Deserialize)]
struct Mark {
    format: u32,
    valid_until: DateTime<Utc>,
}

/// What a collection may do, and how fast.
#[derive(Clone, Copy, Debug)]
pub struct Collection {
    /// Blobs that are younger are kept.
    pub grace: Duration,
    /// Whether to report only.
    pub dry_run: DryRun,
    /// How long commits may be kept waiting.
    pub pace: Pace,
}

impl Collection {
    /// At the usual pace.
    pub fn new(grace: Duration, dry_run: DryRun) -> Self {
        Self { grace, dry_run, pace: Pace::default() }
    }
}

/// The times of a collection's rounds.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Commits wait at most this long for a round.
    pub round: Duration,
    /// Between two rounds, so that they come to their turn.
    pub pause: Duration,
    /// Longest that one removal may take.
    pub removal: Duration,
    /// A mark counts no more after this, even if its collection died and left it. More than `round` and `removal` together, by
    /// what clocks of nodes may differ.
    pub mark_valid: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            round: Duration::from_secs(10),
            pause: Duration::from_secs(2),
            removal: Duration::from_secs(20),
            mark_valid: Duration::from_secs(120),
        }
    }
}

/// Whether a collection only reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DryRun {
    /// Report what would be removed.
    Yes,
    /// Remove it.
    No,
}

/// How far a collection or a check is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done: `reading manifests`, `removing blobs`, `reading blobs`.
    pub step: &'static str,
    /// Done of it.
    pub done: u64,
    /// All of it.
    pub total: u64,
}

/// Told how far it is; must not block.
pub type Watcher<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// What a garbage collection found or did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcReport {
    /// Blobs that a manifest or a commit under way names.
    pub kept: u64,
    /// Blobs that nothing names, but that are younger than the grace period.
    pub young: u64,
    /// Blobs that nothing names and that were removed (or would be, in a dry run).
    pub removed: Vec<Digest>,
    /// Their bytes.
    pub removed_bytes: u64,
}

pub(crate) struct Stored {
    pub(crate) size: u64,
    pub(crate) modified: DateTime<Utc>,
    /// Where it is stored.
    pub(crate) path: Path,
}

impl Stored {
    /// Whether it only says where a layer is.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.path.prefix_matches(&layout::all_elsewhere())
    }
}

/// What the manifests and intents that were read so far name.
#[derive(Default)]
struct Named {
    manifests: HashSet<CheckpointId>,
    blobs: HashSet<Digest>,
}

impl Repository {
    /// Removes blobs that no manifest and no commit under way names and that are older than the grace period; or only reports them.
    ///
    /// Several may run at once. Fails, and removes nothing more, when a manifest cannot be read, because what it names is not known.
    pub async fn gc(
        &self,
        collection: Collection,
        watcher: Watcher<'_>,
    ) -> Result<GcReport, RepositoryError> {
        let stored = self.stored().await?;
        let mut named = Named::default();
        self.read_named(&mut named, collection.dry_run, watcher).await?;
        let grace = TimeDelta::from_std(collection.grace).ok();
        let youngest =
            grace.and_then(|grace| Utc::now().checked_sub_signed(grace)).unwrap_or(DateTime::<Utc>::MIN_UTC);
        let mut report = GcReport::default();
        let mut candidates = Vec::new();
        for (digest, blob) in stored {
            if named.blobs.contains(&digest) {
                report.kept += 1;
            } else if blob.modified > youngest {
                report.young += 1;
            } else {
                candidates.push((digest, blob));
            }
        }
        if collection.dry_run == DryRun::Yes {
            report.removed_bytes = candidates.iter().map(|(_, blob)| blob.size).sum();
            report.removed = candidates.into_iter().map(|(digest, _)| digest).collect();
            return Ok(report);
        }
        let total = candidates.len() as u64;
        while !candidates.is_empty() {
            self.round(collection.pace, &mut candidates, &mut named, &mut report).await?;
            watcher(Progress {
                step: "removing blobs",
                done: total.saturating_sub(candidates.len() as u64),
                total,
            });
            if !candidates.is_empty() {
                tokio::time::sleep(collection.pace.pause).await;
            }
        }
        self.clear_staging().await?;
        Ok(report)
    }

    /// One round of removals, while commits wait.
    async fn round(
        &self,
        pace: Pace,
        candidates: &mut Vec<(Digest, Stored)>,
        named: &mut Named,
        report: &mut GcReport,
    ) -> Result<(), RepositoryError> {
        let mark = self.mark(pace.mark_valid).await?;
        let began = Instant::now();
        // What was announced before the mark is seen here; whoever announces after it waits.
        let outcome = async {
            self.read_named(named, DryRun::No, &|_| ()).await?;
            loop {
                let batch = candidates.split_off(candidates.len().saturating_sub(AT_ONCE));
                let (kept, unnamed): (Vec<_>, Vec<_>) =
                    batch.into_iter().partition(|(digest, _)| named.blobs.contains(digest));
                report.kept += kept.len() as u64;
                let removals = unnamed.into_iter().map(|(digest, blob)| async move {
                    documents::remove(self.opened().await?, &blob.path).await.map(|()| (digest, blob.size))
                });
                let batch = futures::future::try_join_all(removals);
                let batch = tokio::time::timeout(pace.removal, batch).await;
                for (digest, size) in batch.map_err(|_| RoundError::TooSlow)?? {
                    report.removed_bytes += size;
                    report.removed.push(digest);
                }
                if candidates.is_empty() || began.elapsed() >= pace.round {
                    return Ok(());
                }
            }
        };
        match outcome.await {
            // It may still happen: the mark stays until it lapses, so that no commit relies on what goes away under it.
            Err(RoundError::TooSlow) => {
                Err(store_error("removing blobs")("the store did not answer in time"))
            }
            Err(RoundError::Repository(error)) => {
                documents::remove(self.opened().await?, &mark).await?;
                Err(error)
            }
            Ok(()) => documents::remove(self.opened().await?, &mark).await,
        }
    }

    /// Adds what intents and manifests name that were not read before.
    async fn read_named(
        &self,
        named: &mut Named,
        dry_run: DryRun,
        watcher: Watcher<'_>,
    ) -> Result<(), RepositoryError> {
        named.blobs.extend(self.intents(dry_run).await?);
        let mut ids = self.checkpoints().await?;
        ids.retain(|id| !named.manifests.contains(id));
        let total = ids.len() as u64;
        let reads = ids.into_iter().map(|id| async move {
            match self.checkpoint(&id).await {
                Ok(checkpoint) => Ok(Some((id, digests(&checkpoint)?))),
                // Removed since it was listed.
                Err(RepositoryError::NotFound(_)) => Ok(None),
                Err(error) => Err(error),
            }
        });
        let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffer_unordered(AT_ONCE);
        let mut done = 0;
        while let Some(read) = reads.try_next().await? {
            done += 1;
            watcher(Progress { step: "reading manifests", done, total });
            if let Some((id, blobs)) = read {
                named.manifests.insert(id);
                named.blobs.extend(blobs.into_keys());
            }
        }
        Ok(())
    }

    /// Every blob that is there, and every layer of which it is said where it is (of no size here).
    pub(crate) async fn stored(&self) -> Result<HashMap<Digest, Stored>, RepositoryError> {
        let mut blobs = HashMap::new();
        let opened = self.opened().await?;
        let folders =
            [layout::all_elsewhere(), layout::blobs()].map(|folder| opened.store.list(Some(&folder)));
        let mut found = stream::iter(folders).flatten();
        while let Some(meta) = found.try_next().await.map_err(store_error("listing blobs"))? {
            if let Some(digest) = layout::digest_of(&meta.location) {
                let mut blob = Stored { size: meta.size, modified: meta.last_modified, path: meta.location };
                if blob.is_elsewhere() {
                    blob.size = 0;
                }
                blobs.insert(digest, blob);
            }
        }
        Ok(blobs)
    }

    /// Blobs of commits under way. Removes intents that are too old to be one's, unless this is a dry run.
    pub(crate) async fn intents(&self, dry_run: DryRun) -> Result<HashSet<Digest>, RepositoryError> {
        let mut blobs = HashSet::new();
        let mut found = self.opened().await?.store.list(Some(&layout::commits()));
        let oldest = Utc::now() - LONGEST_COMMIT;
        while let Some(meta) = found.try_next().await.map_err(store_error("listing commits"))? {
            if meta.last_modified < oldest {
                if dry_run == DryRun::No {
                    documents::remove(self.opened().await?, &meta.location).await?;
                }
                continue;
            }
            // Gone meanwhile: its manifest is there, and is read after the intents.
            if let Some((bytes, _)) = documents::read(self.opened().await?, &meta.location).await? {
                let intent: Intent = documents::parse(meta.location.as_ref(), &bytes, layout::FORMAT)?;
                blobs.extend(intent.blobs);
            }
        }
        Ok(blobs)
    }

    /// Says that a collection removes, and where that is said.
    async fn mark(&self, valid: Duration) -> Result<Path, RepositoryError> {
        let path = layout::collection(Uuid::new_v4());
        let mark = Mark { format: layout::FORMAT, valid_until: Utc::now() + valid };
        let bytes = documents::encode("the mark of a collection", &mark)?;
        documents::write(self.opened().await?, &path, bytes, PutMode::Create).await?;
        Ok(path)
    }

    /// What uploads that died left in a shared folder's staging.
    async fn clear_staging(&self) -> Result<(), RepositoryError> {
        let Some(Folder { root, patience, .. }) = &self.opened().await?.folder else { return Ok(()) };
        let staging = root.join("staging");
        let cleared = blocking(move || {
            let Ok(entries) = std::fs::read_dir(&staging) else { return Ok(()) };
            for entry in entries.flatten() {
                // A staged hard link has the age of its layer, but its inode changed when it was linked.
                let age = entry.metadata().ok().map(|meta| std::os::unix::fs::MetadataExt::ctime(&meta));
                if age.is_some_and(|ctime| Utc::now().timestamp() - ctime > LONGEST_COMMIT.as_secs() as i64) {
                    std::fs::remove_file(entry.path()).map_err(store_error("clearing staging"))?;
                }
            }
            Ok(())
        });
        patience.wait(cleared).await.map_err(store_error("clearing staging"))?
    }
}

/// Why a round ended.
enum RoundError {
    /// A removal was sent, and it is not known whether it happens.
    TooSlow,
    Repository(RepositoryError),
}

impl From<RepositoryError> for RoundError {
    fn from(error: RepositoryError) -> Self {
        Self::Repository(error)
    }
}

/// Whether a garbage collection removes now. Removes marks that collections left when they died.
pub(crate) async fn deleting(opened: &Opened) -> Result<bool, RepositoryError> {
    let mut found = opened.store.list(Some(&layout::collections()));
    while let Some(meta) = found.try_next().await.map_err(store_error("listing collections"))? {
        // Gone meanwhile: it has ended.
        let Some((bytes, _)) = documents::read(opened, &meta.location).await? else { continue };
        let mark: Mark = documents::parse(meta.location.as_ref(), &bytes, layout::FORMAT)?;
        if mark.valid_until > Utc::now() {
            return Ok(true);
        }
        documents::remove(opened, &meta.location).await?;
    }
    Ok(false)
}
