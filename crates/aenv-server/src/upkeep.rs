//! Upkeep of the repository: one garbage collection or check at a time on this node, asked for or by the clock.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_api::ApiError;
use aenv_orchestrator::Orchestrator;
use aenv_repository::{Collection, Depth, DryRun, Progress};
use aenv_template::{Catalog, Collected, Finding};
use parking_lot::Mutex;
use rand::Rng;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, mpsc};

use crate::failure::template_error;

/// Progress is told so often at most.
const TELL_EVERY: Duration = Duration::from_millis(500);
/// Progress that nobody has read yet.
const UNREAD: usize = 16;
/// The first collection by the clock is not before this, so that a server that starts has its start to itself.
const SETTLE: Duration = Duration::from_secs(60);

/// What a long operation says: how far it is, and at the end what came of it.
#[derive(Debug)]
pub enum Said<T> {
    /// So far.
    Progress(Progress),
    /// The end.
    Done(Result<T, ApiError>),
}

/// The upkeep of a node's repository. Cheap to clone.
#[derive(Clone)]
pub struct Upkeep {
    catalog: Catalog,
    orchestrator: Orchestrator,
    turn: Arc<AsyncMutex<()>>,
}

impl Upkeep {
    /// Over these rooms.
    pub fn new(catalog: Catalog, orchestrator: Orchestrator) -> Self {
        Self { catalog, orchestrator, turn: Arc::default() }
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
    pub fn collect(&self, collection: Collection) -> Result<mpsc::Receiver<Said<Collected>>, ApiError> {
        let turn = self.turn()?;
        let (sender, receiver) = mpsc::channel(UNREAD);
        let upkeep = self.clone();
        tokio::spawn(async move {
            let outcome = upkeep.collect_now(collection, &teller(&sender)).await;
            drop(turn);
            // Nobody listens any more; the log has it.
            sender.send(Said::Done(outcome)).await.ok();
        });
        Ok(receiver)
    }

    /// Starts a check. It ends when nobody listens any more.
    pub fn check(&self, depth: Depth) -> Result<mpsc::Receiver<Said<Vec<Finding>>>, ApiError> {
        let turn = self.turn()?;
        let (sender, receiver) = mpsc::channel(UNREAD);
        let catalog = self.catalog.clone();
        tokio::spawn(async move {
            let tell = teller(&sender);
            let checked = tokio::select! {
                checked = catalog.check(depth, &tell) => checked,
                () = sender.closed() => return,
            };
            drop(turn);
            sender.send(Said::Done(checked.map_err(template_error))).await.ok();
        });
        Ok(receiver)
    }

    async fn collect_now(
        &self,
        collection: Collection,
        watcher: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<Collected, ApiError> {
        let began = Instant::now();
        let outcome = self.catalog.collect(collection, watcher).await;
        let seconds = began.elapsed().as_secs_f64();
        let result = if outcome.is_ok() { "done" } else { "failed" };
        if collection.dry_run == DryRun::No {
            metrics::counter!("aenv_repository_gc_runs_total", "result" => result).increment(1);
            metrics::histogram!("aenv_repository_gc_seconds").record(seconds);
        }
        match &outcome {
            Ok(collected) => {
                let (blobs, bytes) = (collected.blobs.removed.len() as u64, collected.blobs.removed_bytes);
                let manifests = collected.manifests.len();
                let dry_run = collection.dry_run == DryRun::Yes;
                tracing::info!(
                    dry_run,
                    blobs,
                    bytes,
                    manifests,
                    kept = collected.blobs.kept,
                    young = collected.blobs.young,
                    seconds,
                    "the repository was collected"
                );
                if !dry_run {
                    metrics::counter!("aenv_repository_gc_removed_blobs_total").increment(blobs);
                    metrics::counter!("aenv_repository_gc_removed_bytes_total").increment(bytes);
                    // Copies of what is gone are of no use any more.
                    self.orchestrator.collect_soon();
                }
            }
            Err(error) => tracing::error!(detail = %error, seconds, "the repository could not be collected"),
        }
        outcome.map_err(template_error)
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

/// Tells a listener, now and then, how far something is. What a slow listener has not read is left out.
fn teller<T: Send>(sender: &mpsc::Sender<Said<T>>) -> impl Fn(Progress) + Send + Sync + use<T> {
    let sender = sender.downgrade();
    let last = Mutex::new(None::<Instant>);
    move |progress| {
        let mut last = last.lock();
        if last.is_some_and(|last| last.elapsed() < TELL_EVERY) {
            return;
        }
        *last = Some(Instant::now());
        if let Some(sender) = sender.upgrade() {
            sender.try_send(Said::Progress(progress)).ok();
        }
    }
}
