//! Connecting to the outside, from the slot's namespace.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use aenv_types::EgressPolicy;
use tokio::{net::TcpStream, time::timeout};

use crate::{
    gate::Context,
    proxy,
    tunnel::{self, Stream},
};

/// An address that does not answer within this is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Addresses of a name that are tried.
const MAX_TRIES: usize = 3;

/// A connection to the first of these addresses that takes it, through the policy's proxy if it names one.
pub(crate) async fn dial(
    context: &Context,
    policy: &EgressPolicy,
    addresses: &[Ipv4Addr],
    port: u16,
) -> io::Result<Box<dyn Stream>> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address that may be reached");
    for address in addresses.iter().take(MAX_TRIES) {
        let target = SocketAddrV4::new(*address, port);
        let connected = async {
            // The proxy could reach more than this node lets sandboxes reach.
            refuse_denied(context, *address)?;
            match &policy.proxy {
                Some(upstream) => proxy::connect(context, policy, upstream, target).await,
                None => Ok(Box::new(connect(context, target).await?) as Box<dyn Stream>),
            }
        };
        match timeout(PATIENCE, connected).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => {
                let late = format!("{address} has not answered within {} s", PATIENCE.as_secs());
                last = io::Error::new(io::ErrorKind::TimedOut, late);
            }
        }
    }
    Err(last)
}

fn refuse_denied(context: &Context, address: Ipv4Addr) -> io::Result<()> {
    if context.is_denied(address) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("no sandbox may reach {address}"),
        ));
    }
    Ok(())
}

/// A connection of the slot's own.
pub(crate) async fn connect(context: &Context, address: SocketAddrV4) -> io::Result<TcpStream> {
    refuse_denied(context, *address.ip())?;
    let stream = context.slot.tcp_socket().await?.connect(address.into()).await?;
    tunnel::keep_alive(&stream);
    Ok(stream)
}
