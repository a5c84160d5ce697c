//! `/health`, `/metrics`, `/openapi.json`, `/docs`: what needs no key.

use std::sync::OnceLock;

use aenv_orchestrator::SandboxState;
use axum::{
    Router,
    extract::State,
    response::{Html, IntoResponse, Response},
    routing::get,
};
use http::{HeaderValue, StatusCode, header};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::{openapi, state::AppState};

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(document))
        .route("/docs", get(docs))
}

/// 204 when the server takes requests.
#[utoipa::path(get, path = "/health", tag = "system", security(()), responses((status = 204)))]
async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The process's metrics recorder, made at the first call.
pub fn recorder() -> Option<&'static PrometheusHandle> {
    static HANDLE: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    let make = || {
        let buckets = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
        let builder = PrometheusBuilder::new().set_buckets(&buckets).ok()?;
        builder.install_recorder().map_err(|error| tracing::warn!(%error, "metrics are off")).ok()
    };
    HANDLE.get_or_init(make).as_ref()
}

/// Metrics as Prometheus reads them.
#[utoipa::path(get, path = "/metrics", tag = "system", security(()), responses((status = 200, content_type = "text/plain", body = String)))]
async fn metrics(State(state): State<AppState>) -> Response {
    let (mut running, mut paused, mut memory) = (0_u32, 0_u32, 0_u64);
    for view in state.orchestrator.list(None) {
        match view.state {
            SandboxState::Running => {
                running += 1;
                memory += view.shape.memory_bytes();
            }
            SandboxState::Paused => paused += 1,
        }
    }
    metrics::gauge!("aenv_sandboxes", "state" => "running").set(running);
    metrics::gauge!("aenv_sandboxes", "state" => "paused").set(paused);
    metrics::gauge!("aenv_standbys").set(u32::try_from(state.orchestrator.standbys()).unwrap_or(u32::MAX));
    let node = state.orchestrator.memory();
    metrics::gauge!("aenv_memory_overcommit_ratio").set(node.overcommit);
    let sizes = [
        ("aenv_allocated_memory_bytes", memory),
        ("aenv_promised_memory_bytes", node.promised_mib << 20),
        ("aenv_memory_limit_bytes", node.limit_mib << 20),
    ];
    for (name, bytes) in sizes {
        #[allow(clippy::cast_precision_loss, reason = "bytes of a machine's memory fit a float well enough")]
        metrics::gauge!(name).set(bytes as f64);
    }
    let text = recorder().map(PrometheusHandle::render).unwrap_or_default();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// This API's own description.
#[utoipa::path(get, path = "/openapi.json", tag = "system", security(()), responses((status = 200, content_type = "application/json")))]
async fn document() -> Response {
    static TEXT: OnceLock<String> = OnceLock::new();
    let text = TEXT.get_or_init(|| openapi::document().to_json().unwrap_or_default());
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text.as_str()).into_response()
}

/// A page that shows the description and tries its calls.
#[utoipa::path(get, path = "/docs", tag = "system", security(()), responses((status = 200, content_type = "text/html")))]
async fn docs() -> Html<&'static str> {
    Html(include_str!("../docs.html"))
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(health, metrics, document, docs))]
pub struct Doc;
