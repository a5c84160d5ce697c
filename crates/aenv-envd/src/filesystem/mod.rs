//! The filesystem service: metadata, folders, moves, watches.

mod entry;
mod inotify;
mod operations;
mod service;
mod watch;
mod watchers;

use std::{io, path::PathBuf};

use connectrpc::{ConnectError, ErrorCode};
use thiserror::Error;

pub use service::Service;
pub use watchers::Watchers;

use crate::{paths::PathError, users::LookupError};

/// Why a call of the filesystem service failed.
#[derive(Debug, Error)]
pub enum FilesystemError {
    /// The user is not there.
    #[error("{0}")]
    User(#[from] LookupError),
    /// The `Authorization` header cannot be read.
    #[error("{0}")]
    Credentials(&'static str),
    /// The path has no valid form.
    #[error("{0}")]
    Path(#[from] PathError),
    /// Nothing is there.
    #[error("{what} not found: {}", path.display())]
    Missing {
        /// `file`, `directory`, `source file`.
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// Nothing to watch is there.
    #[error("path {} not found: no such file or directory", .0.display())]
    NothingToWatch(PathBuf),
    /// Something else than a folder is to be watched.
    #[error("path {} not a directory", .0.display())]
    WatchesNoFolder(PathBuf),
    /// Changes made by other machines would not be seen.
    #[error("cannot watch path on network filesystem: {}", .0.display())]
    NetworkMount(PathBuf),
    /// Something else than a folder is to be listed.
    #[error("path is not a directory: {}", .0.display())]
    NoFolder(PathBuf),
    /// The folder is there already.
    #[error("directory already exists: {}", .0.display())]
    FolderExists(PathBuf),
    /// Something else is in a folder's place.
    #[error("path already exists but it is not a directory: {}", .0.display())]
    NotAFolder(PathBuf),
    /// The watcher is not there.
    #[error("watcher with id {0} not found")]
    NoWatcher(String),
    /// There are too many watchers.
    #[error("{0} watchers exist: remove some before creating more")]
    TooManyWatchers(usize),
    /// The kernel has no more watches.
    #[error("cannot watch {}: {message}", path.display())]
    Watch {
        /// The folder.
        path: PathBuf,
        /// Why.
        message: String,
    },
    /// The filesystem refused.
    #[error("error with {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The refusal.
        source: io::Error,
    },
}

impl FilesystemError {
    /// Sorts an error of the filesystem; `what` was looked for.
    fn io(what: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { what, path },
            _ => Self::Io { path, source },
        }
    }

    fn code(&self) -> ErrorCode {
        match self {
            Self::User(LookupError::Unknown(_)) | Self::Credentials(_) => ErrorCode::Unauthenticated,
            Self::Missing { .. } | Self::NothingToWatch(_) | Self::NoWatcher(_) => ErrorCode::NotFound,
            Self::FolderExists(_) => ErrorCode::AlreadyExists,
            Self::Path(_)
            | Self::WatchesNoFolder(_)
            | Self::NetworkMount(_)
            | Self::NoFolder(_)
            | Self::NotAFolder(_) => ErrorCode::InvalidArgument,
            Self::TooManyWatchers(_) | Self::Watch { .. } => ErrorCode::ResourceExhausted,
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    ErrorCode::PermissionDenied
                }
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::ResourceExhausted,
                io::ErrorKind::NotADirectory
                | io::ErrorKind::IsADirectory
                | io::ErrorKind::InvalidFilename
                | io::ErrorKind::InvalidInput => ErrorCode::InvalidArgument,
                io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => ErrorCode::AlreadyExists,
                _ => ErrorCode::Internal,
            },
            Self::User(LookupError::Unreadable(_)) => ErrorCode::Internal,
        }
    }
}

impl From<FilesystemError> for ConnectError {
    fn from(error: FilesystemError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
