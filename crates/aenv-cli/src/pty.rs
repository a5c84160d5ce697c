//! The local terminal while a remote one is shown in it.

use std::time::Duration;

use crossterm::terminal;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    Outcome,
    envd::{Envd, Event, Process},
    error::CliError,
};

/// Raw mode for as long as it lives.
struct Raw;

impl Raw {
    fn enter() -> Result<Self, CliError> {
        terminal::enable_raw_mode().map_err(CliError::io("the terminal"))?;
        Ok(Self)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that has gone.
        terminal::disable_raw_mode().ok();
    }
}

/// How often a broken connection is taken up again before it is given up.
const RECONNECTS: u32 = 5;

/// Runs a process in a terminal until it ends. A connection that breaks is taken up again.
pub(crate) async fn run(envd: &Envd, mut process: Process<'_>) -> Outcome {
    let size = terminal::size().unwrap_or((80, 24));
    process.pty = Some(size);
    process.envs.entry("TERM".to_owned()).or_insert_with(|| "xterm-256color".to_owned());
    let user = process.user;
    let mut events = envd.start(&process).await?;
    let Event::Started(pid) = events.next().await? else {
        return Err(CliError::Sandbox("the process did not start".to_owned()));
    };
    let raw = Raw::enter()?;
    let mut resized = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::window_change())
        .map_err(CliError::io("SIGWINCH"))?;
    let mut keys = vec![0; 16 << 10];
    let (mut stdin, mut stdout) = (tokio::io::stdin(), tokio::io::stdout());
    let (mut open, mut lost) = (true, 0);
    let code = loop {
        tokio::select! {
            event = events.next() => match event {
                Ok(Event::Out(bytes) | Event::Err(bytes)) => {
                    lost = 0;
                    stdout.write_all(&bytes).await.map_err(CliError::io("standard output"))?;
                    stdout.flush().await.map_err(CliError::io("standard output"))?;
                }
                Ok(Event::Started(_)) => {}
                Ok(Event::Ended(code)) => break code,
                Err(error) => {
                    lost += 1;
                    if lost > RECONNECTS {
                        return Err(error);
                    }
                    tokio::time::sleep(Duration::from_millis(200 << lost)).await;
                    let body = json!({ "process": { "pid": pid } });
                    match envd.stream("process.Process/Connect", user, &body, None).await {
                        Ok(again) => events = again,
                        Err(CliError::Api { .. }) => return Err(error),
                        Err(_) => {}
                    }
                }
            },
            read = stdin.read(&mut keys), if open => match read {
                Ok(0) | Err(_) => open = false,
                Ok(count) => envd.input(pid, "pty", &keys[..count]).await?,
            },
            _ = resized.recv() => {
                if let Ok((cols, rows)) = terminal::size() {
                    let size = json!({ "cols": cols, "rows": rows });
                    let body = json!({ "process": { "pid": pid }, "pty": { "size": size } });
                    envd.call("process.Process/Update", user, &body).await?;
                }
            }
        }
    };
    drop(raw);
    Ok(code)
}
