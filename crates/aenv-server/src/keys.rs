//! API keys: the first one in a file, more of them (hashed) in the database. Who presents one acts for its team.

use std::{collections::HashMap, io, path::Path, sync::Arc};

use aenv_api::{ApiError, ApiKey, ApiKeyLimits, ApiKeyMask};
use aenv_types::{Home, TeamId};
use chrono::{DateTime, Utc};
use parking_lot::RwLock;
use rand::Rng;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

use crate::db::Db;

/// What every key begins with.
pub const PREFIX: &str = "e2b_";

/// Id of the key that the server was first started with.
const FIRST: &str = "first";

/// Keys that a team may have.
const MAX_KEYS: usize = 10_000;

/// Why keys cannot be read.
#[derive(Debug, Error)]
pub enum KeysError {
    /// The file of the first key.
    #[error("the API key file {path} cannot be used: {message}")]
    File {
        /// The file.
        path: String,
        /// Why.
        message: String,
    },
    /// `AENV_API_KEY` is empty or not printable.
    #[error("AENV_API_KEY must have 8 to 200 visible ASCII characters")]
    Variable,
    /// The database.
    #[error("API keys cannot be read: {0}")]
    Database(#[from] rusqlite::Error),
}

/// Whether a caller may act on other teams' keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The server's first key.
    Operator,
    /// Every other.
    Member,
}

/// Who asks.
#[derive(Clone, Debug)]
pub struct Caller {
    /// For whom.
    pub team: TeamId,
    /// The key's id.
    pub key_id: String,
    /// What else it may do.
    pub role: Role,
    /// The key's limits.
    pub limits: ApiKeyLimits,
}

#[derive(Clone, Debug)]
struct Record {
    hash: [u8; 32],
    team: TeamId,
    role: Role,
    info: ApiKey,
}

/// All keys. Cheap to clone.
#[derive(Clone)]
pub struct Keys {
    inner: Arc<Inner>,
}

struct Inner {
    db: Db,
    by_hash: RwLock<HashMap<[u8; 32], Record>>,
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// A fresh key: `e2b_` and 40 hex digits.
pub fn generate() -> String {
    let mut bytes = [0_u8; 20];
    rand::rng().fill(&mut bytes);
    let digits: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("{PREFIX}{digits}")
}

impl Keys {
    /// Reads all keys; makes the first one when there is none. `override_key` (`AENV_API_KEY`) stands in for the file.
    pub fn open(home: &Home, db: Db, override_key: Option<String>) -> Result<Self, KeysError> {
        let first = match override_key {
            Some(key) if (8..=200).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic()) => key,
            Some(_) => return Err(KeysError::Variable),
            None => first_key(&home.secrets().join("api-key"))?,
        };
        let mut by_hash = HashMap::new();
        for record in db.with(stored)? {
            by_hash.insert(record.hash, record);
        }
        let team = TeamId::default_team();
        let info = ApiKey {
            id: FIRST.to_owned(),
            name: "first key of this server".to_owned(),
            team: team.to_string(),
            mask: mask(&first),
            created_at: Utc::now(),
            last_used: None,
            limits: ApiKeyLimits::default(),
        };
        by_hash.insert(hash(&first), Record { hash: hash(&first), team, role: Role::Operator, info });
        Ok(Self { inner: Arc::new(Inner { db, by_hash: RwLock::new(by_hash) }) })
    }

    /// Who presents this key, if it is one. Found by its hash, compared in constant time.
    pub fn check(&self, presented: &str) -> Option<Caller> {
        let digest = hash(presented);
        let keys = self.inner.by_hash.read();
        let record = keys.get(&digest)?;
        bool::from(record.hash.ct_eq(&digest)).then(|| Caller {
            team: record.team.clone(),
            key_id: record.info.id.clone(),
            role: record.role,
            limits: record.info.limits,
        })
    }

    /// Notes that a key was used, to the minute.
    pub fn touch(&self, key_id: &str) {
        let now = Utc::now();
        {
            let mut keys = self.inner.by_hash.write();
            let Some(record) = keys.values_mut().find(|record| record.info.id == key_id) else { return };
            if record.info.last_used.is_some_and(|last| (now - last).num_seconds() < 60) {
                return;
            }
            record.info.last_used = Some(now);
        }
        let (db, id) = (self.inner.db.clone(), key_id.to_owned());
        tokio::task::spawn_blocking(move || {
            let update = "UPDATE api_keys SET last_used = ?1 WHERE id = ?2";
            if let Err(error) = db.with(|c| c.execute(update, (now.timestamp(), id))) {
                tracing::warn!(%error, "the last use of an API key was not noted");
            }
        });
    }

