//! Every request: an id, a span, counts, a guard against panics; then the data plane or the control plane.

use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use aenv_api::{ApiError, REQUEST_ID_HEADER, SANDBOX_ID_HEADER};
use axum::{Router, body::Body, middleware, response::IntoResponse};
use futures::FutureExt;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri};
use tower::ServiceExt;
use tower_http::cors::{Any, CorsLayer};
use tracing::Instrument;

use crate::{
    audit, auth, limits,
    proxy::{
        Proxy,
        answer::{self, Reader},
        target::Claim,
    },
    routes,
    state::AppState,
};

/// Answers every request of the server. Cheap to clone.
#[derive(Clone)]
pub struct App {
    control: Router,
    proxy: Proxy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plane {
    Control,
    Data,
}

impl App {
    /// Control plane and data plane in front of these rooms.
    pub fn new(state: AppState, proxy: Proxy) -> Self {
        let private = routes::private()
            .route_layer(middleware::from_fn_with_state(state.clone(), limits::within_rate))
            .route_layer(middleware::from_fn_with_state(state.keys.clone(), auth::require_key))
            .route_layer(middleware::from_fn_with_state(state.audit.clone(), audit::note));
        let public = routes::system::router().merge(routes::templates::public_router());
        let public = public.merge(routes::volume_content::router());
        Self::with_routes(private.merge(public).with_state(state), proxy)
    }

    fn with_routes(routes: Router, proxy: Proxy) -> Self {
        let cors = CorsLayer::new()
            .allow_origin(Any)
            .allow_methods(Any)
            .allow_headers(Any)
            .expose_headers(Any)
            .max_age(Duration::from_secs(3600));
        let control = routes.fallback(nothing_here).method_not_allowed_fallback(wrong_method).layer(cors);
        Self { control, proxy }
    }

    /// Answers one request. Never panics, always has an id.
    pub async fn answer(&self, mut request: Request<Body>) -> Response<Body> {
        let id = request_id(&request);
        let claim = self.proxy.claim(&request);
        let plane = if matches!(claim, Claim::Control) { Plane::Control } else { Plane::Data };
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        if let (Plane::Control, Ok(value)) = (plane, HeaderValue::from_str(&id)) {
            request.headers_mut().insert(HeaderName::from_static(REQUEST_ID_HEADER), value);
        }
        let span = tracing::info_span!("request", id = %id);
        let began = Instant::now();
        let work = AssertUnwindSafe(self.route(request, claim).instrument(span.clone())).catch_unwind();
        let mut response = work.await.unwrap_or_else(|_| {
            span.in_scope(|| tracing::error!(%method, path, "a handler panicked"));
            ApiError::internal(format!("the server made a mistake; its log has more under request {id}"))
                .into_response()
        });
        span.in_scope(|| note(plane, &method, &path, response.status().as_u16(), began.elapsed()));
        if let Ok(value) = HeaderValue::from_str(&id) {
            response.headers_mut().entry(HeaderName::from_static(REQUEST_ID_HEADER)).or_insert(value);
        }
        response
    }

    async fn route(&self, request: Request<Body>, claim: Claim) -> Response<Body> {
        let reader = Reader::of(request.headers());
        match claim {
            Claim::Control => {
                self.control.clone().oneshot(request).await.unwrap_or_else(|never| match never {})
            }
            Claim::Sandbox(target) => {
                let id = HeaderValue::from_str(target.id.as_str());
                let mut response = self.proxy.serve(request, target).await;
                if let Ok(id) = id {
                    response.headers_mut().insert(SANDBOX_ID_HEADER, id);
                }
                response
            }
            Claim::Signed(file) => self.proxy.serve_signed(request, file).await,
            Claim::Unknown(id) => answer::not_found(reader, &id),
            Claim::Bad(error) => error.into_response(),
        }
    }
}

/// The client's own id where it is harmless, a fresh one otherwise.
fn request_id<B>(request: &Request<B>) -> String {
    let fits = |id: &&str| {
        (1..=128).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    let given = request.headers().get(REQUEST_ID_HEADER).and_then(|value| value.to_str().ok()).filter(fits);
    given.map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_owned)
}

fn note(plane: Plane, method: &Method, path: &str, status: u16, took: Duration) {
    let (name, shown) = match plane {
        Plane::Control => ("control", took.as_secs_f64() * 1000.0),
        Plane::Data => ("data", took.as_secs_f64() * 1000.0),
    };
    metrics::counter!("aenv_http_requests_total", "plane" => name, "status" => status.to_string())
        .increment(1);
    metrics::histogram!("aenv_http_answer_seconds", "plane" => name).record(took.as_secs_f64());
    let ms = format!("{shown:.1}");
    if plane == Plane::Control && !matches!(path, "/health" | "/metrics") {
        tracing::info!(%method, path, status, ms, "answered");
    } else {
        tracing::debug!(%method, path, status, ms, "answered");
    }
}

async fn nothing_here(method: Method, uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(200).collect();
    ApiError::not_found(format!("there is no {method} {path}; GET /openapi.json lists the calls"))
        .with_code("no_such_call")
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let path: String = uri.path().chars().take(200).collect();
    ApiError::new(
        http::StatusCode::METHOD_NOT_ALLOWED,
        format!("{path} does not take {method}; GET /openapi.json lists the calls"),
    )
    .with_code("method_not_allowed")
}

#[cfg(test)]
pub(crate) mod tests {
    use axum::routing::{get, post};
    use http_body_util::BodyExt;
    use serde_json::Value;

