//! The data plane against real TCP servers that stand in for guests.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use aenv_envd_api::{FileOperation, PORT, signature};
use aenv_orchestrator::ProxyOptions;
use aenv_types::{Dial, DialFuture, TeamId};
use axum::{
    Router,
    extract::Request as AxumRequest,
    response::IntoResponse,
    routing::{any, get, post},
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use http::StatusCode;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::listen;

/// How long connections may be open without a request under way, here.
const IDLE: Duration = Duration::from_secs(1);

/// A server without sandboxes.
pub(crate) struct NoRoutes;

impl Routes for NoRoutes {
    fn route<'a>(&'a self, id: &'a SandboxId, _: Wake) -> BoxFuture<'a, Result<Route, SandboxError>> {
        Box::pin(async move { Err(SandboxError::NotFound(id.clone())) })
    }

    fn gate(&self, _: &SandboxId) -> Option<Gate> {
        None
    }

    fn envd_tokens(&self) -> Vec<(SandboxId, Token)> {
        Vec::new()
    }
}

/// Ports of a guest, each an address on the host's loopback.
struct Ports {
    open: Mutex<HashMap<u16, SocketAddr>>,
    dials: AtomicUsize,
}

impl Dial for Ports {
    fn dial(&self, port: u16) -> DialFuture<'_> {
        self.dials.fetch_add(1, Ordering::SeqCst);
        let address = self.open.lock().get(&port).copied();
        Box::pin(async move {
            match address {
                Some(address) => TcpStream::connect(address).await,
                None => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }
}

/// One sandbox.
struct Guest {
    id: SandboxId,
    ports: Arc<Ports>,
    ended: CancellationToken,
    token: Token,
    traffic: Option<Token>,
    /// How often a way in was asked for, which would wake it.
    asked: AtomicUsize,
    options: ProxyOptions,
}

impl Routes for Guest {
    fn gate(&self, id: &SandboxId) -> Option<Gate> {
        let known = *id == self.id && !self.ended.is_cancelled();
        let gate = if self.options.private_traffic { Gate::Token(self.traffic.clone()) } else { Gate::Open };
        known.then_some(gate)
    }

    fn route<'a>(&'a self, id: &'a SandboxId, _: Wake) -> BoxFuture<'a, Result<Route, SandboxError>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            if *id != self.id || self.ended.is_cancelled() {
                return Err(SandboxError::NotFound(id.clone()));
            }
            Ok(Route {
                id: self.id.clone(),
                team: TeamId::default_team(),
                dial: self.ports.clone(),
                ended: self.ended.clone(),
                envd_token: Some(self.token.clone()),
                proxy: self.options.clone(),
            })
        })
    }

    fn envd_tokens(&self) -> Vec<(SandboxId, Token)> {
        vec![(SandboxId::random(), Token::random()), (self.id.clone(), self.token.clone())]
    }
}

/// A front server with one guest behind it.
struct Stage {
    url: String,
    guest: Arc<Guest>,
    proxy: Proxy,
    client: reqwest::Client,
    stop: CancellationToken,
    _home: tempfile::TempDir,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn serve(router: Router, stop: &CancellationToken) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = move |request| {
        let router = router.clone();
        async move { tower::ServiceExt::oneshot(router, request).await.unwrap() }
    };
    tokio::spawn(listen::serve(listener, None, IDLE, stop.clone(), answer));
    address
}

