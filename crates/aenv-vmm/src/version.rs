//! Versions of VMMs: asked of their programs, and compared.

use std::{path::Path, process::Stdio, time::Duration};

const WAIT: Duration = Duration::from_secs(20);

/// What a program answers to `--version`, without the words before it. `None`: it is not there, or is another.
pub(crate) async fn of(binary: &Path, words: &str) -> Option<String> {
    let mut command = tokio::process::Command::new(binary);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(WAIT, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.strip_prefix(words)?.split(|c: char| c.is_ascii_whitespace() || c == '(').next()?;
    Some(version.to_owned())
}

/// Major and minor.
pub(crate) fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
