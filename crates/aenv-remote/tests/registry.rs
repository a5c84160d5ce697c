//! Registries of every temper, on the loopback interface.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use aenv_remote::{AwsKey, BlobName, Bounds, Credentials, Identity, RegistryClient, RegistrySource};
use aenv_store::{BlockSource, SourceError};
use tokio::runtime::Runtime;

const SIZE: usize = 1000;

/// A request: its first line and its headers in lower case.
#[derive(Clone, Debug)]
struct Asked(String, Vec<String>);

impl Asked {
    fn header(&self, name: &str) -> Option<&str> {
        self.1.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// A server that answers each request as `answer` says: the number of the request, and what was asked. `None`: never.
struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn start(answer: impl Fn(usize, &Asked) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (seen, answer) = (Arc::clone(&asked), Arc::new(answer));
        thread::spawn(move || {
            let mut silent = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines =
                    BufReader::new(stream.try_clone().unwrap()).lines().map(|line| line.unwrap_or_default());
                let first = lines.next().unwrap_or_default();
                let headers = lines.take_while(|line| !line.is_empty()).map(|line| {
                    let (name, value) = line.split_once(": ").unwrap_or((&line, ""));
                    format!("{}: {value}", name.to_lowercase())
                });
                let request = Asked(first, headers.collect());
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(request.clone());
                    seen.len() - 1
                };
                match answer(number, &request) {
                    // A client that has heard enough goes away in the middle.
                    Some(bytes) => drop(stream.write_all(&bytes)),
                    None => silent.push(stream),
                }
            }
        });
        Self { port, asked }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn content() -> Vec<u8> {
    (0..SIZE).map(|i| (i * 7 % 251) as u8).collect()
}

fn answer(status: &str, headers: &str, body: &[u8]) -> Option<Vec<u8>> {
    let head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    Some([head.as_bytes(), body].concat())
}

/// What a good registry answers.
fn range(asked: &Asked) -> Option<Vec<u8>> {
    let (from, to) = asked.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
    let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
    answer(
        "206 Partial Content",
        &format!("Content-Range: bytes {from}-{to}/{SIZE}\r\n"),
        &content()[from..=to],
    )
}

struct Reading {
    runtime: Runtime,
    client: RegistryClient,
    credentials: Option<Credentials>,
}

impl Reading {
    fn new() -> Self {
        Self { runtime: Runtime::new().unwrap(), client: RegistryClient::new().unwrap(), credentials: None }
    }

    fn identity(&self) -> Identity {
        self.credentials.clone().map_or(Identity::Anonymous, Identity::Known)
    }

