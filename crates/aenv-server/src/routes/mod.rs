//! The control plane: one file for each resource.

pub mod api_keys;
pub mod cold;
pub mod create;
pub mod images;
pub mod lifecycle;
pub mod list;
pub mod logs;
pub mod metrics;
pub mod network;
pub mod nodes;
pub mod repository;
pub mod sandboxes;
pub mod secrets;
pub mod snapshots;
pub mod system;
pub mod teams;
pub mod templates;
pub mod volume_content;
pub mod volumes;

use std::future::Future;

use aenv_api::ApiError;
use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, header};

use crate::{failure::Failure, state::AppState, telling::Said};

/// Routes that need a key.
pub fn private() -> Router<AppState> {
    Router::new()
        .merge(create::router())
        .merge(cold::router())
        .merge(images::router())
        .merge(sandboxes::router())
        .merge(lifecycle::router())
        .merge(snapshots::router())
        .merge(network::router())
        .merge(metrics::router())
        .merge(logs::router())
        .merge(nodes::router())
        .merge(teams::router())
        .merge(api_keys::router())
        .merge(repository::router())
        .merge(templates::router())
        .merge(volumes::router())
        .merge(secrets::router())
}

/// Answers with what a long operation says, in lines of JSON as they come.
pub fn lines(said: Said) -> Response {
    let lines = stream::unfold(said, |mut said| async move {
        let line = format!("{}\n", said.recv().await?);
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), said))
    });
    let kind = HeaderValue::from_static("application/x-ndjson");
    ([(header::CONTENT_TYPE, kind)], Body::from_stream(lines)).into_response()
}

/// Runs `work` to its end, whether or not the client still waits for it.
pub async fn detached<T, E>(work: impl Future<Output = Result<T, E>> + Send + 'static) -> Result<T, Failure>
where
    T: Send + 'static,
    E: Into<Failure> + Send + 'static,
{
    use tracing::Instrument;
    match tokio::spawn(work.in_current_span()).await {
        Ok(outcome) => outcome.map_err(Into::into),
        Err(error) => {
            tracing::error!(%error, "a request's task ended early");
            Err(ApiError::internal("the operation broke off inside the server; its log says why").into())
        }
    }
}
