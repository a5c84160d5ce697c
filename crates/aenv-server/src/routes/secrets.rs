//! `GET` and `POST /secrets`, `GET`, `POST` and `DELETE /secrets/{id or name}`.

use aenv_api::{ApiError, ErrorBody, NEXT_TOKEN_HEADER, NewSecret, Secret, SecretUpdate};
use axum::{
    Json as Answer, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::get,
};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use http::{HeaderValue, StatusCode};

use super::detached;
use crate::{
    extract::{Json, PathText, Query},
    failure::Failure,
    keys::Caller,
    secrets::{SecretName, SecretRef},
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/secrets", get(list).post(create))
        .route("/secrets/{secret}", get(show).post(update).delete(remove))
}

/// The team's secrets, by name. A value is never shown.
#[utoipa::path(
    get, path = "/secrets", tag = "secrets",
    params(("limit" = Option<i64>, Query), ("nextToken" = Option<String>, Query)),
    responses((status = 200, body = [Secret]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody))
)]
async fn list(State(state): State<AppState>, caller: Caller, query: Query) -> Result<Response, Failure> {
    let limit = query.integer_in("limit", 1..=100)?.and_then(|n| u32::try_from(n).ok()).unwrap_or(100);
    let after = query.get("nextToken").map(after).transpose()?;
    let mut found = state.secrets.list(&caller.team, after, limit + 1).await?;
    let more = found.len() > limit as usize;
    found.truncate(limit as usize);
    let next = found.last().filter(|_| more).map(|last| BASE64_URL_SAFE_NO_PAD.encode(&last.name));
    let mut response = Answer(found).into_response();
    if let Some(token) = next.and_then(|token| HeaderValue::from_str(&token).ok()) {
        response.headers_mut().insert(NEXT_TOKEN_HEADER, token);
    }
    Ok(response)
}

/// The name that a page follows.
fn after(token: &str) -> Result<String, ApiError> {
    let name = BASE64_URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let name = name.and_then(|name| name.parse::<SecretName>().ok());
    name.map(|name| name.as_str().to_owned()).ok_or_else(|| ApiError::bad_request("Invalid next token"))
}

/// Makes a secret with its first value.
#[utoipa::path(
    post, path = "/secrets", tag = "secrets", request_body = NewSecret,
    responses(
        (status = 201, body = Secret), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 403, body = ErrorBody, description = "The team has too many"),
        (status = 409, body = ErrorBody, description = "There is one of this name"),
    )
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<NewSecret>,
) -> Result<Response, Failure> {
    let name: SecretName = body.name.parse()?;
    let metadata = body.metadata.unwrap_or_default();
    detached(async move {
        let made = state.secrets.create(&caller.team, name, body.value, metadata).await?;
        Ok::<_, Failure>((StatusCode::CREATED, Answer(made)).into_response())
    })
    .await
}

/// One secret, without its value.
#[utoipa::path(
    get, path = "/secrets/{secret}", tag = "secrets", params(("secret" = String, Path, description = "Id or name")),
    responses((status = 200, body = Secret), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    PathText(secret): PathText,
) -> Result<Answer<Secret>, Failure> {
    let which: SecretRef = secret.parse()?;
    Ok(Answer(state.secrets.get(&caller.team, which).await?))
}

/// Gives a secret its next value.
#[utoipa::path(
    post, path = "/secrets/{secret}", tag = "secrets", params(("secret" = String, Path, description = "Id or name")),
    request_body = SecretUpdate,
    responses(
        (status = 200, body = Secret), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
async fn update(
    State(state): State<AppState>,
    caller: Caller,
    PathText(secret): PathText,
    Json(body): Json<SecretUpdate>,
) -> Result<Answer<Secret>, Failure> {
    let which: SecretRef = secret.parse()?;
    detached(async move {
        let updated = state.secrets.update(&caller.team, which, body.value, body.metadata).await?;
        Ok::<_, Failure>(Answer(updated))
    })
    .await
}

/// Removes a secret with all its values.
#[utoipa::path(
    delete, path = "/secrets/{secret}", tag = "secrets", params(("secret" = String, Path, description = "Id or name")),
    responses((status = 204), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    PathText(secret): PathText,
) -> Result<StatusCode, Failure> {
    let which: SecretRef = secret.parse()?;
    detached(async move {
        state.secrets.remove(&caller.team, which).await?;
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, create, show, update, remove))]
pub struct Doc;
