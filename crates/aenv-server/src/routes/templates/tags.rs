//! Tags of templates.

use aenv_api::{AssignTags, AssignedTags, DeleteTags, ErrorBody, TagExists, TagsCount, TemplateTag};
use aenv_template::{Reference, TagName};
use axum::{
    Json as Answer, Router,
    extract::State,
    routing::{get, post},
};
use http::StatusCode;

use crate::{
    convert::shown_time,
    extract::{Json, PathText, Query},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub(super) fn router() -> Router<AppState> {
    Router::new()
        .route("/templates/tags", post(assign).delete(remove))
        .route("/templates/{id}/tags", get(list))
        .route("/templates/{id}/tags/count", get(count))
        .route("/templates/{id}/tags/exists", get(exists))
}

fn parse(tags: &[String]) -> Result<Vec<TagName>, Failure> {
    // `name:tag` is taken too: the tag of it counts.
    let parse = |text: &String| match text.split_once(':') {
        Some(_) => Ok(text.parse::<Reference>()?.tag_or_default()),
        None => Ok(text.parse()?),
    };
    tags.iter().map(parse).collect()
}

/// Lets further tags stand for the build of `target`.
#[utoipa::path(
    post, path = "/templates/tags", tag = "templates", request_body = AssignTags,
    responses((status = 201, body = AssignedTags), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn assign(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<AssignTags>,
) -> Result<(StatusCode, Answer<AssignedTags>), Failure> {
    let tags = parse(&body.tags)?;
    let build = state.templates.catalog.assign_tags(&caller.team, &body.target, &tags).await?;
    let tags = tags.iter().map(ToString::to_string).collect();
    Ok((StatusCode::CREATED, Answer(AssignedTags { tags, build_id: build.to_string() })))
}

/// Removes tags.
#[utoipa::path(
    delete, path = "/templates/tags", tag = "templates", request_body = DeleteTags,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<DeleteTags>,
) -> Result<StatusCode, Failure> {
    state.templates.catalog.remove_tags(&caller.team, &body.name, &parse(&body.tags)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Tags of a template, newest first.
#[utoipa::path(
    get, path = "/templates/{id}/tags", tag = "templates", params(("id" = String, Path)),
    responses((status = 200, body = [TemplateTag]), (status = 404, body = ErrorBody))
)]
async fn list(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<Answer<Vec<TemplateTag>>, Failure> {
    let template = state.templates.catalog.get(&caller.team, &id).await?;
    let mut tags: Vec<_> = template.tags.iter().collect();
    tags.sort_by_key(|tag| std::cmp::Reverse(tag.1.assigned_at));
    let shown = tags.into_iter().map(|(name, tag)| TemplateTag {
        tag: name.to_string(),
        build_id: tag.build.to_string(),
        created_at: shown_time(tag.assigned_at),
    });
    Ok(Answer(shown.collect()))
}

/// How many tags a template has.
#[utoipa::path(
    get, path = "/templates/{id}/tags/count", tag = "templates", params(("id" = String, Path)),
    responses((status = 200, body = TagsCount), (status = 404, body = ErrorBody))
)]
async fn count(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<Answer<TagsCount>, Failure> {
    let template = state.templates.catalog.get(&caller.team, &id).await?;
    Ok(Answer(TagsCount { total: template.tags.len() }))
}

/// Whether a template has a tag.
#[utoipa::path(
    get, path = "/templates/{id}/tags/exists", tag = "templates", params(("id" = String, Path), ("tag" = String, Query)),
    responses((status = 200, body = TagExists), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn exists(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
    query: Query,
) -> Result<Answer<TagExists>, Failure> {
    let tag: TagName = query.get("tag").unwrap_or_default().parse()?;
    let template = state.templates.catalog.get(&caller.team, &id).await?;
    Ok(Answer(TagExists { exists: template.tags.contains_key(&tag), normalized_tag: tag.to_string() }))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(assign, remove, list, count, exists))]
pub(super) struct Doc;