    /// Whether `touch` has something to do.
    pub fn is_stale(&self, key_id: &str) -> bool {
        let keys = self.inner.by_hash.read();
        let last = keys.values().find(|r| r.info.id == key_id).and_then(|r| r.info.last_used);
        last.is_none_or(|last| (Utc::now() - last).num_seconds() >= 60)
    }

    /// Keys of the caller's team (of all teams, for the operator), oldest first.
    pub fn list(&self, caller: &Caller) -> Vec<ApiKey> {
        let keys = self.inner.by_hash.read();
        let seen = |record: &&Record| caller.role == Role::Operator || record.team == caller.team;
        let mut list: Vec<_> = keys.values().filter(seen).map(|record| record.info.clone()).collect();
        list.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        list
    }

    /// Makes a key. Returns it with its secret, which is not kept.
    pub async fn create(
        &self,
        team: TeamId,
        name: &str,
        limits: ApiKeyLimits,
    ) -> Result<(ApiKey, String), ApiError> {
        let name = checked_name(name)?;
        if self.inner.by_hash.read().len() >= MAX_KEYS {
            return Err(ApiError::conflict(format!("there are {MAX_KEYS} keys already; revoke one first")));
        }
        let secret = generate();
        let info = ApiKey {
            id: uuid::Uuid::new_v4().to_string(),
            name,
            team: team.to_string(),
            mask: mask(&secret),
            created_at: DateTime::from_timestamp(Utc::now().timestamp(), 0).unwrap_or_default(),
            last_used: None,
            limits,
        };
        let record = Record { hash: hash(&secret), team, role: Role::Member, info: info.clone() };
        let row = record.clone();
        self.inner.db.run(move |c| insert(c, &row)).await?;
        self.inner.by_hash.write().insert(record.hash, record);
        Ok((info, secret))
    }

    /// Renames a key.
    pub async fn rename(&self, caller: &Caller, id: &str, name: &str) -> Result<(), ApiError> {
        let name = checked_name(name)?;
        let digest = self.own(caller, id)?;
        let (row_name, row_id) = (name.clone(), id.to_owned());
        self.inner
            .db
            .run(move |c| c.execute("UPDATE api_keys SET name = ?1 WHERE id = ?2", (row_name, row_id)))
            .await?;
        if let Some(record) = self.inner.by_hash.write().get_mut(&digest) {
            record.info.name = name;
        }
        Ok(())
    }

    /// Revokes a key; it is refused from now on.
    pub async fn revoke(&self, caller: &Caller, id: &str) -> Result<(), ApiError> {
        let digest = self.own(caller, id)?;
        let row_id = id.to_owned();
        self.inner.db.run(move |c| c.execute("DELETE FROM api_keys WHERE id = ?1", [row_id])).await?;
        self.inner.by_hash.write().remove(&digest);
        Ok(())
    }

    fn own(&self, caller: &Caller, id: &str) -> Result<[u8; 32], ApiError> {
        let keys = self.inner.by_hash.read();
        let seen = |record: &&Record| caller.role == Role::Operator || record.team == caller.team;
        match keys.values().find(|record| record.info.id == id).filter(seen) {
            Some(record) if record.info.id == FIRST => Err(ApiError::conflict(
                "this is the server's first key: change AENV_API_KEY or <home>/secrets/api-key and restart the server",
            )),
            Some(record) => Ok(record.hash),
            None => Err(ApiError::not_found("there is no such API key").with_code("api_key_not_found")),
        }
    }
}

fn checked_name(name: &str) -> Result<String, ApiError> {
    let name = name.trim();
    if name.is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
        return Err(ApiError::bad_request("the name of a key has 1 to 128 printable characters"));
    }
    Ok(name.to_owned())
}

fn mask(key: &str) -> ApiKeyMask {
    let (prefix, value) = match key.strip_prefix(PREFIX) {
        Some(value) => (PREFIX, value),
        None => ("", key),
    };
    let shown = if value.len() >= 16 { 4 } else { 0 };
    ApiKeyMask {
        prefix: prefix.to_owned(),
        value_length: u32::try_from(value.len()).unwrap_or(u32::MAX),
        masked_value_prefix: value.get(..shown / 2).unwrap_or_default().to_owned(),
        masked_value_suffix: value.get(value.len() - shown..).unwrap_or_default().to_owned(),
    }
}

/// Reads the first key, or makes it: written beside, synced, and put in place whole.
fn first_key(path: &Path) -> Result<String, KeysError> {
    let failed = |message: String| KeysError::File { path: path.display().to_string(), message };
    match std::fs::read_to_string(path) {
        Ok(text) if text.trim().len() >= 8 => return Ok(text.trim().to_owned()),
        Ok(_) => return Err(failed("it is empty; delete it to get a new key".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error.to_string())),
    }
    let key = generate();
    aenv_durable::write_private(path, format!("{key}\n").as_bytes())
        .map_err(|error| failed(error.to_string()))?;
    Ok(key)
}

