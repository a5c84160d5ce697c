//! The server's own database, `<home>/server.db`: API keys, what sandboxes did, idempotency keys.
//!
//! The life of sandboxes is not in here: that is the orchestrator's journal.

use std::{path::Path, sync::Arc};

use parking_lot::Mutex;
use rusqlite::Connection;
use thiserror::Error;

/// Why the database cannot be used.
#[derive(Debug, Error)]
pub enum DbError {
    /// SQLite refused.
    #[error("the database {path} cannot be used: {source}")]
    Sqlite {
        /// The file.
        path: String,
        /// The refusal.
        source: rusqlite::Error,
    },
    /// Written by a newer version.
    #[error(
        "the database {path} was written by a newer version (its form is {found}, this version knows {known}); start that version again, or move the file away"
    )]
    Newer {
        /// The file.
        path: String,
        /// Its form.
        found: i64,
        /// The newest that is known.
        known: i64,
    },
}

const VERSION: i64 = 1;

const SCHEMA: &str = "
CREATE TABLE api_keys (
    id TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, name TEXT NOT NULL, team TEXT NOT NULL,
    mask TEXT NOT NULL, limits TEXT NOT NULL, created_at INTEGER NOT NULL, last_used INTEGER
) STRICT;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, sandbox TEXT NOT NULL, team TEXT NOT NULL, at_ms INTEGER NOT NULL,
    level INTEGER NOT NULL, message TEXT NOT NULL, fields TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox, id);
CREATE TABLE idempotency (
    team TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL, answer TEXT, created_at INTEGER NOT NULL,
    PRIMARY KEY (team, key)
) STRICT;
CREATE TABLE spawns (template TEXT PRIMARY KEY, count INTEGER NOT NULL, last_ms INTEGER NOT NULL) STRICT;
";

/// The database. Cheap to clone. Calls block: async callers go through [`Db::run`].
#[derive(Clone)]
pub struct Db {
    connection: Arc<Mutex<Connection>>,
}

impl Db {
    /// Opens or makes the server's own file.
    pub fn open(path: &Path) -> Result<Self, DbError> {
        Self::open_with(path, SCHEMA, VERSION)
    }

    /// Opens or makes a file of this form.
    pub fn open_with(path: &Path, schema: &str, version: i64) -> Result<Self, DbError> {
        let sqlite = |source| DbError::Sqlite { path: path.display().to_string(), source };
        let connection = Connection::open(path).map_err(sqlite)?;
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA busy_timeout = 5000;",
            )
            .map_err(sqlite)?;
        let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(sqlite)?;
        if found > version {
            return Err(DbError::Newer { path: path.display().to_string(), found, known: version });
        }
        if found == 0 {
            let all = format!("BEGIN; {schema} PRAGMA user_version = {version}; COMMIT;");
            connection.execute_batch(&all).map_err(sqlite)?;
        }
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }

    /// Runs `work` with the connection, on this thread.
    pub fn with<T>(&self, work: impl FnOnce(&mut Connection) -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        work(&mut self.connection.lock())
    }

    /// Runs `work` with the connection, on a thread that may block.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, aenv_api::ApiError> {
        let db = self.clone();
        let outcome = tokio::task::spawn_blocking(move || db.with(work)).await;
        let detail = match outcome {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::error!(%detail, "the server's database failed");
        Err(aenv_api::ApiError::internal("the server's database failed; the server's log says why"))
    }
}

#[cfg(test)]
pub(crate) fn temporary() -> (tempfile::TempDir, Db) {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open(&dir.path().join("server.db")).unwrap();
    (dir, db)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_again_and_refuses_a_newer_one() {
        let (dir, db) = temporary();
        let path = dir.path().join("server.db");
        drop(db);
        let db = Db::open(&path).unwrap();
        db.with(|c| c.execute_batch("PRAGMA user_version = 99")).unwrap();
        drop(db);
        assert!(matches!(Db::open(&path), Err(DbError::Newer { found: 99, .. })));
    }
}
