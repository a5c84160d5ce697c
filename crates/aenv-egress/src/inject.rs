//! Requests to hosts with header rules: the gate speaks for the host to the guest, and for the guest to the host.
//!
//! To the guest it shows a certificate of the node's own CA. The host's certificate is checked against the name, so that the
//! headers, which may be secrets, go to nobody else (over port 80, to an address that the resolvers give for the name).
//! HTTP/1.1 both ways; bodies are streamed, and `Upgrade` becomes a tunnel.

use std::{convert::Infallible, io, io::Cursor, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri, header};
use http_body_util::{Either, Full};
use hyper::{
    body::Incoming,
    client::conn::http1::{Builder as Client, SendRequest},
    server::conn::http1::Builder as Server,
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncReadExt, copy_bidirectional},
    net::TcpStream,
    sync::Mutex,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, rustls::pki_types::ServerName};

use crate::{
    HostName,
    connection::{Passage, Refusal},
    dial::dial,
    gate::Context,
    peek::Protocol,
    secrets::headers,
    tunnel::Stream,
};

/// A handshake that takes longer is given up. Emulated guests on a busy host are slow.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// A request's head has to arrive within this, counted from the end of the one before.
const HEAD: Duration = Duration::from_secs(60);
/// Bytes of a head.
const MAX_HEAD: usize = 64 << 10;

type Body = Either<Incoming, Full<Bytes>>;

/// What the guest's requests on one connection have in common.
struct Exchange {
    context: Arc<Context>,
    passage: Passage,
    host: HostName,
    protocol: Protocol,
    /// The connection to the host, from the first request on.
    sender: Mutex<Option<SendRequest<Incoming>>>,
    drivers: Mutex<JoinSet<()>>,
    /// Both sides of a connection that has left HTTP.
    upgraded: Mutex<Option<(OnUpgrade, OnUpgrade)>>,
}

/// Serves a connection for a host with rules to its end. `seen` is what was read of it.
pub(crate) async fn serve(
    context: Arc<Context>,
    guest: TcpStream,
    seen: Vec<u8>,
    passage: Passage,
    host: HostName,
    protocol: Protocol,
) -> Result<(), Refusal> {
    let (read, write) = guest.into_split();
    let stream = tokio::io::join(Cursor::new(seen).chain(read), write);
    let exchange = Arc::new(Exchange {
        context,
        passage,
        host,
        protocol,
        sender: Mutex::default(),
        drivers: Mutex::default(),
        upgraded: Mutex::default(),
    });
    match protocol {
        Protocol::Http => exchange.run(stream).await,
        Protocol::Tls => {
            let config =
                exchange.context.authority().server_config(&exchange.host).map_err(io::Error::other)?;
            let accepted = timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await;
            exchange.run(accepted.map_err(|_| late("the guest"))??).await
        }
    }
}

impl Exchange {
    async fn run(self: Arc<Self>, stream: impl Stream + 'static) -> Result<(), Refusal> {
        let exchange = Arc::clone(&self);
        let service = service_fn(move |request| {
            let exchange = Arc::clone(&exchange);
            async move { Ok::<_, Infallible>(exchange.forward(request).await) }
        });
        let served = Server::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(MAX_HEAD)
            .preserve_header_case(true)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        served.await.map_err(io::Error::other)?;
        let Some((inside, outside)) = self.upgraded.lock().await.take() else { return Ok(()) };
        let inside = inside.await.map_err(io::Error::other)?;
        let outside = outside.await.map_err(io::Error::other)?;
        copy_bidirectional(&mut TokioIo::new(inside), &mut TokioIo::new(outside)).await?;
        Ok(())
    }

    async fn forward(&self, mut request: Request<Incoming>) -> Response<Body> {
        if !self.is_for_host(&request) {
            return say(StatusCode::MISDIRECTED_REQUEST, "this connection is for another host");
        }
        if let Some(path) = request.uri().path_and_query().cloned() {
            *request.uri_mut() = Uri::from(path);
        }
        let upgrade = request.headers().contains_key(header::UPGRADE);
        if !upgrade {
            for name in [header::CONNECTION, header::PROXY_AUTHORIZATION] {
                request.headers_mut().remove(name);
            }
        }
        match headers(&self.passage.policy, &self.host, self.context.secrets()).await {
            Ok(headers) => request.headers_mut().extend(headers),
            Err(error) => return say(StatusCode::BAD_GATEWAY, &error.to_string()),
        }
        let inside = upgrade.then(|| hyper::upgrade::on(&mut request));
        let mut sender = self.sender.lock().await;
        if sender.as_ref().is_none_or(|sender| sender.is_closed()) {
            *sender = match self.connect().await {
                Ok(connected) => Some(connected),
                Err(error) => {
                    tracing::debug!(host = %self.host, %error, "a host with header rules is not reached");
                    return say(StatusCode::BAD_GATEWAY, &format!("{} is not reached: {error}", self.host));
                }
            };
        }
        let Some(connected) = sender.as_mut() else {
            return say(StatusCode::BAD_GATEWAY, "the host is not reached");
        };
        let answered = match connected.ready().await {
            Ok(()) => connected.send_request(request).await,
            Err(error) => Err(error),
        };
        match answered {
            Ok(mut response) => {
                if response.status() == StatusCode::SWITCHING_PROTOCOLS
                    && let Some(inside) = inside
                {
                    *self.upgraded.lock().await = Some((inside, hyper::upgrade::on(&mut response)));
                }
                response.map(Either::Left)
            }
            Err(error) => {
                *sender = None;
                say(StatusCode::BAD_GATEWAY, &format!("{} did not answer: {error}", self.host))
            }
        }
    }

    /// A secret is for one host: requests for others do not travel with it.
    fn is_for_host(&self, request: &Request<Incoming>) -> bool {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
        let authority = request.uri().authority().map(|authority| authority.host().to_owned());
        let named = host.to_str().ok().and_then(|host| host.parse::<http::uri::Authority>().ok());
        let same = |host: &str| host.parse::<HostName>().is_ok_and(|host| host == self.host);
        named.is_some_and(|named| same(named.host())) && authority.is_none_or(|authority| same(&authority))
    }

    async fn connect(&self) -> Result<SendRequest<Incoming>, Refusal> {
        let wanted = *self.passage.destination.ip();
        let addresses = self.context.addresses_of(&self.passage.policy, &self.host, wanted).await?;
        let port = self.passage.destination.port();
        let stream = dial(&self.context, &self.passage.policy, &addresses, port).await?;
        match self.protocol {
            Protocol::Http => self.speak(stream).await,
            Protocol::Tls => {
                let name = ServerName::try_from(self.host.as_str().to_owned()).map_err(io::Error::other)?;
                let connector = TlsConnector::from(Arc::clone(&self.context.trust().hosts));
                let connected = timeout(HANDSHAKE, connector.connect(name, stream)).await;
                self.speak(connected.map_err(|_| late("the host"))??).await
            }
        }
    }

    async fn speak(&self, stream: impl Stream + 'static) -> Result<SendRequest<Incoming>, Refusal> {
        let mut client = Client::new();
        client.preserve_header_case(true).max_buf_size(MAX_HEAD);
        let (sender, connection) = client.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let mut drivers = self.drivers.lock().await;
        while drivers.try_join_next().is_some() {}
        drivers.spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to a host with header rules ended");
            }
        });
        Ok(sender)
    }
}

fn late(who: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{who} did not finish its TLS handshake in time"))
}

fn say(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = Response::new(Either::Right(Full::from(format!("{message}\n"))));
    *response.status_mut() = status;
    response
}
