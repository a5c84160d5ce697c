//! The daemon in each guest: processes, PTYs, files, watches, metrics.
//!
//! It serves E2B's in-sandbox API on port 49983. Every stream has a bounded queue, so that a slow client slows the guest's process
//! down instead of filling memory; nothing waits on the wall clock, so that timers go on where they stopped after a restore.
//!
//! One thread runs everything that waits; what blocks (the filesystem) runs on short-lived threads beside it. A guest that is
//! idle has nothing to wake up for, and a launch touches few pages.

mod access;
mod config;
mod files;
mod filesystem;
mod guest;
mod init;
mod metrics;
mod pace;
mod paths;
mod process;
mod server;
mod system;
mod tunnel;
mod users;

use std::{process::ExitCode, time::Duration};

use config::Config;

fn main() -> ExitCode {
    let config = match Config::from_arguments(std::env::args().skip(1)) {
        Ok(config) => config,
        Err(message) => {
            eprintln!("aenv-envd: {message}\n\n{}", config::USAGE);
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_target(false)
        .init();
    if config.touches_system() {
        system::protect_self();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(64)
        .thread_stack_size(256 << 10)
        .thread_keep_alive(Duration::from_secs(2))
        .build();
    let served = match runtime {
        Ok(runtime) => runtime.block_on(server::serve(config)),
        Err(error) => Err(error),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "envd cannot serve");
            ExitCode::FAILURE
        }
    }
}