impl Stage {
    async fn new(envd: Router, user: Router, options: ProxyOptions) -> Self {
        let stop = CancellationToken::new();
        let open = [(PORT, serve(envd, &stop).await), (3000, serve(user, &stop).await)];
        let ports = Ports { open: Mutex::new(open.into()), dials: AtomicUsize::new(0) };
        let guest = Arc::new(Guest {
            id: SandboxId::random(),
            ports: Arc::new(ports),
            ended: CancellationToken::new(),
            token: Token::random(),
            traffic: options.private_traffic.then(Token::random),
            asked: AtomicUsize::new(0),
            options,
        });
        let (home, keys) = crate::app::tests::keys();
        let proxy = Proxy::new(guest.clone(), keys, &[]);
        let front = proxy.clone();
        let answer = move |request: Request<Body>| {
            let front = front.clone();
            async move {
                match front.claim(&request) {
                    Claim::Sandbox(target) => front.serve(request, target).await,
                    Claim::Signed(file) => front.serve_signed(request, file).await,
                    other => panic!("{other:?}"),
                }
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(listen::serve(listener, None, IDLE, stop.clone(), answer));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { url, guest, proxy, client, stop, _home: home }
    }

    async fn plain() -> Self {
        Self::new(echo(), echo(), ProxyOptions::default()).await
    }

    fn request(&self, method: reqwest::Method, port: u16, path: &str) -> reqwest::RequestBuilder {
        self.client
            .request(method, format!("{}{path}", self.url))
            .header("e2b-sandbox-id", self.guest.id.as_str())
            .header("e2b-sandbox-port", port)
    }

    fn get(&self, port: u16, path: &str) -> reqwest::RequestBuilder {
        self.request(reqwest::Method::GET, port, path)
    }
}

/// Says what arrived.
fn echo() -> Router {
    async fn answer(request: AxumRequest) -> axum::Json<Value> {
        let (parts, body) = request.into_parts();
        let length = body.collect().await.unwrap().to_bytes().len();
        let headers: HashMap<_, _> =
            parts.headers.iter().map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned())).collect();
        axum::Json(json!({"uri": parts.uri.to_string(), "headers": headers, "length": length}))
    }
    Router::new().fallback(any(answer))
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent_but_for_the_platforms_own() {
    let stage = Stage::plain().await;
    let request = stage
        .request(reqwest::Method::POST, 3000, "/a%20b?c=%2F")
        .header("x-api-key", "e2b_test_key")
        .header("authorization", "Basic dXNlcjo=")
        .header("host", "box.example.com")
        .body("12345");
    let seen: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!(seen["uri"], "/a%20b?c=%2F");
    assert_eq!(seen["length"], 5);
    assert_eq!(seen["headers"]["host"], "box.example.com");
    assert_eq!(seen["headers"]["authorization"], "Basic dXNlcjo=");
    for gone in ["x-api-key", "e2b-sandbox-id", "e2b-sandbox-port"] {
        assert!(seen["headers"].get(gone).is_none(), "{gone} reached the guest");
    }
}

#[tokio::test]
async fn header_names_reach_the_guest_in_title_case() {
    let stage = Stage::plain().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    stage.guest.ports.open.lock().insert(4000, listener.local_addr().unwrap());
    let request = stage.get(4000, "/").header("host", "box.example.com").header("x-some-name", "1").send();
    let guest = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        head
    };
    let (answer, head) = tokio::join!(request, guest);
    assert_eq!(answer.unwrap().status(), StatusCode::NO_CONTENT);
    assert!(head.contains("\r\nHost: box.example.com\r\n"), "{head}");
    assert!(head.contains("\r\nX-Some-Name: 1\r\n"), "{head}");
}

#[tokio::test]
async fn h2c_comes_in() {
    let stage = Stage::plain().await;
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let answer =
        client.get(format!("{}/x", stage.url)).header("e2b-sandbox-id", stage.guest.id.as_str()).send().await;
    let answer = answer.unwrap();
    assert_eq!((answer.status(), answer.version()), (StatusCode::OK, http::Version::HTTP_2));
}

#[tokio::test]
async fn a_closed_port_and_a_missing_sandbox_are_told_apart() {
    let stage = Stage::plain().await;
    let closed = stage.get(81, "/").send().await.unwrap();
    assert_eq!(closed.status(), 502);
    let id = stage.guest.id.as_str();
    let expected = json!({"sandboxId": id, "message": "The sandbox is running but port is not open", "port": 81, "code": 502});
    assert_eq!(closed.json::<Value>().await.unwrap(), expected);
    let gone = stage.client.get(&stage.url).header("e2b-sandbox-id", "inone").send().await.unwrap();
    assert_eq!(gone.status(), 502);
    let expected = json!({"sandboxId": "inone", "message": "The sandbox was not found", "code": 502});
    assert_eq!(gone.json::<Value>().await.unwrap(), expected);
}

#[tokio::test]
async fn the_hosts_own_paths_are_closed_on_envd_only() {
    let stage = Stage::plain().await;
    for path in ["/init", "//init/", "/%69nit", "/tunnel/3000"] {
        assert_eq!(stage.get(PORT, path).send().await.unwrap().status(), 404, "{path}");
        assert_eq!(stage.get(3000, path).send().await.unwrap().status(), 200, "{path}");
    }
    let prefixed = stage.get(PORT, "/proxy/init").send().await.unwrap();
    assert_eq!(prefixed.status(), 404);
}

