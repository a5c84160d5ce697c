//! JSON documents with conditional writes.

use std::{
    fs::{File, TryLockError},
    path::Path as FsPath,
    time::{Duration, Instant},
};

use aenv_types::TeamId;
use object_store::{ObjectStoreExt, PutMode, PutPayload, UpdateVersion, path::Path};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use crate::{
    RepositoryError, Versioned,
    backend::Opened,
    blobs::{blocking, store_error},
    layout,
};

/// A writer that finds a team's lock taken waits this long at most; holders keep it for one small write.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    format: u32,
    /// Another one with each write.
    revision: Uuid,
    value: T,
}

/// What can be read of a document whatever its format.
#[derive(Deserialize)]
struct Header {
    format: u32,
}

/// The bytes of an object and its version in the store; `None` when it is not there.
pub(crate) async fn read(
    opened: &Opened,
    path: &Path,
) -> Result<Option<(Vec<u8>, UpdateVersion)>, RepositoryError> {
    let context = || format!("reading {path}");
    let found = match opened.store.get(path).await {
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        found => found.map_err(store_error(context()))?,
    };
    let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
    let bytes = found.bytes().await.map_err(store_error(context()))?;
    Ok(Some((bytes.to_vec(), version)))
}

/// Writes an object; with [`PutMode::Create`] or `Update`, [`RepositoryError::Conflict`] when somebody was faster.
pub(crate) async fn write(
    opened: &Opened,
    path: &Path,
    bytes: Vec<u8>,
    mode: PutMode,
) -> Result<UpdateVersion, RepositoryError> {
    let updates = matches!(mode, PutMode::Update(_));
    match opened.store.put_opts(path, PutPayload::from(bytes), mode.into()).await {
        Ok(put) => Ok(UpdateVersion { e_tag: put.e_tag, version: put.version }),
        Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
            Err(RepositoryError::Conflict(path.to_string()))
        }
        // What was to be updated is gone. Without an update, it is the bucket that is missing.
        Err(object_store::Error::NotFound { .. }) if updates => {
            Err(RepositoryError::Conflict(path.to_string()))
        }
        Err(error) => Err(store_error(format!("writing {path}"))(error)),
    }
}

/// Parses a document, and refuses a format that this version does not know before looking at anything else.
pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8], known: u32) -> Result<T, RepositoryError> {
    let corrupt = |error: serde_json::Error| RepositoryError::Corrupt {
        what: what.to_owned(),
        message: error.to_string(),
    };
    let header: Header = serde_json::from_slice(bytes).map_err(corrupt)?;
    if header.format > known {
        return Err(RepositoryError::Format { what: what.to_owned(), found: header.format, known });
    }
    serde_json::from_slice(bytes).map_err(corrupt)
}

/// A document as JSON.
pub(crate) fn encode<T: Serialize>(what: &str, value: &T) -> Result<Vec<u8>, RepositoryError> {
    serde_json::to_vec(value).map_err(store_error(format!("encoding {what}")))
}

/// Reads a team's document.
pub(crate) async fn get<T: DeserializeOwned>(
    opened: &Opened,
    team: &TeamId,
    key: &str,
) -> Result<Versioned<T>, RepositoryError> {
    let path = layout::document(team, key)?;
    let found = read(opened, &path).await?;
    let (bytes, version) = found.ok_or_else(|| RepositoryError::NotFound(key.to_owned()))?;
    let envelope: Envelope<T> = parse(key, &bytes, layout::FORMAT)?;
    let version = if opened.root.is_some() { revision(envelope.revision) } else { version };
    Ok(Versioned { value: envelope.value, version })
}

/// Writes a team's document if it is still as expected.
pub(crate) async fn put<T: Serialize + Sync>(
    opened: &Opened,
    team: &TeamId,
    key: &str,
    value: &T,
    expected: Option<&UpdateVersion>,
) -> Result<UpdateVersion, RepositoryError> {
    let path = layout::document(team, key)?;
    let fresh = Uuid::new_v4();
    let bytes = encode(key, &Envelope { format: layout::FORMAT, revision: fresh, value })?;
    let conflict = || RepositoryError::Conflict(key.to_owned());
    let named = |error| match error {
        RepositoryError::Conflict(_) => conflict(),
        other => other,
    };
    let Some(root) = &opened.root else {
        let mode = expected.map_or(PutMode::Create, |version| PutMode::Update(version.clone()));
        return write(opened, &path, bytes, mode).await.map_err(named);
    };
    let _locked = lock(root, team).await?;
    let Some(expected) = expected else {
        write(opened, &path, bytes, PutMode::Create).await.map_err(named)?;
        return Ok(revision(fresh));
    };
    let (current, _) = read(opened, &path).await?.ok_or_else(conflict)?;
    let current: Envelope<serde::de::IgnoredAny> = parse(key, &current, layout::FORMAT)?;
    if revision(current.revision) != *expected {
        return Err(conflict());
    }
    write(opened, &path, bytes, PutMode::Overwrite).await?;
    Ok(revision(fresh))
}

/// Removes a team's document.
pub(crate) async fn delete(opened: &Opened, team: &TeamId, key: &str) -> Result<(), RepositoryError> {
    let path = layout::document(team, key)?;
    let _locked = match &opened.root {
        Some(root) => Some(lock(root, team).await?),
        None => None,
    };
    // S3 says yes to the removal of what is not there.
    match opened.store.head(&path).await {
        Ok(_) => remove(opened, &path).await,
        Err(object_store::Error::NotFound { .. }) => Err(RepositoryError::NotFound(key.to_owned())),
        Err(error) => Err(store_error(format!("looking for {key}"))(error)),
    }
}

/// Removes an object; no error when it is gone.
pub(crate) async fn remove(opened: &Opened, path: &Path) -> Result<(), RepositoryError> {
    match opened.store.delete(path).await {
        Err(object_store::Error::NotFound { .. }) => Ok(()),
        deleted => deleted.map_err(store_error(format!("removing {path}"))),
    }
}

fn revision(revision: Uuid) -> UpdateVersion {
    UpdateVersion { e_tag: Some(revision.to_string()), version: None }
}

/// The lock on a team's documents in a shared folder, until it is dropped.
async fn lock(root: &FsPath, team: &TeamId) -> Result<File, RepositoryError> {
    let path = root.join("locks").join(team.as_str());
    blocking(move || {
        let context = format!("locking {}", path.display());
        let file =
            File::options().create(true).append(true).open(&path).map_err(store_error(context.clone()))?;
        let deadline = Instant::now() + LOCK_LIMIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {}
                Err(error) => return Err(store_error(context)(error)),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    })
    .await
}
