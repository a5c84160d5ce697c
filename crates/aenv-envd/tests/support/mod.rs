//! Runs the daemon outside a guest and speaks its wire by hand, so that the tests see the bytes that clients see.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

/// No read of a test waits longer.
const BOUND: Duration = Duration::from_secs(60);

/// A running daemon.
pub struct Envd {
    child: Child,
    pub address: SocketAddr,
}

impl Drop for Envd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Envd {
    /// A daemon that has been told that root is the default user.
    pub fn start() -> Self {
        let envd = Self::start_bare(&["--host", "127.0.0.1"]);
        envd.init(json!({"defaultUser": "root"}));
        envd
    }

    /// A daemon that has not been told anything.
    pub fn start_bare(options: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_aenv-envd"))
            .args(["--bind", "127.0.0.1", "--port", "0", "--no-system"])
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("envd ended before it listened").unwrap();
            if let Some((_, address)) = line.split_once("listening on ") {
                break address.split_whitespace().next().unwrap().parse().unwrap();
            }
        };
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("envd: {line}")));
        Self { child, address }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory in kB.
    pub fn memory(&self) -> u64 {
        self.status_field("VmRSS:")
    }

    /// Most resident memory that there ever was, in kB.
    pub fn peak_memory(&self) -> u64 {
        self.status_field("VmHWM:")
    }

    fn status_field(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub fn init(&self, body: Value) {
        let answer = self.post("/init", &[("content-type", "application/json")], body.to_string().as_bytes());
        assert_eq!(answer.status, 204, "{}", answer.text());
    }

    pub fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.send("GET", path, headers, b"")
    }

    pub fn post(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.send("POST", path, headers, body)
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.open(method, path, headers, body).finish()
    }

    /// Sends a request and reads the head of the answer.
    pub fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Incoming {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: envd\r\nconnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        let mut stream = self.connect();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(b"\r\n").unwrap();
        stream.write_all(body).unwrap();
        Incoming::read(stream)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// A unary call, as the Python client sends it.
    pub fn call(&self, method: &str, body: Value) -> (u16, Value) {
        self.call_with(method, &[], body)
    }

    pub fn call_with(&self, method: &str, headers: &[(&str, &str)], body: Value) -> (u16, Value) {
        let own = [
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
            ("content-encoding", "identity"),
            ("accept-encoding", "identity"),
        ];
        let answer = self.post(&format!("/{method}"), &[&own, headers].concat(), body.to_string().as_bytes());
        (answer.status, answer.json())
    }

    /// A call that answers with a stream, as the Python client sends it: chunked, one envelope.
    pub fn stream(&self, method: &str, headers: &[(&str, &str)], body: Value) -> Stream {
        Stream { incoming: self.stream_of(method, headers, &[body]) }
    }

    /// A call with several messages.
    pub fn stream_of(&self, method: &str, headers: &[(&str, &str)], messages: &[Value]) -> Incoming {
        let mut stream = self.connect();
        let mut head = format!(
            "POST /{method} HTTP/1.1\r\nhost: envd\r\ntransfer-encoding: chunked\r\ncontent-type: application/connect+json\r\n\
             connect-protocol-version: 1\r\nconnect-accept-encoding: identity\r\naccept-encoding: zstd,gzip,br\r\n"
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        for message in messages {
            let envelope = envelope(message);
            stream.write_all(format!("{:x}\r\n", envelope.len()).as_bytes()).unwrap();
            stream.write_all(&envelope).unwrap();
            stream.write_all(b"\r\n").unwrap();
        }
        stream.write_all(b"0\r\n\r\n").unwrap();
        Incoming::read(stream)
    }

    /// Starts a shell command without stdin.
    pub fn shell(&self, script: &str) -> Stream {
        self.stream("process.Process/Start", &[], shell(script))
    }

    /// Runs a shell command to its end.
    pub fn run(&self, script: &str) -> Ran {
        self.shell(script).finish()
    }
}

/// The body of a start of a shell command without stdin.
pub fn shell(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

/// One envelope of the Connect protocol.
pub fn envelope(message: &Value) -> Vec<u8> {
    let body = message.to_string();
    let mut bytes = vec![0];
    bytes.extend(u32::try_from(body.len()).unwrap().to_be_bytes());
    bytes.extend(body.as_bytes());
    bytes
}

/// The header of a user.
pub fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

/// An answer whose body is still coming.
pub struct Incoming {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    body: Body,
}

enum Body {
    Sized(BufReader<TcpStream>, u64),
    Chunked(BufReader<TcpStream>, u64),
    ToTheEnd(BufReader<TcpStream>),
}

impl Incoming {
    pub fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status =
            line.split(' ').nth(1).unwrap_or_else(|| panic!("no status line: {line:?}")).parse().unwrap();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let length = headers.get("content-length").map(|length| length.parse().unwrap());
        let body = match length {
            _ if status == 204 => Body::Sized(reader, 0),
            Some(length) => Body::Sized(reader, length),
            None if headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked") => {
                Body::Chunked(reader, 0)
            }
            None => Body::ToTheEnd(reader),
        };
        Self { status, headers, body }
    }

    pub fn finish(mut self) -> Answer {
        let mut body = Vec::new();
        self.read_to_end(&mut body).unwrap();
        Answer { status: self.status, headers: self.headers, body }
    }
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match &mut self.body {
            Body::ToTheEnd(reader) => reader.read(buffer),
            Body::Sized(reader, left) => {
                let taken = reader.take(*left).read(buffer)?;
                *left -= taken as u64;
                Ok(taken)
            }
            Body::Chunked(reader, left) => {
                if *left == u64::MAX {
                    return Ok(0);
                }
                if *left == 0 {
                    let mut line = String::new();
                    reader.read_line(&mut line)?;
                    if line.is_empty() {
                        return Err(std::io::ErrorKind::UnexpectedEof.into());
                    }
                    *left = u64::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
                    if *left == 0 {
                        *left = u64::MAX;
                        return Ok(0);
                    }
                }
                let taken = reader.take(*left).read(buffer)?;
                *left -= taken as u64;
                if *left == 0 {
                    reader.read_exact(&mut [0; 2])?;
                }
                Ok(taken)
            }
        }
    }
}

