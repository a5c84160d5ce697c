//! `/snapshots`.

use aenv_api::{ErrorBody, NEXT_TOKEN_HEADER, SnapshotInfo};
use axum::{
    Json as Answer, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::get,
};

use crate::{
    convert,
    extract::{PathText, Query, sandbox_id},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub(super) fn router() -> Router<AppState> {
    Router::new().route("/snapshots", get(list)).route("/snapshots/{id}", get(show))
}

/// Snapshots of the caller's team, newest first, a page at a time.
#[utoipa::path(
    get, path = "/snapshots", tag = "snapshots",
    params(("sandboxID" = Option<String>, Query), ("name" = Option<String>, Query), ("limit" = Option<u64>, Query), ("nextToken" = Option<String>, Query)),
    responses((status = 200, body = [SnapshotInfo]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody))
)]
async fn list(State(state): State<AppState>, caller: Caller, query: Query) -> Result<Response, Failure> {
    let sandbox = match query.get("sandboxID").map(sandbox_id) {
        Some(Ok(id)) => Some(id),
        // An id that cannot exist has no snapshots.
        Some(Err(_)) => return Ok(Answer(Vec::<SnapshotInfo>::new()).into_response()),
        None => None,
    };
    let limit = query.integer_in("limit", 1..=100)?.unwrap_or(100) as usize;
    let all = state.templates.catalog.snapshots(&caller.team, sandbox.as_ref(), query.get("name")).await?;
    let after = query.get("nextToken");
    let start = match after {
        Some(token) => all.iter().position(|snapshot| snapshot.id == token).map(|at| at + 1),
        None => Some(0),
    };
    let Some(start) = start else {
        return Err(aenv_api::ApiError::bad_request("Invalid next token").into());
    };
    let page: Vec<_> = all.iter().skip(start).take(limit).collect();
    let next =
        (start + page.len() < all.len()).then(|| page.last().map(|snapshot| snapshot.id.clone())).flatten();
    let mut response = Answer(page.into_iter().map(convert::snapshot).collect::<Vec<_>>()).into_response();
    if let Some(value) = next.and_then(|token| token.parse().ok()) {
        response.headers_mut().insert(NEXT_TOKEN_HEADER, value);
    }
    Ok(response)
}

/// One snapshot, by id or name.
#[utoipa::path(
    get, path = "/snapshots/{id}", tag = "snapshots", params(("id" = String, Path)),
    responses((status = 200, body = SnapshotInfo), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<Answer<SnapshotInfo>, Failure> {
    Ok(Answer(convert::snapshot(&state.templates.catalog.snapshot(&caller.team, &id).await?)))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, show))]
pub(super) struct Doc;
