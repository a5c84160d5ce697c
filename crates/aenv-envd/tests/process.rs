//! `process.Process` on the wire.

mod support;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use support::{Envd, basic, envelope, shell};

const START: &str = "process.Process/Start";
const CONNECT: &str = "process.Process/Connect";

fn is_alive(pid: u64) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn output_and_ends_are_exact() {
    let envd = Envd::start();
    let ran = envd.run("printf out; printf err >&2");
    assert_eq!((ran.out().as_str(), ran.stderr.as_slice()), ("out", &b"err"[..]));
    assert_eq!(ran.end["exited"], true);
    assert_eq!(ran.end["status"], "exit status 0");
    assert_eq!(ran.end.get("error"), None);
    assert_eq!(ran.end.get("exitCode").and_then(Value::as_i64).unwrap_or(0), 0);
    assert_eq!(ran.last, json!({}));

    let ran = envd.run("exit 7");
    assert_eq!(
        ran.end,
        json!({"exitCode": 7, "exited": true, "status": "exit status 7", "error": "exit status 7"})
    );
    let ran = envd.run("kill -9 $$");
    assert_eq!(ran.end, json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}));
}

#[test]
fn bytes_pass_untouched_in_bounded_pieces() {
    let envd = Envd::start();
    let ran = envd.run("head -c 8191 /dev/zero | tr '\\0' a; printf '\\342'; head -c 300000 /dev/zero");
    assert_eq!(ran.stdout.len(), 8191 + 1 + 300_000);
    assert!(ran.stdout[..8191].iter().all(|byte| *byte == b'a'));
    assert_eq!(ran.stdout[8191], 0xe2);
    assert!(ran.largest <= 32 << 10, "a piece has {} bytes", ran.largest);
}

#[test]
fn environment_user_and_folder() {
    let envd = Envd::start_bare(&["--host", "127.0.0.1"]);
    envd.init(json!({"defaultUser": "root", "envVars": {"GLOBAL": "1", "BOTH": "global"}}));
    let body = json!({"process": {"cmd": "env", "envs": {"OWN": "2", "BOTH": "own"}, "cwd": "/"}, "stdin": false, "unknown": 5});
    let ran = envd.stream(START, &[("authorization", &basic("daemon"))], body).finish();
    let out = ran.out();
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "BOTH=own",
            "E2B_SANDBOX=true",
            "GLOBAL=1",
            "HOME=/usr/sbin",
            "LOGNAME=daemon",
            "OWN=2",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "USER=daemon"
        ]
    );
    // One command's environment does not leak into the next.
    assert_eq!(envd.run("echo ${OWN-none} $GLOBAL").out(), "none 1\n");
    assert_eq!(envd.run("pwd").out(), "/root\n");
    assert_eq!(envd.call("process.Process/List", json!({})).1, json!({}));

    let body = json!({"process": {"cmd": "/bin/sh", "args": ["-c", "id -u; id -g; id -G; cat /proc/self/oom_score_adj; nice; grep -c . /proc/self/status; umask"], "cwd": "/tmp"}, "stdin": false});
    let ran = envd.stream(START, &[("authorization", &basic("daemon"))], body).finish();
    let out = ran.out();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((lines[0], lines[1], lines[2]), ("1", "1", "1"));
    assert_eq!((lines[3], lines[4], lines[6]), ("100", "0", "0022"));
}