/// A whole answer.
pub struct Answer {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{}: no JSON: {}", self.status, self.text()))
    }
}

/// A stream of envelopes.
pub struct Stream {
    pub incoming: Incoming,
}

/// One envelope.
#[derive(Clone, Debug, PartialEq)]
pub enum Envelope {
    Message(Value),
    End(Value),
}

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    pub pid: u64,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub terminal: Vec<u8>,
    pub keepalives: usize,
    pub largest: usize,
    /// The end event, or null.
    pub end: Value,
    /// What the stream's last envelope says.
    pub last: Value,
}

impl Stream {
    pub fn next(&mut self) -> Envelope {
        let mut head = [0; 5];
        self.incoming.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes(head[1..].try_into().unwrap());
        let mut body = vec![0; length as usize];
        self.incoming.read_exact(&mut body).unwrap();
        let json = serde_json::from_slice(&body).unwrap();
        match head[0] {
            0 => Envelope::Message(json),
            2 => Envelope::End(json),
            other => panic!("an envelope with flags {other}"),
        }
    }

    /// The next message, which must not be the last envelope.
    pub fn message(&mut self) -> Value {
        match self.next() {
            Envelope::Message(message) => message,
            Envelope::End(end) => panic!("the stream ended: {end}"),
        }
    }

    /// Reads the start event and returns the pid.
    pub fn pid(&mut self) -> u64 {
        let event = self.message();
        event["event"]["start"]["pid"].as_u64().unwrap_or_else(|| panic!("no start event: {event}"))
    }

    /// Reads until the output (of all streams) contains the text.
    pub fn until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            let event = self.message();
            for stream in ["stdout", "stderr", "pty"] {
                seen.extend(bytes(&event["event"]["data"][stream]));
            }
        }
        String::from_utf8_lossy(&seen).into_owned()
    }

    /// Reads to the end.
    pub fn finish(mut self) -> Ran {
        let mut ran = Ran {
            pid: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
            terminal: Vec::new(),
            keepalives: 0,
            largest: 0,
            end: Value::Null,
            last: Value::Null,
        };
        loop {
            match self.next() {
                Envelope::End(last) => {
                    ran.last = last;
                    let rest = self.incoming.read(&mut [0]).unwrap();
                    assert_eq!(rest, 0, "something follows the last envelope");
                    return ran;
                }
                Envelope::Message(message) => {
                    let event = &message["event"];
                    assert!(ran.end.is_null(), "{event} follows the end");
                    if let Some(pid) = event["start"]["pid"].as_u64() {
                        ran.pid = pid;
                    }
                    for (stream, kept) in
                        [("stdout", &mut ran.stdout), ("stderr", &mut ran.stderr), ("pty", &mut ran.terminal)]
                    {
                        let piece = bytes(&event["data"][stream]);
                        ran.largest = ran.largest.max(piece.len());
                        kept.extend(piece);
                    }
                    ran.keepalives += usize::from(event.get("keepalive").is_some());
                    if let Some(end) = event.get("end") {
                        ran.end = end.clone();
                    }
                }
            }
        }
    }
}

impl Ran {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

fn bytes(base64: &Value) -> Vec<u8> {
    base64.as_str().map(|text| STANDARD.decode(text).unwrap()).unwrap_or_default()
}
