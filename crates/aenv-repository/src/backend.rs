//! The two backends, opened.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use object_store::{ClientOptions, ObjectStore, RetryConfig, local::LocalFileSystem};

use crate::{Backend, OssConfig, RepositoryError};

/// An open backend.
#[derive(Clone)]
pub(crate) struct Opened {
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// Its folder, if it is a filesystem.
    pub root: Option<PathBuf>,
}

/// Opens a backend; makes the folder of a `posix_fs` one.
pub(crate) fn open(backend: &Backend) -> Result<Opened, RepositoryError> {
    match backend {
        Backend::PosixFs { root } => posix(root),
        Backend::Oss(config) => oss(config),
    }
}

fn posix(root: &Path) -> Result<Opened, RepositoryError> {
    let refused =
        |message: String| RepositoryError::Store { context: format!("opening {}", root.display()), message };
    std::fs::create_dir_all(root.join("locks")).map_err(|error| refused(error.to_string()))?;
    let store = LocalFileSystem::new_with_prefix(root).map_err(|error| refused(error.to_string()))?;
    let root = root.canonicalize().map_err(|error| refused(error.to_string()))?;
    Ok(Opened { store: Arc::new(store.with_fsync(true)), root: Some(root) })
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
    let store = config
        .reached()
        .open(RetryConfig::default(), ClientOptions::default())
        .map_err(|error| RepositoryError::Config(format!("backend.oss: {error}")))?;
    Ok(Opened { store, root: None })
}
