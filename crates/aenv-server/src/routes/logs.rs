//! `GET /sandboxes/{id}/logs`, `GET /v2/sandboxes/{id}/logs`.

use aenv_api::{
    ApiError, ErrorBody, LogLevel, LogsDirection, SandboxLog, SandboxLogEntry, SandboxLogs, SandboxLogsV2,
};
use aenv_types::SandboxId;
use axum::{Json, Router, extract::State, routing::get};

use crate::{
    events::LogQuery,
    extract::{Query, SandboxPath},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/sandboxes/{id}/logs", get(logs_v1)).route("/v2/sandboxes/{id}/logs", get(logs_v2))
}

/// What a sandbox did, oldest first. A log is kept for a day after its sandbox is gone.
#[utoipa::path(
    get, path = "/sandboxes/{id}/logs", tag = "sandboxes",
    params(
        ("id" = String, Path),
        ("start" = Option<i64>, Query, description = "Milliseconds since 1970, inclusive"),
        ("limit" = Option<i64>, Query, description = "1 to 1000"),
    ),
    responses((status = 200, body = SandboxLogs), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn logs_v1(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<Json<SandboxLogs>, Failure> {
    let wanted = LogQuery {
        cursor_ms: query.integer("start")?,
        direction: LogsDirection::Forward,
        limit: query.integer_in("limit", 1..=1000)?.unwrap_or(1000),
        level: LogLevel::Debug,
        search: None,
    };
    let log_entries = read(&state, &caller, &id, wanted).await?;
    let logs = log_entries.iter().map(line).collect();
    Ok(Json(SandboxLogs { logs, log_entries }))
}

/// The same by pages, in either order, searchable.
#[utoipa::path(
    get, path = "/v2/sandboxes/{id}/logs", tag = "sandboxes",
    params(
        ("id" = String, Path),
        ("cursor" = Option<i64>, Query, description = "Milliseconds since 1970 to go on from, inclusive"),
        ("limit" = Option<i64>, Query, description = "1 to 1000"),
        ("direction" = Option<String>, Query, description = "forward (oldest first, the default) or backward"),
        ("level" = Option<String>, Query, description = "At least debug, info, warn or error"),
        ("search" = Option<String>, Query, description = "Text that must be in it"),
    ),
    responses((status = 200, body = SandboxLogsV2), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn logs_v2(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<Json<SandboxLogsV2>, Failure> {
    let wanted = LogQuery {
        cursor_ms: query.integer("cursor")?,
        direction: direction(&query)?,
        limit: query.integer_in("limit", 1..=1000)?.unwrap_or(1000),
        level: level(&query)?,
        search: query.get("search").map(str::to_owned),
    };
    Ok(Json(SandboxLogsV2 { logs: read(&state, &caller, &id, wanted).await? }))
}

/// In which order a log is asked for.
pub(super) fn direction(query: &Query) -> Result<LogsDirection, ApiError> {
    let directions = [("forward", LogsDirection::Forward), ("backward", LogsDirection::Backward)];
    Ok(query.choice("direction", &directions)?.unwrap_or_default())
}

/// The least level of what is asked for.
pub(super) fn level(query: &Query) -> Result<LogLevel, ApiError> {
    let levels = [
        ("debug", LogLevel::Debug),
        ("info", LogLevel::Info),
        ("warn", LogLevel::Warn),
        ("error", LogLevel::Error),
    ];
    Ok(query.choice("level", &levels)?.unwrap_or(LogLevel::Debug))
}

async fn read(
    state: &AppState,
    caller: &Caller,
    id: &SandboxId,
    query: LogQuery,
) -> Result<Vec<SandboxLogEntry>, Failure> {
    if let Some(entries) = state.events.read(&caller.team, id, query).await? {
        return Ok(entries);
    }
    state.orchestrator.get(&caller.team, id)?;
    Ok(Vec::new())
}

/// The clients' command reads each line as a JSON object.
fn line(entry: &SandboxLogEntry) -> SandboxLog {
    let mut object = serde_json::Map::new();
    for (name, value) in &entry.fields {
        object.insert(name.clone(), value.clone().into());
    }
    object.insert("level".into(), serde_json::to_value(entry.level).unwrap_or_default());
    object.insert("logger".into(), "sandbox".into());
    object.insert("message".into(), entry.message.clone().into());
    SandboxLog { timestamp: entry.timestamp, line: serde_json::Value::Object(object).to_string() }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(logs_v1, logs_v2))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_object() {
        let entry = SandboxLogEntry {
            timestamp: chrono::Utc::now(),
            message: "created".into(),
            level: LogLevel::Warn,
            fields: [("level".to_owned(), "x".to_owned()), ("a".to_owned(), "b".to_owned())].into(),
        };
        let value: serde_json::Value = serde_json::from_str(&line(&entry).line).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"a": "b", "level": "warn", "logger": "sandbox", "message": "created"})
        );
    }
}
