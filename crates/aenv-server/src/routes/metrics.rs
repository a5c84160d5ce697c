//! `GET /sandboxes/{id}/metrics`, `GET /sandboxes/metrics`.

use aenv_api::{ApiError, ErrorBody, SandboxMetric, SandboxesWithMetrics};
use aenv_orchestrator::MetricSample;
use axum::{Json, Router, extract::State, routing::get};

use crate::{
    convert,
    extract::{Query, SandboxPath, sandbox_id},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/sandboxes/metrics", get(latest)).route("/sandboxes/{id}/metrics", get(history))
}

/// Samples of one sandbox, oldest first, every 5 s while it runs.
#[utoipa::path(
    get, path = "/sandboxes/{id}/metrics", tag = "sandboxes",
    params(
        ("id" = String, Path),
        ("start" = Option<i64>, Query, description = "Seconds since 1970, inclusive"),
        ("end" = Option<i64>, Query, description = "Seconds since 1970, inclusive"),
    ),
    responses(
        (status = 200, body = [SandboxMetric]), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
async fn history(
    State(state): State<AppState>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<Json<Vec<SandboxMetric>>, Failure> {
    let start = query.integer("start")?.unwrap_or(i64::MIN);
    let end = query.integer("end")?.unwrap_or(i64::MAX);
    let samples = state.orchestrator.metrics(&caller.team, &id)?;
    Ok(Json(within(&samples, start, end)))
}

fn within(samples: &[MetricSample], start: i64, end: i64) -> Vec<SandboxMetric> {
    let wanted = samples.iter().filter(|sample| (start..=end).contains(&sample.at.timestamp()));
    wanted.map(convert::metric).collect()
}

/// The latest sample of each of up to 100 sandboxes. One that has none, or is not there, is missing.
#[utoipa::path(
    get, path = "/sandboxes/metrics", tag = "sandboxes",
    params(("sandbox_ids" = String, Query, description = "Ids with commas, at most 100")),
    responses((status = 200, body = SandboxesWithMetrics), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody))
)]
async fn latest(
    State(state): State<AppState>,
    caller: Caller,
    query: Query,
) -> Result<Json<SandboxesWithMetrics>, Failure> {
    let ids = query.list("sandbox_ids");
    if ids.is_empty() || ids.len() > 100 {
        return Err(
            ApiError::bad_request("sandbox_ids takes 1 to 100 sandbox ids with commas between them").into()
        );
    }
    let mut answer = SandboxesWithMetrics::default();
    for text in ids {
        let Ok(id) = sandbox_id(text) else { continue };
        let samples = state.orchestrator.metrics(&caller.team, &id).unwrap_or_default();
        if let Some(last) = samples.last() {
            answer.sandboxes.insert(id.to_string(), convert::metric(last));
        }
    }
    Ok(Json(answer))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(history, latest))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;

    #[test]
    fn the_window_is_inclusive_to_the_second() {
        let sample = |ms: i64| MetricSample {
            at: DateTime::from_timestamp_millis(ms).unwrap(),
            cpu_count: 2,
            cpu_used_pct: 1.0,
            mem_used: 1,
            mem_total: 2,
            mem_cache: 0,
            disk_used: 1,
            disk_total: 2,
        };
        let all = [sample(1_000_900), sample(1_005_900), sample(1_010_900)];
        assert_eq!(within(&all, 1000, 1005).len(), 2);
        assert_eq!(within(&all, i64::MIN, i64::MAX).len(), 3);
        assert_eq!(within(&all, 0, 10).len(), 0);
        assert_eq!(within(&all, 1010, 1000).len(), 0);
    }
}
