//! `/files`, tokens, signatures and the plain endpoints on the wire.

mod support;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use aenv_envd_api::{FileOperation, sign};
use aenv_types::Token;
use flate2::{Compression, read::MultiGzDecoder, write::GzEncoder};
use serde_json::{Value, json};
use support::{Envd, Incoming};

const OCTETS: (&str, &str) = ("content-type", "application/octet-stream");
/// daemon, a user that every Debian has.
const DAEMON: u32 = 1;

fn form(parts: &[(&str, Option<&str>, &str)]) -> (String, Vec<u8>) {
    let mut body = String::new();
    for (name, filename, contents) in parts {
        let filename = filename.map(|filename| format!("; filename=\"{filename}\"")).unwrap_or_default();
        body.push_str(&format!(
            "--XX\r\nContent-Disposition: form-data; name=\"{name}\"{filename}\r\n\r\n{contents}\r\n"
        ));
    }
    body.push_str("--XX--\r\n");
    ("multipart/form-data; boundary=XX".to_owned(), body.into_bytes())
}

fn upload(envd: &Envd, query: &str, parts: &[(&str, Option<&str>, &str)]) -> support::Answer {
    let (content_type, body) = form(parts);
    envd.post(&format!("/files{query}"), &[("content-type", &content_type)], &body)
}

fn encoded(path: &Path) -> String {
    path.display().to_string().replace('/', "%2F").replace('+', "%2B").replace(' ', "%20")
}

#[test]
fn health_metrics_and_envs() {
    let envd = Envd::start();
    let health = envd.get("/health", &[]);
    assert_eq!((health.status, health.body.len()), (204, 0));
    let metrics = envd.get("/metrics", &[]).json();
    for field in ["ts", "cpu_count", "mem_total", "mem_used", "disk_used", "disk_total"] {
        assert!(metrics[field].as_u64().unwrap() > 0, "{field}: {metrics}");
    }
    assert!(metrics["cpu_used_pct"].is_number() && metrics["mem_cache"].is_number());
    assert_eq!(envd.get("/envs", &[]).json(), json!({"E2B_SANDBOX": "true"}));
    let preflight = envd.send(
        "OPTIONS",
        "/files",
        &[
            ("origin", "https://x"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "x-access-token,x-metadata-a"),
        ],
        b"",
    );
    assert_eq!(preflight.headers["access-control-allow-origin"], "*");
    assert_eq!(preflight.headers["access-control-allow-headers"], "x-access-token,x-metadata-a");
}

#[test]
fn only_the_host_initialises() {
    let envd = Envd::start_bare(&["--host", "169.254.0.22"]);
    assert_eq!(envd.post("/init", &[], b"{}").status, 404);
    assert_eq!(envd.get("/tunnel/80", &[("upgrade", "tcp"), ("connection", "upgrade")]).status, 404);

    let envd = Envd::start_bare(&["--host", "127.0.0.1"]);
    assert_eq!(envd.post("/init", &[], b"no json").status, 400);
    let bad = envd.post("/init", &[], json!({"hostname": "a b", "accessToken": "t"}).to_string().as_bytes());
    assert_eq!((bad.status, bad.json()["code"].as_u64()), (500, Some(500)));
    // Nothing of a refused request was taken over.
    assert_eq!(envd.get("/envs", &[]).status, 200);
    envd.init(json!({"lifecycleID": "a", "envVars": {"A": "1"}}));
    envd.init(json!({"lifecycleID": "a", "envVars": {"A": "2"}}));
    assert_eq!(envd.get("/envs", &[]).json()["A"], "1");
    envd.init(
        json!({"lifecycleID": "b", "envVars": {"A": "3"}, "hyperloopIP": "1.2.3.4", "volumeMounts": []}),
    );
    assert_eq!(envd.get("/envs", &[]).json(), json!({"E2B_SANDBOX": "true", "A": "3"}));
}

