//! Capture and launch against the memory that has changed.

use serde_json::{Value, json};

use super::{
    Findings,
    plot::{line, plot},
    run::{Run, Sandbox},
    series::Series,
};
use crate::error::CliError;

/// Memory that is left to the guest.
const RESERVE_MIB: u32 = 64;
/// Each is measured on a sandbox in which nothing else has changed much since its launch.
const OPERATIONS: [&str; 4] = ["snapshot", "create from the snapshot", "pause", "resume"];

pub(super) async fn run(run: &Run, n: u32, sizes_mib: &[u32]) -> Findings {
    let mut rows = Vec::new();
    for mib in sizes_mib {
        rows.extend(size(run, *mib, n).await);
    }
    let plots = OPERATIONS.map(|operation| {
        let of_it: Vec<Value> = rows.iter().filter(|row| row["of"] == *operation).cloned().collect();
        let lines = ["p50", "p99", "floorMs"].map(|field| line(field, &of_it, "mib", field));
        plot(operation, "MiB changed", "ms", &lines)
    });
    Findings { rows, plots: plots.to_vec() }
}

async fn size(run: &Run, mib: u32, n: u32) -> Vec<Value> {
    let [snapshot, create, pause, resume] =
        OPERATIONS.map(|operation| Series::new(format!("{operation}, {mib} MiB changed")));
    let mut skipped = None;
    for round in 1..=n {
        run.say(format!("{mib} MiB: {round} of {n}"));
        if let Some(source) = snapshot.prepare(run.ready(run.template())).await {
            let prepared = async {
                let available = run.available_memory(&source).await?;
                if mib.saturating_add(RESERVE_MIB) > available {
                    return Ok(Some(available));
                }
                change(run, &source, mib).await.map(|()| None)
            };
            match snapshot.prepare(prepared).await {
                Some(None) => {
                    let taken = snapshot.time(run.snapshot(&source)).await;
                    let copy = match &taken {
                        Some(id) => create.time(run.ready(id)).await,
                        None => None,
                    };
                    run.discard(copy.as_slice(), taken.as_slice()).await;
                }
                Some(short) => skipped = short,
                None => {}
            }
            run.discard(&[source], &[]).await;
        }
        if skipped.is_some() {
            break;
        }
        let Some(sandbox) = pause.prepare(run.ready(run.template())).await else { continue };
        let prepared = async {
            run.available_memory(&sandbox).await?;
            change(run, &sandbox, mib).await
        };
        if pause.prepare(prepared).await.is_some() && pause.time(run.pause(&sandbox)).await.is_some() {
            resume.time(run.resume(&sandbox)).await;
        }
        run.discard(&[sandbox], &[]).await;
    }
    let write = format!("write{mib}");
    let floors = [write.as_str(), "launch", &write, "launch"];
    let series = [snapshot, create, pause, resume];
    let mut rows = Vec::new();
    for ((series, operation), floor) in series.iter().zip(OPERATIONS).zip(floors) {
        let mut row = series.row(run.floors(), Some((floor, 1.0)));
        row["of"] = json!(operation);
        row["mib"] = json!(mib);
        if let Some(available) = skipped {
            row["skipped"] = json!(format!("the guest has {available} MiB available"));
        }
        rows.push(row);
    }
    rows
}

async fn change(run: &Run, sandbox: &Sandbox, mib: u32) -> Result<(), CliError> {
    if mib == 0 {
        return Ok(());
    }
    run.change_memory(sandbox, "aenv-bench", mib).await
}
