//! `/files`: contents of files, up and down, as streams of bounded pieces.

mod compose;
mod compression;
mod download;
mod metadata;
mod upload;
mod writer;

use std::{io, path::PathBuf, sync::Arc};

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use thiserror::Error;

pub use compose::compose;
pub use download::download;
pub use metadata::{MetadataError, read as read_metadata};
pub use upload::upload;
pub use writer::make_folders;

use crate::{
    access::{self, error_response},
    guest::Guest,
    paths::{self, PathError},
    users::{LookupError, User},
};

/// The query of `/files`. The signature was checked before.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct FilesQuery {
    path: Option<String>,
    username: Option<String>,
}

/// Why a file cannot be read or written.
#[derive(Debug, Error)]
pub enum FilesError {
    /// The request is wrong in itself.
    #[error("{0}")]
    Invalid(String),
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
    #[error("path '{}' does not exist", .0.display())]
    Missing(PathBuf),
    /// A folder is there.
    #[error("path '{}' is a directory", .0.display())]
    Directory(PathBuf),
    /// Something is there that has no contents, such as a socket.
    #[error("path '{}' is not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// No form that the client accepts can be sent.
    #[error("no acceptable encoding: this file can be sent as identity or gzip")]
    NotAcceptable,
    /// The disk or the quota is used up.
    #[error("not enough disk space available to write '{}'", .0.display())]
    DiskFull(PathBuf),
    /// The metadata headers are wrong.
    #[error("{0}")]
    Metadata(#[from] MetadataError),
    /// The client stopped sending.
    #[error("the upload broke off: {0}")]
    BrokenOff(String),
    /// The filesystem refused.
    #[error("error with '{}': {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The refusal.
        source: io::Error,
    },
}

impl FilesError {
    /// Sorts an error of the filesystem.
    pub fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing(path),
            io::ErrorKind::IsADirectory => Self::Directory(path),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull(path),
            _ => Self::Io { path, source },
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_)
            | Self::Path(_)
            | Self::Directory(_)
            | Self::NotRegular(_)
            | Self::Metadata(_)
            | Self::BrokenOff(_) => StatusCode::BAD_REQUEST,
            Self::User(LookupError::Unknown(_)) | Self::Credentials(_) => StatusCode::UNAUTHORIZED,
            Self::Missing(_) => StatusCode::NOT_FOUND,
            Self::NotAcceptable => StatusCode::NOT_ACCEPTABLE,
            Self::DiskFull(_) => StatusCode::INSUFFICIENT_STORAGE,
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename => StatusCode::BAD_REQUEST,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            },
            Self::User(LookupError::Unreadable(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for FilesError {
    fn into_response(self) -> Response {
        let status = self.status();
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(error = %self, "a request for a file failed");
        }
        error_response(status, self.to_string())
    }
}

/// The user of a request: the query's, else that of the `Authorization` header, else the default.
fn user_of(guest: &Guest, query: &FilesQuery, headers: &axum::http::HeaderMap) -> Result<User, FilesError> {
    let basic = access::basic_user(headers).map_err(FilesError::Credentials)?;
    let name = query.username.as_deref().filter(|name| !name.is_empty()).or(basic.as_deref());
    Ok(guest.user(name)?)
}

fn resolve(guest: &Guest, path: &str, user: &User) -> Result<PathBuf, FilesError> {
    Ok(paths::resolve(path, user, guest.settings().default_workdir.as_deref())?)
}

/// Runs what waits for the filesystem beside the thread that serves.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FilesError> + Send + 'static,
) -> Result<T, FilesError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(FilesError::Io { path: PathBuf::new(), source: io::Error::other(error) }),
    }
}

/// Shared by the handlers.
type Shared = Arc<Guest>;
