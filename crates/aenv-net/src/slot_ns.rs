//! A slot as a namespace.

use std::{io, net::Ipv4Addr, os::fd::OwnedFd, path::PathBuf, time::Duration};

use aenv_types::{Dial, DialFuture, EgressPolicy};
use async_trait::async_trait;
use nix::sys::socket::SockType;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream, UdpSocket},
    sync::Mutex,
    time::timeout,
};

use crate::{
    DNS_PORT, GATE_PORT, NetworkError, Slot, SlotRecord, guest,
    netns::{Netns, kernel},
    rules,
    wiring::{self, Forwarding},
    workers::Workers,
};

/// A guest that does not answer within this is given up.
const DIAL_LIMIT: Duration = Duration::from_secs(5);

/// Connections that wait to be accepted.
const BACKLOG: u32 = 256;

/// One slot. Beside what every [`Slot`] does, it gives sockets in its namespace to the egress gate.
pub struct NamespaceSlot {
    index: u32,
    path: PathBuf,
    netns: Netns,
    workers: Workers,
    rules: Mutex<Rules>,
}

/// What is in force in the namespace.
struct Rules {
    /// What its sets hold; `None` when that is not known (taken over, or a change was interrupted).
    policy: Option<EgressPolicy>,
    /// It is known that the guest's packets are forwarded.
    open: bool,
}

impl NamespaceSlot {
    /// `policy`: what the namespace has now, if known.
    pub(crate) fn new(
        index: u32,
        path: PathBuf,
        netns: Netns,
        workers: Workers,
        policy: Option<EgressPolicy>,
    ) -> Self {
        let open = policy.is_some();
        Self { index, path, netns, workers, rules: Mutex::new(Rules { policy, open }) }
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let socket = self.tcp_socket().await?;
        socket.connect((guest::ADDRESS, port).into()).await
    }

    /// A TCP socket in the namespace, not connected yet.
    pub async fn tcp_socket(&self) -> io::Result<TcpSocket> {
        let socket = self.workers.socket(&self.netns, SockType::Stream).await?;
        let socket = TcpSocket::from_std_stream(socket.into());
        socket.set_nodelay(true)?;
        Ok(socket)
    }

    /// A UDP socket in the namespace, on a port that the kernel chooses.
    pub async fn udp_socket(&self) -> io::Result<UdpSocket> {
        self.bound_udp(0).await
    }

    /// The sockets to which the rules hand over what only the gate can judge. At most once at a time for each slot.
    pub async fn gate_sockets(&self) -> io::Result<GateSockets> {
        Ok(GateSockets {
            connections: self.listener(Ipv4Addr::UNSPECIFIED, GATE_PORT).await?,
            queries: self.bound_udp(DNS_PORT).await?,
            long_queries: self.listener(Ipv4Addr::UNSPECIFIED, DNS_PORT).await?,
        })
    }

    async fn listener(&self, address: Ipv4Addr, port: u16) -> io::Result<TcpListener> {
        let socket = self.tcp_socket().await?;
        // Connections of an earlier server may still be closing.
        socket.set_reuseaddr(true)?;
        socket.bind((address, port).into())?;
        socket.listen(BACKLOG)
    }

    async fn bound_udp(&self, port: u16) -> io::Result<UdpSocket> {
        let socket: OwnedFd = self.workers.socket(&self.netns, SockType::Datagram).await?;
        // Bound by the socket itself: `UdpSocket::bind` would make one in the host's namespace.
        let address =
            nix::sys::socket::SockaddrIn::from(std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port));
        nix::sys::socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &address)?;
        UdpSocket::from_std(socket.into())
    }
}

/// The gate's sockets in a slot's namespace.
pub struct GateSockets {
    /// TCP connections of the guest; each knows its original destination.
    pub connections: TcpListener,
    /// DNS over UDP.
    pub queries: UdpSocket,
    /// DNS over TCP.
    pub long_queries: TcpListener,
}

impl Dial for NamespaceSlot {
    fn dial(&self, port: u16) -> DialFuture<'_> {
        Box::pin(async move {
            let silent = || {
                io::Error::new(io::ErrorKind::TimedOut, format!("the guest does not answer on port {port}"))
            };
            timeout(DIAL_LIMIT, self.connect(port)).await.map_err(|_| silent())?
        })
    }
}

#[async_trait]
impl Slot for NamespaceSlot {
    fn record(&self) -> SlotRecord {
        SlotRecord { index: self.index, netns: self.path.clone() }
    }

    async fn set_policy(&self, policy: &EgressPolicy) -> Result<(), NetworkError> {
        let mut current = self.rules.lock().await;
        if current.policy.as_ref() != Some(policy) {
            let document = rules::policy(policy);
            current.policy = None;
            let step = "replacing the egress rules";
            self.netns.run(step, move || rules::apply(step, &document)).await?;
            current.policy = Some(policy.clone());
        }
        if !current.open {
            self.netns.run("opening a slot", || wiring::forward(Forwarding::On)).await?;
            current.open = true;
        }
        Ok(())
    }

    async fn isolate(&self) -> Result<(), NetworkError> {
        let mut current = self.rules.lock().await;
        current.open = false;
        self.netns.run("isolating a slot", || wiring::forward(Forwarding::Off)).await
    }

    async fn listen(&self, port: u16) -> Result<TcpListener, NetworkError> {
        let step = "opening a port to the guest";
        let listener = self.listener(guest::GATEWAY, port).await.map_err(kernel(step))?;
        self.netns.run(step, move || rules::apply(step, &rules::service(port))).await?;
        Ok(listener)
    }

    async fn traffic(&self) -> Result<(u64, u64), NetworkError> {
        let step = "reading the tap's counters";
        let text = self
            .netns
            .run(step, move || std::fs::read_to_string("/proc/thread-self/net/dev").map_err(kernel(step)));
        let missing = || NetworkError::Kernel { step, message: format!("{} is not there", guest::TAP) };
        counters(&text.await?).ok_or_else(missing)
    }
}

/// Bytes that the guest has received and sent, from `/proc/net/dev`. What the tap receives is what the guest sends.
fn counters(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(guest::TAP)?.strip_prefix(':'))?;
    let mut fields = line.split_ascii_whitespace().map(str::parse);
    let received_by_tap = fields.next()?.ok()?;
    let sent_by_tap = fields.nth(7)?.ok()?;
    Some((sent_by_tap, received_by_tap))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_the_guests() {
        let text = "Inter-|   Receive\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 1 1\n  tap0:  70 1 0 0 0 0 0 0  1200 3 0 0 0 0 0 0\n";
        assert_eq!(counters(text), Some((1200, 70)));
        assert_eq!(counters("  tap01: 1"), None);
    }
}
