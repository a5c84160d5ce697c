//! The journal's tables and their versions.

use rusqlite::Connection;

use super::JournalError;

/// Each entry brings the schema from its index to the next version (`PRAGMA user_version`).
const MIGRATIONS: [&str; 1] = ["
    CREATE TABLE sandbox (
        id         TEXT PRIMARY KEY,
        phase      TEXT NOT NULL,
        generation INTEGER NOT NULL,
        record     TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE note (
        sandbox    TEXT NOT NULL,
        key        TEXT NOT NULL,
        generation INTEGER NOT NULL,
        value      TEXT NOT NULL,
        PRIMARY KEY (sandbox, key)
    ) STRICT, WITHOUT ROWID;
"];

/// Opens settings and brings the schema up to date. A journal of a newer version is refused.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), JournalError> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    let version: u32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let version = version as usize;
    if version > MIGRATIONS.len() {
        return Err(JournalError::Newer { found: version, known: MIGRATIONS.len() });
    }
    for (index, statements) in MIGRATIONS.iter().enumerate().skip(version) {
        let transaction = connection.transaction()?;
        transaction.execute_batch(statements)?;
        transaction.pragma_update(None, "user_version", index as u32 + 1)?;
        transaction.commit()?;
    }
    Ok(())
}
