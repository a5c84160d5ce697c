//! The verbs: create, command, pause, resume, snapshot and fork, as a user waits for them.

use super::{Findings, forks::fork, run::Run, series::Series};

/// Memory that the guest changes before a snapshot, a pause or a fork, in MiB.
pub(super) const DIRTY_MIB: u32 = 32;
/// Commands for each sandbox.
const COMMANDS: u32 = 3;

pub(super) async fn run(run: &Run, n: u32, children: u32) -> Findings {
    let create = Series::new("create .. first command");
    let command = Series::new("command round trip");
    let pause = Series::new(format!("pause, {DIRTY_MIB} MiB changed"));
    let resume = Series::new("resume .. first command");
    let snapshot = Series::new(format!("snapshot, {DIRTY_MIB} MiB changed"));
    let forks = Series::new(format!("fork {children} .. all answer"));
    for round in 1..=n {
        run.say(format!("round {round} of {n}"));
        let Some(sandbox) = create.time(run.ready(run.template())).await else { continue };
        for _ in 0..COMMANDS {
            command.time(run.command(&sandbox)).await;
        }
        let mut taken = None;
        if snapshot.prepare(run.change_memory(&sandbox, "aenv-bench", DIRTY_MIB)).await.is_some() {
            taken = snapshot.time(run.snapshot(&sandbox)).await;
        }
        // Anew: what the snapshot has, a pause does not write again.
        if pause.prepare(run.change_memory(&sandbox, "aenv-bench", DIRTY_MIB)).await.is_some()
            && pause.time(run.pause(&sandbox)).await.is_some()
        {
            resume.time(run.resume(&sandbox)).await;
        }
        run.discard(&[sandbox], taken.as_slice()).await;
    }
    let mut answered = 0;
    for round in 1..=n {
        run.say(format!("fork {round} of {n}"));
        let Some(source) = forks.prepare(run.ready(run.template())).await else { continue };
        if forks.prepare(run.change_memory(&source, "aenv-bench", DIRTY_MIB)).await.is_some() {
            let made = fork(run, &forks, &source, children).await;
            answered += made.len();
            run.discard(&made, &[]).await;
        }
        run.discard(&[source], &[]).await;
    }
    let floors = run.floors();
    let mut rows = vec![
        create.row(floors, Some(("launch", 1.0))),
        command.row(floors, Some(("http", 1.0))),
        pause.row(floors, Some(("write32", 1.0))),
        resume.row(floors, Some(("launch", 1.0))),
        snapshot.row(floors, Some(("write32", 1.0))),
    ];
    rows.push(super::forks::row(&forks, floors, answered));
    Findings { rows, plots: Vec::new() }
}
