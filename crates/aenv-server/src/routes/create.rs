//! `POST /sandboxes`, `POST /v2/sandboxes`, `POST /sandboxes/batch`.

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Duration};

use aenv_api::{ApiError, BatchRequest, ErrorBody, ForkResult, NetworkConfig, NewSandbox, Sandbox};
use aenv_orchestrator::{
    CreateRequest, Lifecycle, OnTimeout, PauseMode, ProxyOptions, SandboxError, SandboxState, SandboxView,
};
use aenv_template::Resolved;
use aenv_types::{EgressPolicy, TemplateId};
use aenv_volume::{MountPoint, VolumeName};
use axum::{
    Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde::Serialize;

use super::{detached, volumes};
use crate::{
    config, convert,
    events::Event,
    extract::Json,
    failure::Failure,
    idempotency::{self, Verdict},
    keys::Caller,
    limits::{self, Starting},
    state::AppState,
};

/// Most sandboxes in one request.
pub const MAX_AT_ONCE: i64 = 100;

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/sandboxes", post(create))
        .route("/v2/sandboxes", post(create))
        .route("/sandboxes/batch", post(batch))
}

/// Everything of a request that can be wrong without asking anyone, checked and in types.
#[derive(Clone, Debug)]
pub struct Options {
    /// Until the deadline.
    pub timeout: Duration,
    /// What ends or wakes it.
    pub lifecycle: Lifecycle,
    /// As it was given.
    pub metadata: BTreeMap<String, String>,
    /// Environment.
    pub env: BTreeMap<String, String>,
    /// Volumes by name, and where they are mounted.
    pub mounts: Vec<(VolumeName, MountPoint)>,
    /// Whether envd asks for a token.
    pub secure: bool,
    /// What it may reach.
    pub egress: EgressPolicy,
    /// As it was given.
    pub network: serde_json::Value,
    /// As it was given.
    pub allow_internet_access: Option<bool>,
    /// As it was given.
    pub mcp: serde_json::Value,
    /// How the data plane treats it.
    pub proxy: ProxyOptions,
}

/// Checks a create.
pub fn options(
    request: &NewSandbox,
    defaults: &config::Orchestrator,
    caller: &Caller,
) -> Result<Options, ApiError> {
    let network = request.network.clone().unwrap_or_default();
    if request.iam.as_ref().is_some_and(|iam| !iam.is_null()) {
        return Err(ApiError::bad_request("iam is not supported by this server; leave it out")
            .with_code("unsupported_option"));
    }
    let env = request.env_vars.clone().unwrap_or_default();
    for (name, value) in &env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(ApiError::bad_request(format!(
                "envVars: {:?} cannot be an environment variable: names have no = and nothing has a NUL",
                shortened(name)
            )));
        }
    }
    Ok(Options {
        timeout: timeout(request.timeout, defaults, caller)?,
        lifecycle: lifecycle(request, defaults)?,
        metadata: request.metadata.clone().unwrap_or_default(),
        env,
        mounts: volumes::parse(request.volume_mounts.as_deref().unwrap_or_default())?,
        secure: request.secure.unwrap_or(true),
        egress: network.egress(request.allow_internet_access)?.of_team(&caller.team),
        proxy: proxy_options(&network)?,
        network: request
            .network
            .as_ref()
            .and_then(|n| serde_json::to_value(n.shown()).ok())
            .unwrap_or_default(),
        allow_internet_access: request.allow_internet_access,
        mcp: request.mcp.clone().unwrap_or_default(),
    })
}

/// Checks a timeout that must lie in the future.
pub fn timeout(
    asked: Option<i64>,
    defaults: &config::Orchestrator,
    caller: &Caller,
) -> Result<Duration, ApiError> {
    let Some(asked) = asked else {
        let own = caller.limits.max_timeout_secs.map_or(u64::MAX, u64::from);
        return Ok(Duration::from_secs(defaults.default_sandbox_timeout_secs.min(own)));
    };
    match u64::try_from(asked) {
        Ok(secs) if secs > 0 => within_limit(secs, defaults, caller),
        _ => Err(ApiError::bad_request("Timeout must be greater than 0")),
    }
}

