//! Builds: ask for one, start it, follow it.

use aenv_api::{
    ApiError, BuildStatusReason, ErrorBody, LogsDirection, RegistryLogin, TemplateBuildInfo,
    TemplateBuildLogs, TemplateBuildRequest, TemplateBuildRequested, TemplateBuildStart,
};
use aenv_image::{AwsKey, RegistryAuth};
use aenv_template::{BuildStart, LogOrder, LogQuery, NewBuild, Reference, Source, TagName, TemplateStep};
use aenv_types::{BuildId, MachineShape, TemplateId, Token};
use axum::{
    Extension, Json as Answer, Router,
    extract::{Path, State},
    routing::{get, post},
};
use http::StatusCode;

use super::shown;
use crate::{
    audit::Made,
    extract::{Json, Query},
    failure::Failure,
    keys::Caller,
    limits::{self, Published},
    routes::{cold, logs},
    state::AppState,
};

/// Entries of a log in one answer.
const LOG_PAGE: i64 = 100;

/// The routes.
pub(super) fn router() -> Router<AppState> {
    Router::new()
        .route("/v3/templates", post(request))
        .route("/v2/templates/{id}/builds/{build}", post(start))
        .route("/templates/{id}/builds/{build}/status", get(status))
        .route("/templates/{id}/builds/{build}/logs", get(log))
}

/// Asks for a build of a template, which is made when there is none of this name.
#[utoipa::path(
    post, path = "/v3/templates", tag = "templates", request_body = TemplateBuildRequest,
    responses((status = 202, body = TemplateBuildRequested), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody))
)]
async fn request(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<TemplateBuildRequest>,
) -> Result<(StatusCode, Extension<Made>, Answer<TemplateBuildRequested>), Failure> {
    let text = body.name.or(body.alias).ok_or_else(|| ApiError::bad_request("name is missing"))?;
    let reference: Reference = text.parse()?;
    if reference.namespace.as_ref().is_some_and(|namespace| namespace != caller.team.as_str()) {
        return Err(ApiError::forbidden("the namespace belongs to another team").into());
    }
    let mut tags = body.tags.iter().map(|tag| tag.parse()).collect::<Result<Vec<TagName>, _>>()?;
    tags.extend(reference.tag);
    let default = MachineShape {
        vcpus: state.config.machine.vcpu_count,
        memory_mib: state.config.machine.mem_size_mib,
        ..MachineShape::DEFAULT
    };
    let shape = MachineShape {
        vcpus: body.cpu_count.unwrap_or(default.vcpus),
        memory_mib: body.memory_mb.unwrap_or(default.memory_mib),
        ..default
    };
    let shape = shape.checked().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let new = NewBuild { name: reference.name.parse()?, tags, shape };
    let _turn = limits::publish(&state, &caller, Published::Template, Some(&reference.name)).await?;
    let (template, build) = state.templates.catalog.new_build(&caller.team, new).await?;
    let wanted = template.builds.iter().find(|found| found.id == build);
    let answer = TemplateBuildRequested {
        template_id: template.id.to_string(),
        build_id: build.to_string(),
        public: template.public,
        names: shown::names(&caller.team, &template),
        tags: wanted.iter().flat_map(|build| &build.tags).map(ToString::to_string).collect(),
        aliases: template.names.iter().map(ToString::to_string).collect(),
    };
    Ok((StatusCode::ACCEPTED, Extension(Made(answer.build_id.clone())), Answer(answer)))
}

/// Starts a build that was asked for.
#[utoipa::path(
    post, path = "/v2/templates/{id}/builds/{build}", tag = "templates", params(("id" = String, Path), ("build" = String, Path)),
    request_body = TemplateBuildStart,
    responses((status = 202), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody))
)]
async fn start(
    State(state): State<AppState>,
    caller: Caller,
    Path(path): Path<(String, String)>,
    Json(body): Json<TemplateBuildStart>,
) -> Result<StatusCode, Failure> {
    let (template, build) = ids(&path)?;
    state.orchestrator.disk_room()?;
    let source = match (body.from_image, body.from_template) {
        (Some(reference), None) => {
            let reference = cold::reference(&reference, &state.config, &caller)?;
            Source::Image { reference, credentials: body.from_image_registry.map(credentials).transpose()? }
        }
        (None, Some(reference)) => Source::Template { reference },
        _ => return Err(ApiError::bad_request("give one of fromImage and fromTemplate").into()),
    };
    let step = |step: aenv_api::TemplateStep| {
        Ok::<_, Failure>(TemplateStep {
            kind: step.kind.parse()?,
            args: step.args,
            files_hash: step.files_hash.filter(|hash| !hash.is_empty()),
            force: step.force,
        })
    };
    let start = BuildStart {
        source,
        force: body.force,
        steps: body.steps.into_iter().map(step).collect::<Result<_, _>>()?,
        start_cmd: body.start_cmd.filter(|command| !command.is_empty()),
        ready_cmd: body.ready_cmd.filter(|command| !command.is_empty()),
    };
    state.templates.builds.start(&caller.team, &template, build, start).await?;
    Ok(StatusCode::ACCEPTED)
}

