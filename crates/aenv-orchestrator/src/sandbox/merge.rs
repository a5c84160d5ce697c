//! Deep stacks of a running sandbox are merged while it runs.

use tokio::task::JoinHandle;

use super::actor::Actor;
use crate::{
    SandboxError,
    capture::compact::{self, Merged},
    journal::Survives,
};

/// A merge that goes on beside the actor; pending for ever when there is none.
#[derive(Default)]
pub(super) struct Merging(Option<JoinHandle<Result<Merged, SandboxError>>>);

impl Merging {
    /// Waits for its end. May be cancelled.
    pub(super) async fn done(&mut self) -> Result<Merged, SandboxError> {
        let Some(task) = &mut self.0 else { return std::future::pending().await };
        let outcome = task.await;
        self.0 = None;
        outcome.unwrap_or_else(|error| Err(SandboxError::internal("the merge broke off", error)))
    }
}

impl Actor {
    /// Begins a merge if a stack has become deep. One goes on at a time, of this sandbox and of the node: nobody waits for it.
    pub(super) fn merge_if_deep(&mut self) {
        if self.merging.0.is_some() {
            return;
        }
        let launched = self.record.launched.as_ref();
        let Some(upper) = launched.and_then(|launched| compact::due(&self.node, launched)) else { return };
        let node = std::sync::Arc::clone(&self.node);
        self.merging.0 = Some(self.node.tasks.spawn(async move {
            let merge = async {
                let _turn = node.merges.acquire().await;
                compact::merge(&node, upper).await
            };
            tokio::select! {
                merged = merge => merged,
                () = node.closing.cancelled() => Err(SandboxError::ShuttingDown),
            }
        }));
    }

    /// What was merged takes its place in the record. The running VM and blockd keep what they have open.
    pub(super) async fn merged(&mut self, outcome: Result<Merged, SandboxError>) {
        let merged = match outcome {
            Ok(merged) => merged,
            Err(error) => {
                tracing::warn!(sandbox = %self.record.id, ?error, "a deep stack could not be merged");
                return;
            }
        };
        self.node.crash.pass("merge.written").await;
        let mut record = self.record.clone();
        // Something else may run by now.
        if !record.launched.as_mut().is_some_and(|launched| launched.merge(&merged.upper, merged.layer)) {
            return;
        }
        if let Err(error) = self.node.journal.put(&record, Survives::Crash).await {
            tracing::warn!(sandbox = %self.record.id, %error, "a merged stack could not be journaled");
            return;
        }
        self.record = record;
        self.publish();
        drop(merged);
        self.node.garbage.notify_one();
        self.merge_if_deep();
    }
}
