//! `GET /sandboxes`, `GET /v2/sandboxes`, `GET` and `DELETE /sandboxes/{id}`.

use aenv_api::{ErrorBody, ListedSandbox, NEXT_TOKEN_HEADER, SandboxDetail};
use aenv_orchestrator::SandboxState;
use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::get,
};
use http::{HeaderValue, StatusCode};

use super::{detached, list};
use crate::{
    convert,
    events::Event,
    extract::{Query, SandboxPath},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/sandboxes", get(list_v1))
        .route("/v2/sandboxes", get(list_v2))
        .route("/sandboxes/{id}", get(show).delete(kill))
}

/// Running sandboxes, newest first.
#[utoipa::path(
    get, path = "/sandboxes", tag = "sandboxes",
    params(("metadata" = Option<String>, Query, description = "Pairs that must all be there, form-encoded")),
    responses((status = 200, body = [ListedSandbox]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody))
)]
async fn list_v1(State(state): State<AppState>, caller: Caller, query: Query) -> Result<Response, Failure> {
    let wanted = list::parse(&query)?;
    let mut views = state.orchestrator.list(Some(&caller.team));
    views.retain(|view| view.state == SandboxState::Running);
    let page = list::page(views, &wanted.unpaged());
    let body: Vec<ListedSandbox> = page.views.iter().map(convert::listed).collect();
    Ok(Json(body).into_response())
}

/// Sandboxes, by pages.
#[utoipa::path(
    get, path = "/v2/sandboxes", tag = "sandboxes",
    params(
        ("metadata" = Option<String>, Query, description = "Pairs that must all be there, form-encoded"),
        ("state" = Option<String>, Query, description = "running, paused, or both with a comma"),
        ("order" = Option<String>, Query, description = "desc (newest first, the default) or asc"),
        ("startedAfter" = Option<String>, Query, description = "RFC 3339, inclusive"),
        ("template" = Option<String>, Query, description = "Id or name of a template"),
        ("limit" = Option<i64>, Query, description = "1 to 100"),
        ("nextToken" = Option<String>, Query, description = "x-next-token of the page before"),
    ),
    responses(
        (status = 200, body = [ListedSandbox], headers(("x-next-token" = String), ("x-total-running" = i64))),
        (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
    )
)]
async fn list_v2(State(state): State<AppState>, caller: Caller, query: Query) -> Result<Response, Failure> {
    let wanted = list::parse(&query)?;
    let page = list::page(state.orchestrator.list(Some(&caller.team)), &wanted);
    let body: Vec<ListedSandbox> = page.views.iter().map(convert::listed).collect();
    let mut response = Json(body).into_response();
    let headers = response.headers_mut();
    if let Some(token) = page.next.and_then(|token| HeaderValue::try_from(token).ok()) {
        headers.insert(NEXT_TOKEN_HEADER, token);
    }
    headers.insert("x-total-running", HeaderValue::from(page.running));
    Ok(response)
}

/// One sandbox, running or paused; also one that another node has published.
#[utoipa::path(
    get, path = "/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 200, body = SandboxDetail), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<SandboxDetail>, Failure> {
    Ok(Json(convert::detail(&state.orchestrator.find(&caller.team, &id).await?)))
}

/// Removes a sandbox, running or paused, and what it kept.
#[utoipa::path(
    delete, path = "/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 204), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn kill(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, Failure> {
    detached(async move {
        state.orchestrator.kill(&caller.team, &id).await?;
        state.events.push(Event::info(&caller.team, &id, "sandbox deleted"));
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list_v1, list_v2, show, kill))]
pub struct Doc;