#[test]
fn tokens_and_signatures() {
    let envd = Envd::start_bare(&["--host", "127.0.0.1"]);
    let token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
    envd.init(json!({"defaultUser": "root", "accessToken": token}));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a b+c");
    fs::write(&path, "contents").unwrap();
    let text = path.display().to_string();
    let token = Token::from(token.to_owned());

    let message = |answer: support::Answer| {
        assert_eq!(answer.status, 401, "{}", answer.text());
        answer.json()
    };
    let general = json!({"code": 401, "message": "unauthorized access, please provide a valid access token or method signing if supported"});
    assert_eq!(message(envd.get("/envs", &[])), general);
    assert_eq!(message(envd.get("/metrics", &[("x-access-token", "wrong")])), general);
    let rpc = envd.post("/process.Process/List", &[("content-type", "application/json")], b"{}");
    assert_eq!(message(rpc), general);
    assert_eq!(envd.get("/health", &[]).status, 204);
    assert_eq!(envd.get("/envs", &[("x-access-token", token.expose())]).status, 200);

    let url = |query: &str| format!("/files?path={}&username=root{query}", encoded(&path));
    let said = |text: &str| json!({"code": 401, "message": text});
    let wrong = envd.get(&url(""), &[("x-access-token", "wrong")]);
    assert_eq!(message(wrong), said("access token present in header but does not match"));
    assert_eq!(message(envd.get(&url(""), &[])), said("missing signature query parameter"));
    assert_eq!(message(envd.get(&url("&signature=v1_x"), &[])), said("invalid signature"));
    let signed = |operation, expiry: Option<i64>| {
        let signature =
            sign(&text, operation, "root", &token, expiry).replace('+', "%2B").replace('/', "%2F");
        let expiry = expiry.map(|expiry| format!("&signature_expiration={expiry}")).unwrap_or_default();
        url(&format!("&signature={signature}{expiry}"))
    };
    let expired = envd.get(&signed(FileOperation::Read, Some(1_000_000)), &[]);
    assert_eq!(expired.text(), r#"{"code":401,"message":"signature is already expired"}"#);
    assert_eq!(expired.status, 401);
    assert_eq!(message(envd.get(&signed(FileOperation::Write, None), &[])), said("invalid signature"));
    assert_eq!(envd.get(&signed(FileOperation::Read, None), &[]).text(), "contents");
    assert_eq!(envd.get(&signed(FileOperation::Read, Some(99_999_999_999)), &[]).text(), "contents");
    let written = envd.post(&signed(FileOperation::Write, None), &[OCTETS], b"new");
    assert_eq!(written.json(), json!([{"name": "a b+c", "path": text, "type": "file"}]));
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
}

#[test]
fn downloads() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f.txt");
    let contents: Vec<u8> = (0..1_000_000u32).map(|number| (number % 251) as u8).collect();
    fs::write(&file, &contents).unwrap();
    let url = |path: &Path| format!("/files?path={}", encoded(path));

    let whole = envd.get(&url(&file), &[("accept-encoding", "gzip, deflate")]);
    assert_eq!((whole.status, whole.body == contents), (200, true));
    assert_eq!(whole.headers["content-length"], "1000000");
    assert_eq!(whole.headers["content-disposition"], "inline; filename=\"f.txt\"");
    assert!(whole.headers["last-modified"].ends_with(" GMT"));

    let part = envd.get(&url(&file), &[("range", "bytes=10-19"), ("accept-encoding", "gzip")]);
    assert_eq!((part.status, part.body.as_slice()), (206, &contents[10..20]));
    assert_eq!(part.headers["content-range"], "bytes 10-19/1000000");
    let outside = envd.get(&url(&file), &[("range", "bytes=1000000-")]);
    assert_eq!((outside.status, outside.headers["content-range"].as_str()), (416, "bytes */1000000"));

    let compressed = envd.get(&url(&file), &[("accept-encoding", "gzip")]);
    assert_eq!(compressed.headers["content-encoding"], "gzip");
    assert!(compressed.body.len() < contents.len() / 2);
    let mut inflated = Vec::new();
    MultiGzDecoder::new(compressed.body.as_slice()).read_to_end(&mut inflated).unwrap();
    assert_eq!(inflated, contents);
    assert_eq!(envd.get(&url(&file), &[("accept-encoding", "identity;q=0, br")]).status, 406);

    let empty = folder.path().join("empty");
    fs::write(&empty, "").unwrap();
    let answer = envd.get(&url(&empty), &[]);
    assert_eq!((answer.status, answer.headers["content-length"].as_str()), (200, "0"));
    let proc = envd.get("/files?path=/proc/self/status", &[]);
    assert!(proc.text().starts_with("Name:"), "{}", proc.text());

    let missing = envd.get("/files?path=/nowhere/x", &[]);
    assert_eq!(
        (missing.status, missing.json()),
        (404, json!({"code": 404, "message": "path '/nowhere/x' does not exist"}))
    );
    let relative = envd.get("/files?path=no-such-file", &[]);
    assert_eq!(relative.json()["message"], "path '/root/no-such-file' does not exist");
    let directory = envd.get(&url(folder.path()), &[]);
    assert_eq!((directory.status, directory.json()["code"].as_u64()), (400, Some(400)));
    assert!(directory.json()["message"].as_str().unwrap().ends_with("' is a directory"));
    let user = envd.get("/files?path=/etc/passwd&username=root123", &[]);
    assert_eq!((user.status, user.json()["message"].as_str().unwrap()), (401, "invalid username: 'root123'"));
    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(envd.get(&url(&fifo), &[]).status, 400);
}

