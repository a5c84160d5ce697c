//! Blobs: into the repository and out of it, streaming, verified on both ways.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use aenv_remote::{Location, Place};
use aenv_types::{Digest, Home, LayerName};
use futures::StreamExt;
use object_store::{ObjectStoreExt, PutPayload, WriteMultipart};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;

use crate::{
    RepositoryError,
    backend::{Folder, Opened},
    layout,
};

/// Bytes that are read and hashed at a time.
const CHUNK: usize = 1 << 20;
/// Parts of a multipart upload; larger for blobs that would need more than S3's 10,000 parts.
const PART: u64 = 8 << 20;
/// Parts of one blob that are under way at the same time.
const PARTS_AT_ONCE: usize = 4;

/// Digest and size of a local file.
pub(crate) async fn hash(path: PathBuf) -> Result<(Digest, u64), RepositoryError> {
    blocking(move || {
        let hashed =
            File::open(&path).and_then(|file| Digest::of_reader(io::BufReader::with_capacity(CHUNK, file)));
        hashed.map_err(store_error(format!("reading {}", path.display())))
    })
    .await
}

/// Whether the repository has the blob, whole as far as its size shows.
pub(crate) async fn present(opened: &Opened, digest: &Digest, size: u64) -> Result<bool, RepositoryError> {
    Ok(stored(opened, digest).await? == Some(size))
}

/// Whether the repository has the blob, of whatever size.
pub(crate) async fn exists(opened: &Opened, digest: &Digest) -> Result<bool, RepositoryError> {
    Ok(stored(opened, digest).await?.is_some())
}

/// Bytes that the repository has of the blob.
async fn stored(opened: &Opened, digest: &Digest) -> Result<Option<u64>, RepositoryError> {
    match opened.store.head(&layout::blob(digest)).await {
        Ok(meta) => Ok(Some(meta.size)),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(store_error(format!("looking for blob {digest}"))(error)),
    }
}

/// Puts a local file into the repository. Fails, and leaves nothing visible, when its bytes are not the digest's; `hashed` says
/// that they are, so that a hard link needs no second look at them.
pub(crate) async fn upload(
    opened: &Opened,
    digest: Digest,
    size: u64,
    source: PathBuf,
    hashed: bool,
) -> Result<(), RepositoryError> {
    match &opened.folder {
        Some(Folder { root, patience, .. }) => {
            let target = root.join(layout::blob(&digest).as_ref());
            let staging = root.join("staging");
            let placed = blocking(move || place(&source, &target, &staging, &digest, hashed));
            let placed = patience.wait_for(size, placed).await;
            placed.map_err(store_error(format!("uploading blob {digest}")))?
        }
        None => send(opened, digest, &source).await,
    }
}

async fn send(opened: &Opened, digest: Digest, source: &Path) -> Result<(), RepositoryError> {
    let context = || format!("uploading blob {digest}");
    let mut file = tokio::fs::File::open(source).await.map_err(store_error(context()))?;
    let size = file.metadata().await.map_err(store_error(context()))?.len();
    let target = layout::blob(&digest);
    let part = PART.max(size.div_ceil(9_000)) as usize;
    if size <= part as u64 {
        let mut bytes = Vec::with_capacity(size as usize);
        file.read_to_end(&mut bytes).await.map_err(store_error(context()))?;
        expect_digest(&digest, Digest::of(&bytes))?;
        opened.store.put(&target, PutPayload::from(bytes)).await.map_err(store_error(context()))?;
        return Ok(());
    }
    let upload = opened.store.put_multipart(&target).await.map_err(store_error(context()))?;
    let mut upload = WriteMultipart::new_with_chunk_size(upload, part);
    let sent = async {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; CHUNK];
        loop {
            let length = file.read(&mut buffer).await.map_err(store_error(context()))?;
            if length == 0 {
                return expect_digest(&digest, Digest::from_bytes(hasher.finalize().into()));
            }
            hasher.update(&buffer[..length]);
            upload.wait_for_capacity(PARTS_AT_ONCE).await.map_err(store_error(context()))?;
            upload.write(&buffer[..length]);
        }
    };
    match sent.await {
        Ok(()) => upload.finish().await.map(drop).map_err(store_error(context())),
        Err(error) => {
            // The parts cost room until they are given up; the first error says more than a second one.
            if let Err(abort) = upload.abort().await {
                tracing::warn!(%digest, error = %abort, "parts of an upload that failed stay in the object store");
            }
            Err(error)
        }
    }
}

/// Makes sure that the node has a blob under its digest name.
pub(crate) async fn download(
    opened: &Opened,
    home: &Home,
    digest: Digest,
    size: u64,
) -> Result<(), RepositoryError> {
    let target = home.layer(&LayerName::Digest(digest));
    if kept(&target, size) {
        return Ok(());
    }
    let staging = home.staging();
    if let Some(Folder { root, patience, .. }) = &opened.folder {
        let source = root.join(layout::blob(&digest).as_ref());
        let placed = blocking(move || {
            if !source.exists() {
                return Err(missing(&digest));
            }
            place(&source, &target, &staging, &digest, false)
        });
        let placed = patience.wait_for(size, placed).await;
        return placed.map_err(store_error(format!("fetching blob {digest}")))?;
    }
    let staged = Staged::new(&staging).map_err(store_error("making a file in staging"))?;
    let context = || format!("downloading blob {digest}");
    let found = match opened.store.get(&layout::blob(&digest)).await {
        Err(object_store::Error::NotFound { .. }) => return Err(missing(&digest)),
        found => found.map_err(store_error(context()))?,
    };
    let mut file = tokio::fs::File::create(&staged.0).await.map_err(store_error(context()))?;
    let mut hasher = Sha256::new();
    let mut stream = found.into_stream();
    while let Some(bytes) = stream.next().await {
        let bytes = bytes.map_err(store_error(context()))?;
        hasher.update(&bytes);
        file.write_all(&bytes).await.map_err(store_error(context()))?;
    }
    expect_digest(&digest, Digest::from_bytes(hasher.finalize().into()))?;
    file.flush().await.map_err(store_error(context()))?;
    file.sync_all().await.map_err(store_error(context()))?;
    blocking(move || staged.publish(&target).map_err(store_error(format!("keeping blob {digest}")))).await
}