fn insert(connection: &rusqlite::Connection, record: &Record) -> rusqlite::Result<usize> {
    let json = |value: serde_json::Result<String>| value.unwrap_or_else(|_| "{}".to_owned());
    connection.execute(
        "INSERT INTO api_keys (id, hash, name, team, mask, limits, created_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        (
            &record.info.id,
            record.hash.as_slice(),
            &record.info.name,
            record.team.as_str(),
            json(serde_json::to_string(&record.info.mask)),
            json(serde_json::to_string(&record.info.limits)),
            record.info.created_at.timestamp(),
        ),
    )
}

fn stored(connection: &mut rusqlite::Connection) -> rusqlite::Result<Vec<Record>> {
    let mut statement = connection
        .prepare("SELECT id, hash, name, team, mask, limits, created_at, last_used FROM api_keys")?;
    let broken = |column: usize, error: Box<dyn std::error::Error + Send + Sync>| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, error)
    };
    let rows = statement.query_map([], |row| {
        let team: String = row.get(3)?;
        let parsed: TeamId = team.parse().map_err(|e| broken(3, Box::new(e)))?;
        let mask: String = row.get(4)?;
        let limits: String = row.get(5)?;
        let time = |secs: i64| DateTime::from_timestamp(secs, 0).unwrap_or_default();
        Ok(Record {
            hash: row.get::<_, [u8; 32]>(1)?,
            team: parsed,
            role: Role::Member,
            info: ApiKey {
                id: row.get(0)?,
                name: row.get(2)?,
                team,
                mask: serde_json::from_str(&mask).map_err(|e| broken(4, Box::new(e)))?,
                created_at: time(row.get(6)?),
                last_used: row.get::<_, Option<i64>>(7)?.map(time),
                limits: serde_json::from_str(&limits).map_err(|e| broken(5, Box::new(e)))?,
            },
        })
    })?;
    rows.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn open(dir: &Path) -> Keys {
        let home = Home::new(dir.join("home"), dir.join("run"));
        home.create().unwrap();
        let db = Db::open(&home.path().join("server.db")).unwrap();
        Keys::open(&home, db, None).unwrap()
    }

    #[test]
    fn the_first_key_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let keys = open(dir.path());
        let path = dir.path().join("home/secrets/api-key");
        let key = std::fs::read_to_string(&path).unwrap().trim().to_owned();
        assert_eq!((key.len(), &key[..4]), (44, "e2b_"));
        assert!(key[4..].bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(keys.check(&key).unwrap().role, Role::Operator);
        drop(keys);
        assert!(open(dir.path()).check(&key).is_some(), "the key changed with a restart");
        assert!(open(dir.path()).check("e2b_wrong").is_none());
    }

    #[tokio::test]
    async fn more_keys_survive_and_can_be_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let keys = open(dir.path());
        let operator =
            keys.check(std::fs::read_to_string(dir.path().join("home/secrets/api-key")).unwrap().trim());
        let operator = operator.unwrap();
        let limits = ApiKeyLimits { max_running_sandboxes: Some(3), ..ApiKeyLimits::default() };
        let (info, secret) = keys.create("blue".parse().unwrap(), "ci", limits).await.unwrap();
        assert!(!format!("{:?}", info.mask).contains(&secret[6..]));

        let keys = open(dir.path());
        let caller = keys.check(&secret).unwrap();
        assert_eq!((caller.team.as_str(), caller.role, caller.limits), ("blue", Role::Member, limits));
        assert_eq!(keys.list(&caller).len(), 1);
        assert_eq!(keys.list(&operator).len(), 2);

        let (other, _) = keys.create("red".parse().unwrap(), "x", ApiKeyLimits::default()).await.unwrap();
        assert_eq!(keys.revoke(&caller, &other.id).await.unwrap_err().status, 404);
        keys.revoke(&operator, &info.id).await.unwrap();
        assert!(keys.check(&secret).is_none());
        assert!(open(dir.path()).check(&secret).is_none());
        assert_eq!(keys.revoke(&operator, "first").await.unwrap_err().status, 409);
    }

    #[test]
    fn the_variable_stands_in() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path().join("home"), dir.path().join("run"));
        home.create().unwrap();
        let db = || Db::open(&home.path().join("server.db")).unwrap();
        let keys = Keys::open(&home, db(), Some("e2b_0000".into())).unwrap();
        assert!(keys.check("e2b_0000").is_some());
        assert!(!home.secrets().join("api-key").exists());
        assert!(matches!(Keys::open(&home, db(), Some("a b".into())), Err(KeysError::Variable)));
    }
}
