//! Templates, their builds and tags, and `/snapshots`.

mod builds;
mod catalog;
mod files;
mod shown;
mod snapshots;
mod tags;

use axum::Router;
use utoipa::OpenApi;

use crate::state::AppState;

/// The routes that need a key.
pub fn router() -> Router<AppState> {
    catalog::router()
        .merge(builds::router())
        .merge(tags::router())
        .merge(snapshots::router())
        .merge(files::router())
}

/// The route that carries its own authorisation: an upload to a signed URL.
pub fn public_router() -> Router<AppState> {
    files::public_router()
}

/// Their part of the API's description.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut document = catalog::Doc::openapi();
    for part in
        [builds::Doc::openapi(), tags::Doc::openapi(), snapshots::Doc::openapi(), files::Doc::openapi()]
    {
        document.merge(part);
    }
    document
}