/// Refuses a timeout above the server's or the key's limit.
pub fn within_limit(
    secs: u64,
    defaults: &config::Orchestrator,
    caller: &Caller,
) -> Result<Duration, ApiError> {
    let own = caller.limits.max_timeout_secs.map_or(u64::MAX, u64::from);
    let limit = defaults.max_sandbox_timeout_secs.min(own);
    if secs > limit {
        return Err(ApiError::bad_request(format!(
            "Timeout cannot be greater than {limit} seconds (orchestrator.max_sandbox_timeout_secs, or the key's own limit)"
        )));
    }
    Ok(Duration::from_secs(secs))
}

fn lifecycle(request: &NewSandbox, defaults: &config::Orchestrator) -> Result<Lifecycle, ApiError> {
    let auto_resume = request.auto_resume.is_some_and(|choice| choice.enabled);
    let keeps_memory = request.auto_pause_memory.unwrap_or(true);
    if !keeps_memory && request.auto_pause != Some(true) {
        return Err(ApiError::bad_request("autoPauseMemory: false needs autoPause: true"));
    }
    if !keeps_memory && auto_resume {
        return Err(ApiError::bad_request(
            "autoResume cannot be enabled with autoPauseMemory: false: a sandbox that was paused to its disk is not resumed by traffic",
        ));
    }
    let pauses = request.auto_pause.unwrap_or(defaults.default_on_timeout == "pause");
    Ok(Lifecycle {
        on_timeout: if pauses { OnTimeout::Pause } else { OnTimeout::Kill },
        pause_mode: if keeps_memory { PauseMode::Full } else { PauseMode::Filesystem },
        auto_resume,
    })
}

/// How the data plane treats a sandbox with these network options.
pub fn proxy_options(network: &NetworkConfig) -> Result<ProxyOptions, ApiError> {
    if let Some(mask) = &network.mask_request_host {
        let filled = mask.replace("${PORT}", "80");
        let is_host =
            filled.parse::<Uri>().is_ok_and(|uri| uri.authority().is_some_and(|a| a.as_str() == filled));
        if !is_host {
            return Err(ApiError::bad_request(format!(
                "network.maskRequestHost is {:?}; it takes a host such as example.com or example.com:${{PORT}}",
                shortened(mask)
            )));
        }
    }
    Ok(ProxyOptions {
        private_traffic: network.allow_public_traffic == Some(false),
        mask_request_host: network.mask_request_host.clone(),
        https_ports: network.https_ports.clone().unwrap_or_default(),
    })
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

/// The orchestrator's request. Fails when there is no volume of a name.
pub fn request(
    state: &AppState,
    caller: &Caller,
    resolved: &Resolved,
    options: Options,
) -> Result<CreateRequest, ApiError> {
    let checkpoint = resolved.checkpoint.clone();
    Ok(CreateRequest {
        volumes: volumes::find(state, caller, &options.mounts)?,
        team: caller.team.clone(),
        shape: (!checkpoint.has_memory()).then_some(checkpoint.shape),
        checkpoint,
        template: resolved.template.clone(),
        alias: resolved.alias.clone(),
        timeout: options.timeout,
        lifecycle: options.lifecycle,
        metadata: options.metadata,
        env: options.env,
        secure: options.secure,
        egress: options.egress,
        network: options.network,
        allow_internet_access: options.allow_internet_access,
        mcp: options.mcp,
        proxy: options.proxy,
        hidden: false,
        limits: limits::of_team(caller),
    })
}

/// Counts starts of a caller, or refuses one that would go beyond its key's limits before any work is done for it. The orchestrator
/// has the last word about what runs.
pub fn check_running(state: &AppState, caller: &Caller, more: u32) -> Result<Starting, ApiError> {
    let starting = state.limits.start(caller, more)?;
    if let Some(limit) = caller.limits.max_running_sandboxes {
        let team = state.orchestrator.list(Some(&caller.team));
        let running = team.iter().filter(|view| view.state == SandboxState::Running).count() as u64;
        if running + u64::from(more) > u64::from(limit) {
            return Err(ApiError::too_many(
                format!("this API key may have {limit} sandboxes running, and {running} are; delete or pause one first"),
                5,
            )
            .with_code("sandbox_limit_reached"));
        }
    }
    Ok(starting)
}

/// Creates, counts and notes it.
pub async fn launch(state: &AppState, request: CreateRequest) -> Result<SandboxView, SandboxError> {
    let (team, template) =
        (request.team.clone(), request.alias.clone().unwrap_or_else(|| request.template.to_string()));
    state.counts.starting.fetch_add(1, Ordering::Relaxed);
    let outcome = state.orchestrator.create(request).await;
    state.counts.starting.fetch_sub(1, Ordering::Relaxed);
    match &outcome {
        Ok(view) => {
            state.counts.created.fetch_add(1, Ordering::Relaxed);
            count_spawn(state, &view.template);
            let timings = view.timings;
            let event = Event::info(&team, &view.id, "sandbox created")
                .with("template", template)
                .with("queue_ms", timings.queue_ms)
                .with("place_ms", timings.place_ms)
                .with("restore_ms", timings.restore_ms)
                .with("ready_ms", timings.ready_ms);
            state.events.push(event);
        }
        Err(error) => {
            state.counts.failed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, template, "a sandbox was not created");
        }
    }
    outcome
}

