//! The two backends, opened.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use object_store::{ClientOptions, ObjectStore, RetryConfig, local::LocalFileSystem};

use crate::{
    Backend, OssConfig, RepositoryError,
    stall::{Patience, Patient},
};

/// A request to an object store is not tried again after so long: whoever waits for it is told, and may ask again.
const TRIED_FOR: Duration = Duration::from_secs(15);
/// One attempt, its body included.
const ATTEMPT: Duration = Duration::from_secs(30);

/// An open backend.
#[derive(Clone)]
pub(crate) struct Opened {
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// Its folder, if it is a filesystem.
    pub folder: Option<Folder>,
}

/// A backend's folder.
#[derive(Clone)]
pub(crate) struct Folder {
    /// Its path.
    pub root: PathBuf,
    /// The store in it, whose operations take as long as they take.
    pub unbounded: Arc<LocalFileSystem>,
    /// For whoever waits for it.
    pub patience: Patience,
}

/// Opens a backend; makes the folder of a `posix_fs` one.
pub(crate) fn open(backend: &Backend) -> Result<Opened, RepositoryError> {
    match backend {
        Backend::PosixFs { root } => posix(root, Patience::default()),
        Backend::Oss(config) => oss(config),
    }
}

/// Opens a folder, for whose operations nobody waits longer than that.
pub(crate) fn posix(root: &Path, patience: Patience) -> Result<Opened, RepositoryError> {
    let refused =
        |message: String| RepositoryError::Store { context: format!("opening {}", root.display()), message };
    std::fs::create_dir_all(root.join("locks")).map_err(|error| refused(error.to_string()))?;
    let store = LocalFileSystem::new_with_prefix(root).map_err(|error| refused(error.to_string()))?;
    let root = root.canonicalize().map_err(|error| refused(error.to_string()))?;
    let unbounded = Arc::new(store.with_fsync(true));
    let store = Arc::new(Patient { store: Arc::clone(&unbounded), patience: patience.clone() });
    Ok(Opened { store, folder: Some(Folder { root, unbounded, patience }) })
}

fn oss(config: &OssConfig) -> Result<Opened, RepositoryError> {
    let missing = |what: &str| {
        RepositoryError::Config(format!("backend.oss.{what} is missing: set it in the configuration"))
    };
    if config.region.is_empty() {
        return Err(missing("region"));
    }
    if config.bucket.is_empty() {
        return Err(missing("bucket"));
    }
    let retry = RetryConfig { retry_timeout: TRIED_FOR, ..RetryConfig::default() };
    let store = config
        .reached()
        .open(retry, ClientOptions::default().with_timeout(ATTEMPT))
        .map_err(|error| RepositoryError::Config(format!("backend.oss: {error}")))?;
    Ok(Opened { store, folder: None })
}
