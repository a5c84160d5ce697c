//! Round trips to one sandbox, one after the other.

use super::{Findings, run::Run, series::Series};

pub(super) async fn run(run: &Run, n: u32) -> Findings {
    let shell = Series::new("`true` in a login shell, as the SDKs run it");
    let process = Series::new("`true` without a shell");
    let health = Series::new("a request to envd that starts nothing");
    if let Some(sandbox) = shell.prepare(run.ready(run.template())).await {
        for round in 1..=n {
            run.say(format!("round {round} of {n}"));
            shell.time(run.command(&sandbox)).await;
            process.time(run.process(&sandbox)).await;
            health.time(run.health(&sandbox)).await;
        }
        run.discard(&[sandbox], &[]).await;
    }
    let rows = [shell, process, health].map(|series| series.row(run.floors(), Some(("http", 1.0))));
    Findings { rows: rows.to_vec(), plots: Vec::new() }
}