/// Counts a use of a template, without letting the client wait for the disk.
fn count_spawn(state: &AppState, template: &TemplateId) {
    let (spawns, template) = (state.spawns.clone(), template.clone());
    tokio::spawn(async move { spawns.add(template.as_str()).await });
}

/// 201 with the sandbox and its id as a header.
pub fn created(id: &str, body: impl Serialize) -> Response {
    let mut response = (StatusCode::CREATED, axum::Json(body)).into_response();
    if let Ok(value) = HeaderValue::from_str(id) {
        response.headers_mut().insert(aenv_api::SANDBOX_ID_HEADER, value);
    }
    response
}

/// Creates a sandbox from a template or a snapshot. Returns when it answers.
#[utoipa::path(
    post, path = "/v2/sandboxes", tag = "sandboxes", request_body = NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "Repeats with the same key make no second sandbox")),
    responses(
        (status = 201, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 429, body = ErrorBody, description = "No capacity; Retry-After says when to ask again"),
        (status = 500, body = ErrorBody), (status = 507, body = ErrorBody),
    )
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    uri: Uri,
    Json(mut body): Json<NewSandbox>,
) -> Result<Response, Failure> {
    if uri.path().starts_with("/v2/") {
        body.secure = None;
    }
    let options = options(&body, &state.config.orchestrator, &caller)?;
    let key = idempotency::key_of(&headers)?;
    detached(async move {
        let ticket = match &key {
            None => None,
            Some(key) => {
                match state.idempotency.begin(&caller.team, key, idempotency::fingerprint(&body)).await? {
                    Verdict::Go(ticket) => Some(ticket),
                    Verdict::Repeat(answer) => {
                        let id = answer["sandboxID"].as_str().unwrap_or_default().to_owned();
                        return Ok::<_, Failure>(created(&id, answer));
                    }
                }
            }
        };
        let outcome = create_one(&state, &caller, &body.template_id, options).await;
        if let Some(ticket) = ticket {
            let answer = outcome.as_ref().ok().and_then(|sandbox| serde_json::to_value(sandbox).ok());
            ticket.finish(answer.as_ref()).await?;
        }
        let sandbox = outcome?;
        Ok(created(&sandbox.sandbox_id, &sandbox))
    })
    .await
}

async fn create_one(
    state: &AppState,
    caller: &Caller,
    template: &str,
    options: Options,
) -> Result<Sandbox, Failure> {
    let _starting = check_running(state, caller, 1)?;
    let resolved = state.templates.catalog.resolve(&caller.team, template).await?;
    let view = launch(state, request(state, caller, &resolved, options)?).await?;
    Ok(convert::sandbox(&view))
}

