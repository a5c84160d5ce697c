//! `bench`: what a user waits for, beside what the bare engine takes on the same machine in the same run.
//!
//! Each suite is one file; it gets a [`Run`] to work with and gives [`Findings`]. A failure of one operation is counted in
//! its row, and the suite goes on. This file makes the report of it, and removes what was made, however the run ended.
//! docs/performance.md describes the report.

mod burst;
mod commands;
mod density;
mod floor;
mod forks;
mod html;
mod mixed;
mod plot;
mod processes;
mod repeat;
mod report;
mod run;
mod series;
mod sizes;
mod verbs;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use self::{floor::Wanted, run::Run};
use crate::{
    Outcome,
    args::{Bench, Suite, VERBS_CHILDREN},
    client::Client,
    error::CliError,
    output::{self, Format},
};

/// Exit code of a run that was interrupted.
const INTERRUPTED: i32 = 130;
/// Repetitions of a floor are no more than that, however often a suite repeats.
const FLOORS: u32 = 20;

/// What a suite found.
struct Findings {
    /// One for each operation, or for each case of one.
    rows: Vec<Value>,
    /// See [`plot::plot`].
    plots: Vec<Value>,
}

pub(super) async fn run(args: Bench, format: Format) -> Outcome {
    let suite = args.suite.unwrap_or(Suite::Verbs { n: args.n, children: VERBS_CHILDREN });
    if let Suite::Render { files, markdown } = &suite {
        return render(files, *markdown, args.html.as_deref(), format);
    }
    let client = Client::load()?;
    let machine = machine(&client).await?;
    let interrupted = interrupted().map_err(CliError::io("signals cannot be caught"))?;
    let started_at = chrono::Utc::now();

    let spinner = output::spinner("measuring the bare engine");
    let mut floors = Value::Null;
    if let Some(wanted) = wanted(&suite) {
        floors = floor::measure(args.server_binary, &args.template, &wanted).await;
        if floors.is_null() {
            spinner.suspend(|| {
                eprintln!("aenv: the bare engine could not be measured here; ratios are left out")
            });
        }
    }
    let run = Run::new(client, &args.template, floors, spinner);
    let outcome = tokio::select! {
        biased;
        () = interrupted => None,
        findings = Box::pin(measure(&run, &suite)) => Some(findings),
    };
    let left = run.close().await;
    let Some(findings) = outcome.transpose()? else {
        eprintln!("aenv: interrupted");
        return Ok(INTERRUPTED);
    };
    let (name, settings) = described(&suite);
    let failed = findings.rows.iter().any(|row| row["failed"].as_u64() > Some(0));
    let report = json!({
        "suite": name, "settings": settings, "template": args.template, "startedAt": started_at.to_rfc3339(),
        "machine": machine, "unit": "ms", "floor": run.floors(),
        "results": findings.rows, "plots": findings.plots,
    });
    show(&report, format);
    if let Some(path) = args.html {
        write_page(&path, &[report])?;
    }
    Ok(i32::from(failed || left > 0))
}

async fn measure(run: &Run, suite: &Suite) -> Result<Findings, CliError> {
    Ok(match *suite {
        Suite::Verbs { n, children } => verbs::run(run, n, children).await,
        Suite::Sizes { n, ref mib } => sizes::run(run, n, mib).await,
        Suite::Forks { n, ref children } => forks::run(run, n, children).await,
        Suite::Repeat { n } => repeat::run(run, n).await,
        Suite::Commands { n } => commands::run(run, n).await,
        Suite::Density { n, seconds } => density::run(run, n, seconds).await?,
        Suite::Burst { n, seconds } => burst::run(run, n, seconds).await,
        Suite::Mixed { n, seconds } => mixed::run(run, n, seconds).await,
        Suite::Render { .. } => return Err(CliError::Usage("`render` measures nothing".to_owned())),
    })
}

/// The floors of a suite.
fn wanted(suite: &Suite) -> Option<Wanted<'_>> {
    let (n, write_mib): (u32, &[u32]) = match *suite {
        Suite::Verbs { n, .. } => (n, &[verbs::DIRTY_MIB]),
        Suite::Sizes { n, ref mib } => (n, mib),
        Suite::Repeat { n } => (n, &[repeat::CHANGE_MIB]),
        Suite::Forks { n, .. } | Suite::Commands { n } | Suite::Burst { n, .. } | Suite::Mixed { n, .. } => {
            (n, &[])
        }
        Suite::Density { .. } | Suite::Render { .. } => return None,
    };
    Some(Wanted { n: n.min(FLOORS), write_mib })
}

fn described(suite: &Suite) -> (&'static str, Value) {
    match *suite {
        Suite::Verbs { n, children } => ("verbs", json!({ "n": n, "children": children })),
        Suite::Sizes { n, ref mib } => ("sizes", json!({ "n": n, "mib": mib })),
        Suite::Forks { n, ref children } => ("forks", json!({ "n": n, "children": children })),
        Suite::Repeat { n } => ("repeat", json!({ "n": n })),
        Suite::Commands { n } => ("commands", json!({ "n": n })),
        Suite::Density { n, seconds } => ("density", json!({ "n": n, "seconds": seconds })),
        Suite::Burst { n, seconds } => ("burst", json!({ "n": n, "seconds": seconds })),
        Suite::Mixed { n, seconds } => ("mixed", json!({ "n": n, "seconds": seconds })),
        Suite::Render { .. } => ("render", Value::Null),
    }
}

/// Shows reports that were kept.
fn render(files: &[PathBuf], markdown: bool, html: Option<&Path>, format: Format) -> Outcome {
    let mut reports = Vec::new();
    for file in files {
        let text = std::fs::read(file).map_err(CliError::io(file.display().to_string()))?;
        let report: Value = serde_json::from_slice(&text)
            .map_err(|error| CliError::Usage(format!("{} is no report: {error}", file.display())))?;
        if !report["results"].is_array() {
            return Err(CliError::Usage(format!("{} is no report of `aenv bench`", file.display())));
        }
        reports.push(report);
    }
    match html {
        Some(path) => write_page(path, &reports)?,
        None if markdown => {
            println!("{}", reports.iter().map(report::markdown).collect::<Vec<_>>().join("\n"))
        }
        None => reports.iter().for_each(|report| show(report, format)),
    }
    Ok(0)
}

fn show(report: &Value, format: Format) {
    match format {
        Format::Json => output::one(format, report),
        Format::Table => report::print(report),
    }
}

fn write_page(path: &Path, reports: &[Value]) -> Result<(), CliError> {
    std::fs::write(path, html::page(reports)).map_err(CliError::io(path.display().to_string()))
}

/// Ends at SIGINT or SIGTERM, also at one that came before this is waited for.
fn interrupted() -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// What it is measured on.
async fn machine(client: &Client) -> Result<Value, CliError> {
    let nodes = client.get("/nodes").await?;
    let node = &nodes[0];
    Ok(json!({
        "cpu": node["machineInfo"]["cpuModelName"], "cores": node["metrics"]["cpuCount"],
        "memoryBytes": node["metrics"]["memoryTotalBytes"], "version": node["version"],
        "engine": node["engine"]["name"], "engineVersion": node["engine"]["version"],
        "virtualization": node["engine"]["virtualization"],
    }))
}
