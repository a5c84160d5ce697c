//! Templates: list, show, publish, delete.

use aenv_api::{ErrorBody, Template, TemplateAlias, TemplateUpdate, TemplateUpdated, TemplateWithBuilds};
use aenv_template::{Kind, catalog::Visibility};
use axum::{
    Json as Answer, Router,
    extract::State,
    routing::{get, patch},
};
use http::StatusCode;

use super::shown;
use crate::{
    extract::{JsonOr, PathText, Query},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub(super) fn router() -> Router<AppState> {
    Router::new()
        .route("/templates", get(list))
        .route("/v2/templates", get(list))
        .route("/default-templates", get(list))
        .route("/templates/aliases/{alias}", get(alias))
        .route("/templates/{id}", get(show).delete(delete).patch(update))
        .route("/v2/templates/{id}", patch(update))
}

/// Templates of the caller's team, newest first.
#[utoipa::path(get, path = "/v2/templates", tag = "templates", responses((status = 200, body = [Template]), (status = 401, body = ErrorBody)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Result<Answer<Vec<Template>>, Failure> {
    let spawned = state.spawns.all().await?;
    let all = state.templates.catalog.list(&caller.team).await?;
    let templates = all.iter().filter(|template| template.kind == Kind::Template);
    let shown = templates.filter_map(|template| {
        let counts = spawned.get(template.id.as_str()).copied().unwrap_or_default();
        shown::template(&caller.team, template, counts)
    });
    Ok(Answer(shown.collect()))
}

/// A template and its builds.
#[utoipa::path(
    get, path = "/templates/{id}", tag = "templates", params(("id" = String, Path)),
    responses((status = 200, body = TemplateWithBuilds), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
    query: Query,
) -> Result<Answer<TemplateWithBuilds>, Failure> {
    let limit = query.integer_in("limit", 1..=100)?.unwrap_or(100);
    let found = state.templates.catalog.get(&caller.team, &id).await?;
    let counts = state.spawns.all().await?.get(found.id.as_str()).copied().unwrap_or_default();
    let template = shown::template(&caller.team, &found, counts)
        .ok_or_else(|| Failure::from(aenv_template::TemplateError::NotReady(id)))?;
    let newest = found.builds.iter().rev().take(usize::try_from(limit).unwrap_or(100));
    Ok(Answer(TemplateWithBuilds { template, builds: newest.map(shown::build).collect() }))
}

/// Whether a name exists.
#[utoipa::path(
    get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = TemplateAlias), (status = 404, body = ErrorBody))
)]
async fn alias(
    State(state): State<AppState>,
    caller: Caller,
    PathText(alias): PathText,
) -> Result<Answer<TemplateAlias>, Failure> {
    let found = state.templates.catalog.get(&caller.team, &alias).await?;
    Ok(Answer(TemplateAlias { template_id: found.id.to_string(), public: found.public }))
}

/// Shows a template to other teams, or hides it.
#[utoipa::path(
    patch, path = "/v2/templates/{id}", tag = "templates", params(("id" = String, Path)), request_body = TemplateUpdate,
    responses((status = 200, body = TemplateUpdated), (status = 404, body = ErrorBody))
)]
async fn update(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
    JsonOr(body): JsonOr<TemplateUpdate>,
) -> Result<Answer<TemplateUpdated>, Failure> {
    let template = match body.public {
        Some(public) => {
            let visibility = if public { Visibility::Public } else { Visibility::Private };
            state.templates.catalog.set_public(&caller.team, &id, visibility).await?
        }
        None => state.templates.catalog.get(&caller.team, &id).await?,
    };
    Ok(Answer(TemplateUpdated { names: shown::names(&caller.team, &template) }))
}

/// Removes a template, or a snapshot, and ends its builds.
#[utoipa::path(
    delete, path = "/templates/{id}", tag = "templates", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody))
)]
async fn delete(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<StatusCode, Failure> {
    let found = state.templates.catalog.get(&caller.team, &id).await?;
    state.templates.catalog.delete(&caller.team, &id).await?;
    state.templates.builds.forget(&found);
    for checkpoint in found.builds.iter().filter_map(|build| build.checkpoint.as_ref()) {
        state.orchestrator.forget_standbys(checkpoint);
    }
    Ok(StatusCode::NO_CONTENT)
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, show, alias, update, delete))]
pub(super) struct Doc;
