//! Times of one operation: what is counted, and the row that it becomes.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::error::CliError;

/// Exit code of an error that says "no capacity".
const NO_CAPACITY: i32 = 6;

/// Times of one operation.
pub(super) struct Series {
    name: String,
    seen: RefCell<Seen>,
}

#[derive(Default)]
struct Seen {
    /// When it began, and the milliseconds that it took.
    times: Vec<(Instant, f64)>,
    /// Refused for want of capacity: an answer, and no failure.
    refused: u32,
    /// Messages, and how often.
    failures: BTreeMap<String, u32>,
}

impl Series {
    pub(super) fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), seen: RefCell::default() }
    }

    /// Runs the operation and keeps its time. A failure is counted, and gives nothing.
    pub(super) async fn time<T>(&self, work: impl Future<Output = Result<T, CliError>>) -> Option<T> {
        let began = Instant::now();
        let outcome = work.await;
        let took = began.elapsed();
        let value = self.succeeded(outcome)?;
        self.push(began, took);
        Some(value)
    }

    /// What comes before the operation: its failure is the operation's, its time is not.
    pub(super) async fn prepare<T>(&self, work: impl Future<Output = Result<T, CliError>>) -> Option<T> {
        self.succeeded(work.await)
    }

    fn succeeded<T>(&self, outcome: Result<T, CliError>) -> Option<T> {
        outcome.map_err(|error| self.missed(&error, 1)).ok()
    }

    /// Keeps a time.
    pub(super) fn push(&self, began: Instant, took: Duration) {
        self.seen.borrow_mut().times.push((began, ms(took)));
    }

    /// Counts what did not happen.
    pub(super) fn missed(&self, error: &CliError, times: u32) {
        let mut seen = self.seen.borrow_mut();
        if error.exit_code() == NO_CAPACITY {
            seen.refused += times;
        } else {
            *seen.failures.entry(error.to_string()).or_default() += times;
        }
    }

    /// The milliseconds, in the order in which they were kept.
    pub(super) fn times(&self) -> Vec<f64> {
        self.seen.borrow().times.iter().map(|(_, ms)| *ms).collect()
    }

    /// One row of the results. `floor`: which one it is compared with, and how many of it it consists of.
    pub(super) fn row(&self, floors: &Value, floor: Option<(&str, f64)>) -> Value {
        let times = self.times();
        let seen = self.seen.borrow();
        let at = |percent| percentile(&times, percent);
        let floor_ms = floor.and_then(|(name, count)| Some(floors[name]["p50"].as_f64()? * count));
        let ratio = at(50).zip(floor_ms.filter(|ms| *ms > 0.0)).map(|(p50, floor)| round(p50 / floor));
        json!({
            "operation": self.name, "n": times.len(),
            "failed": seen.failures.values().sum::<u32>(), "refused": seen.refused, "errors": seen.failures,
            "p50": at(50).map(round), "p90": at(90).map(round), "p99": at(99).map(round),
            "floor": floor_ms.and(floor).map(|(name, _)| name), "floorMs": floor_ms.map(round), "ratio": ratio,
        })
    }

    /// A percentile over time: `[seconds since the origin, milliseconds, how many times]` for each bucket that has any.
    pub(super) fn over_time(&self, origin: Instant, width: f64, percent: usize) -> Vec<Value> {
        let seen = self.seen.borrow();
        let times: Vec<(f64, f64)> = seen
            .times
            .iter()
            .map(|(began, ms)| (began.saturating_duration_since(origin).as_secs_f64(), *ms))
            .collect();
        let point =
            |(at, times): (f64, Vec<f64>)| json!([at, percentile(&times, percent).map(round), times.len()]);
        buckets(&times, width).into_iter().map(point).collect()
    }
}

/// Sorts `(seconds, value)` into buckets of so many seconds: when each begins, and its values. Empty ones are left out.
fn buckets(times: &[(f64, f64)], width: f64) -> Vec<(f64, Vec<f64>)> {
    let mut buckets: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (at, value) in times {
        let number = (at / width).floor() as u64;
        buckets.entry(number).or_default().push(*value);
    }
    let begin = |number: u64| round(number as f64 * width);
    buckets.into_iter().map(|(number, values)| (begin(number), values)).collect()
}

/// The nearest-rank percentile; nothing of nothing.
pub(super) fn percentile(times: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// Two digits after the point.
pub(super) fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let times: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        let at = |percent| percentile(&times, percent);
        assert_eq!((at(50), at(90), at(99)), (Some(10.0), Some(18.0), Some(20.0)));
        assert_eq!((percentile(&[7.0], 1), percentile(&[7.0], 99)), (Some(7.0), Some(7.0)));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn buckets_begin_where_their_time_does() {
        let times = [(0.0, 1.0), (2.49, 2.0), (2.5, 3.0), (12.6, 4.0)];
        assert_eq!(buckets(&times, 2.5), [(0.0, vec![1.0, 2.0]), (2.5, vec![3.0]), (12.5, vec![4.0])]);
        assert!(buckets(&[], 1.0).is_empty());
    }

    #[tokio::test]
    async fn a_row_counts_what_failed_and_what_was_refused() {
        let refusal =
            |status| CliError::Api { status, message: "no".to_owned(), code: None, retry_after: None };
        let series = Series::new("create");
        assert_eq!(series.time(async { Ok(1) }).await, Some(1));
        for status in [429, 500, 500] {
            assert!(series.time(async { Err::<(), _>(refusal(status)) }).await.is_none());
        }
        let row = series.row(&json!({ "launch": { "p50": 0.0 } }), Some(("launch", 1.0)));
        assert_eq!((&row["n"], &row["refused"], &row["failed"]), (&json!(1), &json!(1), &json!(2)));
        assert_eq!((&row["errors"], &row["ratio"]), (&json!({ "no": 2 }), &Value::Null));
        assert_eq!(Series::new("none").row(&Value::Null, None)["p50"], Value::Null);
    }
}
