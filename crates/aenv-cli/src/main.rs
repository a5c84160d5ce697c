//! `aenv`: the command. Talks to a server by its HTTP API and to sandboxes through the server's data plane.
//!
//! Exit codes: 0 done; 1 the operation failed; 2 wrong usage; 3 the server cannot be reached; 4 not found; 5 refused
//! (wrong API key); 6 no capacity, try again. `exec` exits with the code of the command (128 + n when a signal ended it).

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a command prints")]

mod args;
mod client;
mod commands;
mod credentials;
mod envd;
mod error;
mod output;
mod pty;

use clap::Parser;

use crate::{args::Args, error::CliError};

fn main() {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("aenv: cannot start: {error}");
            std::process::exit(1);
        }
    };
    let code = match runtime.block_on(commands::run(args)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("aenv: {}", output::plain(&error.to_string()));
            error.exit_code()
        }
    };
    // A reader of stdin may still be blocked in its thread; nothing is lost by leaving it.
    runtime.shutdown_background();
    std::process::exit(code);
}

/// What every command returns: the exit code of the process.
type Outcome = Result<i32, CliError>;
