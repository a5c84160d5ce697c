//! Whom a connection is for, told by its first bytes: the server name of a TLS hello, or the `Host` of an HTTP request.
//!
//! The bytes come from a guest that may be hostile. They are read into a buffer that is bounded, and kept, because whoever
//! continues the connection needs them as well.

use std::{io, time::Duration};

use thiserror::Error;
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::rustls::server::Acceptor;

use crate::HostName;

/// Bytes that a hello or a request's head may have.
const LIMIT: usize = 16 << 10;
/// Time in which they must arrive. Long, because a client such as curl reads all certificates that it believes between its connection
/// and its hello, which takes a second in an emulated guest, and many on a busy host.
const PATIENCE: Duration = Duration::from_secs(30);
/// Headers that are looked through.
const MAX_HEADERS: usize = 128;

/// What is spoken on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tls,
    Http,
}

impl Protocol {
    /// What the gate can read on a port.
    pub(crate) fn of_port(port: u16) -> Option<Self> {
        match port {
            443 => Some(Self::Tls),
            80 => Some(Self::Http),
            _ => None,
        }
    }
}

/// Why nobody knows whom a connection is for.
#[derive(Debug, Error)]
pub(crate) enum PeekError {
    #[error("the first bytes are not what is spoken on this port")]
    Foreign,
    #[error("it names no host")]
    Nameless,
    #[error("it names its host in two ways")]
    Ambiguous,
    #[error("its head is longer than {LIMIT} bytes")]
    Long,
    #[error("its head did not arrive within {} s", PATIENCE.as_secs())]
    Late,
    #[error("it ended before its head did")]
    Ended,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads until the host is known; everything that was read is in `seen`, whatever the outcome.
pub(crate) async fn host(
    stream: &mut TcpStream,
    protocol: Protocol,
    seen: &mut Vec<u8>,
) -> Result<HostName, PeekError> {
    let deadline = Instant::now() + PATIENCE;
    let mut hello = Acceptor::default();
    loop {
        let before = seen.len();
        let read = timeout_at(deadline, stream.read_buf(seen)).await.map_err(|_| PeekError::Late)??;
        if read == 0 {
            return Err(PeekError::Ended);
        }
        let found = match protocol {
            Protocol::Tls => server_name(&mut hello, &seen[before..])?,
            Protocol::Http => request_host(seen)?,
        };
        if let Some(name) = found {
            return Ok(name);
        }
        if seen.len() >= LIMIT {
            return Err(PeekError::Long);
        }
    }
}

/// The server name, once the hello is complete. `more` is what arrived since the last call.
fn server_name(hello: &mut Acceptor, mut more: &[u8]) -> Result<Option<HostName>, PeekError> {
    while !more.is_empty() {
        hello.read_tls(&mut more).map_err(|_| PeekError::Foreign)?;
        if let Some(accepted) = hello.accept().map_err(|_| PeekError::Foreign)? {
            let name = accepted.client_hello().server_name().map(str::to_owned);
            let name = name.ok_or(PeekError::Nameless)?;
            return name.parse().map(Some).map_err(|_| PeekError::Nameless);
        }
    }
    Ok(None)
}

/// The host of a request, once its head is complete.
fn request_host(head: &[u8]) -> Result<Option<HostName>, PeekError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    if request.parse(head).map_err(|_| PeekError::Foreign)?.is_partial() {
        return Ok(None);
    }
    let mut hosts = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host"));
    let host = hosts.next().ok_or(PeekError::Nameless)?;
    if hosts.next().is_some() {
        return Err(PeekError::Ambiguous);
    }
    let host = std::str::from_utf8(host.value).map_err(|_| PeekError::Nameless)?;
    let name = without_port(host.trim())?;
    let target = request.path.unwrap_or_default();
    if request.method == Some("CONNECT") {
        return Err(PeekError::Foreign);
    }
    if !target.starts_with('/') && target != "*" {
        // A request that was meant for a proxy names its host in the target, too; servers believe that one.
        let authority = target.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
        let authority = authority.and(target.get(7..)).ok_or(PeekError::Foreign)?;
        let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
        if without_port(authority)? != name {
            return Err(PeekError::Ambiguous);
        }
    }
    Ok(Some(name))
}

fn without_port(host: &str) -> Result<HostName, PeekError> {
    let name = match host.split_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        Some(_) => return Err(PeekError::Nameless),
        None => host,
    };
    name.parse().map_err(|_| PeekError::Nameless)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, crypto::ring, version};

    use super::*;

    fn hello(name: &'static str) -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(ring::default_provider().into())
            .with_protocol_versions(&[&version::TLS13, &version::TLS12])
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let mut client =
            ClientConnection::new(std::sync::Arc::new(config), name.try_into().unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    fn sni(bytes: &[u8]) -> Result<Option<HostName>, PeekError> {
        server_name(&mut Acceptor::default(), bytes)
    }

    #[test]
    fn a_hello_names_its_server_in_pieces_too() {
        let bytes = hello("www.Example.com");
        assert_eq!(sni(&bytes).unwrap().unwrap().as_str(), "www.example.com");
        let mut acceptor = Acceptor::default();
        let (last, first) = bytes.split_last().unwrap();
        for byte in first {
            assert_eq!(server_name(&mut acceptor, &[*byte]).unwrap(), None);
        }
        assert!(server_name(&mut acceptor, &[*last]).unwrap().is_some());
        assert!(matches!(sni(&hello("192.0.2.1")), Err(PeekError::Nameless)));
        assert!(matches!(sni(b"GET / HTTP/1.1\r\n\r\n"), Err(PeekError::Foreign)));
        assert!(matches!(sni(b"SSH-2.0-OpenSSH_9.2\r\n"), Err(PeekError::Foreign)));
    }

    #[test]
    fn a_request_names_its_host_once() {
        let host = |text: &str| request_host(text.as_bytes()).map(|found| found.map(|name| name.to_string()));
        let found = |text: &str| host(text).unwrap().unwrap();
        assert_eq!(found("GET / HTTP/1.1\r\nHost: A.example.com\r\n\r\n"), "a.example.com");
        assert_eq!(found("GET / HTTP/1.1\r\nhost:a.example.com:80\r\n\r\nbody"), "a.example.com");
        assert_eq!(found("GET http://a.b/x HTTP/1.1\r\nHost: a.b\r\n\r\n"), "a.b");
        assert_eq!(host("GET / HTTP/1.1\r\nHost: a.b\r\n").unwrap(), None);
        for bad in [
            "GET / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.b\r\nHost: c.d\r\n\r\n",
            "GET http://c.d/ HTTP/1.1\r\nHost: a.b\r\n\r\n",
            "GET http://c.d@a.b/ HTTP/1.1\r\nHost: a.b\r\n\r\n",
            "CONNECT c.d:443 HTTP/1.1\r\nHost: a.b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.b, c.d\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : a.b\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "\u{16}\u{3}\u{1}",
        ] {
            assert!(host(bad).is_err(), "{bad:?} gave {:?}", host(bad));
        }
    }

    proptest! {
        #[test]
        fn damage_is_no_panic(at in 0_usize..200, byte: u8) {
            let mut bytes = hello("www.example.com");
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = sni(&bytes);
            let mut request = b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n".to_vec();
            let at = at % request.len();
            request[at] = byte;
            let _ = request_host(&request);
        }

        #[test]
        fn noise_is_no_panic(noise in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = sni(&noise);
            let _ = request_host(&noise);
            let tls = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3], noise.as_slice()].concat();
            let _ = sni(&tls);
        }
    }
}
