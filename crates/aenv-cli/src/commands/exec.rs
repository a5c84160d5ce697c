//! `exec` and `connect`.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{envd_of, pairs};
use crate::{
    Outcome,
    args::{Connect, Exec},
    client::Client,
    envd::{Event, Process},
    error::CliError,
    pty,
};

/// Runs the arguments as they are, with the environment of a login shell.
const RUN_ARGUMENTS: &str = r#"exec "$@""#;

pub(super) async fn run(args: Exec) -> Outcome {
    let client = Client::load()?;
    let envd = envd_of(&client, &args.id).await?;
    let mut shell = vec!["-l".to_owned(), "-c".to_owned(), RUN_ARGUMENTS.to_owned(), "aenv".to_owned()];
    shell.extend(args.command);
    let process = Process {
        args: &shell,
        envs: pairs(&args.env)?,
        cwd: args.cwd.as_deref(),
        user: args.user.as_deref(),
        stdin: args.interactive,
        timeout_ms: args.timeout.map(|secs| secs.saturating_mul(1000)),
        ..Process::default()
    };
    if args.tty {
        return pty::run(&envd, process).await;
    }
    let mut events = envd.start(&process).await?;
    let (mut stdin, mut stdout, mut stderr) = (tokio::io::stdin(), tokio::io::stdout(), tokio::io::stderr());
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())
        .map_err(CliError::io("SIGINT"))?;
    let mut input = vec![0; 64 << 10];
    let (mut pid, mut open, mut interrupted) = (None, args.interactive, false);
    loop {
        tokio::select! {
            event = events.next() => match event? {
                Event::Started(started) => pid = Some(started),
                Event::Out(bytes) => {
                    stdout.write_all(&bytes).await.map_err(CliError::io("standard output"))?;
                    stdout.flush().await.map_err(CliError::io("standard output"))?;
                }
                Event::Err(bytes) => stderr.write_all(&bytes).await.map_err(CliError::io("standard error"))?,
                Event::Ended(code) => return Ok(code),
            },
            read = stdin.read(&mut input), if open && pid.is_some() => {
                let pid = pid.expect("checked above");
                match read.map_err(CliError::io("standard input"))? {
                    0 => {
                        open = false;
                        envd.close_stdin(pid).await?;
                    }
                    count => envd.input(pid, "stdin", &input[..count]).await?,
                }
            }
            _ = interrupts.recv() => {
                // The first one asks, the second one does not.
                let signal = if interrupted { "SIGNAL_SIGKILL" } else { "SIGNAL_SIGTERM" };
                interrupted = true;
                match pid {
                    Some(pid) => envd.signal(pid, signal).await?,
                    None => return Ok(130),
                }
            }
        }
    }
}

pub(super) async fn connect(args: Connect) -> Outcome {
    let client = Client::load()?;
    let envd = envd_of(&client, &args.id).await?;
    let shell = ["-i".to_owned(), "-l".to_owned()];
    pty::run(&envd, Process { args: &shell, user: args.user.as_deref(), ..Process::default() }).await
}