    use super::*;
    use crate::{extract::Json, keys::Keys};

    pub(crate) fn keys() -> (tempfile::TempDir, Keys) {
        let (dir, db) = crate::db::temporary();
        let home = aenv_types::Home::new(dir.path(), dir.path());
        let keys = Keys::open(&home, db, Some("e2b_test_key".into())).unwrap();
        (dir, keys)
    }

    async fn ask(app: &App, request: Request<Body>) -> (u16, http::HeaderMap, Value) {
        let response = app.answer(request).await;
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        (parts.status.as_u16(), parts.headers, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    #[tokio::test]
    async fn nothing_but_envelopes() {
        async fn panics() {
            panic!("on purpose");
        }
        async fn takes(Json(_): Json<aenv_api::TimeoutRequest>) {}
        let (_dir, keys) = keys();
        let private = Router::new()
            .route("/private", get(|| async { "in" }))
            .route("/panics", get(panics))
            .route("/takes", post(takes))
            .route_layer(middleware::from_fn_with_state(keys.clone(), auth::require_key));
        let proxy = Proxy::new(std::sync::Arc::new(crate::proxy::tests::NoRoutes), keys, &[]);
        let app = App::with_routes(private, proxy);
        let get = |path: &str, key: Option<&str>| {
            let mut request = Request::get(path).body(Body::empty()).unwrap();
            if let Some(key) = key {
                request.headers_mut().insert("x-api-key", HeaderValue::from_str(key).unwrap());
            }
            request
        };
        for (request, status) in [
            (get("/private", None), 401),
            (get("/private", Some("wrong")), 401),
            (get("/nowhere", None), 404),
            (get("/%ff", None), 404),
            (get("/takes", Some("e2b_test_key")), 405),
            (get("/panics", Some("e2b_test_key")), 500),
            (
                Request::post("/takes").header("x-api-key", "e2b_test_key").body(Body::from("{]")).unwrap(),
                400,
            ),
        ] {
            let path = request.uri().clone();
            let (got, headers, body) = ask(&app, request).await;
            assert_eq!(got, status, "{path}");
            assert_eq!(body["code"], status, "{path}: {body}");
            assert!(body["message"].as_str().is_some_and(|m| !m.is_empty()));
            assert!(headers.contains_key("x-request-id"));
        }
        let mut request = get("/private", Some("e2b_test_key"));
        request.headers_mut().insert("x-request-id", HeaderValue::from_static("mine-1"));
        let (status, headers, _) = ask(&app, request).await;
        assert_eq!((status, headers["x-request-id"].to_str().unwrap()), (200, "mine-1"));
    }

    #[tokio::test]
    async fn a_preflight_needs_no_key() {
        let (_dir, keys) = keys();
        let private = Router::new()
            .route("/private", get(|| async { "in" }))
            .route_layer(middleware::from_fn_with_state(keys.clone(), auth::require_key));
        let proxy = Proxy::new(std::sync::Arc::new(crate::proxy::tests::NoRoutes), keys, &[]);
        let app = App::with_routes(private, proxy);
        let request = Request::options("/private")
            .header("origin", "http://x")
            .header("access-control-request-method", "GET")
            .header("access-control-request-headers", "x-api-key")
            .body(Body::empty())
            .unwrap();
        let response = app.answer(request).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
    }
}
