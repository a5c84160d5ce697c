//! Files of `COPY` steps: a signed URL, and the upload to it.

use aenv_api::{ApiError, ErrorBody, TemplateBuildFileUpload};
use aenv_template::build::UploadGrant;
use axum::{
    Json as Answer, Router,
    body::Body,
    extract::{Path, State},
    routing::{get, put},
};
use http::{HeaderMap, StatusCode, header};

use crate::{extract::Query, failure::Failure, keys::Caller, state::AppState};

/// Longest upload.
const UPLOAD_BYTES: u64 = 16 << 30;

/// The route that needs a key.
pub(super) fn router() -> Router<AppState> {
    Router::new().route("/templates/{id}/files/{hash}", get(grant))
}

/// The route that carries its own authorisation.
pub(super) fn public_router() -> Router<AppState> {
    Router::new().route("/template-files/{team}/{hash}", put(store))
}

/// Where to send the files of a `COPY` step, unless they are here already.
#[utoipa::path(
    get, path = "/templates/{id}/files/{hash}", tag = "templates", params(("id" = String, Path), ("hash" = String, Path)),
    responses((status = 201, body = TemplateBuildFileUpload), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn grant(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, hash)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<(StatusCode, Answer<TemplateBuildFileUpload>), Failure> {
    state.templates.catalog.get(&caller.team, &id).await?;
    if state.templates.uploads.find(&caller.team, &hash)?.is_some() {
        return Ok((StatusCode::CREATED, Answer(TemplateBuildFileUpload { present: true, url: None })));
    }
    let grant = state.templates.uploads.grant(&caller.team, &hash)?;
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let scheme = headers.get("x-forwarded-proto").and_then(|proto| proto.to_str().ok());
    let scheme = if scheme == Some("https") { "https" } else { "http" };
    let url = format!(
        "{scheme}://{host}/template-files/{}/{}?expires={}&signature={}",
        grant.team, grant.hash, grant.expires, grant.signature
    );
    Ok((StatusCode::CREATED, Answer(TemplateBuildFileUpload { present: false, url: Some(url) })))
}

async fn store(
    State(state): State<AppState>,
    Path((team, hash)): Path<(String, String)>,
    query: Query,
    body: Body,
) -> Result<StatusCode, Failure> {
    let team = team.parse().map_err(|_| ApiError::not_found("no such upload"))?;
    let expires = query.integer_in("expires", 0..=i64::MAX)?.unwrap_or(0);
    let signature = query.get("signature").unwrap_or_default().to_owned();
    let grant = UploadGrant { team, hash, expires: expires as u64, signature };
    state.templates.uploads.store(&grant, body.into_data_stream(), UPLOAD_BYTES).await?;
    Ok(StatusCode::OK)
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(grant))]
pub(super) struct Doc;