#[test]
fn uploads() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let root = folder.path().display().to_string();

    // A form with several files, whose names are paths.
    let parts = [
        ("file", Some(&*format!("{root}/deep/er/one.txt")), "1"),
        ("other", Some("ignored"), "x"),
        ("file", Some(&*format!("{root}/two.txt")), ""),
    ];
    let answer = upload(&envd, "?username=daemon", &parts);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(
        answer.json(),
        json!([
            {"name": "one.txt", "path": format!("{root}/deep/er/one.txt"), "type": "file"},
            {"name": "two.txt", "path": format!("{root}/two.txt"), "type": "file"},
        ])
    );
    let found = fs::metadata(path("deep/er/one.txt")).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777, found.len()), (DAEMON, DAEMON, 0o644, 1));
    let made = fs::metadata(path("deep")).unwrap();
    assert_eq!((made.uid(), made.mode() & 0o7777), (DAEMON, 0o755));
    assert_eq!(fs::metadata(path("two.txt")).unwrap().len(), 0);

    // The path of the query, and a part without a filename.
    fs::set_permissions(path("two.txt"), fs::Permissions::from_mode(0o600)).unwrap();
    let query = format!("?path={}", encoded(&path("two.txt")));
    let answer = upload(&envd, &query, &[("file", None, "text")]);
    assert_eq!(
        answer.json(),
        json!([{"name": "two.txt", "path": format!("{root}/two.txt"), "type": "file"}])
    );
    let found = fs::metadata(path("two.txt")).unwrap();
    assert_eq!((found.uid(), found.mode() & 0o7777, found.len()), (0, 0o600, 4));

    let twice = upload(&envd, &query, &[("file", Some("a"), "1"), ("file", Some("b"), "2")]);
    assert_eq!((twice.status, twice.json()["code"].as_u64()), (400, Some(400)));
    assert_eq!(upload(&envd, "", &[("file", None, "x")]).status, 400);
    assert_eq!(envd.post(&format!("/files{query}"), &[("content-type", "text/plain")], b"x").status, 400);
    assert_eq!(envd.post("/files", &[OCTETS], b"x").status, 400);
    assert_eq!(envd.post(&format!("/files?path={}", encoded(folder.path())), &[OCTETS], b"x").status, 400);

    // Octets, compressed, chunked.
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&[9; 5_000_000]).unwrap();
    let compressed = encoder.finish().unwrap();
    let target = format!("/files?path={}", encoded(&path("big")));
    let answer = envd.post(&target, &[OCTETS, ("content-encoding", "gzip")], &compressed);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(fs::read(path("big")).unwrap() == [9; 5_000_000]);
    let mut stream = envd.connect();
    let head = format!(
        "POST {target} HTTP/1.1\r\nhost: e\r\nexpect: 100-continue\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n").unwrap();
    assert_eq!(Incoming::read(stream).finish().status, 200);
    assert_eq!(fs::read(path("big")).unwrap(), b"abcde");
    assert_eq!(envd.post(&target, &[OCTETS, ("content-encoding", "gzip")], b"no gzip").status, 400);

    // An upload that breaks off leaves nothing half-made.
    let gone = path("gone");
    let mut stream = envd.connect();
    let head = format!(
        "POST /files?path={} HTTP/1.1\r\nhost: e\r\ncontent-type: application/octet-stream\r\ncontent-length: 100\r\n\r\nabc",
        encoded(&gone)
    );
    stream.write_all(head.as_bytes()).unwrap();
    while !gone.exists() {
        std::thread::yield_now();
    }
    drop(stream);
    while gone.exists() {
        std::thread::yield_now();
    }
}

#[test]
fn metadata_travels_and_is_replaced() {
    let envd = Envd::start();
    // On a disk: not every /tmp has attributes.
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = folder.path().join("f");
    let target = format!("/files?path={}", encoded(&file));
    let stat = |path: &Path| {
        envd.call("filesystem.Filesystem/Stat", json!({"path": path})).1["entry"]["metadata"].clone()
    };

    let answer = envd.post(&target, &[OCTETS, ("X-Metadata-Author", "me"), ("x-metadata-b", "2")], b"x");
    assert_eq!(answer.json()[0]["metadata"], json!({"author": "me", "b": "2"}));
    assert_eq!(xattr::get(&file, "user.e2b.author").unwrap().unwrap(), b"me");
    xattr::set(&file, "user.e2b.inside", b"yes").unwrap();
    assert_eq!(stat(&file), json!({"author": "me", "b": "2", "inside": "yes"}));
    let moved = folder.path().join("g");
    envd.call("filesystem.Filesystem/Move", json!({"source": file, "destination": moved}));
    assert_eq!(stat(&moved)["author"], "me");
    let target = format!("/files?path={}", encoded(&moved));
    assert_eq!(envd.post(&target, &[OCTETS], b"y").json()[0].get("metadata"), None);
    assert_eq!(stat(&moved), Value::Null);
    let long = "v".repeat(5000);
    assert_eq!(envd.post(&target, &[OCTETS, ("x-metadata-a", &long)], b"z").status, 400);
    assert_eq!(fs::read(&moved).unwrap(), b"y");
}