    fn source(&self, port: u16) -> RegistrySource {
        let name = BlobName {
            registry: format!("127.0.0.1:{port}"),
            repository: "team/app".to_owned(),
            digest: "sha256:00".to_owned(),
        };
        let bounds = Bounds {
            read: Duration::from_secs(5),
            attempt: Duration::from_secs(2),
            attempts: 3,
            pause: Duration::from_millis(1),
        };
        let (runtime, client) = (self.runtime.handle().clone(), self.client.clone());
        RegistrySource::new(runtime, client, name, SIZE as u64, self.identity(), bounds).unwrap()
    }
}

fn read(source: &RegistrySource) -> Result<Vec<u8>, SourceError> {
    let mut buf = vec![0; 100];
    source.read_at(&mut buf, 300).map(|()| buf)
}

#[test]
fn a_range_is_read() {
    let server = Server::start(|_, asked| range(asked));
    let reading = Reading::new();
    assert_eq!(read(&reading.source(server.port)).unwrap(), content()[300..400]);
    let asked = server.asked();
    assert_eq!(asked[0].0, "GET /v2/team/app/blobs/sha256:00 HTTP/1.1");
    assert_eq!((asked.len(), asked[0].header("range")), (1, Some("bytes=300-399")));
}

#[test]
fn a_token_is_fetched_once_and_again_when_it_is_refused() {
    let tokens =
        Server::start(|number, _| answer("200 OK", "", format!(r#"{{"token":"t{number}"}}"#).as_bytes()));
    let port = tokens.port;
    let registry = Server::start(move |number, asked| {
        let fresh = if number < 4 { "Bearer t0" } else { "Bearer t1" };
        if asked.header("authorization") == Some(fresh) {
            return range(asked);
        }
        let challenge = format!(
            "WWW-Authenticate: Bearer realm=\"http://127.0.0.1:{port}/token\",service=\"r\",scope=\"x\"\r\n"
        );
        answer("401 Unauthorized", &challenge, b"")
    });
    let mut reading = Reading::new();
    reading.credentials = Some(Credentials { user: "u".to_owned(), password: "p".to_owned() });
    let source = reading.source(registry.port);
    for _ in 0..3 {
        read(&source).unwrap();
    }
    assert_eq!(tokens.asked().len(), 1);
    read(&source).unwrap();
    let asked = tokens.asked();
    assert_eq!(asked.len(), 2);
    assert!(
        asked[0].0.contains("scope=repository%3Ateam%2Fapp%3Apull") && asked[0].0.contains("service=r"),
        "{asked:?}"
    );
    assert_eq!(asked[0].header("authorization"), Some("Basic dTpw"));
}

#[test]
fn a_password_is_shown_only_where_it_is_wanted() {
    let elsewhere = Server::start(|_, asked| range(asked));
    let port = elsewhere.port;
    let registry = Server::start(move |_, asked| match asked.header("authorization") {
        Some("Basic dTpw") => {
            // "localhost" is another host than 127.0.0.1.
            answer("307 Temporary Redirect", &format!("Location: http://localhost:{port}/cdn\r\n"), b"")
        }
        _ => answer("401 Unauthorized", "WWW-Authenticate: Basic realm=\"x\"\r\n", b""),
    });
    let mut reading = Reading::new();
    assert!(matches!(read(&reading.source(registry.port)), Err(SourceError::Denied { .. })));
    assert_eq!(registry.asked().len(), 1, "without a password there is nothing to try");
    reading.credentials = Some(Credentials { user: "u".to_owned(), password: "p".to_owned() });
    assert_eq!(read(&reading.source(registry.port)).unwrap(), content()[300..400]);
    let asked = elsewhere.asked();
    assert_eq!((asked.len(), asked[0].header("authorization")), (1, None));
    assert_eq!(asked[0].header("range"), Some("bytes=300-399"));
}

#[test]
fn what_may_go_better_is_tried_again() {
    let server = Server::start(|number, asked| match number {
        0 => answer("429 Too Many Requests", "Retry-After: 0\r\n", b""),
        1 => answer("503 Service Unavailable", "", b"<html>"),
        _ => range(asked),
    });
    let reading = Reading::new();
    assert_eq!(read(&reading.source(server.port)).unwrap(), content()[300..400]);
    assert_eq!(server.asked().len(), 3);
    let server = Server::start(|_, _| answer("502 Bad Gateway", "", b""));
    let error = read(&reading.source(server.port)).unwrap_err().to_string();
    assert!(error.contains("502") && error.contains("tried 3 times"), "{error}");
    assert_eq!(server.asked().len(), 3);
    // A connection that ends in the middle of the bytes.
    let server = Server::start(|number, asked| {
        let bytes = range(asked)?;
        Some(if number == 0 { bytes[..bytes.len() - 30].to_vec() } else { bytes })
    });
    assert_eq!(read(&reading.source(server.port)).unwrap(), content()[300..400]);
}

#[test]
fn what_will_not_is_an_error_at_once() {
    let reading = Reading::new();
    let whole = content();
    let cases: Vec<(&str, Option<Vec<u8>>)> = vec![
        ("(403", answer("403 Forbidden", "", b"")),
        ("(404", answer("404 Not Found", "", b"")),
        ("416", answer("416 Range Not Satisfiable", "", b"")),
        ("unknown kind of login", answer("401 Unauthorized", "WWW-Authenticate: Digest x\r\n", b"")),
        ("knows no ranges", answer("200 OK", "", &whole)),
        ("a web page", answer("200 OK", "Content-Type: text/html\r\n", b"<html>")),
        (
            "not bytes 300-399/1000",
            answer("206 Partial Content", "Content-Range: bytes 0-99/1000\r\n", &whole[..100]),
        ),
        (
            "not bytes 300-399/1000",
            answer("206 Partial Content", "Content-Range: bytes 300-399/2000\r\n", &whole[..100]),
        ),
        (
            "more than 100 bytes",
            answer("206 Partial Content", "Content-Range: bytes 300-399/1000\r\n", &whole[..101]),
        ),
    ];
    for (expected, response) in cases {
        let server = Server::start(move |_, _| response.clone());
        let error = read(&reading.source(server.port)).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(server.asked().len(), 1, "{error}");
    }
}

#[test]
fn a_registry_that_stays_away_is_an_error_in_time() {
    let reading = Reading::new();
    let server = Server::start(|_, _| None);
    let started = Instant::now();
    let error = read(&reading.source(server.port)).unwrap_err();
    assert!(matches!(error, SourceError::Away { .. } | SourceError::TimedOut { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert!(matches!(read(&reading.source(nobody)), Err(SourceError::Away { .. })));
}

const SECRET: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";

/// A login for ECR from a server that answers like this; each attempt is told at once.
fn login(port: u16) -> Result<Credentials, SourceError> {
    let key = AwsKey::new("AKIAEXAMPLE".to_owned(), SECRET.to_owned(), "eu-central-1".to_owned()).unwrap();
    let pause = Duration::from_millis(1);
    let bounds = Bounds { attempts: 3, pause, ..Bounds::default() };
    let runtime = Runtime::new().unwrap();
    runtime.block_on(key.login_at(&format!("http://127.0.0.1:{port}"), bounds))
}

#[test]
fn amazon_gives_a_password_for_a_key() {
    let server = Server::start(|number, _| match number {
        0 => answer(
            "400 Bad Request",
            "",
            br#"{"__type":"com.amazon#ThrottlingException","message":"slowly"}"#,
        ),
        1 => answer("503 Service Unavailable", "", b"<html>"),
        // "AWS:pass:word"
        _ => answer(
            "200 OK",
            "",
            br#"{"authorizationData":[{"authorizationToken":"QVdTOnBhc3M6d29yZA==","expiresAt":1.7E9}]}"#,
        ),
    });
    let credentials = login(server.port).unwrap();
    assert_eq!((credentials.user.as_str(), credentials.password.as_str()), ("AWS", "pass:word"));
    let asked = server.asked();
    assert_eq!((asked.len(), asked[2].0.as_str()), (3, "POST / HTTP/1.1"));
    let operation = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken";
    assert_eq!(asked[2].header("x-amz-target"), Some(operation));
    let signature = asked[2].header("authorization").unwrap();
    assert!(signature.starts_with("AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/"), "{signature}");
    assert!(
        signature.contains("/eu-central-1/ecr/aws4_request, SignedHeaders=content-type;host;"),
        "{signature}"
    );
    assert!(!format!("{asked:?}").contains(SECRET));
}

#[test]
fn whatever_amazon_answers_is_a_typed_error() {
    type Check = fn(&SourceError) -> bool;
    let denied: Check = |error| matches!(error, SourceError::Denied { .. });
    let away: Check = |error| matches!(error, SourceError::Away { .. });
    let remote: Check = |error| matches!(error, SourceError::Remote { .. });
    let corrupt: Check = |error| matches!(error, SourceError::Corrupt { .. });
    let unknown = br#"{"__type":"UnrecognizedClientException","message":"The security token is invalid."}"#;
    let long = vec![b' '; 70 << 10];
    let cases: [(&str, &[u8], &str, Check); 9] = [
        ("400 Bad Request", unknown, "UnrecognizedClientException The security token is invalid.", denied),
        ("403 Forbidden", b"<html>", "403", denied),
        ("301 Moved Permanently", b"", "301", remote),
        ("500 Internal Server Error", b"", "tried 3 times", away),
        ("200 OK", b"<html>", "no login", remote),
        ("200 OK", br#"{"authorizationData":[]}"#, "no login", remote),
        ("200 OK", br#"{"authorizationData":[{"authorizationToken":"!"}]}"#, "no login", remote),
        // "AWS" without a password
        ("200 OK", br#"{"authorizationData":[{"authorizationToken":"QVdT"}]}"#, "no login", remote),
        ("200 OK", &long, "more than", corrupt),
    ];
    for (status, body, expected, check) in cases {
        let response = answer(status, "Location: http://127.0.0.1:9/\r\n", body);
        let server = Server::start(move |_, _| response.clone());
        let error = login(server.port).unwrap_err();
        assert!(check(&error) && error.to_string().contains(expected), "{status}: {error:?}");
        assert!(!format!("{error:?}").contains(SECRET));
    }
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert!(away(&login(nobody).unwrap_err()));
}
