//! `/volumecontent/{id}`: the files of a volume, for whoever shows its token. Bodies are streamed both ways.

use std::{io, sync::Arc, time::Duration};

use aenv_api::{ApiError, ErrorBody, VolumeEntryStat, VolumeEntryType, VolumeEntryUpdate};
use aenv_types::VolumeId;
use aenv_volume::{
    Volume, VolumePath,
    content::{self, Attributes, ContentError, Entry, Kind, Upload},
};
use axum::{
    Json as Answer, Router,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_util::io::ReaderStream;

use super::volumes::{broke, missing};
use crate::{
    auth,
    extract::{self, Json, PathText, Query},
    failure::Failure,
    state::AppState,
};

/// Pieces of an upload that wait to be written.
const PIECES: usize = 8;
/// Bytes of one piece of a download.
const PIECE: usize = 128 << 10;
/// An upload of which nothing has come for so long has ended.
const IDLE: Duration = Duration::from_secs(120);

/// The routes. They need no API key.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/volumecontent/{id}/file", get(download).put(upload))
        .route("/volumecontent/{id}/dir", get(list).post(make_folder))
        .route("/volumecontent/{id}/path", get(stat).patch(update).delete(remove))
}

/// The volume of a request, if its token is shown.
fn open(state: &AppState, headers: &HeaderMap, id: &str) -> Result<Arc<Volume>, ApiError> {
    let Some(token) = auth::bearer(headers) else {
        return Err(ApiError::unauthorized("no token: send the volume's as Authorization: Bearer"));
    };
    let volume = id.parse::<VolumeId>().ok().and_then(|id| state.volumes.any(&id));
    let volume = volume.ok_or_else(|| missing(id))?;
    if volume.opens_with(token) {
        return Ok(volume);
    }
    Err(ApiError::unauthorized(
        "this token does not open this volume; GET /volumes/{id} shows the one that does",
    ))
}

fn path(query: &Query) -> Result<VolumePath, ApiError> {
    let path = query.get("path").unwrap_or_default().parse();
    path.map_err(|error: aenv_volume::PathError| {
        ApiError::bad_request(error.to_string()).with_code("path_invalid")
    })
}

fn attributes(query: &Query) -> Result<Attributes, ApiError> {
    let id = |name| -> Result<Option<u32>, ApiError> {
        let value = query.integer_in(name, 0..=i64::from(u32::MAX - 1))?;
        Ok(value.and_then(|value| u32::try_from(value).ok()))
    };
    let mode = query.integer_in("mode", 0..=0o7777)?.and_then(|mode| u32::try_from(mode).ok());
    Ok(Attributes { uid: id("uid")?, gid: id("gid")?, mode })
}

fn force(query: &Query) -> Result<bool, ApiError> {
    let choices =
        [("true", true), ("false", false), ("1", true), ("0", false), ("True", true), ("False", false)];
    Ok(query.choice("force", &choices)?.unwrap_or(false))
}

fn shown(entry: &Entry) -> VolumeEntryStat {
    VolumeEntryStat {
        name: entry.path.split().map_or("/".to_owned(), |(_, name)| name.to_owned()),
        kind: match entry.kind {
            Kind::File => VolumeEntryType::File,
            Kind::Directory => VolumeEntryType::Directory,
            Kind::Symlink => VolumeEntryType::Symlink,
            Kind::Unknown => VolumeEntryType::Unknown,
        },
        path: entry.path.to_string(),
        size: entry.size,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        atime: entry.atime,
        mtime: entry.mtime,
        ctime: entry.ctime,
        target: entry.target.clone(),
    }
}

