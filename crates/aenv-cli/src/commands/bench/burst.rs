//! Many creates at once, on a node that may have room for fewer: each ends in a sandbox or in a refusal that says when to
//! ask again; none hangs.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{Findings, run::Run, series::Series};
use crate::error::CliError;

/// What became of creates that ended alike.
struct Ended {
    series: Series,
    /// The least and the most that `Retry-After` said, in seconds.
    retry_after: Option<(u64, u64)>,
    failed: u32,
}

pub(super) async fn run(run: &Run, n: u32, seconds: u64) -> Findings {
    run.say(format!("{n} creates at once"));
    let limit = Duration::from_secs(seconds);
    let began = Instant::now();
    let creates = (0..n).map(|_| async {
        let created = tokio::time::timeout(limit, run.create(run.template())).await;
        (created.unwrap_or(Err(CliError::NoAnswer(limit))), began.elapsed())
    });
    let outcomes = futures::future::join_all(creates).await;
    let all = Series::new("all creates .. the last answer");
    all.push(began, began.elapsed());

    let mut sandboxes = Vec::new();
    let mut ways: BTreeMap<String, Ended> = BTreeMap::new();
    for (outcome, took) in outcomes {
        let refusal = outcome.as_ref().err();
        let name = format!("create: {}", way(refusal));
        let ended = ways.entry(name.clone()).or_insert_with(|| Ended {
            series: Series::new(name),
            retry_after: None,
            failed: 0,
        });
        ended.series.push(began, took);
        ended.failed += u32::from(refusal.is_some_and(is_failure));
        if let Some(CliError::Api { retry_after: Some(secs), .. }) = refusal {
            let (least, most) = ended.retry_after.unwrap_or((*secs, *secs));
            ended.retry_after = Some((least.min(*secs), most.max(*secs)));
        }
        sandboxes.extend(outcome.ok());
    }
    run.discard(&sandboxes, &[]).await;

    let mut rows: Vec<Value> = Vec::new();
    for ended in ways.values() {
        let mut row = ended.series.row(run.floors(), None);
        row["failed"] = json!(ended.failed);
        row["retryAfter"] = json!(ended.retry_after.map(|(least, most)| [least, most]));
        rows.push(row);
    }
    let launches = sandboxes.len() as f64;
    rows.push(all.row(run.floors(), Some(("launch", launches))));
    Findings { rows, plots: Vec::new() }
}

/// How a create ended: its status and error code.
fn way(refusal: Option<&CliError>) -> String {
    match refusal {
        None => "201".to_owned(),
        Some(CliError::Api { status, code, .. }) => {
            format!("{status} {}", code.as_deref().unwrap_or("without a code"))
        }
        Some(other) => other.to_string(),
    }
}

/// Whether it is anything but a refusal with a code and a time to ask again.
fn is_failure(error: &CliError) -> bool {
    !matches!(error, CliError::Api { status: 429, code: Some(_), retry_after: Some(_), .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_refusal_is_no_failure() {
        let refusal = |status, code: Option<&str>, retry_after| CliError::Api {
            status,
            message: String::new(),
            code: code.map(str::to_owned),
            retry_after,
        };
        let whole = refusal(429, Some("full"), Some(1));
        assert_eq!(way(Some(&whole)), "429 full");
        assert!(!is_failure(&whole));
        for broken in [
            refusal(429, Some("full"), None),
            refusal(429, None, Some(1)),
            refusal(500, Some("internal"), Some(1)),
            CliError::NoAnswer(Duration::from_secs(1)),
        ] {
            assert!(is_failure(&broken), "{broken:?}");
        }
    }
}
