//! Upkeep of the repository: one garbage collection or check at a time on this node, asked for or by the clock.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_api::ApiError;
use aenv_orchestrator::Orchestrator;
use aenv_repository::{Collection, Depth, DryRun, Progress};
use aenv_template::{Catalog, Collected, Finding, MadeFrom, Retention, TemplateError};
use rand::Rng;
use serde_json::json;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::{
    failure::template_error,
    telling::{Said, Teller, telling},
};

/// The first collection by the clock is not before this, so that a server that starts has its start to itself.
const SETTLE: Duration = Duration::from_secs(60);
/// A note that was used so recently may be of a pull whose build goes on still.
const NOTES_UNUSED: Duration = Duration::from_secs(24 * 3600);

/// The upkeep of a node's repository. Cheap to clone.
#[derive(Clone)]
pub struct Upkeep {
    catalog: Catalog,
    orchestrator: Orchestrator,
    retention: Retention,
    turn: Arc<Mutex<()>>,
}

impl Upkeep {
    /// Over these rooms.
    pub fn new(catalog: Catalog, orchestrator: Orchestrator, retention: Retention) -> Self {
        Self { catalog, orchestrator, retention, turn: Arc::default() }
    }

    fn turn(&self) -> Result<OwnedMutexGuard<()>, ApiError> {
        Arc::clone(&self.turn).try_lock_owned().map_err(|_| {
            ApiError::conflict(
                "a garbage collection or check of the repository is under way on this node; wait for its end",
            )
            .with_code("repository_busy")
        })
    }

    /// Starts a garbage collection. It goes on to its end, whether or not anybody listens.
    pub fn collect(&self, collection: Collection) -> Result<Said, ApiError> {
        let turn = self.turn()?;
        let (telling, said) = telling();
        let upkeep = self.clone();
        tokio::spawn(async move {
            let outcome = upkeep.collect_now(collection, &watcher(telling.teller())).await;
            drop(turn);
            telling.end(outcome).await;
        });
        Ok(said)
    }

    /// Starts a check. It ends when nobody listens any more.
    pub fn check(&self, depth: Depth) -> Result<Said, ApiError> {
        let turn = self.turn()?;
        let (telling, said) = telling();
        let catalog = self.catalog.clone();
        tokio::spawn(async move {
            let watcher = watcher(telling.teller());
            let checked: Result<Vec<Finding>, _> = tokio::select! {
                checked = catalog.check(depth, &watcher) => checked,
                () = telling.closed() => return,
            };
            drop(turn);
            telling.end(checked.map_err(template_error)).await;
        });
        Ok(said)
    }

    async fn collect_now(
        &self,
        collection: Collection,
        watcher: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Collected, ApiError> {
        let began = Instant::now();
        let outcome = self.expire_and_collect(collection, watcher).await;
        let seconds = began.elapsed().as_secs_f64();
        let result = if outcome.is_ok() { "done" } else { "failed" };
        if collection.dry_run == DryRun::No {
            metrics::counter!("aenv_repository_gc_runs_total", "result" => result).increment(1);
            metrics::histogram!("aenv_repository_gc_seconds").record(seconds);
        }
        match &outcome {
            Ok(collected) => {
                let (blobs, bytes) = (collected.blobs.removed.len() as u64, collected.blobs.removed_bytes);
                let (expired, manifests) = (collected.expired.len(), collected.manifests.len());
                let dry_run = collection.dry_run == DryRun::Yes;
                tracing::info!(
                    dry_run,
                    blobs,
                    bytes,
                    manifests,
                    expired,
                    kept = collected.blobs.kept,
                    young = collected.blobs.young,
                    seconds,
                    "the repository was collected"
                );
                if !dry_run {
                    metrics::counter!("aenv_repository_gc_removed_blobs_total").increment(blobs);
                    metrics::counter!("aenv_repository_gc_removed_bytes_total").increment(bytes);
                    // Copies of what is gone are of no use any more, nor are notes.
                    self.orchestrator.collect_soon();
                    self.collect_notes().await;
                }
            }
            Err(error) => tracing::error!(detail = %error, seconds, "the repository could not be collected"),
        }
        outcome.map_err(template_error)
    }

    async fn expire_and_collect(
        &self,
        collection: Collection,
        watcher: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Collected, TemplateError> {
        let sandboxes = self.orchestrator.list(None).into_iter();
        let used: Vec<_> =
            sandboxes.map(|view| MadeFrom { template: view.template, at: view.started_at }).collect();
        let expired = self.catalog.expire(self.retention, &used, collection.dry_run).await?;
        let collected = self.catalog.collect(collection, watcher).await?;
        Ok(Collected { expired, ..collected })
    }

    /// Removes notes of layers that are elsewhere which neither this node nor the repository has any use for.
    async fn collect_notes(&self) {
        let collected = async {
            let mut unknown = Vec::new();
            for digest in self.orchestrator.unneeded_notes(NOTES_UNUSED).await? {
                let knows = self.catalog.repository().knows(&digest).await;
                if !knows.map_err(std::io::Error::other)? {
                    unknown.push(digest);
                }
            }
            self.orchestrator.remove_notes(unknown, NOTES_UNUSED).await
        };
        match collected.await {
            Ok(0) => {}
            Ok(notes) => tracing::info!(notes, "notes of layers that are elsewhere were removed"),
            Err(error) => tracing::warn!(%error, "notes of layers that are elsewhere are not collected"),
        }
    }

    /// Collects by the clock until the server ends. Times vary by a quarter, so that nodes on one repository do not meet.
    pub async fn run(self, interval: Duration, grace: Duration) {
        if interval.is_zero() {
            return;
        }
        let mut next = interval.mul_f64(rand::rng().random_range(0.1..1.0)).max(SETTLE.min(interval));
        loop {
            tokio::time::sleep(next).await;
            next = interval.mul_f64(rand::rng().random_range(0.75..1.25));
            // Somebody asked for one already.
            let Ok(_turn) = self.turn() else { continue };
            // Logged and counted where it happens.
            self.collect_now(Collection::new(grace, DryRun::No), &|_| ()).await.ok();
        }
    }
}

/// Tells what the repository says of its progress.
fn watcher(teller: Teller) -> impl Fn(Progress) + Send + Sync {
    move |progress| {
        teller.tell(|| json!({ "step": progress.step, "done": progress.done, "total": progress.total }));
    }
}
