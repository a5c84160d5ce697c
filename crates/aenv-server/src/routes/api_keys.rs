//! `GET` and `POST /api-keys`, `PATCH` and `DELETE /api-keys/{id}`.

use aenv_api::{ApiError, ApiKey, ApiKeyUpdate, CreatedApiKey, ErrorBody, NewApiKey};
use aenv_types::TeamId;
use axum::{
    Extension, Json as Answer, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::{get, patch},
};
use http::StatusCode;

use crate::{
    audit::Made,
    extract::{Json, PathText},
    failure::Failure,
    keys::{Caller, Role},
    limits,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/api-keys", get(list).post(create))
        .route("/api-keys/{id}", patch(rename).delete(revoke))
}

/// Keys of the caller's team; of all teams, for the server's first key.
#[utoipa::path(get, path = "/api-keys", tag = "account", responses((status = 200, body = [ApiKey]), (status = 401, body = ErrorBody)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Answer<Vec<ApiKey>> {
    Answer(state.keys.list(&caller))
}

/// Makes a key. Its secret is shown only here.
#[utoipa::path(
    post, path = "/api-keys", tag = "account", request_body = NewApiKey,
    responses(
        (status = 201, body = CreatedApiKey), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 403, body = ErrorBody),
    )
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<NewApiKey>,
) -> Result<Response, Failure> {
    let team = match &body.team {
        None => caller.team.clone(),
        Some(text) => text.parse::<TeamId>().map_err(|error| {
            ApiError::bad_request(format!("team has 1 to 64 lowercase letters, digits, - or _: {error}"))
        })?,
    };
    if team != caller.team && caller.role != Role::Operator {
        return Err(ApiError::forbidden("only the server's first key may make keys for another team").into());
    }
    let asked = limits::effective(Role::Member, body.limits, &state.config.limits);
    if caller.role != Role::Operator && !limits::within(&caller.limits, &asked) {
        return Err(ApiError::forbidden("a key cannot have wider limits than the key that makes it").into());
    }
    let (info, key) = state.keys.create(team, &body.name, body.limits).await?;
    let made = Extension(Made(info.id.clone()));
    Ok((StatusCode::CREATED, made, Answer(CreatedApiKey { info, key })).into_response())
}

/// Renames a key.
#[utoipa::path(
    patch, path = "/api-keys/{id}", tag = "account", params(("id" = String, Path)), request_body = ApiKeyUpdate,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn rename(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
    Json(body): Json<ApiKeyUpdate>,
) -> Result<StatusCode, Failure> {
    state.keys.rename(&caller, &id, &body.name).await?;
    Ok(StatusCode::OK)
}

/// Revokes a key: it is refused from now on.
#[utoipa::path(
    delete, path = "/api-keys/{id}", tag = "account", params(("id" = String, Path)),
    responses((status = 204), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody))
)]
async fn revoke(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<StatusCode, Failure> {
    state.keys.revoke(&caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, create, rename, revoke))]
pub struct Doc;
