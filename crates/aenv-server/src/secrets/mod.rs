//! Secrets of teams, in `<home>/secrets/secrets.db`, each value sealed with the node's key in `<home>/secrets/secrets.key`.
//!
//! Values go in through the API and come out only through [`Secrets::value`], for the parts of the server that use them on a
//! sandbox's behalf. They are never logged and never part of an answer.

mod seal;
mod store;

use std::{collections::BTreeMap, str::FromStr};

use aenv_api::{ApiError, Secret};
use aenv_egress::SecretSource;
use aenv_types::{Home, TeamId, Token};
use async_trait::async_trait;
use http::StatusCode;

use crate::db::{Db, DbError};
use seal::Key;

/// Secrets of one team.
const MAX_SECRETS: i64 = 1000;
/// Bytes of one value.
const MAX_VALUE: usize = 64 << 10;
/// Bytes of a name.
const MAX_NAME: usize = 255;
/// What ids begin with, and names do not.
const ID_PREFIX: &str = "sec_";

/// A secret's name: lower case, without braces and control characters, because it stands in `${e2b.secrets.<name>}`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SecretName(String);

impl SecretName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        let wrong = |message: &str| {
            ApiError::bad_request(format!("name: {message}")).with_code("secret_name_invalid")
        };
        let name = text.to_lowercase();
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(wrong("it has 1 to 255 bytes"));
        }
        if name.contains(|c: char| c.is_control() || matches!(c, '{' | '}')) {
            return Err(wrong("it has no braces and no control characters"));
        }
        if name.starts_with(ID_PREFIX) {
            return Err(wrong("it must not begin with sec_, as ids do"));
        }
        Ok(Self(name))
    }
}

/// How a caller names a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretRef {
    /// By its id.
    Id(String),
    /// By its name.
    Name(SecretName),
}

impl FromStr for SecretRef {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        if text.to_lowercase().starts_with(ID_PREFIX) {
            return Ok(Self::Id(text.to_lowercase()));
        }
        // What is no name is a secret that does not exist.
        text.parse().map(Self::Name).map_err(|_: ApiError| missing(text))
    }
}

/// There is none.
fn missing(text: &str) -> ApiError {
    let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
    ApiError::not_found(format!("secret {shown:?} not found")).with_code("secret_not_found")
}

/// Refuses values and metadata beyond the limits.
fn check(value: &str, metadata: Option<&BTreeMap<String, String>>) -> Result<(), ApiError> {
    if value.is_empty() || value.len() > MAX_VALUE {
        return Err(ApiError::bad_request(format!("value: it has 1 to {MAX_VALUE} bytes")));
    }
    let Some(metadata) = metadata else { return Ok(()) };
    let total: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    let fits = |(key, value): (&String, &String)| key.len() <= 128 && value.len() <= 1024;
    if metadata.len() > 32 || total > 8192 || !metadata.iter().all(fits) {
        return Err(ApiError::bad_request(
            "metadata: at most 32 entries, keys of 128 bytes, values of 1024, 8192 in all",
        ));
    }
    Ok(())
}

/// The secrets of a node. Cheap to clone.
#[derive(Clone)]
pub struct Secrets {
    db: Db,
    key: Key,
}

impl Secrets {
    /// Opens or makes database and key. Fails when there are secrets and their key is gone.
    pub fn open(home: &Home) -> anyhow::Result<Self> {
        let db = Db::open_with(&home.secrets().join("secrets.db"), store::SCHEMA, store::VERSION)?;
        // What is removed is overwritten, the file as well as the log beside it in time.
        let path = home.secrets().join("secrets.db").display().to_string();
        let overwrite = db.with(|c| c.execute_batch("PRAGMA secure_delete = ON"));
        overwrite.map_err(|source| DbError::Sqlite { path, source })?;
        let file = home.secrets().join("secrets.key");
        let path = file.display().to_string();
        let used = db.with(store::any).map_err(|source| DbError::Sqlite { path, source })?;
        let key = Key::open(&file, used)?;
        Ok(Self { db, key })
    }

    /// Makes one.
    pub async fn create(
        &self,
        team: &TeamId,
        name: SecretName,
        value: String,
        metadata: BTreeMap<String, String>,
    ) -> Result<Secret, ApiError> {
        check(&value, Some(&metadata))?;
        let (key, team) = (self.key.clone(), team.clone());
        self.db.run(move |c| store::create(c, &key, &team, &name, &value, &metadata)).await?.map_err(
            |refusal| match refusal {
                store::Refusal::Exists => ApiError::conflict(
                    "there is a secret of this name already; POST /secrets/{name} gives it a new value",
                )
                .with_code("secret_exists"),
                store::Refusal::TooMany => ApiError::new(
                    StatusCode::FORBIDDEN,
                    format!("this team has {MAX_SECRETS} secrets; delete one first"),
                )
                .with_code("secret_limit_reached"),
            },
        )
    }

    /// Gives one its next value.
    pub async fn update(
        &self,
        team: &TeamId,
        which: SecretRef,
        value: String,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<Secret, ApiError> {
        check(&value, metadata.as_ref())?;
        let gone = absent(&which);
        let (key, team) = (self.key.clone(), team.clone());
        let found =
            self.db.run(move |c| store::update(c, &key, &team, &which, &value, metadata.as_ref())).await?;
        found.ok_or(gone)
    }

    /// What may be shown of one.
    pub async fn get(&self, team: &TeamId, which: SecretRef) -> Result<Secret, ApiError> {
        let gone = absent(&which);
        let team = team.clone();
        self.db.run(move |c| store::get(c, &team, &which)).await?.ok_or(gone)
    }

    /// Those of a team after a name, in the order of their names.
    pub async fn list(
        &self,
        team: &TeamId,
        after: Option<String>,
        limit: u32,
    ) -> Result<Vec<Secret>, ApiError> {
        let team = team.clone();
        self.db.run(move |c| store::list(c, &team, after.as_deref().unwrap_or_default(), limit)).await
    }

    /// Removes one with all its values.
    pub async fn remove(&self, team: &TeamId, which: SecretRef) -> Result<(), ApiError> {
        let gone = absent(&which);
        let team = team.clone();
        if self.db.run(move |c| store::remove(c, &team, &which)).await? { Ok(()) } else { Err(gone) }
    }

    /// The current value of a team's secret, for a part of the server that uses it.
    pub async fn value(&self, team: &TeamId, which: SecretRef) -> Result<Token, ApiError> {
        let gone = absent(&which);
        let (key, team) = (self.key.clone(), team.clone());
        let sealed = self.db.run(move |c| store::value(c, &team, &which)).await?.ok_or(gone)?;
        let opened = key.open_value(&sealed).ok_or_else(|| {
            tracing::error!(secret = sealed.id, "a secret cannot be opened with the node's key");
            ApiError::internal("the secret cannot be opened with this server's key")
        })?;
        Ok(opened.into())
    }
}

#[async_trait]
impl SecretSource for Secrets {
    async fn value(&self, team: &TeamId, name: &str) -> Option<Token> {
        let value = match name.parse() {
            Ok(name) => Self::value(self, team, SecretRef::Name(name)).await,
            Err(error) => Err(error),
        };
        let refused = |error: &ApiError| tracing::warn!(%team, %error, "a header rule names a secret that cannot be used");
        value.inspect_err(refused).ok()
    }
}

fn absent(which: &SecretRef) -> ApiError {
    match which {
        SecretRef::Id(id) => missing(id),
        SecretRef::Name(name) => missing(name.as_str()),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
