//! The listener and the routes.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::{HeaderName, StatusCode, header},
    middleware,
    routing::{get, post},
    serve::ListenerExt as _,
};
use connectrpc::{ConnectRpcService, Limits};
use tokio::net::TcpListener;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::{
    access, config::Config, files, filesystem, guest::Guest, init, metrics, process, system, tunnel,
};

/// Largest RPC message: a piece of input, in base64. Files travel over `/files` and have no limit.
const MAX_MESSAGE: usize = 32 << 20;

/// Serves until the process is ended.
pub async fn serve(config: Config) -> io::Result<()> {
    let listener = TcpListener::bind(config.listen).await?;
    let address = listener.local_addr()?;
    let app = router(Arc::new(Guest::new(config)));
    let listener = listener.tap_io(|stream| {
        if let Err(error) = system::tune_connection(stream) {
            tracing::debug!(%error, "a connection keeps the system's options");
        }
    });
    tracing::info!(version = aenv_envd_api::ENVD_VERSION, "listening on {address}");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

fn router(guest: Arc<Guest>) -> Router {
    let rpc = connectrpc::Router::new()
        .add_service(Arc::new(process::Service::new(Arc::clone(&guest))))
        .add_service(Arc::new(filesystem::Service::new(Arc::clone(&guest))));
    let limits = Limits::default().with_max_message_size(MAX_MESSAGE).with_max_request_body_size(MAX_MESSAGE);
    let rpc = ConnectRpcService::new(rpc).with_limits(limits);

    let with_token = Router::new()
        .route("/metrics", get(metrics::serve))
        .route("/envs", get(envs))
        .route("/files", get(files::download).post(files::upload))
        .route("/files/compose", post(files::compose))
        .fallback_service(rpc)
        .layer(middleware::from_fn_with_state(Arc::clone(&guest), access::require_token));
    let for_host = Router::new()
        .route("/init", post(init::serve))
        .route("/modules", post(init::load_modules))
        .route("/tunnel/{port}", get(tunnel::serve))
        .layer(middleware::from_fn_with_state(Arc::clone(&guest), access::require_host));
    Router::new()
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .merge(for_host)
        .merge(with_token)
        .layer(DefaultBodyLimit::disable())
        .layer(cors())
        .with_state(guest)
}

/// Clients in browsers call from anywhere; the token protects, not the origin.
fn cors() -> CorsLayer {
    let exposed = [
        header::LOCATION,
        header::CACHE_CONTROL,
        header::CONTENT_LENGTH,
        header::CONTENT_DISPOSITION,
        header::CONTENT_ENCODING,
        header::CONTENT_RANGE,
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderName::from_static("connect-content-encoding"),
        HeaderName::from_static("connect-protocol-version"),
        HeaderName::from_static("grpc-status"),
        HeaderName::from_static("grpc-message"),
    ];
    CorsLayer::new()
        .allow_origin(AllowOrigin::any())
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(exposed)
        .max_age(std::time::Duration::from_secs(7200))
}

async fn envs(State(guest): State<Arc<Guest>>) -> Json<std::collections::BTreeMap<String, String>> {
    Json(guest.settings().env.clone())
}