#[test]
fn refusals_have_their_codes_and_words() {
    let envd = Envd::start();
    let refusal = |headers: &[(&str, &str)], body: Value| {
        let mut stream = envd.stream(START, headers, body);
        assert_eq!(stream.incoming.status, 200);
        match stream.next() {
            support::Envelope::End(end) => end["error"].clone(),
            other => panic!("{other:?}"),
        }
    };
    let unknown = refusal(&[("authorization", &basic("root123"))], shell("true"));
    assert_eq!(unknown, json!({"code": "unauthenticated", "message": "invalid username: 'root123'"}));
    let cwd = refusal(&[], json!({"process": {"cmd": "true", "cwd": "none"}}));
    assert_eq!(cwd, json!({"code": "invalid_argument", "message": "cwd '/root/none' does not exist"}));
    let cmd = refusal(&[], json!({"process": {"cmd": "no-such-program"}}));
    assert_eq!(cmd["code"], "not_found");
    assert!(
        cmd["message"].as_str().unwrap().starts_with("error starting process 'no-such-program': "),
        "{cmd}"
    );
    assert_eq!(refusal(&[], json!({}))["code"], "invalid_argument");

    let (status, body) = envd
        .call("process.Process/SendSignal", json!({"process": {"pid": 999_999}, "signal": "SIGNAL_SIGKILL"}));
    assert_eq!(
        (status, body),
        (404, json!({"code": "not_found", "message": "process with pid 999999 not found"}))
    );
    let (status, body) =
        envd.call("process.Process/SendInput", json!({"process": {"tag": "x"}, "input": {"stdin": ""}}));
    assert_eq!((status, body["message"].as_str().unwrap()), (404, "process with tag x not found"));
    let mut stream = envd.stream(CONNECT, &[], json!({"process": {"pid": 999_999}}));
    assert_eq!(stream.incoming.status, 200);
    assert!(matches!(stream.next(), support::Envelope::End(end) if end["error"]["code"] == "not_found"));
    assert_eq!(envd.call("process.Process/Nothing", json!({})).0, 404);
}

