//! Bytes between a guest and whom it reached, for as long as the policy allows it.

use std::{io, os::fd::AsFd, sync::Arc};

use aenv_types::EgressPolicy;
use nix::{libc, sys::socket::setsockopt, sys::socket::sockopt};
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes},
    net::TcpStream,
    sync::watch,
};

/// Bytes that are held in each direction.
const BUFFER: usize = 16 << 10;
/// Seconds of silence after which a peer is asked whether it is there, and between questions.
const KEEPALIVE: u32 = 60;

/// The other end of a connection: plain, or inside TLS to a proxy.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A policy as it changes.
pub(crate) type Policies = watch::Receiver<Arc<EgressPolicy>>;

/// Returns when a policy has come that `still` does not hold for. What `policies` has seen already is not asked about again.
pub(crate) async fn until_forbidden(mut policies: Policies, still: impl Fn(&EgressPolicy) -> bool) {
    loop {
        if policies.changed().await.is_err() {
            return;
        }
        let now = policies.borrow_and_update().clone();
        if !still(&now) {
            return;
        }
    }
}

/// Passes bytes on until both directions have ended.
pub(crate) async fn pass_on(guest: &mut TcpStream, outside: &mut dyn Stream) -> io::Result<()> {
    let mut outside = outside;
    copy_bidirectional_with_sizes(guest, &mut outside, BUFFER, BUFFER).await.map(drop)
}

/// Makes closing the connection a reset: the peer does not take it for an end.
pub(crate) fn reset_on_close(stream: &impl AsFd) {
    let now = libc::linger { l_onoff: 1, l_linger: 0 };
    if let Err(error) = setsockopt(stream, sockopt::Linger, &now) {
        tracing::debug!(%error, "a connection will be closed instead of reset");
    }
}

/// Lets the kernel find out that a silent peer has gone.
pub(crate) fn keep_alive(stream: &impl AsFd) {
    let set = setsockopt(stream, sockopt::KeepAlive, &true)
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE))
        .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE));
    if let Err(error) = set {
        tracing::debug!(%error, "a silent peer will not be noticed");
    }
}
