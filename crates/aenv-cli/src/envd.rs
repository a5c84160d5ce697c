//! Processes and files of a sandbox, through the server's data plane.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::StreamExt;
use http::Method;
use serde_json::{Value, json};

use crate::{
    client::{Client, api_error},
    error::CliError,
};

/// Port of envd in every sandbox.
const PORT: &str = "49983";
/// Longest message that is taken from a sandbox.
const MESSAGE_BYTES: usize = 16 << 20;

/// One sandbox's envd.
#[derive(Clone)]
pub(crate) struct Envd {
    client: Client,
    sandbox: String,
    token: Option<String>,
}

/// What a process says.
pub(crate) enum Event {
    /// It runs.
    Started(u32),
    /// Standard output, or the terminal.
    Out(Bytes),
    /// Standard error.
    Err(Bytes),
    /// It has ended, with this exit code.
    Ended(i32),
}

/// A stream of events.
pub(crate) struct Events {
    body: futures::stream::BoxStream<'static, reqwest::Result<Bytes>>,
    buffer: BytesMut,
}

impl Envd {
    /// From what the API says of a sandbox (`sandboxID`, `envdAccessToken`).
    pub(crate) fn new(client: &Client, sandbox: &Value) -> Result<Self, CliError> {
        let id = sandbox["sandboxID"].as_str();
        let id = id.ok_or_else(|| CliError::Sandbox("the server's answer names no sandbox".to_owned()))?;
        let token = sandbox["envdAccessToken"].as_str().map(str::to_owned);
        Ok(Self { client: client.clone(), sandbox: id.to_owned(), token })
    }

    pub(crate) fn request(&self, method: Method, path: &str, user: Option<&str>) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.client.url());
        let mut request = self.client.http().request(method, url);
        request = request.header("E2b-Sandbox-Id", &self.sandbox).header("E2b-Sandbox-Port", PORT);
        if let Some(token) = &self.token {
            request = request.header("X-Access-Token", token);
        }
        if let Some(user) = user {
            request = request
                .header("Authorization", format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:"))));
        }
        request
    }

    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, CliError> {
        self.client.send(request).await
    }

    /// A unary call.
    pub(crate) async fn call(
        &self,
        method: &str,
        user: Option<&str>,
        body: &Value,
    ) -> Result<Value, CliError> {
        let request = self.request(Method::POST, &format!("/{method}"), user).json(body);
        let response = self.send(request).await?;
        response
            .json()
            .await
            .map_err(|error| CliError::Sandbox(format!("the sandbox's answer cannot be read: {error}")))
    }

    /// A call that is answered by a stream.
    pub(crate) async fn stream(
        &self,
        method: &str,
        user: Option<&str>,
        body: &Value,
        timeout_ms: Option<u64>,
    ) -> Result<Events, CliError> {
        let message = serde_json::to_vec(body).expect("a value is JSON");
        let mut envelope = BytesMut::with_capacity(message.len() + 5);
        envelope.put_u8(0);
        envelope.put_u32(u32::try_from(message.len()).map_err(|_| CliError::Usage("too long".to_owned()))?);
        envelope.extend_from_slice(&message);
        let mut request = self
            .request(Method::POST, &format!("/{method}"), user)
            .header("Content-Type", "application/connect+json")
            .header("Connect-Protocol-Version", "1")
            .header("Keepalive-Ping-Interval", "50")
            .body(envelope.freeze());
        if let Some(ms) = timeout_ms {
            request = request.header("Connect-Timeout-Ms", ms.to_string());
        }
        let response = request.send().await.map_err(|error| self.client.unreachable(&error))?;
        if !response.status().is_success() {
            return Err(api_error(response).await);
        }
        Ok(Events { body: response.bytes_stream().boxed(), buffer: BytesMut::new() })
    }

    /// Starts a process.
    pub(crate) async fn start(&self, process: &Process<'_>) -> Result<Events, CliError> {
        let mut body = json!({
            "process": { "cmd": process.cmd, "args": process.args, "envs": process.envs },
            "stdin": process.stdin,
        });
        if let Some(cwd) = process.cwd {
            body["process"]["cwd"] = json!(cwd);
        }
        if let Some((cols, rows)) = process.pty {
            body["pty"] = json!({ "size": { "cols": cols, "rows": rows } });
        }
        self.stream("process.Process/Start", process.user, &body, process.timeout_ms).await
    }

    /// Runs a shell line and returns its standard output; anything but exit code 0 is an error.
    pub(crate) async fn shell(&self, line: &str) -> Result<String, CliError> {
        let args = ["-l".to_owned(), "-c".to_owned(), line.to_owned()];
        let process = Process { cmd: "/bin/bash", args: &args, ..Process::default() };
        self.output(&process, &format!("`{line}`")).await
    }

    /// Runs a process and returns its standard output; anything but exit code 0 is an error that names `what`.
    pub(crate) async fn output(&self, process: &Process<'_>, what: &str) -> Result<String, CliError> {
        let mut events = self.start(process).await?;
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            match events.next().await? {
                Event::Started(_) => {}
                Event::Out(bytes) => out.extend_from_slice(&bytes),
                Event::Err(bytes) => err.extend_from_slice(&bytes),
                Event::Ended(0) => return Ok(String::from_utf8_lossy(&out).into_owned()),
                Event::Ended(code) => {
                    let said = String::from_utf8_lossy(&err).into_owned();
                    return Err(CliError::Sandbox(format!("{what} ended with {code}: {}", said.trim())));
                }
            }
        }
    }

    /// Sends bytes to a process.
    pub(crate) async fn input(&self, pid: u32, kind: &str, bytes: &[u8]) -> Result<(), CliError> {
        let body = json!({ "process": { "pid": pid }, "input": { kind: BASE64_STANDARD.encode(bytes) } });
        self.call("process.Process/SendInput", None, &body).await.map(drop)
    }

    /// Closes a process's standard input.
    pub(crate) async fn close_stdin(&self, pid: u32) -> Result<(), CliError> {
        let body = json!({ "process": { "pid": pid } });
        self.call("process.Process/CloseStdin", None, &body).await.map(drop)
    }

    /// Sends a signal: `SIGNAL_SIGTERM` or `SIGNAL_SIGKILL`.
    pub(crate) async fn signal(&self, pid: u32, signal: &str) -> Result<(), CliError> {
        let body = json!({ "process": { "pid": pid }, "signal": signal });
        self.call("process.Process/SendSignal", None, &body).await.map(drop)
    }
}