#[test]
fn stdin_is_fed_and_closed() {
    let envd = Envd::start();
    let mut cat = envd.stream(START, &[], json!({"process": {"cmd": "cat"}, "tag": "cat"}));
    let pid = cat.pid();
    for piece in ["aGVs", "", "bG8="] {
        let (status, body) = envd
            .call("process.Process/SendInput", json!({"process": {"pid": pid}, "input": {"stdin": piece}}));
        assert_eq!(status, 200, "{body}");
    }
    assert!(cat.until("hello").contains("hello"));
    let wrong =
        envd.call("process.Process/SendInput", json!({"process": {"pid": pid}, "input": {"pty": "aGVs"}}));
    assert_eq!((wrong.0, wrong.1["code"].as_str().unwrap()), (500, "internal"));
    // A stream of input, selected by tag.
    let messages = [
        json!({"start": {"process": {"tag": "cat"}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": "d29ybGQ="}}}),
    ];
    let answer = envd.stream_of("process.Process/StreamInput", &[], &messages).finish();
    assert_eq!(answer.status, 200);
    let expected = [envelope(&json!({})), vec![2, 0, 0, 0, 2, b'{', b'}']].concat();
    assert_eq!(answer.body, expected, "{}", answer.text());
    assert!(cat.until("world").contains("world"));
    assert_eq!(envd.call("process.Process/CloseStdin", json!({"process": {"pid": pid}})), (200, json!({})));
    assert_eq!(cat.finish().end["exited"], true);

    let mut deaf = envd.shell("sleep 100");
    let pid = deaf.pid();
    let (status, body) =
        envd.call("process.Process/SendInput", json!({"process": {"pid": pid}, "input": {"stdin": "eA=="}}));
    assert_eq!((status, body["code"].as_str().unwrap()), (500, "internal"));
    assert!(body["message"].as_str().unwrap().starts_with("error writing to stdin: "), "{body}");
    envd.call("process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}));
    deaf.finish();
}

#[test]
fn signals_end_processes_at_once() {
    let envd = Envd::start();
    // The grandchild holds the output open.
    let mut stream = envd.shell("echo ready; sleep 300 & wait");
    let pid = stream.pid();
    stream.until("ready");
    let listed = envd.call("process.Process/List", json!({})).1;
    assert_eq!(listed["processes"][0]["pid"], pid);
    assert_eq!(listed["processes"][0]["config"]["cmd"], "/bin/sh");
    let signal = |signal: &str| {
        envd.call("process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": signal}))
    };
    assert_eq!(signal("SIGNAL_UNSPECIFIED").0, 501);
    let began = Instant::now();
    assert_eq!(signal("SIGNAL_SIGTERM"), (200, json!({})));
    let ran = stream.finish();
    assert_eq!(ran.end["status"], "signal: terminated");
    assert!(began.elapsed() < Duration::from_secs(10));
    assert!(!is_alive(pid), "it was not reaped");
    assert_eq!(signal("SIGNAL_SIGKILL").0, 404);

    // Without a signal, the end waits for the grandchild's output.
    let ran = envd.run("(sleep 1; echo late) & echo early");
    assert_eq!(ran.out(), "early\nlate\n");
}

#[test]
fn deadline_kills_the_process() {
    let envd = Envd::start();
    let began = Instant::now();
    let body = json!({"process": {"cmd": "sleep", "args": ["60"]}, "stdin": false});
    let mut stream = envd.stream(START, &[("connect-timeout-ms", "1000")], body);
    let pid = stream.pid();
    let ran = stream.finish();
    assert_eq!(ran.last["error"]["code"], "deadline_exceeded");
    assert!(began.elapsed() >= Duration::from_millis(900) && began.elapsed() < Duration::from_secs(10));
    wait_until("the end of the process", || !is_alive(pid));
}

#[test]
fn processes_outlive_their_clients() {
    let envd = Envd::start();
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = format!("echo one; while [ ! -e {} ]; do sleep 0.05; done; echo two; exit 3", go.display());
    let mut first = envd.shell(&script);
    let pid = first.pid();
    first.until("one");
    drop(first);

    let connect = || envd.stream(CONNECT, &[], json!({"process": {"pid": pid}}));
    let (mut second, mut third) = (connect(), connect());
    assert_eq!((second.pid(), third.pid()), (pid, pid));
    fs::write(&go, "").unwrap();
    for stream in [second, third] {
        let ran = stream.finish();
        // No replay: only what came after the connect.
        assert_eq!((ran.out().as_str(), ran.end["exitCode"].as_i64()), ("two\n", Some(3)));
    }
    // Its end can still be asked for, it is not listed any more.
    let ran = connect().finish();
    assert_eq!((ran.pid, ran.end["exitCode"].as_i64()), (pid, Some(3)));
    assert_eq!(envd.call("process.Process/List", json!({})).1, json!({}));
}

#[test]
fn silence_is_broken_by_keepalives() {
    let envd = Envd::start();
    let began = Instant::now();
    let ran = envd.stream(START, &[("keepalive-ping-interval", "1")], shell("sleep 2.5; echo done")).finish();
    // Two, and one more for each further second that a busy machine takes.
    let most = usize::try_from(began.elapsed().as_secs()).unwrap();
    assert!((2..=most).contains(&ran.keepalives), "{} in {most} s", ran.keepalives);
    assert_eq!(ran.out(), "done\n");
}

#[test]
fn terminals() {
    let envd = Envd::start();
    let size = |cols: u32| json!({"size": {"cols": cols, "rows": 24}});
    let body = json!({"process": {"cmd": "/bin/sh", "args": ["-i"], "envs": {"PS1": "", "TERM": "xterm", "FOO": "bar"}}, "pty": size(80)});
    let mut stream = envd.stream(START, &[], body);
    let pid = stream.pid();
    let process = json!({"pid": pid});
    let type_in = |text: &str| {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        let input = json!({"process": process, "input": {"pty": STANDARD.encode(text)}});
        assert_eq!(envd.call("process.Process/SendInput", input), (200, json!({})));
    };
    type_in("stty size; echo $FOO-x\n");
    let seen = stream.until("bar-x");
    assert!(seen.contains("24 80"), "{seen}");
    assert_eq!(
        envd.call("process.Process/Update", json!({"process": process, "pty": size(100)})),
        (200, json!({}))
    );
    type_in("stty size\n");
    stream.until("24 100");
    let closed = envd.call("process.Process/CloseStdin", json!({"process": process}));
    assert_eq!(closed.1["code"], "unknown");
    assert!(closed.1["message"].as_str().unwrap().starts_with("error closing stdin: "));
    drop(stream);

    let mut again = envd.stream(CONNECT, &[], json!({"process": process}));
    again.pid();
    type_in("echo later; exit\n");
    let ran = again.finish();
    assert!(String::from_utf8_lossy(&ran.terminal).contains("later"));
    assert_eq!((ran.end["exited"].as_bool(), ran.end.get("exitCode")), (Some(true), None));
}

#[test]
fn much_output_takes_little_memory() {
    let envd = Envd::start();
    let mut stream = envd.shell("head -c 200000000 /dev/zero");
    stream.pid();
    let ran = stream.finish();
    assert_eq!(ran.stdout.len(), 200_000_000);
    assert!(envd.peak_memory() < 30_000, "envd had {} kB", envd.peak_memory());

    // Nobody listens: the process does not wait for anybody.
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let mut stream = envd.shell(&format!("sleep 0.2; head -c 20000000 /dev/zero; echo > {}", done.display()));
    stream.pid();
    drop(stream);
    wait_until("the end of the output", || done.exists());
}

#[test]
fn slow_readers_slow_the_process() {
    let envd = Envd::start();
    let mut stream = envd.shell("head -c 100000000 /dev/zero; echo finished >&2");
    let pid = stream.pid();
    // What the kernel's buffers and the queue hold is written, then the process waits.
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(!state().is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert!(is_alive(pid), "it ended though nobody read");
    assert!(envd.memory() < 30_000, "envd has {} kB", envd.memory());
    let ran = stream.finish();
    assert_eq!((ran.stdout.len(), ran.stderr.as_slice()), (100_000_000, &b"finished\n"[..]));
}

#[test]
fn binary_messages_are_served_to_the_hosts_client() {
    use aenv_envd_api::{EnvdClient, Output, RunRequest};
    use aenv_types::{Dial, DialFuture, Token};
    struct Direct(std::net::SocketAddr);
    impl Dial for Direct {
        fn dial(&self, _port: u16) -> DialFuture<'_> {
            Box::pin(tokio::net::TcpStream::connect(self.0))
        }
    }
    let envd = Envd::start_bare(&["--host", "127.0.0.1"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use futures::TryStreamExt as _;
        let bound = Duration::from_secs(20);
        let token = Token::random();
        let client = EnvdClient::new(std::sync::Arc::new(Direct(envd.address)), Some(token.clone()));
        let init = aenv_envd_api::InitRequest {
            access_token: Some(token.expose().to_owned()),
            default_user: Some("root".to_owned()),
            env_vars: [("A".to_owned(), "b".to_owned())].into(),
            lifecycle_id: Some("1".to_owned()),
            ..Default::default()
        };
        client.health(bound).await.unwrap();
        client.init(&init, bound).await.unwrap();
        assert_eq!(client.envs().await.unwrap()["A"], "b");
        assert!(client.metrics().await.unwrap().mem_total > 0);

        let mut output = Vec::new();
        let request = RunRequest {
            env: [("X".to_owned(), "y".to_owned())].into(),
            ..RunRequest::shell("echo $A$X; echo e >&2; exit 4")
        };
        let status = client.run(request, |piece| output.push(piece)).await.unwrap();
        assert_eq!((status.code, status.status.as_str()), (Some(4), "exit status 4"));
        assert!(
            output.contains(&Output::Stdout("by\n".into())) && output.contains(&Output::Stderr("e\n".into())),
            "{output:?}"
        );
        let unknown = RunRequest { user: Some("root123".to_owned()), ..RunRequest::shell("true") };
        let error = client.run(unknown, |_| {}).await.unwrap_err();
        assert_eq!(error.to_string(), "unauthenticated: invalid username: 'root123'");
        let slow = RunRequest { timeout: Some(Duration::from_millis(300)), ..RunRequest::shell("sleep 50") };
        assert!(client.run(slow, |_| {}).await.unwrap_err().to_string().starts_with("deadline_exceeded"));
        let pid = client.start_detached(RunRequest::shell("sleep 50")).await.unwrap();
        assert!(is_alive(pid.into()));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/f ü").display().to_string();
        let pieces = (0..100).map(|_| Ok(bytes::Bytes::from(vec![7; 100_000])));
        client.upload(&path, Some("daemon"), futures::stream::iter(pieces)).await.unwrap();
        let download = client.download(&path, None).await.unwrap();
        assert_eq!(download.size, Some(10_000_000));
        let total = download.try_fold(0, async |sum, piece| Ok(sum + piece.len())).await.unwrap();
        assert_eq!(total, 10_000_000);
        let stranger = EnvdClient::new(std::sync::Arc::new(Direct(envd.address)), None);
        let error = stranger.metrics().await.unwrap_err().to_string();
        assert!(error.starts_with("unauthorized access, please provide"), "{error}");
    });
}
