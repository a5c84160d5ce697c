//! The node's journal: every state that was acknowledged, and notes of what is being made.
//!
//! SQLite in WAL mode, written by one thread of its own. What must survive a power failure is committed with
//! `synchronous=FULL` before the caller goes on; notes of things that a power failure takes anyway (processes, namespaces,
//! exports) only need to survive the death of the server and are committed without a sync. Jobs that wait together are
//! committed together.

mod schema;
mod writer;

use std::path::{Path, PathBuf};

use aenv_types::SandboxId;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

use crate::sandbox::Record;

/// Jobs that may wait for the writer.
const QUEUE: usize = 1024;

/// Why the journal cannot be used.
#[derive(Debug, Error)]
pub(crate) enum JournalError {
    /// SQLite refused.
    #[error("{0}")]
    Sqlite(#[from] rusqlite::Error),
    /// Written by a newer version of this program.
    #[error("it has schema version {found}; this version of aenv-server knows {known}: upgrade aenv-server")]
    Newer {
        /// Its version.
        found: usize,
        /// The newest that is known.
        known: usize,
    },
    /// A row cannot be read.
    #[error("the row of sandbox {sandbox} is damaged: {message}")]
    Damaged {
        /// Which.
        sandbox: String,
        /// What does not fit.
        message: String,
    },
    /// The writer's thread could not be started, or has ended.
    #[error("the journal's writer does not run: {0}")]
    Writer(String),
    /// A commit failed.
    #[error("a commit failed: {0}")]
    Commit(String),
}

/// One change. The changes of one call are committed together.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Writes a sandbox's row.
    Put(Box<Record>),
    /// Removes a sandbox's row and its notes.
    Remove(SandboxId),
    /// Notes something that is being made.
    Note(Note),
    /// Forgets a note.
    Forget {
        /// Whose.
        sandbox: SandboxId,
        /// Which.
        key: String,
    },
}

/// Something that is made for a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub sandbox: SandboxId,
    /// `slot`, `vm`, or `seal-<drive>`.
    pub key: String,
    pub generation: u64,
    /// JSON.
    pub value: String,
}

/// What a commit has to survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survives {
    /// The death of this process.
    Crash,
    /// A power failure as well.
    PowerLoss,
}

/// What the journal holds.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub records: Vec<Record>,
    pub notes: Vec<Note>,
}

struct Job {
    changes: Vec<Change>,
    survives: Survives,
    done: oneshot::Sender<Result<(), String>>,
}

/// The handle. Cheap to clone; the writer ends when the last one is dropped.
#[derive(Clone)]
pub(crate) struct Journal {
    path: PathBuf,
    jobs: mpsc::Sender<Job>,
}

impl Journal {
    /// Opens (and, if need be, makes or migrates) the journal and reads it.
    pub(crate) fn open(path: &Path) -> Result<(Self, Contents), JournalError> {
        let mut connection = rusqlite::Connection::open(path)?;
        schema::prepare(&mut connection)?;
        let contents = writer::read(&connection)?;
        let (jobs, inbox) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("aenv-journal".into())
            .spawn(move || writer::run(connection, inbox))
            .map_err(|error| JournalError::Writer(error.to_string()))?;
        Ok((Self { path: path.to_owned(), jobs }, contents))
    }

    /// Commits all changes or none.
    pub(crate) async fn commit(&self, changes: Vec<Change>, survives: Survives) -> Result<(), JournalError> {
        let gone = || JournalError::Writer(format!("its thread for {} has ended", self.path.display()));
        let (done, outcome) = oneshot::channel();
        self.jobs.send(Job { changes, survives, done }).await.map_err(|_| gone())?;
        outcome.await.map_err(|_| gone())?.map_err(JournalError::Commit)
    }

    /// Writes one row.
    pub(crate) async fn put(&self, record: &Record, survives: Survives) -> Result<(), JournalError> {
        self.commit(vec![Change::Put(Box::new(record.clone()))], survives).await
    }
}

#[cfg(test)]
mod tests;
