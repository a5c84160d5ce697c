//! `doctor`: the server's binary looks at the host; this shows what it says.

use super::beside;
use crate::{Outcome, args::Doctor, error::CliError, output::Format};

pub(super) fn run(args: Doctor, format: Format) -> Outcome {
    let binary = beside(args.server_binary, "aenv-server");
    let mut command = std::process::Command::new(&binary);
    command.arg("doctor");
    if format == Format::Json {
        command.arg("--json");
    }
    let status = command.status().map_err(CliError::io(format!(
        "{} (doctor looks at this host, so it needs the server here)",
        binary.display()
    )))?;
    Ok(status.code().unwrap_or(1))
}