fn refused(error: ContentError) -> ApiError {
    let text = error.to_string();
    match error {
        ContentError::NotFound(_) | ContentError::Kind { .. } => {
            ApiError::not_found(text).with_code("path_not_found")
        }
        ContentError::Exists(_) => ApiError::conflict(text).with_code("path_exists"),
        ContentError::Full(_) => {
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, text).with_code("volume_full")
        }
        ContentError::TooLong => ApiError::bad_request(text).with_code("listing_too_long"),
        ContentError::Io { source, .. } if source.raw_os_error() == Some(nix::libc::ENAMETOOLONG) => {
            ApiError::bad_request(text).with_code("path_invalid")
        }
        ContentError::Io { .. } => {
            tracing::error!(detail = %text, "a volume's file could not be used");
            ApiError::internal("the file could not be read or written; the server's log says why")
        }
    }
}

/// Runs what blocks.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ContentError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(broke)?.map_err(refused)
}

/// The bytes of a file.
#[utoipa::path(
    get, path = "/volumecontent/{id}/file", tag = "volume content", security(("VolumeToken" = [])),
    params(("id" = String, Path), ("path" = String, Query)),
    responses(
        (status = 200, content_type = "application/octet-stream"), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 404, body = ErrorBody),
    )
)]
async fn download(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
) -> Result<Response, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    let (file, size) = blocking(move || content::read(&volume, &path)).await?;
    // No more than was announced, should it grow meanwhile.
    let file = tokio::fs::File::from_std(file).take(size);
    let body = Body::from_stream(ReaderStream::with_capacity(file, PIECE));
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, size.to_string()),
    ];
    Ok((headers, body).into_response())
}

enum Piece {
    Bytes(Bytes),
    End,
}

/// Writes a file: it is there when all of it has come, and not before.
#[utoipa::path(
    put, path = "/volumecontent/{id}/file", tag = "volume content", security(("VolumeToken" = [])),
    params(
        ("id" = String, Path), ("path" = String, Query), ("uid" = Option<u32>, Query), ("gid" = Option<u32>, Query),
        ("mode" = Option<u32>, Query, description = "Permission bits as a decimal number"),
        ("force" = Option<bool>, Query, description = "Replaces a file that is there"),
    ),
    request_body(content = String, content_type = "application/octet-stream"),
    responses(
        (status = 201, body = VolumeEntryStat), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 507, body = ErrorBody),
    )
)]
async fn upload(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
    mut body: Body,
) -> Result<Response, Failure> {
    let checked =
        (|| Ok((open(&state, &headers, &id)?, path(&query)?, attributes(&query)?, force(&query)?)))();
    let (volume, path, attributes, force) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            extract::discard(body).await;
            return Err(Failure(error));
        }
    };
    let (sender, mut pieces) = mpsc::channel(PIECES);
    let work = tokio::task::spawn_blocking(move || {
        let mut upload = Upload::begin(&volume, path.clone(), force)?;
        loop {
            match pieces.blocking_recv() {
                Some(Piece::Bytes(bytes)) => upload.write(&bytes)?,
                Some(Piece::End) => return upload.finish(attributes, force),
                None => return Err(ContentError::Io { path, source: io::ErrorKind::UnexpectedEof.into() }),
            }
        }
    });
    let received = receive(&mut body, &sender).await;
    drop(sender);
    let written = work.await.map_err(broke)?;
    if written.is_err() {
        // Whoever still sends sees the answer only after that.
        extract::discard(body).await;
    }
    received?;
    Ok((StatusCode::CREATED, Answer(shown(&written.map_err(refused)?))).into_response())
}

/// Passes a body on, piece by piece. Ends early, without an error, when nobody takes them any more.
async fn receive(body: &mut Body, pieces: &mpsc::Sender<Piece>) -> Result<(), ApiError> {
    let early = || ApiError::bad_request("the body ended early").with_code("body_incomplete");
    loop {
        let next = tokio::time::timeout(IDLE, body.frame()).await.map_err(|_| early())?;
        let piece = match next {
            None => Piece::End,
            Some(frame) => match frame.map_err(|_| early())?.into_data() {
                Ok(bytes) => Piece::Bytes(bytes),
                Err(_) => continue,
            },
        };
        let last = matches!(piece, Piece::End);
        if pieces.send(piece).await.is_err() || last {
            return Ok(());
        }
    }
}

