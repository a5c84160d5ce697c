//! The listening socket: HTTP/1.1 and HTTP/2 on one port, with TLS or without, a bound on connections, a graceful end.

pub mod own;
pub mod tls;

use std::{convert::Infallible, future::Future, pin::pin, sync::Arc, time::Duration};

use axum::body::Body;
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Connections at once. More wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 20_000;

/// How long a connection may be open without a request under way and without the next one's head. Longer than the clients keep
/// idle connections, so that none is closed under a request.
pub const IDLE: Duration = Duration::from_secs(360);

/// After so many seconds of silence a client is asked whether it is there, again and again. One that is not is noticed after two
/// minutes; and what lies between it and us, and forgets silent connections, does not forget this one.
const KEEPALIVE_IDLE: u32 = 60;
const KEEPALIVE_INTERVAL: u32 = 10;
const KEEPALIVE_COUNT: u32 = 6;

/// How long requests under way may take after the server was told to end.
const DRAIN: Duration = Duration::from_secs(10);

/// How long a client may take for its TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Pause after a failed accept, such as one for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Takes connections until `shutdown`, then lets requests under way finish within a bound.
pub async fn serve<F, Fut>(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    idle: Duration,
    shutdown: CancellationToken,
    answer: F,
) where
    F: Fn(Request<Body>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Response<Body>> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    loop {
        let accepted = async {
            let slot = slots.clone().acquire_owned().await;
            (listener.accept().await, slot)
        };
        let (accepted, slot) = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = accepted => accepted,
        };
        let Ok(slot) = slot else { break };
        match accepted {
            Ok((stream, _)) => {
                let work = connection(stream, tls.clone(), idle, shutdown.clone(), answer.clone());
                connections.spawn(async move {
                    work.await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection was not taken");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::info!(left = connections.len(), "connections that are still open are cut");
    }
}

async fn connection<F, Fut>(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    idle: Duration,
    shutdown: CancellationToken,
    answer: F,
) where
    F: Fn(Request<Body>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Response<Body>> + Send + 'static,
{
    if let Err(error) = stream.set_nodelay(true).and_then(|()| ask_for_life(&stream)) {
        tracing::debug!(%error, "a connection ended before it began");
        return;
    }
    let Some(tls) = tls else { return exchange(stream, idle, shutdown, answer).await };
    let handshake = tokio::select! {
        handshake = tokio::time::timeout(HANDSHAKE, tls.accept(stream)) => handshake,
        () = shutdown.cancelled() => return,
    };
    match handshake {
        Ok(Ok(stream)) => Box::pin(exchange(stream, idle, shutdown, answer)).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

fn ask_for_life(stream: &TcpStream) -> std::io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL)?;
    setsockopt(stream, sockopt::TcpKeepCount, &KEEPALIVE_COUNT)?;
    Ok(())
}

async fn exchange<S, F, Fut>(stream: S, idle: Duration, shutdown: CancellationToken, answer: F)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Body>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Response<Body>> + Send + 'static,
{
    let asked = CancellationToken::new();
    let first = asked.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        first.cancel();
        let answer = answer.clone();
        async move { Ok::<_, Infallible>(answer(request.map(Body::new)).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(idle);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(1024).adaptive_window(true);
    let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    // The protocol is found out by the first bytes, for which no limit holds but this one.
    let never_asked = async {
        if tokio::time::timeout(idle, asked.cancelled()).await.is_ok() {
            std::future::pending::<()>().await;
        }
    };
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = never_asked => return,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection broke");
    }
}