#[tokio::test]
async fn private_ports_ask_for_their_token() {
    let options = ProxyOptions {
        private_traffic: true,
        mask_request_host: Some("masked.example.com:${PORT}".into()),
        ..ProxyOptions::default()
    };
    let stage = Stage::new(echo(), echo(), options).await;
    let missing = stage.get(3000, "/").send().await.unwrap();
    assert_eq!(missing.status(), 403);
    let body: Value = missing.json().await.unwrap();
    assert_eq!(body["code"], 403);
    assert!(body["message"].as_str().unwrap().ends_with("'e2b-traffic-access-token' is missing"));
    let wrong = stage.get(3000, "/").header("e2b-traffic-access-token", "x").send().await.unwrap();
    let body: Value = wrong.json().await.unwrap();
    assert!(body["message"].as_str().unwrap().ends_with("'e2b-traffic-access-token' is invalid"));
    assert_eq!(stage.guest.asked.load(Ordering::SeqCst), 0, "nobody is woken for what is refused");
    let token = stage.guest.traffic.clone().unwrap();
    let right = stage.get(3000, "/").header("e2b-traffic-access-token", token.expose()).send().await.unwrap();
    let seen: Value = right.json().await.unwrap();
    assert_eq!(seen["headers"]["host"], "masked.example.com:3000");
    assert!(seen["headers"].get("e2b-traffic-access-token").is_none());
    assert_eq!(stage.get(PORT, "/").send().await.unwrap().status(), 200, "envd asks for its own token");
}

#[tokio::test]
async fn a_signed_url_finds_its_sandbox() {
    let stage = Stage::plain().await;
    let signature = signature::sign("a.txt", FileOperation::Read, "user", &stage.guest.token, None);
    let query = [("path", "a.txt"), ("username", "user"), ("signature", &signature)];
    let url = format!("{}/files", stage.url);
    let found = stage.client.get(&url).query(&query).send().await.unwrap();
    assert_eq!(found.status(), 200);
    let forged = stage.client.post(&url).query(&query).send().await.unwrap();
    assert_eq!(forged.status(), 401);
    assert_eq!(forged.text().await.unwrap(), r#"{"code":401,"message":"invalid signature"}"#);
}

/// Sends one piece and then nothing.
fn endless() -> Router {
    let body = || async {
        let first = stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"first"))]);
        Body::from_stream(first.chain(stream::pending())).into_response()
    };
    Router::new().route("/endless", get(body)).route("/never", get(std::future::pending::<()>))
}

#[tokio::test]
async fn a_stream_breaks_when_its_sandbox_ends() {
    let stage = Stage::new(endless(), echo(), ProxyOptions::default()).await;
    let mut answer = stage.get(PORT, "/endless").send().await.unwrap();
    assert_eq!(answer.chunk().await.unwrap().unwrap(), "first");
    stage.guest.ended.cancel();
    assert!(answer.chunk().await.is_err(), "a killed stream must not look like one that ended well");
    let after = stage.get(PORT, "/health").send().await.unwrap();
    assert_eq!(after.json::<Value>().await.unwrap()["message"], "The sandbox was not found");
}

/// Streams have no time limit: what bounds an idle connection does not count while a request is under way.
#[tokio::test]
async fn streams_tunnels_and_requests_that_wait_may_be_silent_for_long() {
    let silence = IDLE * 3;
    let late = move || async move {
        tokio::time::sleep(silence).await;
        Ok::<_, io::Error>(Bytes::from_static(b"last"))
    };
    let stream = move || async move {
        let first = stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"first"))]);
        Body::from_stream(first.chain(stream::once(late())))
    };
    let waits = move || async move { late().await.unwrap() };
    let user = Router::new().route("/stream", get(stream)).route("/waits", get(waits));
    let stage = Stage::new(echo(), user, ProxyOptions::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    stage.guest.ports.open.lock().insert(9000, listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut guest, _) = listener.accept().await.unwrap();
        read_head(&mut guest).await;
        guest
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
            .await
            .unwrap();
        tokio::time::sleep(silence).await;
        guest.write_all(b"last").await.unwrap();
    });
    let mut client = TcpStream::connect(stage.url.trim_start_matches("http://")).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\ne2b-sandbox-id: {}\r\ne2b-sandbox-port: 9000\r\n\r\n",
        stage.guest.id
    );
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101"));
    let tunnel = async {
        let mut buffer = [0; 4];
        client.read_exact(&mut buffer).await.unwrap();
        buffer
    };
    let stage = &stage;
    let whole = |path: &'static str| async move {
        stage.get(3000, path).send().await.unwrap().bytes().await.unwrap()
    };
    let (streamed, waited, tunnelled) = tokio::join!(whole("/stream"), whole("/waits"), tunnel);
    assert_eq!((&streamed[..], &waited[..], &tunnelled), (&b"firstlast"[..], &b"last"[..], b"last"));

    // And it does count: a connection on which nothing is asked is closed.
    let mut idle = TcpStream::connect(stage.url.trim_start_matches("http://")).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(30), idle.read(&mut [0; 64])).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test]
async fn a_request_that_waits_hears_of_the_end() {
    let stage = Stage::new(endless(), echo(), ProxyOptions::default()).await;
    let waiting = tokio::spawn(stage.get(PORT, "/never").send());
    while stage.guest.ports.dials.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    stage.guest.ended.cancel();
    let answer = waiting.await.unwrap().unwrap();
    assert_eq!(answer.status(), 502);
    assert_eq!(answer.json::<Value>().await.unwrap()["message"], "The sandbox was not found");
}

