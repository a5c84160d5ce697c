//! Watches of clients that poll instead of reading a stream.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use aenv_envd_api::proto::filesystem::FilesystemEvent;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::{
    FilesystemError,
    inotify::Watched,
    watch::{Entries, events},
};

/// Watchers at one time. Each holds one of the kernel's inotify instances, of which there are 128 by default.
const MAX_WATCHERS: usize = 100;
/// Events that a watcher keeps for a client that does not come; then the oldest go.
const MAX_EVENTS: usize = 16_384;

/// The watchers, by id.
#[derive(Default)]
pub struct Watchers(Mutex<HashMap<String, Watcher>>);

struct Watcher {
    events: Arc<Mutex<VecDeque<FilesystemEvent>>>,
    task: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    /// Starts collecting; returns the watcher's id.
    pub fn create(&self, watched: Watched, entries: Entries) -> Result<String, FilesystemError> {
        let mut watchers = self.0.lock();
        if watchers.len() >= MAX_WATCHERS {
            return Err(FilesystemError::TooManyWatchers(watchers.len()));
        }
        let collected = Arc::new(Mutex::new(VecDeque::new()));
        let task = tokio::spawn(collect(watched, entries, Arc::clone(&collected))).abort_handle();
        let id = format!("w{:016x}", rand::random::<u64>());
        watchers.insert(id.clone(), Watcher { events: collected, task });
        Ok(id)
    }

    /// Takes what a watcher has collected since the last time.
    pub fn take(&self, id: &str) -> Result<Vec<FilesystemEvent>, FilesystemError> {
        let watchers = self.0.lock();
        let watcher = watchers.get(id).ok_or_else(|| FilesystemError::NoWatcher(id.to_owned()))?;
        let taken = std::mem::take(&mut *watcher.events.lock());
        Ok(taken.into())
    }

    /// Ends a watcher.
    pub fn remove(&self, id: &str) -> Result<(), FilesystemError> {
        self.0.lock().remove(id).map(drop).ok_or_else(|| FilesystemError::NoWatcher(id.to_owned()))
    }
}

async fn collect(mut watched: Watched, entries: Entries, collected: Arc<Mutex<VecDeque<FilesystemEvent>>>) {
    loop {
        match watched.next().await {
            Ok(changes) => {
                let events = events(watched.root(), changes, entries);
                let mut collected = collected.lock();
                collected.extend(events);
                let surplus = collected.len().saturating_sub(MAX_EVENTS);
                if surplus > 0 {
                    tracing::warn!(surplus, "a watcher is not asked for its events: the oldest are dropped");
                    collected.drain(..surplus);
                }
            }
            Err(error) => {
                tracing::error!(%error, root = %watched.root().display(), "a watcher ended");
                return;
            }
        }
    }
}
