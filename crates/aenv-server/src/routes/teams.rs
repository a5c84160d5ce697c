//! `GET /teams`, as the clients' `auth login` asks.

use aenv_api::{ErrorBody, Team};
use axum::{Json, Router, routing::get};
use http::HeaderMap;

use crate::{auth, keys::Caller, state::AppState};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/teams", get(list))
}

/// The caller's team, with the key that it came with.
#[utoipa::path(get, path = "/teams", tag = "account", responses((status = 200, body = [Team]), (status = 401, body = ErrorBody)))]
async fn list(caller: Caller, headers: HeaderMap) -> Json<Vec<Team>> {
    Json(vec![Team {
        team_id: caller.team.to_string(),
        name: caller.team.to_string(),
        api_key: auth::presented(&headers).unwrap_or_default().to_owned(),
        is_default: true,
    }])
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list))]
pub struct Doc;
