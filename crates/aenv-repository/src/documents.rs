//! JSON documents with conditional writes.

use std::{
    fs::{File, TryLockError},
    future::Future,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_types::TeamId;
use object_store::{ObjectStoreExt, PutMode, PutPayload, UpdateVersion, path::Path};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

use crate::{
    RepositoryError, Versioned,
    backend::{Folder, Opened},
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
    let version = if opened.folder.is_some() { revision(envelope.revision) } else { version };
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
    let named = |error| match error {
        RepositoryError::Conflict(_) => RepositoryError::Conflict(key.to_owned()),
        other => other,
    };
    let Some(folder) = &opened.folder else {
        let mode = expected.map_or(PutMode::Create, |version| PutMode::Update(version.clone()));
        return write(opened, &path, bytes, mode).await.map_err(named);
    };
    let expected = expected.cloned();
    let written = locked(folder, team, move |opened| async move {
        let mode = if let Some(expected) = expected {
            let conflict = || RepositoryError::Conflict(path.to_string());
            let (current, _) = read(&opened, &path).await?.ok_or_else(conflict)?;
            let current: Envelope<serde::de::IgnoredAny> = parse(path.as_ref(), &current, layout::FORMAT)?;
            if revision(current.revision) != expected {
                return Err(conflict());
            }
            PutMode::Overwrite
        } else {
            PutMode::Create
        };
        write(&opened, &path, bytes, mode).await.map(drop)
    });
    written.await.map_err(named)?;
    Ok(revision(fresh))
}

/// Removes a team's document.
pub(crate) async fn delete(opened: &Opened, team: &TeamId, key: &str) -> Result<(), RepositoryError> {
    let path = layout::document(team, key)?;
    let missing = key.to_owned();
    let removal = |opened: Opened| async move {
        // S3 says yes to the removal of what is not there.
        match opened.store.head(&path).await {
            Ok(_) => remove(&opened, &path).await,
            Err(object_store::Error::NotFound { .. }) => Err(RepositoryError::NotFound(missing)),
            Err(error) => Err(store_error(format!("looking for {missing}"))(error)),
        }
    };
    match &opened.folder {
        Some(folder) => locked(folder, team, removal).await,
        None => removal(opened.clone()).await,
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

/// Changes a team's documents in a shared folder under their lock. The lock is held until the change has happened, also when it takes
/// so long that its caller is told that the folder stalls: a later writer would lose what it wrote otherwise.
async fn locked<F: Future<Output = Result<(), RepositoryError>> + Send + 'static>(
    folder: &Folder,
    team: &TeamId,
    change: impl FnOnce(Opened) -> F + Send + 'static,
) -> Result<(), RepositoryError> {
    let path = folder.root.join("locks").join(team.as_str());
    let context = format!("changing documents under {}", path.display());
    let unbounded = Opened { store: Arc::clone(&folder.unbounded) as _, folder: Some(folder.clone()) };
    let work = async move {
        let _locked = lock(path).await?;
        change(unbounded).await
    };
    folder.patience.wait(work).await.map_err(store_error(context))?
}

/// The lock on a team's documents in a shared folder, until it is dropped.
async fn lock(path: PathBuf) -> Result<File, RepositoryError> {
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{backend::posix, stall::Patience};

    /// Reads of a FIFO that nobody writes stay in the kernel, as those of a file do whose NFS server is silent.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_document_that_stalls_keeps_the_lock_until_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let opened = posix(folder.path(), Patience::new(Duration::from_millis(300))).unwrap();
        let team: TeamId = "team".parse().unwrap();
        let first = put(&opened, &team, "well", &1, None).await.unwrap();
        let fifo = folder.path().join("teams/team/stalls.json");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());

        let stalls = |error: RepositoryError| {
            let RepositoryError::Store { message, .. } = error else { panic!("{error}") };
            assert!(message.contains("does not answer"), "{message}");
        };
        stalls(get::<u32>(&opened, &team, "stalls").await.unwrap_err());
        // What does not need it goes on; what needs the lock, which is still held, does not.
        assert_eq!(get::<u32>(&opened, &team, "well").await.unwrap().value, 1);
        stalls(put(&opened, &team, "stalls", &2, Some(&first)).await.unwrap_err());
        stalls(put(&opened, &team, "well", &2, Some(&first)).await.unwrap_err());
        stalls(delete(&opened, &team, "well").await.unwrap_err());
        let other: TeamId = "other".parse().unwrap();
        put(&opened, &other, "well", &1, None).await.unwrap();

        // It is back. What was given up on happens now, one after the other, and then documents can be changed as before.
        blocking(move || File::options().write(true).open(fifo).map_err(store_error("opening")))
            .await
            .unwrap();
        let back = async {
            while !matches!(
                put(&opened, &team, "later", &3, None).await,
                Ok(_) | Err(RepositoryError::Conflict(_))
            ) {}
        };
        tokio::time::timeout(Duration::from_secs(30), back).await.unwrap();
        assert_eq!(get::<u32>(&opened, &team, "later").await.unwrap().value, 3);
    }
}