/// A process to start.
pub(crate) struct Process<'a> {
    pub(crate) cmd: &'a str,
    pub(crate) args: &'a [String],
    pub(crate) envs: std::collections::BTreeMap<String, String>,
    pub(crate) cwd: Option<&'a str>,
    pub(crate) user: Option<&'a str>,
    pub(crate) stdin: bool,
    pub(crate) pty: Option<(u16, u16)>,
    pub(crate) timeout_ms: Option<u64>,
}

impl Default for Process<'_> {
    fn default() -> Self {
        Self {
            cmd: "/bin/bash",
            args: &[],
            envs: std::collections::BTreeMap::new(),
            cwd: None,
            user: None,
            stdin: false,
            pty: None,
            timeout_ms: None,
        }
    }
}

impl Events {
    /// The next event. A stream that breaks or ends in an error is an error.
    pub(crate) async fn next(&mut self) -> Result<Event, CliError> {
        loop {
            let message = self.envelope().await?;
            let event = &message["event"];
            if let Some(pid) = event["start"]["pid"].as_u64() {
                return Ok(Event::Started(u32::try_from(pid).unwrap_or_default()));
            }
            let data = &event["data"];
            for (kind, make) in
                [("stdout", Event::Out as fn(Bytes) -> Event), ("pty", Event::Out), ("stderr", Event::Err)]
            {
                if let Some(text) = data[kind].as_str() {
                    let bytes = BASE64_STANDARD.decode(text);
                    let bytes =
                        bytes.map_err(|_| CliError::Sandbox("output that is no base64".to_owned()))?;
                    return Ok(make(bytes.into()));
                }
            }
            if event["end"].is_object() {
                return Ok(Event::Ended(exit_code(&event["end"])));
            }
        }
    }

    async fn envelope(&mut self) -> Result<Value, CliError> {
        loop {
            if self.buffer.len() >= 5 {
                let flags = self.buffer[0];
                let len = (&self.buffer[1..5]).get_u32() as usize;
                if len > MESSAGE_BYTES {
                    return Err(CliError::Sandbox(format!("a message of {len} bytes is too long")));
                }
                if self.buffer.len() >= 5 + len {
                    self.buffer.advance(5);
                    let message: Value = serde_json::from_slice(&self.buffer.split_to(len))
                        .map_err(|error| CliError::Sandbox(format!("a message cannot be read: {error}")))?;
                    if flags & 2 == 0 {
                        return Ok(message);
                    }
                    let text =
                        message["error"]["message"].as_str().unwrap_or("the stream ended before the process");
                    return Err(CliError::Sandbox(text.to_owned()));
                }
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Some(Err(_)) | None => {
                    return Err(CliError::Sandbox(
                        "the connection to the sandbox broke: it was killed or paused, or the server ended"
                            .to_owned(),
                    ));
                }
            }
        }
    }
}

/// The shell's form: 128 + n when a signal ended it.
fn exit_code(end: &Value) -> i32 {
    let code = end["exitCode"].as_i64().unwrap_or(0);
    let signals =
        [("killed", 9), ("terminated", 15), ("interrupt", 2), ("hangup", 1), ("segmentation fault", 11)];
    if code >= 0 {
        return i32::try_from(code).unwrap_or(1);
    }
    let status = end["status"].as_str().unwrap_or_default();
    signals.iter().find(|(name, _)| status.contains(name)).map_or(1, |(_, number)| 128 + number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn envelopes_may_come_in_any_pieces() {
        let mut wire = Vec::new();
        for (flags, message) in [
            (0u8, r#"{"event":{"start":{"pid":7}}}"#),
            (0, r#"{"event":{"keepalive":{}}}"#),
            (0, r#"{"event":{"data":{"stdout":"aGk="}}}"#),
            (0, r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed"}}}"#),
            (2, "{}"),
        ] {
            wire.push(flags);
            wire.extend_from_slice(&(message.len() as u32).to_be_bytes());
            wire.extend_from_slice(message.as_bytes());
        }
        for size in [1, 3, 7, wire.len()] {
            let pieces: Vec<reqwest::Result<Bytes>> =
                wire.chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let mut events = Events { body: futures::stream::iter(pieces).boxed(), buffer: BytesMut::new() };
            assert!(matches!(events.next().await.unwrap(), Event::Started(7)));
            assert!(matches!(events.next().await.unwrap(), Event::Out(bytes) if bytes == "hi"));
            assert!(matches!(events.next().await.unwrap(), Event::Ended(137)));
            assert!(events.next().await.is_err());
        }
    }
}
