//! Timeout, refresh, connect, resume, pause, fork and rollback.

use std::time::Duration;

use aenv_api::{
    ApiError, ConnectRequest, ConnectRequestV2, ErrorBody, ForkRequest, ForkResult, PauseRequest,
    RefreshRequest, ResumeRequest, RollbackRequest, Sandbox, TimeoutRequest,
};
use aenv_envd_api::EnvdClient;
use aenv_orchestrator::{PauseMode, SandboxError, SandboxState, Timeout, Wake};
use aenv_types::SandboxId;
use axum::{
    Json as Answer, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use http::StatusCode;

use super::{
    create::{at_once, check_running, timeout, within_limit},
    detached,
};
use crate::{
    convert,
    events::Event,
    extract::{Json, JsonOr, SandboxPath},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// How long a healthy guest may take to say so.
const HEALTH_BOUND: Duration = Duration::from_secs(5);

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/sandboxes/{id}/timeout", post(set_timeout))
        .route("/sandboxes/{id}/refreshes", post(refresh))
        .route("/sandboxes/{id}/connect", post(connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(connect_v2))
        .route("/sandboxes/{id}/resume", post(resume))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/fork", post(fork))
        .route("/sandboxes/{id}/rollback", post(rollback))
}

fn mode(memory: Option<bool>) -> PauseMode {
    if memory == Some(false) { PauseMode::Filesystem } else { PauseMode::Full }
}

/// A paused sandbox has no deadline that could be moved: for these calls it is not there.
fn paused_is_missing(error: SandboxError, id: &SandboxId) -> Failure {
    match error {
        SandboxError::Paused(_) => {
            ApiError::not_found(format!("Sandbox \"{id}\" is paused and has no timeout; connect to it first"))
                .with_code("sandbox_paused")
                .into()
        }
        other => other.into(),
    }
}

/// Moves the deadline to now plus `timeout` seconds, sooner or later than before.
#[utoipa::path(
    post, path = "/sandboxes/{id}/timeout", tag = "sandboxes", params(("id" = String, Path)), request_body = TimeoutRequest,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn set_timeout(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(body): Json<TimeoutRequest>,
) -> Result<StatusCode, Failure> {
    let secs = u64::try_from(body.timeout).unwrap_or(0);
    let duration = within_limit(secs, &state.config.orchestrator, &caller)?;
    detached(async move {
        let moved = state.orchestrator.set_timeout(&caller.team, &id, Timeout::Set(duration)).await;
        moved.map_err(|error| paused_is_missing(error, &id))?;
        state.events.push(Event::info(&caller.team, &id, "timeout set").with("secs", secs));
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// Moves the deadline to at least now plus `duration` seconds.
#[utoipa::path(
    post, path = "/sandboxes/{id}/refreshes", tag = "sandboxes", params(("id" = String, Path)), request_body = RefreshRequest,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn refresh(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<RefreshRequest>,
) -> Result<StatusCode, Failure> {
    let default =
        i64::try_from(state.config.orchestrator.default_sandbox_timeout_secs).unwrap_or(300).min(3600);
    let secs = body.duration.unwrap_or(default);
    if !(0..=3600).contains(&secs) {
        return Err(ApiError::bad_request(format!("duration is {secs}; it takes 0 to 3600 seconds")).into());
    }
    let duration = Duration::from_secs(secs.unsigned_abs());
    detached(async move {
        let moved = state.orchestrator.set_timeout(&caller.team, &id, Timeout::Extend(duration)).await;
        moved.map_err(|error| paused_is_missing(error, &id))?;
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// Makes sure that a sandbox runs and has at least `timeout` seconds left: 200 when it ran, 201 when it was resumed.
#[utoipa::path(
    post, path = "/sandboxes/{id}/connect", tag = "sandboxes", params(("id" = String, Path)), request_body = ConnectRequest,
    responses(
        (status = 200, body = Sandbox), (status = 201, body = Sandbox), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn connect_v1(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(body): Json<ConnectRequest>,
) -> Result<Response, Failure> {
    connect(state, caller, id, Some(body.timeout), body.memory).await
}

/// The same; `timeout` may be left out.
#[utoipa::path(
    post, path = "/v2/sandboxes/{id}/connect", tag = "sandboxes", params(("id" = String, Path)), request_body = ConnectRequestV2,
    responses(
        (status = 200, body = Sandbox), (status = 201, body = Sandbox), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn connect_v2(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<ConnectRequestV2>,
) -> Result<Response, Failure> {
    connect(state, caller, id, body.timeout, body.memory).await
}

async fn connect(
    state: AppState,
    caller: Caller,
    id: SandboxId,
    asked: Option<i64>,
    memory: Option<bool>,
) -> Result<Response, Failure> {
    let duration = timeout(asked, &state.config.orchestrator, &caller)?;
    detached(async move {
        let _starting = state.limits.start(&caller, 1)?;
        let extend = Timeout::Extend(duration);
        let (view, was_paused) = state.orchestrator.resume(&caller.team, &id, extend, mode(memory)).await?;
        if was_paused {
            state.events.push(Event::info(&caller.team, &id, "sandbox resumed"));
        }
        let status = if was_paused { StatusCode::CREATED } else { StatusCode::OK };
        Ok::<_, Failure>((status, Answer(convert::sandbox(&view))).into_response())
    })
    .await
}

/// Resumes a paused sandbox; 409 when it runs. `connect` does not mind either way.
#[utoipa::path(
    post, path = "/sandboxes/{id}/resume", tag = "sandboxes", params(("id" = String, Path)), request_body = ResumeRequest,
    responses(
        (status = 201, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn resume(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<ResumeRequest>,
) -> Result<Response, Failure> {
    let duration = timeout(body.timeout, &state.config.orchestrator, &caller)?;
    if state.orchestrator.find(&caller.team, &id).await?.state == SandboxState::Running {
        return Err(SandboxError::Running(id).into());
    }
    detached(async move {
        let _starting = state.limits.start(&caller, 1)?;
        let set = Timeout::Set(duration);
        let (view, was_paused) = state.orchestrator.resume(&caller.team, &id, set, mode(body.memory)).await?;
        if !was_paused {
            return Err(Failure::from(SandboxError::Running(id)));
        }
        state.events.push(Event::info(&caller.team, &id, "sandbox resumed"));
        Ok((StatusCode::CREATED, Answer(convert::sandbox(&view))).into_response())
    })
    .await
}

/// Pauses a sandbox; returns when it is durable. 409 when it was paused already.
#[utoipa::path(
    post, path = "/sandboxes/{id}/pause", tag = "sandboxes", params(("id" = String, Path)), request_body = PauseRequest,
    responses(
        (status = 204), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 500, body = ErrorBody),
    )
)]
async fn pause(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<PauseRequest>,
) -> Result<StatusCode, Failure> {
    let view = state.orchestrator.get(&caller.team, &id)?;
    detached(async move {
        if body.require_healthy_guest == Some(true) && view.state == SandboxState::Running {
            let route = state.orchestrator.route(&id, Wake::Never).await?;
            let envd = EnvdClient::new(route.dial, route.envd_token);
            envd.health(HEALTH_BOUND).await.map_err(|error| SandboxError::GuestUnresponsive {
                id: id.clone(),
                reason: error.to_string(),
            })?;
        }
        let mode = mode(body.memory);
        state.orchestrator.pause(&caller.team, &id, mode).await?;
        state.events.push(Event::info(&caller.team, &id, "sandbox paused").with("mode", format!("{mode:?}")));
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    })
    .await
}

/// Makes copies of a running sandbox, which goes on. Each has its own outcome, in order.
#[utoipa::path(
    post, path = "/sandboxes/{id}/fork", tag = "sandboxes", params(("id" = String, Path)), request_body = ForkRequest,
    responses(
        (status = 201, body = [ForkResult]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn fork(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    JsonOr(body): JsonOr<ForkRequest>,
) -> Result<Response, Failure> {
    let count = at_once(body.count.unwrap_or(1))?;
    let duration = timeout(body.timeout, &state.config.orchestrator, &caller)?;
    detached(async move {
        let _starting = check_running(&state, &caller, count)?;
        let children = state.orchestrator.fork(&caller.team, &id, count, duration).await?;
        state.events.push(Event::info(&caller.team, &id, "sandbox forked").with("count", count));
        for child in children.iter().flatten() {
            state
                .events
                .push(Event::info(&caller.team, &child.id, "sandbox created").with("forked_from", &id));
        }
        let body: Vec<ForkResult> = children.into_iter().map(convert::child).collect();
        Ok::<_, Failure>((StatusCode::CREATED, Answer(body)).into_response())
    })
    .await
}

/// Lets a sandbox go on from an earlier snapshot of itself, with the same id.
#[utoipa::path(
    post, path = "/sandboxes/{id}/rollback", tag = "sandboxes", params(("id" = String, Path)), request_body = RollbackRequest,
    responses(
        (status = 200, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
    )
)]
async fn rollback(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(body): Json<RollbackRequest>,
) -> Result<Response, Failure> {
    state.orchestrator.get(&caller.team, &id)?;
    detached(async move {
        let own = state.templates.catalog.snapshots(&caller.team, Some(&id), None).await?;
        let wanted = body.snapshot_id.as_str();
        let snapshot =
            own.iter().find(|s| s.id == wanted || s.checkpoint.as_str() == wanted || is_named(s, wanted));
        let Some(snapshot) = snapshot else {
            let shown: String = wanted.chars().take(200).collect();
            return Err(Failure::from(
                ApiError::not_found(format!(
                    "sandbox {id} has no snapshot {shown:?}; GET /snapshots?sandboxID={id} lists them"
                ))
                .with_code("snapshot_not_found"),
            ));
        };
        let resolved = state.templates.catalog.resolve(&caller.team, &snapshot.id).await?;
        let view = state.orchestrator.rollback(&caller.team, &id, resolved.checkpoint).await?;
        state
            .events
            .push(Event::info(&caller.team, &id, "sandbox rolled back").with("snapshot", &snapshot.id));
        Ok((StatusCode::OK, Answer(convert::sandbox(&view))).into_response())
    })
    .await
}

fn is_named(snapshot: &aenv_template::Snapshot, wanted: &str) -> bool {
    let short = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    snapshot.names.iter().any(|name| name == wanted || short(name) == wanted)
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(set_timeout, refresh, connect_v1, connect_v2, resume, pause, fork, rollback))]
pub struct Doc;
