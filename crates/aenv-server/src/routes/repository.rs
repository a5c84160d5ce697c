//! `/admin/repository`: garbage collection, checks and accounts of the repository, for the server's first key.

use std::time::Duration;

use aenv_api::{ApiError, CheckRepository, CollectRepository, ErrorBody, RepositoryUsage, TeamUsage};
use aenv_repository::{Collection, Depth, DryRun};
use axum::{
    Json as Answer, Router,
    extract::State,
    response::Response,
    routing::{get, post},
};

use super::lines;
use crate::{
    extract::JsonOr,
    failure::Failure,
    keys::{Caller, Role},
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/admin/repository/gc", post(collect))
        .route("/admin/repository/fsck", post(check))
        .route("/admin/repository/usage", get(usage))
}

/// Refuses every key but the server's first.
pub fn operator(caller: &Caller) -> Result<(), ApiError> {
    match caller.role {
        Role::Operator => Ok(()),
        Role::Member => Err(ApiError::forbidden("only the server's first API key may do this")),
    }
}

/// Removes what no template and no snapshot needs. Answers with lines of JSON: `{"progress": ...}` while it works, at last
/// `{"result": ...}` or `{"error": ...}`.
#[utoipa::path(
    post, path = "/admin/repository/gc", tag = "admin", request_body = CollectRepository,
    responses(
        (status = 200, content_type = "application/x-ndjson", body = String), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 409, body = ErrorBody),
    )
)]
async fn collect(
    State(state): State<AppState>,
    caller: Caller,
    JsonOr(body): JsonOr<CollectRepository>,
) -> Result<Response, Failure> {
    operator(&caller)?;
    let grace = body.grace_secs.unwrap_or(state.config.snapshot.gc_grace_secs);
    let dry_run = if body.dry_run { DryRun::Yes } else { DryRun::No };
    let collected = state.upkeep.collect(Collection::new(Duration::from_secs(grace), dry_run))?;
    Ok(lines(collected))
}

/// Looks for missing, damaged and unneeded parts of the repository, and says which templates and snapshots each takes with it.
/// Answers in lines, as the collection does; the result is a list.
#[utoipa::path(
    post, path = "/admin/repository/fsck", tag = "admin", request_body = CheckRepository,
    responses(
        (status = 200, content_type = "application/x-ndjson", body = String), (status = 401, body = ErrorBody),
        (status = 403, body = ErrorBody), (status = 409, body = ErrorBody),
    )
)]
async fn check(
    State(state): State<AppState>,
    caller: Caller,
    JsonOr(body): JsonOr<CheckRepository>,
) -> Result<Response, Failure> {
    operator(&caller)?;
    Ok(lines(state.upkeep.check(if body.deep { Depth::Bytes } else { Depth::Names })?))
}

/// What the repository holds, and for whom.
#[utoipa::path(
    get, path = "/admin/repository/usage", tag = "admin",
    responses((status = 200, body = RepositoryUsage), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody))
)]
async fn usage(State(state): State<AppState>, caller: Caller) -> Result<Answer<RepositoryUsage>, Failure> {
    operator(&caller)?;
    let account = state.templates.catalog.account().await?;
    let team = |(team, usage): (aenv_types::TeamId, aenv_template::TeamUsage)| TeamUsage {
        team: team.to_string(),
        templates: usage.templates,
        snapshots: usage.snapshots,
        paused: usage.paused,
        checkpoints: usage.checkpoints,
        bytes: usage.bytes,
    };
    Ok(Answer(RepositoryUsage {
        checkpoints: account.total.checkpoints,
        blobs: account.total.blobs,
        bytes: account.total.bytes,
        bytes_unshared: account.total.bytes_unshared,
        bytes_unreferenced: account.total.bytes_unreferenced,
        teams: account.teams.into_iter().map(team).collect(),
    }))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(collect, check, usage))]
pub struct Doc;
