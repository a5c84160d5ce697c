//! The journal's thread: takes what waits, commits it in one transaction, answers.

use aenv_types::SandboxId;
use rusqlite::{Connection, params};
use tokio::sync::mpsc;

use super::{Change, Contents, Job, JournalError, Note, Survives};
use crate::sandbox::Record;

/// Jobs that one transaction takes.
const GROUP: usize = 64;

/// Runs until every handle is gone.
pub(super) fn run(mut connection: Connection, mut inbox: mpsc::Receiver<Job>) {
    while let Some(first) = inbox.blocking_recv() {
        let mut group = vec![first];
        while group.len() < GROUP {
            let Ok(next) = inbox.try_recv() else { break };
            group.push(next);
        }
        let outcome = commit(&mut connection, &group).map_err(|error| error.to_string());
        for job in group {
            // The caller may be gone; the change is made all the same.
            let _ = job.done.send(outcome.clone());
        }
    }
    if let Err((_, error)) = connection.close() {
        tracing::warn!(%error, "the journal was not closed cleanly");
    }
}

fn commit(connection: &mut Connection, group: &[Job]) -> Result<(), rusqlite::Error> {
    let durable = group.iter().any(|job| job.survives == Survives::PowerLoss);
    connection.pragma_update(None, "synchronous", if durable { "FULL" } else { "NORMAL" })?;
    let transaction = connection.transaction()?;
    for change in group.iter().flat_map(|job| &job.changes) {
        apply(&transaction, change)?;
    }
    transaction.commit()
}

fn apply(connection: &Connection, change: &Change) -> Result<(), rusqlite::Error> {
    match change {
        Change::Put(record) => {
            let text = serde_json::to_string(record)
                .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
            connection
                .prepare_cached(
                    "INSERT INTO sandbox (id, phase, generation, record) VALUES (?1, ?2, ?3, ?4)
                     ON CONFLICT (id) DO UPDATE SET phase = ?2, generation = ?3, record = ?4",
                )?
                .execute(params![
                    record.id.as_str(),
                    record.phase.word(),
                    i64::try_from(record.generation).unwrap_or(i64::MAX),
                    text
                ])?;
        }
        Change::Remove(id) => {
            connection.prepare_cached("DELETE FROM sandbox WHERE id = ?1")?.execute([id.as_str()])?;
            connection.prepare_cached("DELETE FROM note WHERE sandbox = ?1")?.execute([id.as_str()])?;
        }
        Change::Note(note) => {
            connection
                .prepare_cached(
                    "INSERT OR REPLACE INTO note (sandbox, key, generation, value) VALUES (?, ?, ?, ?)",
                )?
                .execute(params![
                    note.sandbox.as_str(),
                    note.key,
                    i64::try_from(note.generation).unwrap_or(i64::MAX),
                    note.value
                ])?;
        }
        Change::Forget { sandbox, key } => {
            connection
                .prepare_cached("DELETE FROM note WHERE sandbox = ?1 AND key = ?2")?
                .execute([sandbox.as_str(), key.as_str()])?;
        }
    }
    Ok(())
}

/// Everything that is in it.
pub(super) fn read(connection: &Connection) -> Result<Contents, JournalError> {
    let mut contents = Contents::default();
    let mut rows = connection.prepare("SELECT id, record FROM sandbox ORDER BY id")?;
    for row in rows.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))? {
        let (sandbox, text) = row?;
        let record: Record = serde_json::from_str(&text)
            .map_err(|error| JournalError::Damaged { sandbox, message: error.to_string() })?;
        contents.records.push(record);
    }
    let mut rows =
        connection.prepare("SELECT sandbox, key, generation, value FROM note ORDER BY sandbox, key")?;
    let notes = rows.query_map([], |row| {
        Ok((row.get::<_, String>(0)?, row.get(1)?, row.get::<_, i64>(2)?, row.get(3)?))
    })?;
    for note in notes {
        let (sandbox, key, generation, value) = note?;
        let id: SandboxId = sandbox
            .parse()
            .map_err(|error| JournalError::Damaged { sandbox, message: format!("{error}") })?;
        contents.notes.push(Note { sandbox: id, key, generation: generation.max(0).cast_unsigned(), value });
    }
    Ok(contents)
}
