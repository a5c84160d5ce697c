//! Capture after capture of one sandbox, with the same change in between: the cost of each should stay what it was.

use serde_json::{Value, json};

use super::{
    Findings,
    plot::plot,
    run::Run,
    series::{Series, percentile, round},
};

/// Memory that the guest changes before each capture, in MiB.
pub(super) const CHANGE_MIB: u32 = 8;
/// Files that are changed in turn, so that each change is of other memory than the one before it.
const FILES: u32 = 16;

pub(super) async fn run(run: &Run, n: u32) -> Findings {
    let series = Series::new(format!("snapshot, {CHANGE_MIB} MiB changed since the last"));
    if let Some(sandbox) = series.prepare(run.ready(run.template())).await {
        for round in 1..=n {
            run.say(format!("snapshot {round} of {n}"));
            let file = format!("aenv-bench-{}", round % FILES);
            if series.prepare(run.change_memory(&sandbox, &file, CHANGE_MIB)).await.is_some() {
                let taken = series.time(run.snapshot(&sandbox)).await;
                run.discard(&[], taken.as_slice()).await;
            }
        }
        run.discard(&[sandbox], &[]).await;
    }
    let times = series.times();
    let points = times.iter().zip(1..).map(|(ms, number): (_, u32)| json!([number, round(*ms), 1]));
    let plots = vec![plot(
        "capture after capture",
        "capture",
        "ms",
        &[json!({ "name": "snapshot", "points": points.collect::<Vec<_>>() })],
    )];
    let floor = format!("write{CHANGE_MIB}");
    let mut row = series.row(run.floors(), Some((&floor, 1.0)));
    row["growth"] = growth(&times);
    Findings { rows: vec![row], plots }
}

/// The median of the last third over that of the first: 1 when the cost does not grow. Null for fewer than three.
fn growth(times: &[f64]) -> Value {
    let third = times.len() / 3;
    let (first, last) = (&times[..third], &times[times.len() - third..]);
    let ratio = percentile(last, 50).zip(percentile(first, 50)).map(|(last, first)| round(last / first));
    json!(ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_compares_thirds() {
        assert_eq!(growth(&[10.0, 10.0, 99.0, 99.0, 30.0, 30.0]), json!(3.0));
        assert_eq!(growth(&[10.0, 20.0]), Value::Null);
    }
}
