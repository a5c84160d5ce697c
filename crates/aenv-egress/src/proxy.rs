//! The way out through a SOCKS5 proxy of the user's.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
};

use aenv_types::{EgressPolicy, EgressProxy, ProxyTls};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use tokio_socks::tcp::Socks5Stream;

use crate::{HostName, dial, gate::Context, tunnel::Stream};

/// A connection through the proxy to an address. There is no other way when it fails.
pub(crate) async fn connect(
    context: &Context,
    policy: &EgressPolicy,
    proxy: &EgressProxy,
    target: SocketAddrV4,
) -> io::Result<Box<dyn Stream>> {
    let address = SocketAddrV4::new(address(context, policy, proxy).await?, proxy.port);
    let plain = dial::connect(context, address).await.map_err(|error| {
        io::Error::new(error.kind(), format!("the proxy {address} is not reached: {error}"))
    })?;
    let stream: Box<dyn Stream> = match &proxy.tls {
        None => Box::new(plain),
        Some(tls) => {
            let name = server_name(proxy, tls)?;
            let config = context.trust().proxy(tls)?;
            Box::new(TlsConnector::from(config).connect(name, plain).await?)
        }
    };
    let connected = match &proxy.login {
        None => Socks5Stream::connect_with_socket(stream, SocketAddr::V4(target)).await,
        Some((name, password)) => {
            let target = SocketAddr::V4(target);
            Socks5Stream::connect_with_password_and_socket(stream, target, name, password.expose()).await
        }
    };
    // The library's errors name what the proxy answered, never what it was told.
    let stream = connected.map_err(|error| io::Error::other(format!("the proxy {address} says: {error}")))?;
    Ok(Box::new(stream))
}

/// One of the proxy's addresses, found anew for each connection.
async fn address(context: &Context, policy: &EgressPolicy, proxy: &EgressProxy) -> io::Result<Ipv4Addr> {
    if let Ok(address) = proxy.host.parse() {
        return Ok(address);
    }
    let unknown =
        |error: String| io::Error::other(format!("the proxy {} has no address: {error}", proxy.host));
    let name: HostName = proxy.host.parse().map_err(|_| unknown("it is no host name".to_owned()))?;
    let found = context.lookup(policy, &name).await.map_err(|error| unknown(error.to_string()))?;
    found.addresses.first().copied().ok_or_else(|| unknown("none is an IPv4 address".to_owned()))
}

fn server_name(proxy: &EgressProxy, tls: &ProxyTls) -> io::Result<ServerName<'static>> {
    let name = tls.server_name.clone().unwrap_or_else(|| proxy.host.clone());
    ServerName::try_from(name).map_err(io::Error::other)
}
