//! `POST /sandboxes/{id}/snapshots`.

use aenv_api::{ErrorBody, SnapshotInfo, SnapshotRequest};
use aenv_orchestrator::PauseMode;
use axum::{
    Extension, Json, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use http::StatusCode;

use super::detached;
use crate::{
    audit::Made,
    convert,
    events::Event,
    extract::{JsonOr, SandboxPath},
    failure::Failure,
    keys::Caller,
    limits::{self, Published},
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/sandboxes/{id}/snapshots", post(take))
}

/// Takes a snapshot of a sandbox, which goes on, and publishes it.
#[utoipa::path(
    post, path = "/sandboxes/{id}/snapshots", tag = "snapshots", params(("id" = String, Path)), request_body = SnapshotRequest,
    responses(
        (status = 201, body = SnapshotInfo), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 507, body = ErrorBody),
    )
)]
async fn take(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<SnapshotRequest>,
) -> Result<Response, Failure> {
    state.orchestrator.get(&caller.team, &id)?;
    detached(async move {
        let mode = if body.memory == Some(false) { PauseMode::Filesystem } else { PauseMode::Full };
        let name = body.name.as_deref().filter(|name| !name.is_empty());
        let _turn = limits::publish(&state, &caller, Published::Snapshot, name).await?;
        let checkpoint = state.orchestrator.capture(&caller.team, &id, mode).await?;
        let captured = checkpoint.id.clone();
        let published = state.templates.catalog.publish_snapshot(&caller.team, checkpoint, name).await;
        state.orchestrator.release(&captured);
        let snapshot = published?;
        state.events.push(Event::info(&caller.team, &id, "snapshot taken").with("snapshot", &snapshot.id));
        let made = Extension(Made(snapshot.id.clone()));
        Ok::<_, Failure>((StatusCode::CREATED, made, Json(convert::snapshot(&snapshot))).into_response())
    })
    .await
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(take))]
pub struct Doc;
