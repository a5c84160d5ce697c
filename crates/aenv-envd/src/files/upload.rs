//! `POST /files`: one file as the body, or several as parts of a form.

use std::{collections::HashSet, io, path::PathBuf, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{DefaultBodyLimit, FromRequest as _, Multipart, Query, Request, State},
    http::{HeaderMap, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream::BoxStream};
use serde::Serialize;
use tokio::time::timeout;

use super::{
    FilesError, FilesQuery, Shared, compression,
    metadata::{self, Metadata},
    resolve, user_of, writer,
};
use crate::{guest::Guest, users::User};

/// After a refusal the rest of the body is read for this long and this far, because a client that is still sending does not
/// read answers.
const DRAIN_BOUND: Duration = Duration::from_secs(5);
const DRAIN_BYTES: usize = 64 << 20;

/// What was written.
#[derive(Debug, Serialize)]
pub struct Written {
    name: String,
    path: PathBuf,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Metadata::is_empty")]
    metadata: Metadata,
}

impl Written {
    /// A file that was written.
    pub fn file(path: PathBuf, metadata: Metadata) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { name, path, r#type: "file", metadata }
    }
}

/// Answers `POST /files`.
pub async fn upload(
    State(guest): State<Shared>,
    Query(query): Query<FilesQuery>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let (mut body, rest) = shared(body);
    let written = match decoded(&parts.headers, &mut body) {
        Ok(contents) => receive(&guest, &query, &parts.headers, contents).await,
        Err(error) => Err(error),
    };
    match written {
        Ok(written) => Json(written).into_response(),
        Err(error) => {
            drop(body);
            let _ = timeout(DRAIN_BOUND, drain(rest)).await;
            error.into_response()
        }
    }
}

async fn receive(
    guest: &Guest,
    query: &FilesQuery,
    headers: &HeaderMap,
    contents: BoxStream<'static, io::Result<Bytes>>,
) -> Result<Vec<Written>, FilesError> {
    let user = user_of(guest, query, headers)?;
    let metadata = metadata::from_headers(headers)?;
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match media_type.as_str() {
        "application/octet-stream" => {
            let path = query.path.as_deref().filter(|path| !path.is_empty());
            let path = path.ok_or_else(|| {
                FilesError::Invalid("an octet-stream needs the query parameter 'path'".to_owned())
            })?;
            let path = resolve(guest, path, &user)?;
            writer::write(path.clone(), user, metadata.clone(), contents).await?;
            Ok(vec![Written::file(path, metadata)])
        }
        "multipart/form-data" => {
            let form = form(content_type, contents).await?;
            receive_form(guest, query, user, metadata, form).await
        }
        other => Err(FilesError::Invalid(format!(
            "cannot take Content-Type '{other}': send multipart/form-data or application/octet-stream"
        ))),
    }
}

async fn form(
    content_type: &str,
    contents: BoxStream<'static, io::Result<Bytes>>,
) -> Result<Multipart, FilesError> {
    let request = axum::http::Request::post("/")
        .header(header::CONTENT_TYPE, content_type)
        .body(Body::from_stream(contents));
    let mut request = request.map_err(|error| FilesError::Invalid(error.to_string()))?;
    // Streams have no limit; the extractor's own is for forms that are held in memory.
    DefaultBodyLimit::disable().apply(&mut request);
    Multipart::from_request(request, &()).await.map_err(|error| FilesError::Invalid(error.body_text()))
}

async fn receive_form(
    guest: &Guest,
    query: &FilesQuery,
    user: User,
    metadata: Metadata,
    mut form: Multipart,
) -> Result<Vec<Written>, FilesError> {
    let mut written = Vec::new();
    let mut seen = HashSet::new();
    while let Some(part) =
        form.next_field().await.map_err(|error| FilesError::BrokenOff(error.body_text()))?
    {
        if part.name() != Some("file") {
            continue;
        }
        let given = query.path.as_deref().filter(|path| !path.is_empty()).or(part.file_name());
        let path = given.filter(|path| !path.is_empty()).ok_or_else(|| {
            FilesError::Invalid(
                "a part named 'file' needs a filename, or the request the query parameter 'path'".to_owned(),
            )
        })?;
        let path = resolve(guest, path, &user)?;
        if !seen.insert(path.clone()) {
            let message = format!(
                "'{}' is in the request more than once: give each file a path of its own",
                path.display()
            );
            return Err(FilesError::Invalid(message));
        }
        let contents = part.map_err(|error| io::Error::other(error.body_text()));
        writer::write(path.clone(), user.clone(), metadata.clone(), contents).await?;
        written.push(Written::file(path, metadata.clone()));
    }
    Ok(written)
}

/// The body without its `Content-Encoding`.
fn decoded(
    headers: &HeaderMap,
    body: &mut Option<SharedBody>,
) -> Result<BoxStream<'static, io::Result<Bytes>>, FilesError> {
    let body = body.take().ok_or_else(|| FilesError::Invalid("the body was read already".to_owned()))?;
    let encoding =
        headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match encoding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(body.boxed()),
        "gzip" | "x-gzip" => Ok(compression::inflate(body).boxed()),
        other => {
            Err(FilesError::Invalid(format!("cannot take Content-Encoding '{other}': send gzip or none")))
        }
    }
}

type Rest = std::sync::Arc<tokio::sync::Mutex<axum::body::BodyDataStream>>;

/// A body that can be read on after the one who read it has given up.
struct SharedBody(Rest);

fn shared(body: Body) -> (Option<SharedBody>, Rest) {
    let rest: Rest = std::sync::Arc::new(tokio::sync::Mutex::new(body.into_data_stream()));
    (Some(SharedBody(rest.clone())), rest)
}

impl Stream for SharedBody {
    type Item = io::Result<Bytes>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        match self.0.try_lock() {
            Ok(mut body) => body.poll_next_unpin(context).map_err(io::Error::other),
            Err(_) => {
                std::task::Poll::Ready(Some(Err(io::Error::other("the body is being read by another"))))
            }
        }
    }
}

async fn drain(rest: Rest) {
    let mut rest = rest.lock().await;
    let mut drained = 0;
    while let Some(Ok(piece)) = rest.next().await {
        drained += piece.len();
        if drained > DRAIN_BYTES {
            return;
        }
    }
}
