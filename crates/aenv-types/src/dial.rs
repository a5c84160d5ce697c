//! The way into a guest, as a seam: who holds a [`Dial`] can open TCP connections to a guest without knowing namespaces.

use std::io;

use futures::future::BoxFuture;
use tokio::net::TcpStream;

/// What [`Dial::dial`] returns.
pub type DialFuture<'a> = BoxFuture<'a, io::Result<TcpStream>>;

/// Opens TCP connections to one guest.
pub trait Dial: Send + Sync {
    /// Connects to `port` of the guest. Fails with `ConnectionRefused` when nothing listens, with `TimedOut` when
    /// the guest does not answer within the implementation's bound.
    fn dial(&self, port: u16) -> DialFuture<'_>;
}
