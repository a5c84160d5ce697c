//! What happened at deadlines. Nobody asked for it in a request, so nobody else could tell.

use aenv_types::{SandboxId, TeamId};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::OnTimeout;

/// Expiries that may wait to be read.
const QUEUE: usize = 4096;

/// A sandbox whose deadline has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// Which.
    pub sandbox: SandboxId,
    /// Whose.
    pub team: TeamId,
    /// What was done.
    pub done: OnTimeout,
}

/// Where actors report them. Those of a start are kept until somebody reads.
pub(crate) struct Expiries {
    reports: mpsc::Sender<Expiry>,
    unread: Mutex<Option<mpsc::Receiver<Expiry>>>,
}

impl Expiries {
    pub(crate) fn new() -> Self {
        let (reports, unread) = mpsc::channel(QUEUE);
        Self { reports, unread: Mutex::new(Some(unread)) }
    }

    /// Never waits; what nobody reads is dropped.
    pub(crate) fn report(&self, expiry: Expiry) {
        if let Err(mpsc::error::TrySendError::Full(expiry)) = self.reports.try_send(expiry) {
            tracing::warn!(?expiry, "an expiry goes unnoted: nobody reads them");
        }
    }

    /// The reader, once.
    pub(crate) fn take(&self) -> Option<mpsc::Receiver<Expiry>> {
        self.unread.lock().take()
    }
}
