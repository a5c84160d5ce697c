//! Idle siblings: what memory each further one takes, and what CPU they and their server use while nobody asks for anything.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    Findings,
    plot::plot,
    processes::{Memory, Vmm, cpu_seconds, memory},
    run::{Run, Sandbox},
    series::{Series, round},
};
use crate::error::CliError;

/// What the guests and the server still have to do after the last create.
const SETTLE: Duration = Duration::from_secs(5);

pub(super) async fn run(run: &Run, n: u32, seconds: u64) -> Result<Findings, CliError> {
    let create = Series::new("create .. first command");
    let mut sandboxes = Vec::new();
    run.say("the first sandbox".to_owned());
    sandboxes.extend(create.time(run.ready(run.template())).await);
    let Some(first) = sandboxes.first() else {
        return Ok(Findings { rows: vec![create.row(run.floors(), None)], plots: Vec::new() });
    };
    let vmm = vmm_of(first)?;
    tokio::time::sleep(SETTLE).await;
    let alone = memory(vmm.pid).ok_or_else(elsewhere)?;

    for number in 2..=n {
        run.say(format!("sandbox {number} of {n}"));
        sandboxes.extend(create.time(run.ready(run.template())).await);
    }
    tokio::time::sleep(SETTLE).await;
    let ours: Vec<Vmm> = Vmm::all().into_iter().filter(|found| found.owner == vmm.owner).collect();
    let busy: Vec<u32> = ours
        .iter()
        .filter(|vmm| sandboxes.iter().any(|sandbox| vmm.runs(&sandbox.id)))
        .map(|vmm| vmm.pid)
        .collect();
    let waiting: Vec<u32> = ours.iter().filter(|vmm| vmm.waits()).map(|vmm| vmm.pid).collect();
    let groups = [
        ("all sandboxes", busy.clone()),
        ("VMMs that wait for a sandbox", waiting),
        ("aenv-server", vmm.server().into_iter().collect()),
        ("aenv-blockd", vmm.blockd().into_iter().collect()),
    ];
    run.say(format!("idle for {seconds} s"));
    let before = groups.each_ref().map(|(_, pids)| cpu(pids));
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let after = groups.each_ref().map(|(_, pids)| cpu(pids));

    let mut rows =
        vec![create.row(run.floors(), Some(("launch", 1.0))), row("the first sandbox, alone", 1, alone)];
    let each: Vec<Memory> = busy.iter().filter_map(|pid| memory(*pid)).collect();
    if let Some(further) = further(alone, &each) {
        let mut row = row("each further sandbox", each.len() - 1, further);
        row["ratio"] = json!(round(further.pss / alone.pss));
        rows.push(row);
    }
    for (((name, pids), before), after) in groups.iter().zip(before).zip(after) {
        let each: Vec<Memory> = pids.iter().filter_map(|pid| memory(*pid)).collect();
        let mut row = row(name, each.len(), sum(&each));
        let percent = (after - before) / seconds as f64 * 100.0;
        row["cpuPercent"] = json!(round(percent));
        rows.push(row);
    }
    let points = each.iter().zip(1..).map(|(memory, number): (_, u32)| json!([number, round(memory.pss), 1]));
    let lines = [json!({ "name": "PSS", "points": points.collect::<Vec<_>>() })];
    Ok(Findings { rows, plots: vec![plot("memory of each sandbox", "VMM", "MiB", &lines)] })
}

fn vmm_of(sandbox: &Sandbox) -> Result<Vmm, CliError> {
    Vmm::all().into_iter().find(|vmm| vmm.runs(&sandbox.id)).ok_or_else(elsewhere)
}

fn elsewhere() -> CliError {
    CliError::Sandbox(
        "`density` reads the server's processes, and there are none here that it may read: run it on the server's own machine, as root"
            .to_owned(),
    )
}

fn row(name: &str, n: usize, memory: Memory) -> Value {
    json!({ "operation": name, "n": n, "pssMib": round(memory.pss), "anonymousMib": round(memory.anonymous) })
}

/// What each sandbox beyond the first takes; nothing when there is none.
fn further(alone: Memory, each: &[Memory]) -> Option<Memory> {
    let all = sum(each);
    let others = each.len().checked_sub(1).filter(|others| *others > 0)? as f64;
    Some(Memory {
        pss: (all.pss - alone.pss) / others,
        anonymous: (all.anonymous - alone.anonymous) / others,
    })
}

fn sum(each: &[Memory]) -> Memory {
    each.iter().fold(Memory::default(), |all, one| Memory {
        pss: all.pss + one.pss,
        anonymous: all.anonymous + one.anonymous,
    })
}

fn cpu(pids: &[u32]) -> f64 {
    pids.iter().filter_map(|pid| cpu_seconds(*pid)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sandbox_pays_for_what_all_share() {
        let memory = |pss| Memory { pss, anonymous: pss / 2.0 };
        let each = [memory(40.0), memory(40.0), memory(40.0)];
        assert_eq!(further(memory(80.0), &each), Some(memory(20.0)));
        assert_eq!(further(memory(80.0), &each[..1]), None);
    }
}
