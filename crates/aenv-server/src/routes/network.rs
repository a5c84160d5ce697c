//! `PUT /sandboxes/{id}/network`.

use aenv_api::{ErrorBody, NetworkUpdate};
use axum::{Router, extract::State, routing::put};
use http::StatusCode;
use serde_json::Value;

use super::detached;
use crate::{
    events::Event,
    extract::{JsonOr, SandboxPath},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/sandboxes/{id}/network", put(replace))
}

/// Replaces the egress rules of a running sandbox, atomically. What is absent is cleared.
#[utoipa::path(
    put, path = "/sandboxes/{id}/network", tag = "sandboxes", params(("id" = String, Path)), request_body = NetworkUpdate,
    responses(
        (status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody),
    )
)]
async fn replace(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<NetworkUpdate>,
) -> Result<StatusCode, Failure> {
    let egress = body.egress()?.of_team(&caller.team);
    let view = state.orchestrator.get(&caller.team, &id)?;
    detached(async move {
        let network = merged(&view.network, &body);
        let allow = body.allow_internet_access;
        state.orchestrator.set_network(&caller.team, &id, egress, network, allow).await?;
        state.events.push(Event::info(&caller.team, &id, "network rules replaced"));
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// What get shows afterwards: the new egress options, and the options that are not about egress as they were.
fn merged(before: &Value, update: &NetworkUpdate) -> Value {
    let mut after = serde_json::Map::new();
    for kept in ["allowPublicTraffic", "maskRequestHost", "httpsPorts"] {
        if let Some(value) = before.get(kept) {
            after.insert(kept.to_owned(), value.clone());
        }
    }
    if let Ok(Value::Object(new)) = serde_json::to_value(update.shown()) {
        after.extend(new.into_iter().filter(|(name, _)| name != "allow_internet_access"));
    }
    if after.is_empty() { Value::Null } else { Value::Object(after) }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(replace))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn egress_is_replaced_and_the_rest_is_kept() {
        let before = json!({"allowOut": ["1.1.1.1"], "allowPublicTraffic": false});
        let update = NetworkUpdate { deny_out: Some(vec!["8.8.8.8".into()]), ..NetworkUpdate::default() };
        assert_eq!(merged(&before, &update), json!({"allowPublicTraffic": false, "denyOut": ["8.8.8.8"]}));
        assert_eq!(merged(&Value::Null, &NetworkUpdate::default()), Value::Null);
    }
}
