//! `POST /files/compose`: several files become one. Clients upload a large file in parts and then put it together.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{OpenOptionsExt as _, fchown},
    path::{Path, PathBuf},
};

use axum::{Json, extract::State, http::HeaderMap};
use serde::Deserialize;

use super::{
    FilesError, FilesQuery, Shared, blocking,
    metadata::{self, Metadata},
    resolve,
    upload::Written,
    user_of, writer,
};
use crate::users::User;

/// What to put together.
#[derive(Debug, Deserialize)]
pub struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
    #[serde(default)]
    username: Option<String>,
}

/// Answers `POST /files/compose`.
pub async fn compose(
    State(guest): State<Shared>,
    headers: HeaderMap,
    Json(request): Json<ComposeRequest>,
) -> Result<Json<Written>, FilesError> {
    if request.source_paths.is_empty() || request.destination.is_empty() {
        return Err(FilesError::Invalid("source_paths and destination must not be empty".to_owned()));
    }
    let query = FilesQuery { path: None, username: request.username };
    let user = user_of(&guest, &query, &headers)?;
    let metadata = metadata::from_headers(&headers)?;
    let destination = resolve(&guest, &request.destination, &user)?;
    let sources: Result<Vec<PathBuf>, _> =
        request.source_paths.iter().map(|path| resolve(&guest, path, &user)).collect();
    let sources = sources?;
    if sources.contains(&destination) {
        return Err(FilesError::Invalid("the destination cannot be one of the sources".to_owned()));
    }
    let written = Written::file(destination.clone(), metadata.clone());
    blocking(move || concatenate(&sources, &destination, &user, &metadata)).await?;
    Ok(Json(written))
}

/// Writes beside the destination and renames, so that the sources are removed only after all of them are in one place.
fn concatenate(
    sources: &[PathBuf],
    destination: &Path,
    user: &User,
    metadata: &Metadata,
) -> Result<(), FilesError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| FilesError::io(path, source)
    };
    if destination.is_dir() {
        return Err(FilesError::Directory(destination.to_owned()));
    }
    for source in sources {
        let found = fs::metadata(source).map_err(io(source))?;
        if !found.is_file() {
            return Err(if found.is_dir() {
                FilesError::Directory(source.clone())
            } else {
                FilesError::NotRegular(source.clone())
            });
        }
    }
    let folder = destination.parent().unwrap_or(Path::new("/"));
    writer::make_folders(folder, user).map_err(io(folder))?;
    let beside = destination.with_file_name(format!(".compose-{:016x}", rand::random::<u64>()));
    let composed = (|| {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o666).open(&beside).map_err(io(&beside))?;
        for source in sources {
            let mut part = File::open(source).map_err(io(source))?;
            io::copy(&mut part, &mut file).map_err(io(destination))?;
        }
        fchown(&file, Some(user.uid), Some(user.gid)).map_err(io(destination))?;
        metadata::replace(&beside, metadata).map_err(io(destination))?;
        fs::rename(&beside, destination).map_err(io(destination))
    })();
    if composed.is_err() {
        // The error that matters is the first.
        let _ = fs::remove_file(&beside);
        return composed;
    }
    for source in sources {
        match fs::remove_file(source) {
            // A source that was named twice.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(io(source))?,
        }
    }
    Ok(())
}