#[test]
fn compose_puts_parts_together() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("1"), "one ").unwrap();
    fs::write(path("2"), "two").unwrap();
    let compose = |sources: &[&str]| {
        let sources: Vec<_> = sources.iter().map(|name| path(name)).collect();
        let body = json!({"source_paths": sources, "destination": path("new/whole"), "username": "daemon"});
        envd.post("/files/compose", &[("content-type", "application/json")], body.to_string().as_bytes())
    };
    assert_eq!(compose(&["1", "missing"]).status, 404);
    assert!(path("1").exists() && !path("new/whole").exists());
    let answer = compose(&["1", "2"]);
    assert_eq!(answer.json(), json!({"name": "whole", "path": path("new/whole"), "type": "file"}));
    assert_eq!(fs::read_to_string(path("new/whole")).unwrap(), "one two");
    assert_eq!(fs::metadata(path("new/whole")).unwrap().uid(), DAEMON);
    assert!(!path("1").exists() && !path("2").exists());
}

#[test]
fn a_full_disk_is_told() {
    // A filesystem of one MiB in a mount namespace would need one; /dev/full is a disk that is always full.
    let envd = Envd::start();
    let answer = envd.post("/files?path=/dev/full", &[OCTETS], &[1; 200_000]);
    assert_eq!((answer.status, answer.json()["code"].as_u64()), (507, Some(507)));
    assert!(Path::new("/dev/full").exists());
}

#[test]
fn large_files_take_little_memory() {
    let envd = Envd::start();
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = folder.path().join("big");
    const SIZE: u64 = 1 << 30;
    let mut stream = envd.connect();
    let head = format!(
        "POST /files?path={} HTTP/1.1\r\nhost: e\r\ncontent-type: application/octet-stream\r\ncontent-length: {SIZE}\r\n\r\n",
        encoded(&file)
    );
    stream.write_all(head.as_bytes()).unwrap();
    let piece = vec![5; 1 << 20];
    for _ in 0..SIZE >> 20 {
        stream.write_all(&piece).unwrap();
    }
    assert_eq!(Incoming::read(stream).finish().status, 200);
    assert_eq!(fs::metadata(&file).unwrap().len(), SIZE);
    let mut incoming = envd.open("GET", &format!("/files?path={}", encoded(&file)), &[], b"");
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match incoming.read(&mut buffer).unwrap() {
            0 => break,
            taken => total += taken as u64,
        }
    }
    assert_eq!(total, SIZE);
    assert!(envd.peak_memory() < 50_000, "envd had {} kB", envd.peak_memory());
}

#[test]
fn connections_are_kept_and_early_closes_hurt_nobody() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f");
    fs::write(&file, vec![1; 50_000_000]).unwrap();
    let mut early = envd.open("GET", &format!("/files?path={}", encoded(&file)), &[], b"");
    early.read_exact(&mut [0; 1000]).unwrap();
    drop(early);
    let mut stream = envd.connect();
    for _ in 0..3 {
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: e\r\n\r\n").unwrap();
        assert_eq!(Incoming::read(stream.try_clone().unwrap()).finish().status, 204);
    }
}

#[test]
fn loopback_listeners_are_reached_through_a_tunnel() {
    use aenv_envd_api::LoopbackDial;
    use aenv_types::{Dial, DialFuture};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    struct Guest(std::net::SocketAddr);
    impl Dial for Guest {
        fn dial(&self, port: u16) -> DialFuture<'_> {
            Box::pin(async move {
                match port {
                    aenv_envd_api::PORT => tokio::net::TcpStream::connect(self.0).await,
                    _ => Err(std::io::ErrorKind::ConnectionRefused.into()),
                }
            })
        }
    }
    let envd = Envd::start();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let listener = tokio::net::TcpListener::bind("[::1]:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let dial = LoopbackDial::new(std::sync::Arc::new(Guest(envd.address)));
        let (dialed, accepted) = tokio::join!(dial.dial(port), listener.accept());
        let (mut client, mut server) = (dialed.unwrap(), accepted.unwrap().0);
        server.write_all(b"hello").await.unwrap();
        let mut hello = [0; 5];
        client.read_exact(&mut hello).await.unwrap();
        client.write_all(b"bye").await.unwrap();
        client.shutdown().await.unwrap();
        let mut bye = String::new();
        server.read_to_string(&mut bye).await.unwrap();
        assert_eq!((&hello, bye.as_str()), (b"hello", "bye"));
        drop((listener, server));
        let refused = dial.dial(port).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}
