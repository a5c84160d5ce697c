//! Secrets in the database. All of it blocks.

use std::collections::BTreeMap;

use aenv_api::Secret;
use aenv_types::TeamId;
use chrono::{DateTime, Utc};
use rand::Rng;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use super::{
    ID_PREFIX, MAX_SECRETS, SecretName, SecretRef,
    seal::{Key, Sealed},
};

/// Versions of one secret that are kept.
const KEPT_VERSIONS: u32 = 16;

pub(super) const VERSION: i64 = 1;

pub(super) const SCHEMA: &str = "
CREATE TABLE secrets (
    id TEXT PRIMARY KEY, team TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, metadata TEXT NOT NULL,
    created_us INTEGER NOT NULL, updated_us INTEGER NOT NULL, UNIQUE (team, name)
) STRICT;
CREATE TABLE secret_values (
    secret TEXT NOT NULL REFERENCES secrets (id) ON DELETE CASCADE, version INTEGER NOT NULL, nonce BLOB NOT NULL,
    text BLOB NOT NULL, PRIMARY KEY (secret, version)
) STRICT;
";

const COLUMNS: &str = "id, name, version, metadata, created_us, updated_us";

/// Why one was not made.
pub(super) enum Refusal {
    Exists,
    TooMany,
}

/// Whether there is any.
pub(super) fn any(c: &mut Connection) -> rusqlite::Result<bool> {
    c.query_row("SELECT EXISTS (SELECT 1 FROM secrets)", [], |row| row.get(0))
}

fn secret(row: &Row<'_>) -> rusqlite::Result<Secret> {
    let time = |micros: i64| DateTime::from_timestamp_micros(micros).unwrap_or_default();
    let metadata: String = row.get(3)?;
    Ok(Secret {
        secret_id: row.get(0)?,
        name: row.get(1)?,
        current_version: row.get(2)?,
        metadata: serde_json::from_str(&metadata).unwrap_or_default(),
        created_at: time(row.get(4)?),
        updated_at: time(row.get(5)?),
    })
}

fn text(metadata: &BTreeMap<String, String>) -> String {
    serde_json::to_string(metadata).unwrap_or_else(|_| "{}".to_owned())
}

fn put(t: &Transaction<'_>, key: &Key, id: &str, version: u32, value: &str) -> rusqlite::Result<()> {
    let sealed = key.seal(id, version, value).ok_or(rusqlite::Error::InvalidQuery)?;
    t.execute(
        "INSERT INTO secret_values (secret, version, nonce, text) VALUES (?1, ?2, ?3, ?4)",
        params![sealed.id, sealed.version, sealed.nonce, sealed.text],
    )?;
    let oldest = i64::from(version) - i64::from(KEPT_VERSIONS);
    t.execute("DELETE FROM secret_values WHERE secret = ?1 AND version <= ?2", params![id, oldest]).map(drop)
}

pub(super) fn create(
    c: &mut Connection,
    key: &Key,
    team: &TeamId,
    name: &SecretName,
    value: &str,
    metadata: &BTreeMap<String, String>,
) -> rusqlite::Result<Result<Secret, Refusal>> {
    let t = c.transaction()?;
    let own: i64 =
        t.query_row("SELECT COUNT(*) FROM secrets WHERE team = ?1", [team.as_str()], |r| r.get(0))?;
    let taken = "SELECT EXISTS (SELECT 1 FROM secrets WHERE team = ?1 AND name = ?2)";
    if t.query_row(taken, [team.as_str(), name.as_str()], |row| row.get(0))? {
        return Ok(Err(Refusal::Exists));
    }
    if own >= MAX_SECRETS {
        return Ok(Err(Refusal::TooMany));
    }
    let id = format!("{ID_PREFIX}{}", random());
    let now = Utc::now().timestamp_micros();
    t.execute(
        "INSERT INTO secrets (id, team, name, version, metadata, created_us, updated_us) VALUES (?1, ?2, ?3, 1, ?4, ?5, ?5)",
        params![id, team.as_str(), name.as_str(), text(metadata), now],
    )?;
    put(&t, key, &id, 1, value)?;
    let made = find(&t, team, &SecretRef::Id(id))?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
    t.commit()?;
    Ok(Ok(made))
}

fn random() -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut rng = rand::rng();
    (0..20).map(|_| char::from(DIGITS[rng.random_range(0..36)])).collect()
}

fn find(c: &Connection, team: &TeamId, which: &SecretRef) -> rusqlite::Result<Option<Secret>> {
    let (column, value) = match which {
        SecretRef::Id(id) => ("id", id.as_str()),
        SecretRef::Name(name) => ("name", name.as_str()),
    };
    let query = format!("SELECT {COLUMNS} FROM secrets WHERE team = ?1 AND {column} = ?2");
    c.query_row(&query, [team.as_str(), value], secret).optional()
}

pub(super) fn get(c: &mut Connection, team: &TeamId, which: &SecretRef) -> rusqlite::Result<Option<Secret>> {
    find(c, team, which)
}

pub(super) fn update(
    c: &mut Connection,
    key: &Key,
    team: &TeamId,
    which: &SecretRef,
    value: &str,
    metadata: Option<&BTreeMap<String, String>>,
) -> rusqlite::Result<Option<Secret>> {
    let t = c.transaction()?;
    let Some(found) = find(&t, team, which)? else { return Ok(None) };
    let (id, version) = (found.secret_id, found.current_version + 1);
    let metadata = text(metadata.unwrap_or(&found.metadata));
    let now = Utc::now().timestamp_micros();
    t.execute(
        "UPDATE secrets SET version = ?2, metadata = ?3, updated_us = ?4 WHERE id = ?1",
        params![id, version, metadata, now],
    )?;
    put(&t, key, &id, version, value)?;
    let updated = find(&t, team, &SecretRef::Id(id))?;
    t.commit()?;
    Ok(updated)
}

pub(super) fn list(
    c: &mut Connection,
    team: &TeamId,
    after: &str,
    limit: u32,
) -> rusqlite::Result<Vec<Secret>> {
    let query = format!("SELECT {COLUMNS} FROM secrets WHERE team = ?1 AND name > ?2 ORDER BY name LIMIT ?3");
    c.prepare(&query)?.query_map(params![team.as_str(), after, limit], secret)?.collect()
}

pub(super) fn remove(c: &mut Connection, team: &TeamId, which: &SecretRef) -> rusqlite::Result<bool> {
    let t = c.transaction()?;
    let Some(found) = find(&t, team, which)? else { return Ok(false) };
    t.execute("DELETE FROM secret_values WHERE secret = ?1", [&found.secret_id])?;
    t.execute("DELETE FROM secrets WHERE id = ?1", [&found.secret_id])?;
    t.commit()?;
    Ok(true)
}

pub(super) fn value(
    c: &mut Connection,
    team: &TeamId,
    which: &SecretRef,
) -> rusqlite::Result<Option<Sealed>> {
    let Some(found) = find(c, team, which)? else { return Ok(None) };
    let query = "SELECT nonce, text FROM secret_values WHERE secret = ?1 AND version = ?2";
    c.query_row(query, params![found.secret_id, found.current_version], |row| {
        Ok(Sealed {
            id: found.secret_id.clone(),
            version: found.current_version,
            nonce: row.get(0)?,
            text: row.get(1)?,
        })
    })
    .optional()
}
