//! `GET /tunnel/{port}` with `Upgrade: tcp`: connects the host with a server that listens on loopback only.
//!
//! Why on demand and not by watching `/proc/net/tcp`: see `aenv_envd_api::tunnel`.

use std::{io, net::Ipv4Addr, net::Ipv6Addr, net::SocketAddr, time::Duration};

use aenv_envd_api::PORT;
use axum::{
    body::Body,
    extract::{Path, Request},
    http::{StatusCode, header},
    response::Response,
};
use hyper_util::rt::TokioIo;
use tokio::{io::copy_bidirectional, net::TcpStream, time::timeout};

use crate::access::error_response;

/// Loopback answers at once or not at all.
const CONNECT_BOUND: Duration = Duration::from_secs(2);

/// Answers `GET /tunnel/{port}`.
pub async fn serve(Path(port): Path<u16>, request: Request) -> Response {
    let wants_tunnel = request.headers().get(header::UPGRADE).is_some_and(|protocol| protocol == "tcp");
    if !wants_tunnel || port == 0 || port == PORT {
        return error_response(
            StatusCode::BAD_REQUEST,
            "a tunnel needs 'Upgrade: tcp' and a port other than envd's own",
        );
    }
    let mut server = match connect(port).await {
        Ok(server) => server,
        Err(error) => {
            return error_response(
                StatusCode::BAD_GATEWAY,
                format!("nothing listens on port {port} on loopback: {error}"),
            );
        }
    };
    tokio::spawn(async move {
        match hyper::upgrade::on(request).await {
            Ok(upgraded) => {
                let ended = copy_bidirectional(&mut TokioIo::new(upgraded), &mut server).await;
                tracing::debug!(port, ?ended, "tunnel ended");
            }
            Err(error) => tracing::debug!(port, %error, "no tunnel came about"),
        }
    });
    let switched = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, "tcp")
        .body(Body::empty());
    switched.unwrap_or_else(|error| error_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

async fn connect(port: u16) -> io::Result<TcpStream> {
    let addresses =
        [SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((Ipv6Addr::LOCALHOST, port))];
    let stream = timeout(CONNECT_BOUND, TcpStream::connect(&addresses[..])).await??;
    stream.set_nodelay(true)?;
    Ok(stream)
}