/// Creates many sandboxes from one template. Each has its own outcome, in order.
#[utoipa::path(
    post, path = "/sandboxes/batch", tag = "sandboxes", request_body = BatchRequest,
    responses(
        (status = 201, body = [ForkResult]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn batch(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<BatchRequest>,
) -> Result<Response, Failure> {
    let count = at_once(body.count)?;
    let options = options(&body.sandbox, &state.config.orchestrator, &caller)?;
    detached(async move {
        let _starting = check_running(&state, &caller, count)?;
        let resolved = state.templates.catalog.resolve(&caller.team, &body.sandbox.template_id).await?;
        let one = request(&state, &caller, &resolved, options)?;
        let launches = (0..count).map(|_| {
            let (state, request) = (state.clone(), one.clone());
            async move { launch(&state, request).await }
        });
        let outcomes = futures::future::join_all(launches).await;
        let children: Vec<ForkResult> = outcomes.into_iter().map(convert::child).collect();
        Ok::<_, Failure>((StatusCode::CREATED, axum::Json(children)).into_response())
    })
    .await
}

/// Checks a number of children.
pub fn at_once(count: i64) -> Result<u32, ApiError> {
    match u32::try_from(count) {
        Ok(n) if (1..=MAX_AT_ONCE).contains(&count) => Ok(n),
        _ => Err(ApiError::bad_request(format!("count is {count}; it takes 1 to {MAX_AT_ONCE}"))),
    }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(create, batch))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use aenv_api::{ApiKeyLimits, AutoResume, VolumeMount};
    use aenv_types::TeamId;

    use super::*;
    use crate::keys::Role;

    fn defaults() -> config::Orchestrator {
        config::Orchestrator {
            default_sandbox_timeout_secs: 300,
            max_sandbox_timeout_secs: 3600,
            default_on_timeout: "pause".into(),
            ..config::Orchestrator::default()
        }
    }

    fn caller() -> Caller {
        Caller {
            team: TeamId::default_team(),
            key_id: "k".into(),
            role: Role::Member,
            limits: ApiKeyLimits { max_timeout_secs: Some(1000), ..ApiKeyLimits::default() },
        }
    }

    fn check(request: NewSandbox) -> Result<Options, ApiError> {
        options(&request, &defaults(), &caller())
    }

    #[test]
    fn what_is_absent_has_the_configured_default() {
        let options = check(NewSandbox::default()).unwrap();
        assert_eq!(options.timeout, Duration::from_secs(300));
        assert_eq!(options.lifecycle.on_timeout, OnTimeout::Pause);
        assert!(options.secure && !options.lifecycle.auto_resume && options.network.is_null());
    }

    #[test]
    fn what_is_said_is_done() {
        let options = check(NewSandbox {
            timeout: Some(5),
            auto_pause: Some(false),
            secure: Some(false),
            allow_internet_access: Some(false),
            auto_resume: Some(AutoResume { enabled: true }),
            network: Some(NetworkConfig {
                allow_public_traffic: Some(false),
                mask_request_host: Some("custom-host.example.com:${PORT}".into()),
                ..NetworkConfig::default()
            }),
            ..NewSandbox::default()
        })
        .unwrap();
        assert_eq!(options.lifecycle.on_timeout, OnTimeout::Kill);
        assert!(!options.secure && !options.egress.internet && options.proxy.private_traffic);
        assert_eq!(options.network["allowPublicTraffic"], false);
    }

    #[test]
    fn nonsense_is_refused() {
        let new = NewSandbox::default;
        let network = |network| NewSandbox { network: Some(network), ..new() };
        let refused = [
            NewSandbox { timeout: Some(0), ..new() },
            NewSandbox { timeout: Some(-3), ..new() },
            NewSandbox { timeout: Some(1001), ..new() },
            NewSandbox { timeout: Some(i64::MAX), ..new() },
            NewSandbox { auto_pause_memory: Some(false), ..new() },
            NewSandbox {
                auto_pause: Some(true),
                auto_pause_memory: Some(false),
                auto_resume: Some(AutoResume { enabled: true }),
                ..new()
            },
            NewSandbox { iam: Some(serde_json::json!({"tokens": {}})), ..new() },
            NewSandbox {
                volume_mounts: Some(vec![VolumeMount { name: "v".into(), path: "v".into() }]),
                ..new()
            },
            NewSandbox { env_vars: Some([("A=B".into(), "c".into())].into()), ..new() },
            NewSandbox { env_vars: Some([("A".into(), "c\0".into())].into()), ..new() },
            network(NetworkConfig { deny_out: Some(vec!["example.com".into()]), ..NetworkConfig::default() }),
            network(NetworkConfig { mask_request_host: Some("a b".into()), ..NetworkConfig::default() }),
            network(NetworkConfig { mask_request_host: Some("a\r\nb".into()), ..NetworkConfig::default() }),
        ];
        for request in refused {
            let shown = format!("{request:?}");
            assert_eq!(check(request).expect_err(&shown).status, 400);
        }
        assert_eq!(
            check(NewSandbox { timeout: Some(0), ..new() }).unwrap_err().message,
            "Timeout must be greater than 0"
        );
        for count in [0, -1, 101, i64::MAX] {
            assert!(at_once(count).is_err());
        }
    }
}
