//! `doctor`: the server's binary looks at the host; this shows what it says.

use serde_json::Value;

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

/// The floor of `bench`: what the bare engine takes on this host.
pub(super) fn floor(binary: Option<std::path::PathBuf>, n: usize) -> Option<Value> {
    let output = std::process::Command::new(beside(binary, "aenv-server"))
        .args(["floor", "--json", "-n", &n.to_string()])
        .stderr(std::process::Stdio::inherit())
        .output()
        .ok()?;
    output.status.success().then(|| serde_json::from_slice(&output.stdout).ok()).flatten()
}
