//! Connections to guests, and the few idle ones that are kept.
//!
//! Only connections to envd are kept: envd is ours and never closes an idle one, so that a request cannot be lost on it. What a
//! user's own server does with idle connections nobody knows; each request to it gets a fresh one.

use std::{
    collections::HashMap,
    io,
    time::{Duration, Instant},
};

use aenv_envd_api::{LoopbackDial, PORT};
use aenv_orchestrator::Route;
use aenv_types::{Dial, SandboxId};
use axum::body::Body;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Idle connections that are kept for each sandbox.
const KEPT: usize = 8;

/// How long an idle connection is kept.
const KEPT_FOR: Duration = Duration::from_secs(15);

/// How long the protocol may take to become ready on a connection that is open.
const READY: Duration = Duration::from_millis(100);

/// A connection to a guest. It ends when this is dropped, unless it is given back.
pub struct Lease {
    sender: SendRequest<Body>,
    ended: CancellationToken,
    alive: DropGuard,
}

struct Idle {
    lease: Lease,
    since: Instant,
}

/// Idle connections by sandbox.
pub struct Pool {
    idle: Mutex<HashMap<SandboxId, Vec<Idle>>>,
    swept: Mutex<Instant>,
}

impl Default for Pool {
    fn default() -> Self {
        Self { idle: Mutex::default(), swept: Mutex::new(Instant::now()) }
    }
}

impl Pool {
    /// An idle connection of the route's generation, ready for a request.
    pub async fn take(&self, route: &Route) -> Option<Lease> {
        loop {
            let mut lease = self.pop(&route.id)?;
            let fresh = !lease.ended.is_cancelled() && !lease.sender.is_closed();
            if fresh && matches!(tokio::time::timeout(READY, lease.sender.ready()).await, Ok(Ok(()))) {
                return Some(lease);
            }
        }
    }

    fn pop(&self, id: &SandboxId) -> Option<Lease> {
        let mut idle = self.idle.lock();
        let list = idle.get_mut(id)?;
        list.retain(|one| one.since.elapsed() < KEPT_FOR);
        let last = list.pop();
        if list.is_empty() {
            idle.remove(id);
        }
        last.map(|one| one.lease)
    }

    /// Gives a connection back whose answer was read to its end.
    pub fn give_back(&self, id: &SandboxId, lease: Lease) {
        self.sweep_if_due();
        if lease.ended.is_cancelled() || lease.sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock();
        let list = idle.entry(id.clone()).or_default();
        if list.len() < KEPT {
            list.push(Idle { lease, since: Instant::now() });
        }
    }

    fn sweep_if_due(&self) {
        let mut swept = self.swept.lock();
        if swept.elapsed() >= KEPT_FOR {
            *swept = Instant::now();
            drop(swept);
            self.sweep();
        }
    }

    /// Closes what was idle for too long or belongs to an ended generation.
    pub fn sweep(&self) {
        self.idle.lock().retain(|_, list| {
            list.retain(|one| one.since.elapsed() < KEPT_FOR && !one.lease.ended.is_cancelled());
            !list.is_empty()
        });
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.idle.lock().values().map(Vec::len).sum()
    }
}

impl Lease {
    /// The half that takes requests.
    pub fn sender(&mut self) -> &mut SendRequest<Body> {
        &mut self.sender
    }

    /// Lets the connection live on without this lease: it was upgraded, and the tunnel ends it.
    pub fn into_tunnel(self) -> DropGuard {
        self.alive
    }
}

/// Opens a connection to a port of the guest. Listeners on the guest's loopback are reached too.
pub async fn open(route: &Route, port: u16) -> io::Result<Lease> {
    let stream = if port == PORT {
        route.dial.dial(port).await?
    } else {
        LoopbackDial::new(route.dial.clone()).dial(port).await?
    };
    stream.set_nodelay(true)?;
    if route.proxy.https_ports.contains(&port) {
        let stream = super::tunnel::wrap_tls(stream).await?;
        return handshake(route, TokioIo::new(stream)).await;
    }
    handshake(route, TokioIo::new(stream)).await
}

async fn handshake<I>(route: &Route, io: I) -> io::Result<Lease>
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    // Names of headers have no case, but programs in guests have been written as if; they expect that of E2B's own proxy.
    let started = http1::Builder::new().title_case_headers(true).handshake(io).await;
    let (sender, connection) = started.map_err(io::Error::other)?;
    let stop = CancellationToken::new();
    let (ended, dropped) = (route.ended.clone(), stop.clone());
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = ended.cancelled() => {}
            () = dropped.cancelled() => {}
            // What goes wrong is told to whoever waits for the answer.
            _ = connection.with_upgrades() => {}
        }
    });
    Ok(Lease { sender, ended: route.ended.clone(), alive: stop.drop_guard() })
}