#[tokio::test]
async fn connections_to_envd_are_kept_and_to_users_not() {
    let stage = Stage::plain().await;
    for _ in 0..5 {
        stage.get(PORT, "/x").send().await.unwrap().bytes().await.unwrap();
        while stage.proxy.pool.len() == 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(stage.guest.ports.dials.load(Ordering::SeqCst), 1);
    for _ in 0..3 {
        stage.get(3000, "/x").send().await.unwrap().bytes().await.unwrap();
    }
    assert_eq!(stage.guest.ports.dials.load(Ordering::SeqCst), 4);
    stage.guest.ended.cancel();
    stage.proxy.pool.sweep();
    assert_eq!(stage.proxy.pool.len(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_guests_request() {
    let (gone, mut left) = tokio::sync::mpsc::channel::<()>(1);
    let endless = move || {
        let gone = gone.clone();
        async move {
            // The sender is dropped with the stream, when the guest sees that nobody reads any more.
            let first = stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"first"))]);
            let rest = stream::unfold(gone, |gone| async move {
                std::future::pending::<()>().await;
                Some((Ok(Bytes::new()), gone))
            });
            Body::from_stream(first.chain(rest)).into_response()
        }
    };
    let stage =
        Stage::new(Router::new().route("/endless", get(endless)), echo(), ProxyOptions::default()).await;
    let mut answer = stage.get(PORT, "/endless").send().await.unwrap();
    answer.chunk().await.unwrap();
    drop(answer);
    // The route holds one sender, the stream the other one: when only the route's is left, the stream is gone.
    let only_one = async {
        while left.sender_strong_count() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), only_one).await.expect("the guest still sends to nobody");
    left.close();
}

#[tokio::test]
async fn upgrades_are_raw_tunnels_that_break_with_the_sandbox() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stage = Stage::plain().await;
    stage.guest.ports.open.lock().insert(9000, listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        assert!(head.to_lowercase().contains("upgrade: anything"), "{head}");
        let answer =
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: anything\r\n\r\nhello";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let mut buffer = [0; 64];
        while let Ok(n @ 1..) = stream.read(&mut buffer).await {
            stream.write_all(&buffer[..n]).await.unwrap();
        }
    });
    let mut client = TcpStream::connect(stage.url.trim_start_matches("http://")).await.unwrap();
    let request = format!(
        "GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: anything\r\ne2b-sandbox-id: {}\r\ne2b-sandbox-port: 9000\r\n\r\n",
        stage.guest.id
    );
    client.write_all(request.as_bytes()).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101"));
    let mut buffer = [0; 5];
    client.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"hello");
    client.write_all(b"\x00\xffraw").await.unwrap();
    client.read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"\x00\xffraw");
    stage.guest.ended.cancel();
    let end = tokio::time::timeout(Duration::from_secs(5), client.read(&mut buffer)).await.unwrap();
    assert!(matches!(end, Ok(0) | Err(_)));
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test]
async fn large_bodies_stream_both_ways() {
    const SIZE: usize = 64 << 20;
    async fn upload(body: Body) -> String {
        let mut stream = body.into_data_stream();
        let mut total = 0;
        while let Some(piece) = stream.next().await {
            total += piece.unwrap().len();
        }
        total.to_string()
    }
    async fn download() -> Body {
        let piece = Bytes::from(vec![7; 1 << 16]);
        Body::from_stream(stream::iter((0..SIZE >> 16).map(move |_| Ok::<_, io::Error>(piece.clone()))))
    }
    let router = Router::new().route("/up", post(upload)).route("/down", get(download));
    let stage = Stage::new(router, echo(), ProxyOptions::default()).await;
    let piece = Bytes::from(vec![7; 1 << 16]);
    let body = reqwest::Body::wrap_stream(stream::iter(
        (0..SIZE >> 16).map(move |_| Ok::<_, io::Error>(piece.clone())),
    ));
    let sent = stage.request(reqwest::Method::POST, PORT, "/up").body(body).send().await.unwrap();
    assert_eq!(sent.text().await.unwrap(), SIZE.to_string());
    let mut answer = stage.get(PORT, "/down").send().await.unwrap();
    let mut total = 0;
    while let Some(piece) = answer.chunk().await.unwrap() {
        total += piece.len();
    }
    assert_eq!(total, SIZE);
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_costs_no_request() {
    // A guest that answers one request on each connection and then closes it without saying so.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stage = Stage::plain().await;
    stage.guest.ports.open.lock().insert(PORT, listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_head(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        }
    });
    for _ in 0..20 {
        let answer = stage.get(PORT, "/x").send().await.unwrap();
        assert_eq!((answer.status(), answer.text().await.unwrap().as_str()), (StatusCode::OK, "ok"));
    }
}