/// Whether the node has the blob. Noted as its last use, so that the node's collector leaves it for a while: noted first, then
/// looked for, and the collector does it the other way round.
fn kept(target: &Path, size: u64) -> bool {
    let now = fs::FileTimes::new().set_accessed(std::time::SystemTime::now());
    File::open(target).and_then(|file| file.set_times(now)).is_ok()
        && fs::metadata(target).is_ok_and(|meta| meta.len() == size)
}

/// Whether the node has the blob in a file.
pub(crate) fn here(home: &Home, digest: &Digest, size: u64) -> bool {
    fs::metadata(home.layer(&LayerName::Digest(*digest))).is_ok_and(|meta| meta.len() == size)
}

/// Notes where a blob is that the repository has.
pub(crate) async fn refer(home: &Home, digest: Digest, size: u64) -> Result<(), RepositoryError> {
    let note = home.remote_layer(&LayerName::Digest(digest));
    let key = layout::blob(&digest).to_string();
    let location =
        Location { place: Place::Repository { key }, size, digest: digest.to_string(), disk: None };
    let context = format!("noting where blob {digest} is");
    blocking(move || {
        let text = serde_json::to_vec(&location).map_err(store_error(context.clone()))?;
        aenv_durable::write(&note, &text).map_err(store_error(context))
    })
    .await
}

/// Gives a node's layer its digest name too.
pub(crate) async fn link_locally(
    home: &Home,
    name: LayerName,
    digest: Digest,
) -> Result<(), RepositoryError> {
    let (from, to) = (home.layer(&name), home.layer(&LayerName::Digest(digest)));
    if from == to {
        return Ok(());
    }
    blocking(move || {
        match fs::hard_link(&from, &to) {
            // Most are there from the commit before. One that a power failure takes is fetched again.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
            Ok(()) => sync_folder_of(&to),
        }
        .map_err(store_error(format!("linking {}", to.display())))
    })
    .await
}

/// Verifies `source` and puts it at `target`: a hard link on one filesystem, otherwise a copy (a reflink where the filesystem can).
/// Blobs are immutable on both sides, so that sharing their bytes is safe; a link to bytes that were `hashed` is not read. Blocks.
fn place(
    source: &Path,
    target: &Path,
    staging: &Path,
    digest: &Digest,
    hashed: bool,
) -> Result<(), RepositoryError> {
    let context = format!("placing blob {digest} at {}", target.display());
    let placed = || -> Result<bool, io::Error> {
        fs::create_dir_all(staging)?;
        let staged = Staged::new(staging)?;
        let linked = fs::hard_link(source, &staged.0).is_ok();
        if !linked {
            fs::copy(source, &staged.0)?;
        }
        let mut file = File::open(&staged.0)?;
        if !(linked && hashed) && hash_file(&mut file)? != *digest {
            return Ok(false);
        }
        file.sync_all()?;
        staged.publish(target)?;
        Ok(true)
    };
    match placed() {
        Ok(true) => Ok(()),
        Ok(false) => Err(damaged(digest, format!("the bytes of {} are others", source.display()))),
        Err(error) => Err(store_error(context)(error)),
    }
}

fn hash_file(file: &mut File) -> io::Result<Digest> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(Digest::from_bytes(hasher.finalize().into()));
        }
        hasher.update(&buffer[..length]);
    }
}

/// A name in a staging folder that goes when it is not published.
struct Staged(PathBuf);

impl Staged {
    fn new(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self(folder.join(Uuid::new_v4().to_string())))
    }

    /// Renames it to `target`, durably.
    fn publish(self, target: &Path) -> io::Result<()> {
        if let Some(parent) = target.parent()
            && !parent.is_dir()
        {
            fs::create_dir_all(parent)?;
            sync_folder_of(parent)?;
        }
        fs::rename(&self.0, target)?;
        sync_folder_of(target)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Gone after a publish; still there when both names were links to one file, or after a failure.
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %self.0.display(), "a file stays in staging");
        }
    }
}

fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

fn expect_digest(expected: &Digest, found: Digest) -> Result<(), RepositoryError> {
    if *expected == found {
        Ok(())
    } else {
        Err(damaged(expected, format!("its bytes have the digest {found}")))
    }
}

pub(crate) fn damaged(digest: &Digest, message: String) -> RepositoryError {
    RepositoryError::Corrupt { what: format!("blob {digest}"), message }
}

pub(crate) fn missing(digest: &Digest) -> RepositoryError {
    damaged(digest, "it is missing from the repository".to_owned())
}

/// Turns an error into [`RepositoryError::Store`].
pub(crate) fn store_error<E: std::fmt::Display>(
    context: impl Into<String>,
) -> impl FnOnce(E) -> RepositoryError {
    let context = context.into();
    move |error| RepositoryError::Store { context, message: error.to_string() }
}

/// Runs what blocks on a thread that may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RepositoryError> + Send + 'static,
) -> Result<T, RepositoryError> {
    tokio::task::spawn_blocking(work).await.map_err(store_error("waiting for a blocking task"))?
}
