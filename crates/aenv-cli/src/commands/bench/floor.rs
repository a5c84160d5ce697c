//! What the bare engine takes on this host, as the server's binary measures it.

use std::{path::PathBuf, process::Stdio};

use serde_json::Value;

use crate::commands::beside;

/// Which floors a suite asks for.
pub(super) struct Wanted<'a> {
    /// Repetitions.
    pub(super) n: u32,
    /// MiB of the writes that are timed.
    pub(super) write_mib: &'a [u32],
}

/// Measures; null where the server's binary, or what it needs, is not on this machine.
///
/// It is waited for even when the run is interrupted: Ctrl-C reaches it as well, and it removes what it has made.
pub(super) async fn measure(binary: Option<PathBuf>, template: &str, wanted: &Wanted<'_>) -> Value {
    let sizes: Vec<String> = wanted.write_mib.iter().map(u32::to_string).collect();
    let mut command = tokio::process::Command::new(beside(binary, "aenv-server"));
    command.args(["floor", "--json", "--template", template, "-n", &wanted.n.to_string()]);
    if !sizes.is_empty() {
        command.args(["--write-mib", &sizes.join(",")]);
    }
    let Ok(output) = command.stderr(Stdio::inherit()).output().await else { return Value::Null };
    if !output.status.success() {
        return Value::Null;
    }
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}
