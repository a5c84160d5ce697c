//! A few threads that make sockets in other namespaces, so that no runtime thread ever leaves its own.

use std::{
    io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, mpsc},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use tokio::sync::oneshot;

use crate::netns::Netns;

/// Making a socket takes microseconds, so that few threads serve thousands of dials.
const THREADS: usize = 2;

struct Order {
    netns: Netns,
    kind: SockType,
    answer: oneshot::Sender<io::Result<OwnedFd>>,
}

/// Handle on the threads; they end with the last one.
#[derive(Clone)]
pub(crate) struct Workers(mpsc::Sender<Order>);

impl Workers {
    /// Starts the threads. `home` is where they wait: a thread left in a slot's namespace would keep it alive.
    pub(crate) fn start(home: &Netns) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<Order>();
        let receiver = Arc::new(Mutex::new(receiver));
        for number in 0..THREADS {
            let (receiver, home) = (Arc::clone(&receiver), home.clone());
            let thread = std::thread::Builder::new().name(format!("aenv-dial-{number}"));
            thread.spawn(move || serve(&receiver, &home))?;
        }
        Ok(Self(sender))
    }

    /// A nonblocking IPv4 socket that belongs to `netns`, wherever it is used afterwards.
    pub(crate) async fn socket(&self, netns: &Netns, kind: SockType) -> io::Result<OwnedFd> {
        let gone = || io::Error::other("the network threads have ended");
        let (answer, receiver) = oneshot::channel();
        self.0.send(Order { netns: netns.clone(), kind, answer }).map_err(|_| gone())?;
        receiver.await.map_err(|_| gone())?
    }
}

fn serve(orders: &Mutex<mpsc::Receiver<Order>>, home: &Netns) {
    loop {
        let next = orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
        let Ok(order) = next else { return };
        let made = catch_unwind(AssertUnwindSafe(|| make_socket(&order.netns, order.kind)));
        // Back first: after the answer, the namespace may be expected to be free.
        if let Err(error) = home.enter() {
            tracing::error!(%error, "a network thread cannot return to the host's namespace");
        }
        let result = made.unwrap_or_else(|_| Err(io::Error::other("making a socket panicked")));
        // A dial that was cancelled needs no socket.
        drop(order.answer.send(result));
    }
}

fn make_socket(netns: &Netns, kind: SockType) -> io::Result<OwnedFd> {
    netns.enter()?;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(socket(AddressFamily::Inet, kind, flags, None)?)
}