fn credentials(login: RegistryLogin) -> Result<RegistryAuth, ApiError> {
    let password =
        |username: String, password| RegistryAuth::Password { username, password: Token::from(password) };
    match login {
        RegistryLogin::Registry { username, password: secret } => Ok(password(username, secret)),
        // Google's registries take a service account's key as the password of this user.
        RegistryLogin::Gcp { service_account_json } => {
            Ok(password("_json_key".to_owned(), service_account_json))
        }
        RegistryLogin::Aws { aws_access_key_id, aws_secret_access_key, aws_region } => {
            let key = AwsKey::new(aws_access_key_id, aws_secret_access_key, aws_region);
            key.map(RegistryAuth::Aws).map_err(|error| ApiError::bad_request(error.to_string()))
        }
    }
}

fn ids((template, build): &(String, String)) -> Result<(TemplateId, BuildId), ApiError> {
    let template_id = template.parse();
    let template_id =
        template_id.map_err(|_| ApiError::not_found(format!("template '{template}' not found")))?;
    let build_id = build.parse();
    let build_id = build_id
        .map_err(|_| ApiError::not_found(format!("build '{build}' of template '{template}' not found")))?;
    Ok((template_id, build_id))
}

/// How far a build is, and its log from an offset on. Beyond the end there is nothing, which is how a client knows that it has all.
#[utoipa::path(
    get, path = "/templates/{id}/builds/{build}/status", tag = "templates",
    params(
        ("id" = String, Path), ("build" = String, Path),
        ("logsOffset" = Option<u64>, Query, description = "Entries of that level to leave out"),
        ("limit" = Option<u64>, Query, description = "1 to 100"),
        ("level" = Option<String>, Query, description = "At least debug, info, warn or error"),
    ),
    responses((status = 200, body = TemplateBuildInfo), (status = 404, body = ErrorBody))
)]
async fn status(
    State(state): State<AppState>,
    caller: Caller,
    Path(path): Path<(String, String)>,
    query: Query,
) -> Result<Answer<TemplateBuildInfo>, Failure> {
    let (template, build) = ids(&path)?;
    let offset = query.integer_in("logsOffset", 0..=i64::MAX)?.unwrap_or(0);
    let limit = query.integer_in("limit", 1..=LOG_PAGE)?.unwrap_or(LOG_PAGE);
    let wanted = LogQuery {
        level: shown::least(logs::level(&query)?),
        from_ms: None,
        order: LogOrder::OldestFirst,
        offset: offset as usize,
        limit: limit as usize,
    };
    let view = state.templates.builds.view(&caller.team, &template, build, &wanted).await?;
    let reason = view.failure.map(|failure| BuildStatusReason {
        message: failure.message,
        step: failure.step,
        log_entries: Vec::new(),
    });
    let log_entries: Vec<_> = view.logs.into_iter().map(shown::log).collect();
    Ok(Answer(TemplateBuildInfo {
        logs: log_entries.iter().map(|entry| entry.message.clone()).collect(),
        log_entries,
        template_id: template.to_string(),
        build_id: build.to_string(),
        status: shown::status(view.status),
        reason,
    }))
}

/// A build's log by pages, in either order.
#[utoipa::path(
    get, path = "/templates/{id}/builds/{build}/logs", tag = "templates",
    params(
        ("id" = String, Path), ("build" = String, Path),
        ("cursor" = Option<i64>, Query, description = "Milliseconds since 1970 to go on from, inclusive"),
        ("limit" = Option<u64>, Query, description = "1 to 1000"),
        ("direction" = Option<String>, Query, description = "forward (oldest first, the default) or backward"),
        ("level" = Option<String>, Query, description = "At least debug, info, warn or error"),
        ("source" = Option<String>, Query, description = "temporary or persistent: there is one log, which is both"),
    ),
    responses((status = 200, body = TemplateBuildLogs), (status = 404, body = ErrorBody))
)]
async fn log(
    State(state): State<AppState>,
    caller: Caller,
    Path(path): Path<(String, String)>,
    query: Query,
) -> Result<Answer<TemplateBuildLogs>, Failure> {
    let (template, build) = ids(&path)?;
    query.choice("source", &[("temporary", ()), ("persistent", ())])?;
    let wanted = LogQuery {
        level: shown::least(logs::level(&query)?),
        from_ms: query.integer("cursor")?,
        order: match logs::direction(&query)? {
            LogsDirection::Forward => LogOrder::OldestFirst,
            LogsDirection::Backward => LogOrder::NewestFirst,
        },
        offset: 0,
        limit: query.integer_in("limit", 1..=1000)?.unwrap_or(LOG_PAGE) as usize,
    };
    let view = state.templates.builds.view(&caller.team, &template, build, &wanted).await?;
    Ok(Answer(TemplateBuildLogs { logs: view.logs.into_iter().map(shown::log).collect() }))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(request, start, status, log))]
pub(super) struct Doc;
