//! The report of a run as text: which columns its rows have, as a table or in Markdown.

use serde_json::Value;

use crate::output::{self, cell};

/// Every column that a suite may have. Shown are those in which some row has something else than nothing and zero.
const COLUMNS: [(&str, &str); 17] = [
    ("OPERATION", "operation"),
    ("N", "n"),
    ("FAILED", "failed"),
    ("REFUSED", "refused"),
    ("ANSWERED", "answered"),
    ("P50 MS", "p50"),
    ("P90", "p90"),
    ("P99", "p99"),
    ("PSS MIB", "pssMib"),
    ("ANON. MIB", "anonymousMib"),
    ("CPU %", "cpuPercent"),
    ("FLOOR", "floor"),
    ("FLOOR MS", "floorMs"),
    ("RATIO", "ratio"),
    ("GROWTH", "growth"),
    ("RETRY AFTER S", "retryAfter"),
    ("SKIPPED", "skipped"),
];

/// The columns of these rows.
pub(super) fn columns(rows: &[Value]) -> Vec<(&'static str, &'static str)> {
    let says = |value: &Value| !value.is_null() && value.as_f64() != Some(0.0);
    COLUMNS
        .into_iter()
        .filter(|(_, field)| ["operation", "n"].contains(field) || rows.iter().any(|row| says(&row[field])))
        .collect()
}

/// Prints a report on a terminal.
pub(super) fn print(report: &Value) {
    let rows = report["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    output::rows(output::Format::Table, rows, &columns(rows));
    for error in errors(rows) {
        eprintln!("{}", output::plain(&error));
    }
    output::one(output::Format::Table, &report["machine"]);
}

/// A report in Markdown, for docs/performance.md.
pub(super) fn markdown(report: &Value) -> String {
    let rows = report["results"].as_array().map(Vec::as_slice).unwrap_or_default();
    let columns = columns(rows);
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let safe = |text: &str| text.replace('|', "\\|").replace('\n', " ");
    let heads = columns.iter().map(|(heading, _)| heading.to_lowercase()).collect();
    let body =
        rows.iter().map(|row| line(columns.iter().map(|(_, field)| safe(&cell(row, field))).collect()));
    format!(
        "### `{}`\n\n{}\n\n{}{}{}",
        safe(&cell(report, "suite")),
        safe(&described(report)),
        line(heads),
        line(vec!["---".to_owned(); columns.len()]),
        body.collect::<String>(),
    )
}

/// Where and when it was measured, in one line.
pub(super) fn described(report: &Value) -> String {
    let field = |name| cell(report, name);
    let gib = report["machine"]["memoryBytes"].as_f64().map_or(0.0, |bytes| bytes / f64::from(1 << 30));
    format!(
        "{}; template {}, {}; {}, {} cores, {gib:.1} GiB; {} {} ({}); AgentENV {}",
        field("startedAt"),
        field("template"),
        field("settings"),
        field("machine.cpu"),
        field("machine.cores"),
        field("machine.engine"),
        field("machine.engineVersion"),
        field("machine.virtualization"),
        field("machine.version"),
    )
}

/// What failed, one line for each message.
pub(super) fn errors(rows: &[Value]) -> Vec<String> {
    let of = |row: &Value| {
        let operation = cell(row, "operation");
        let messages = row["errors"].as_object().cloned().unwrap_or_default();
        messages.into_iter().map(move |(message, count)| format!("{operation}: {count} times: {message}"))
    };
    rows.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_that_say_nothing_are_left_out() {
        let rows = [json!({ "operation": "a", "n": 0, "failed": 0, "p50": null }), json!({ "p99": 3.5 })];
        let headings: Vec<&str> = columns(&rows).iter().map(|(heading, _)| *heading).collect();
        assert_eq!(headings, ["OPERATION", "N", "P99"]);
    }

    #[test]
    fn markdown_is_a_table() {
        let report = json!({ "suite": "forks", "results": [{ "operation": "a | b", "n": 2, "p50": 1.25 }] });
        let text = markdown(&report);
        assert!(text.starts_with("### `forks`\n\n"));
        assert!(
            text.ends_with("| operation | n | p50 ms |\n| --- | --- | --- |\n| a \\| b | 2 | 1.25 |\n"),
            "{text}"
        );
    }
}
