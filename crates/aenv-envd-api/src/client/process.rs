//! Running commands in the guest.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use connectrpc::client::{CallOptions, ClientConfig, ServerStream};
use hyper::body::Incoming;

use super::{EnvdClient, EnvdError, transport::DialTransport};
use crate::proto::process::{
    __buffa::{
        oneof::process_event::{Event, data_event::Output as Data},
        view::StartResponseView,
    },
    ProcessClient, ProcessConfig, ProcessEvent, StartRequest,
};

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct RunRequest {
    /// The program, looked up in the guest's `PATH`.
    pub cmd: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Who runs it; `None`: the guest's default user.
    pub user: Option<String>,
    /// Where it runs; `None`: the guest's default folder.
    pub cwd: Option<String>,
    /// Environment in addition to the guest's own.
    pub env: BTreeMap<String, String>,
    /// The guest kills it after this long; `None`: never.
    pub timeout: Option<Duration>,
}

impl RunRequest {
    /// `script` by a login shell, which is how E2B's clients run commands.
    pub fn shell(script: impl Into<String>) -> Self {
        Self {
            cmd: "/bin/bash".to_owned(),
            args: vec!["-l".to_owned(), "-c".to_owned(), script.into()],
            ..Self::default()
        }
    }
}

/// Something that a command wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// To standard output (or its terminal).
    Stdout(Bytes),
    /// To standard error.
    Stderr(Bytes),
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitStatus {
    /// Its exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// In words, such as `exit status 1` or `signal: killed`.
    pub status: String,
}

impl ExitStatus {
    /// Whether it exited with 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

/// A started command whose output is being read. Dropping it leaves the command running.
pub struct ProcessStream {
    pid: u32,
    stream: ServerStream<Incoming, StartResponseView<'static>>,
    ended: Option<ExitStatus>,
}

impl ProcessStream {
    /// The command's process id in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The next piece of output; `None` when the command has ended.
    pub async fn next(&mut self) -> Result<Option<Output>, EnvdError> {
        while self.ended.is_none() {
            match next_event(&mut self.stream).await? {
                Some(Event::Data(data)) => match data.output {
                    Some(Data::Stdout(bytes) | Data::Pty(bytes)) => {
                        return Ok(Some(Output::Stdout(bytes.into())));
                    }
                    Some(Data::Stderr(bytes)) => return Ok(Some(Output::Stderr(bytes.into()))),
                    None => {}
                },
                Some(Event::End(end)) => {
                    let code = end.exited.then_some(end.exit_code);
                    self.ended = Some(ExitStatus { code, status: end.status });
                }
                Some(Event::Start(_) | Event::Keepalive(_)) => {}
                None => {
                    return Err(EnvdError::Malformed {
                        message: "the stream ended before the process".to_owned(),
                    });
                }
            }
        }
        Ok(None)
    }

    /// How the command ended, once [`next`](Self::next) has returned `None`.
    pub fn exit_status(&self) -> Option<&ExitStatus> {
        self.ended.as_ref()
    }
}

impl EnvdClient {
    /// Starts a command and returns once it runs. Its output streams as it is read; an unread stream slows the command down.
    pub async fn start(&self, request: RunRequest) -> Result<ProcessStream, EnvdError> {
        let mut config = ClientConfig::new(http::Uri::from_static("http://envd"));
        for (name, value) in &self.headers()? {
            config = config.with_default_header(name.clone(), value.clone());
        }
        let mut options = CallOptions::default();
        if let Some(user) = &request.user {
            options = options
                .with_header("authorization", format!("Basic {}", STANDARD.encode(format!("{user}:"))));
        }
        if let Some(timeout) = request.timeout {
            options = options.with_timeout(timeout);
        }
        let client = ProcessClient::<DialTransport>::new(self.transport.clone(), config);
        let process = ProcessConfig {
            cmd: request.cmd,
            args: request.args,
            envs: request.env.into_iter().collect(),
            cwd: request.cwd,
            ..Default::default()
        };
        let start = StartRequest { process: process.into(), stdin: Some(false), ..Default::default() };
        let mut stream = client.start_with_options(start, options).await?;
        match next_event(&mut stream).await? {
            Some(Event::Start(start)) => Ok(ProcessStream { pid: start.pid, stream, ended: None }),
            other => {
                Err(EnvdError::Malformed { message: format!("instead of a start event came {other:?}") })
            }
        }
    }

    /// Starts a command that goes on without anybody reading its output, and returns its process id.
    pub async fn start_detached(&self, request: RunRequest) -> Result<u32, EnvdError> {
        Ok(self.start(request).await?.pid())
    }

    /// Runs a command to its end and hands each piece of output to `on_output` as it comes.
    pub async fn run(
        &self,
        request: RunRequest,
        mut on_output: impl FnMut(Output) + Send,
    ) -> Result<ExitStatus, EnvdError> {
        let mut stream = self.start(request).await?;
        while let Some(output) = stream.next().await? {
            on_output(output);
        }
        let ended = stream.ended.take();
        ended.ok_or_else(|| EnvdError::Malformed { message: "the process ended without a status".to_owned() })
    }
}

async fn next_event(
    stream: &mut ServerStream<Incoming, StartResponseView<'static>>,
) -> Result<Option<Event>, EnvdError> {
    let Some(message) = stream.message().await? else {
        return Ok(None);
    };
    let event: Option<ProcessEvent> = message.to_owned_message().event.into_option();
    Ok(event.and_then(|event| event.event))
}
