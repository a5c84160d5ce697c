//! The process `aenv-blockd`.

mod detach;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use aenv_blockd::{
    ExportChoice,
    daemon::{Config, Daemon, StartError, remotes::Remotes, stacks::Stacks},
    launch::EXIT_ALREADY_RUNNING,
};
use anyhow::Context;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::detach::Starter;

const SHUTDOWN_BOUND: Duration = Duration::from_secs(5);

/// Shows stacks of layers to VMMs, as ublk block devices and as files in a FUSE mount.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Control socket to make.
    #[arg(long)]
    socket: PathBuf,
    /// Folder to mount the exports on.
    #[arg(long)]
    mount: PathBuf,
    /// File that keeps the list of exports.
    #[arg(long)]
    state: PathBuf,
    /// File that says how layers on other machines are reached. Without it there are none.
    #[arg(long)]
    remotes: Option<PathBuf>,
    /// How disks are shown: auto (ublk where the machine has it), fuse, ublk.
    #[arg(long, default_value_t)]
    export: ExportChoice,
    /// Threads that serve requests.
    #[arg(long, default_value_t = Config::default_workers())]
    workers: usize,
    /// Go on in the background, in a session of its own, once ready.
    #[arg(long)]
    detach: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_env("AENV_LOG").unwrap_or_else(|_| EnvFilter::new("info,libublk=warn")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let starter = if arguments.detach {
        // SAFETY: nothing has started a thread yet.
        match unsafe { Starter::detached() } {
            Ok(starter) => starter,
            Err(error) => return fail(&error),
        }
    } else {
        Starter::attached()
    };
    prepare();
    let config = Config {
        socket: arguments.socket,
        mount: arguments.mount,
        state: arguments.state,
        workers: arguments.workers,
        export: arguments.export,
    };
    match serve(config, arguments.remotes, starter) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

/// All guests' disks depend on this process: it is the last that the kernel should end for want of memory, and it may open as
/// many layers as the host allows.
fn prepare() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        tracing::warn!(%error, "not protected from the OOM killer");
    }
    aenv_blockd::raise_open_files();
}

fn fail(error: &anyhow::Error) -> ExitCode {
    tracing::error!("{error:#}");
    ExitCode::FAILURE
}

fn serve(config: Config, remotes: Option<PathBuf>, starter: Starter) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
        let handle = tokio::runtime::Handle::current();
        let stacks = match remotes {
            Some(settings) => Stacks::with_remotes(Remotes::new(settings, handle)),
            None => Stacks::default(),
        };
        let daemon = match Daemon::start(config, stacks) {
            Ok(daemon) => daemon,
            Err(error @ StartError::AlreadyRunning { .. }) => {
                tracing::warn!("{error}");
                starter.finish(EXIT_ALREADY_RUNNING)?;
                return Ok(ExitCode::from(EXIT_ALREADY_RUNNING));
            }
            Err(error) => return Err(error.into()),
        };
        starter.finish(0).context("the process that started us is gone")?;
        let asked = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        daemon.run(asked).await?;
        Ok(ExitCode::SUCCESS)
    });
    // Calls that are still in progress get a little time, not for ever.
    runtime.shutdown_timeout(SHUTDOWN_BOUND);
    ended
}