/// What is in a folder, down to `depth` levels.
#[utoipa::path(
    get, path = "/volumecontent/{id}/dir", tag = "volume content", security(("VolumeToken" = [])),
    params(("id" = String, Path), ("path" = String, Query), ("depth" = Option<u32>, Query)),
    responses(
        (status = 200, body = [VolumeEntryStat]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
async fn list(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
) -> Result<Answer<Vec<VolumeEntryStat>>, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    let depth = query.integer_in("depth", 0..=i64::from(u32::MAX))?.unwrap_or(1);
    let depth = u32::try_from(depth).unwrap_or(1);
    let entries = blocking(move || content::list(&volume, &path, depth)).await?;
    Ok(Answer(entries.iter().map(shown).collect()))
}

/// Makes a folder.
#[utoipa::path(
    post, path = "/volumecontent/{id}/dir", tag = "volume content", security(("VolumeToken" = [])),
    params(
        ("id" = String, Path), ("path" = String, Query), ("uid" = Option<u32>, Query), ("gid" = Option<u32>, Query),
        ("mode" = Option<u32>, Query, description = "Permission bits as a decimal number"),
        ("force" = Option<bool>, Query, description = "Makes missing parents, and takes a folder that is there"),
    ),
    responses(
        (status = 201, body = VolumeEntryStat), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 507, body = ErrorBody),
    )
)]
async fn make_folder(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
) -> Result<Response, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    let (attributes, force) = (attributes(&query)?, force(&query)?);
    let entry = blocking(move || content::make_folder(&volume, &path, attributes, force)).await?;
    Ok((StatusCode::CREATED, Answer(shown(&entry))).into_response())
}

/// What an entry is.
#[utoipa::path(
    get, path = "/volumecontent/{id}/path", tag = "volume content", security(("VolumeToken" = [])),
    params(("id" = String, Path), ("path" = String, Query)),
    responses(
        (status = 200, body = VolumeEntryStat), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
async fn stat(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
) -> Result<Answer<VolumeEntryStat>, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    let entry = blocking(move || content::stat(&volume, &path)).await?;
    Ok(Answer(shown(&entry)))
}

/// Changes owner, group or permissions.
#[utoipa::path(
    patch, path = "/volumecontent/{id}/path", tag = "volume content", security(("VolumeToken" = [])),
    params(("id" = String, Path), ("path" = String, Query)), request_body = VolumeEntryUpdate,
    responses(
        (status = 200, body = VolumeEntryStat), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
async fn update(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
    Json(body): Json<VolumeEntryUpdate>,
) -> Result<Answer<VolumeEntryStat>, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    if body.mode.is_some_and(|mode| mode > 0o7777) || [body.uid, body.gid].contains(&Some(u32::MAX)) {
        return Err(
            ApiError::bad_request("mode has at most 12 bits; uid and gid are below 4294967295").into()
        );
    }
    let attributes = Attributes { uid: body.uid, gid: body.gid, mode: body.mode };
    let entry = blocking(move || content::update(&volume, &path, attributes)).await?;
    Ok(Answer(shown(&entry)))
}

/// Removes an entry and all that is in it.
#[utoipa::path(
    delete, path = "/volumecontent/{id}/path", tag = "volume content", security(("VolumeToken" = [])),
    params(("id" = String, Path), ("path" = String, Query)),
    responses(
        (status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody),
    )
)]
async fn remove(
    State(state): State<AppState>,
    headers: HeaderMap,
    PathText(id): PathText,
    query: Query,
) -> Result<StatusCode, Failure> {
    let (volume, path) = (open(&state, &headers, &id)?, path(&query)?);
    blocking(move || content::remove(&volume, &path)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(download, upload, list, make_folder, stat, update, remove))]
pub struct Doc;
