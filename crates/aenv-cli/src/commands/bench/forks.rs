//! Forks of one sandbox into more and more children. A child that finds no room is counted, not hidden.

use std::time::Instant;

use serde_json::{Value, json};

use super::{
    Findings,
    plot::{line, plot},
    run::{Run, Sandbox},
    series::Series,
    verbs::DIRTY_MIB,
};

pub(super) async fn run(run: &Run, n: u32, children: &[u32]) -> Findings {
    let mut rows = Vec::new();
    for count in children.iter().copied() {
        let series = Series::new(format!("fork {count} .. all answer"));
        let mut answered = 0;
        for round in 1..=n {
            run.say(format!("fork {count}: {round} of {n}"));
            let Some(source) = series.prepare(run.ready(run.template())).await else { continue };
            if series.prepare(run.change_memory(&source, "aenv-bench", DIRTY_MIB)).await.is_some() {
                let children = fork(run, &series, &source, count).await;
                answered += children.len();
                run.discard(&children, &[]).await;
            }
            run.discard(&[source], &[]).await;
        }
        let mut row = row(&series, run.floors(), answered);
        row["children"] = json!(count);
        rows.push(row);
    }
    let lines = ["p50", "p99", "floorMs"].map(|field| line(field, &rows, "children", field));
    Findings { plots: vec![plot("forks", "children", "ms", &lines)], rows }
}

/// Forks once and keeps the time until all children that came have answered a command; those.
pub(super) async fn fork(run: &Run, series: &Series, source: &Sandbox, count: u32) -> Vec<Sandbox> {
    let began = Instant::now();
    let children = match run.fork(source, count).await {
        Ok(children) => children,
        Err(error) => {
            series.missed(&error, count);
            return Vec::new();
        }
    };
    let answers = children.into_iter().map(|child| async {
        let child = child?;
        run.command(&child).await.map(|()| child)
    });
    let answers = futures::future::join_all(answers).await;
    let took = began.elapsed();
    let mut answered = Vec::new();
    for answer in answers {
        match answer {
            Ok(child) => answered.push(child),
            Err(error) => series.missed(&error, 1),
        }
    }
    if !answered.is_empty() {
        series.push(began, took);
    }
    answered
}

/// The row of forks whose children that answered were so many in all: the floor is as many launches as each had on average.
pub(super) fn row(series: &Series, floors: &Value, answered: usize) -> Value {
    let forks = series.times().len().max(1);
    let each = answered as f64 / forks as f64;
    let mut row = series.row(floors, Some(("launch", each)));
    row["answered"] = json!(answered);
    row
}
