//! The build's sandbox, seen from its steps: run, start, upload, and find out where a path leads.

use std::{collections::BTreeMap, path::Path};

use aenv_envd_api::{EnvdClient, EnvdError, ExitStatus, Output, RunRequest};
use aenv_orchestrator::Route;
use futures::StreamExt;
use thiserror::Error;
use tokio_util::io::ReaderStream;

use super::log::{LogFile, LogLevel};

/// Why something in the guest failed. The texts are part of what E2B's clients show.
#[derive(Debug, Error)]
pub(crate) enum GuestError {
    /// The command did not exit with 0.
    #[error("{}", status.status)]
    Exit {
        /// How it ended.
        status: ExitStatus,
        /// The last line of its errors.
        said: String,
    },
    /// envd refused to run it, or the guest does not answer.
    #[error("command failed: {0}")]
    Envd(#[from] EnvdError),
    /// A file on the host.
    #[error("{context}: {source}")]
    Io {
        /// Which.
        context: String,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

/// A command and what it runs with.
pub(crate) struct Exec<'a> {
    pub(crate) program: &'a str,
    pub(crate) args: &'a [&'a str],
    pub(crate) user: &'a str,
    /// Empty: the user's home.
    pub(crate) cwd: &'a str,
    pub(crate) env: &'a BTreeMap<String, String>,
}

impl Exec<'_> {
    fn request(&self) -> RunRequest {
        RunRequest {
            cmd: self.program.to_owned(),
            args: self.args.iter().map(|arg| (*arg).to_owned()).collect(),
            user: Some(self.user.to_owned()),
            cwd: (!self.cwd.is_empty()).then(|| self.cwd.to_owned()),
            env: self.env.clone(),
            timeout: None,
        }
    }
}

/// The sandbox of a build, and the log that its output goes to.
#[derive(Clone)]
pub(crate) struct Guest<'a> {
    envd: EnvdClient,
    log: &'a LogFile,
    step: String,
}

impl<'a> Guest<'a> {
    pub(crate) fn new(route: &Route, log: &'a LogFile) -> Self {
        Self {
            envd: EnvdClient::new(route.dial.clone(), route.envd_token.clone()),
            log,
            step: "base".to_owned(),
        }
    }

    /// The same guest, logging for another step.
    pub(crate) fn for_step(&self, step: &str) -> Self {
        Self { step: step.to_owned(), ..self.clone() }
    }

    /// Runs a command to its end; its output goes to the log line by line.
    pub(crate) async fn exec(&self, exec: Exec<'_>) -> Result<(), GuestError> {
        let mut lines = [Lines::default(), Lines::default()];
        let push = |level, line: &str| self.log.push(level, Some(&self.step), line);
        let mut said = String::new();
        let mut complain = |line: &str| {
            push(LogLevel::Warn, line);
            if !line.trim().is_empty() {
                line.clone_into(&mut said);
            }
        };
        let status = self
            .envd
            .run(exec.request(), |output| match output {
                Output::Stdout(bytes) => lines[0].feed(&bytes, |line| push(LogLevel::Info, line)),
                Output::Stderr(bytes) => lines[1].feed(&bytes, &mut complain),
            })
            .await?;
        lines[0].finish(|line| push(LogLevel::Info, line));
        lines[1].finish(&mut complain);
        if status.is_success() { Ok(()) } else { Err(GuestError::Exit { status, said }) }
    }

    /// Starts a command that goes on.
    pub(crate) async fn start(&self, exec: Exec<'_>) -> Result<u32, GuestError> {
        Ok(self.envd.start_detached(exec.request()).await?)
    }

    /// Streams a file of the host into the guest, as root.
    pub(crate) async fn upload(&self, local: &Path, inside: &str) -> Result<(), GuestError> {
        let file = tokio::fs::File::open(local).await;
        let file = file.map_err(|source| GuestError::Io { context: local.display().to_string(), source })?;
        let stream = ReaderStream::with_capacity(file, 256 << 10).boxed();
        Ok(self.envd.upload(inside, Some("root"), stream).await?)
    }

    /// Where a path of a step leads: absolute as it is, relative to the workdir, else to the user's home.
    pub(crate) async fn absolute(&self, path: &str, workdir: &str, user: &str) -> Result<String, GuestError> {
        if path.starts_with('/') {
            return Ok(path.to_owned());
        }
        let base = if workdir.is_empty() { self.home(user).await? } else { workdir.to_owned() };
        let relative = path.trim_start_matches("./");
        Ok(match relative {
            "" | "." => base,
            relative => format!("{}/{relative}", base.trim_end_matches('/')),
        })
    }

    async fn home(&self, user: &str) -> Result<String, GuestError> {
        let request = RunRequest {
            cmd: "/bin/sh".to_owned(),
            args: vec!["-c".to_owned(), r#"printf %s "$HOME""#.to_owned()],
            user: Some(user.to_owned()),
            ..RunRequest::default()
        };
        let mut home = Vec::new();
        let status = self
            .envd
            .run(request, |output| {
                if let Output::Stdout(bytes) = output {
                    home.extend_from_slice(&bytes);
                }
            })
            .await?;
        if !status.is_success() {
            return Err(GuestError::Exit { status, said: String::new() });
        }
        Ok(String::from_utf8_lossy(&home).into_owned())
    }
}

/// Longest line that is waited for; a longer one is passed on in pieces.
const LINE_BYTES: usize = 64 << 10;

/// Cuts a stream of bytes into lines.
#[derive(Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    fn feed(&mut self, bytes: &[u8], mut line: impl FnMut(&str)) {
        self.partial.extend_from_slice(bytes);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let rest = self.partial.split_off(end + 1);
            line(String::from_utf8_lossy(&self.partial[..end]).trim_end_matches('\r'));
            self.partial = rest;
        }
        if self.partial.len() > LINE_BYTES {
            line(&String::from_utf8_lossy(&self.partial));
            self.partial.clear();
        }
    }

    fn finish(&mut self, mut line: impl FnMut(&str)) {
        if !self.partial.is_empty() {
            line(&String::from_utf8_lossy(&self.partial));
            self.partial.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_cut_into_lines_wherever_it_is_split() {
        let mut seen = Vec::new();
        let mut lines = Lines::default();
        for piece in ["a", "b\nc\r", "\n\nd"] {
            lines.feed(piece.as_bytes(), |line| seen.push(line.to_owned()));
        }
        lines.finish(|line| seen.push(line.to_owned()));
        assert_eq!(seen, ["ab", "c", "", "d"]);
    }
}
