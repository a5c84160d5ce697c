//! Tables on a terminal, JSON in a pipe; nothing that a sandbox says reaches the terminal raw.

use std::io::IsTerminal;

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use serde_json::Value;

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// For programs.
    Json,
}

impl Format {
    /// The one that was asked for, else a table on a terminal and JSON elsewhere.
    pub(crate) fn or_default(asked: Option<Self>) -> Self {
        asked.unwrap_or(if std::io::stdout().is_terminal() { Self::Table } else { Self::Json })
    }
}

/// Without control characters: a name or message from a sandbox must not drive the terminal.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// Prints rows. `columns`: heading and the field to show (`a.b` looks into objects).
pub(crate) fn rows(format: Format, items: &[Value], columns: &[(&str, &str)]) {
    match format {
        Format::Json => println!("{}", serde_json::to_string_pretty(items).expect("values are JSON")),
        Format::Table if items.is_empty() => eprintln!("nothing to list"),
        Format::Table => {
            let mut table = Table::new();
            table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
            table.set_header(columns.iter().map(|(heading, _)| *heading));
            for item in items {
                table.add_row(columns.iter().map(|(_, field)| cell(item, field)));
            }
            println!("{table}");
        }
    }
}

/// Prints one thing: its fields in a table, or the JSON.
pub(crate) fn one(format: Format, item: &Value) {
    match (format, item) {
        (Format::Table, Value::Object(fields)) => {
            let mut table = Table::new();
            table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
            for (name, value) in fields {
                table.add_row([name.clone(), show(value)]);
            }
            println!("{table}");
        }
        _ => println!("{}", serde_json::to_string_pretty(item).expect("values are JSON")),
    }
}

/// What a row shows of a field (`a.b` looks into objects).
pub(crate) fn cell(item: &Value, field: &str) -> String {
    show(field.split('.').fold(item, |value, name| &value[name]))
}

fn show(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => plain(text),
        Value::Array(items) => items.iter().map(show).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| format!("{}={}", plain(name), show(value)))
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    }
}

/// A spinner on a terminal; nothing in a pipe.
pub(crate) fn spinner(text: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new_spinner();
    bar.set_message(text.to_owned());
    bar.enable_steady_tick(std::time::Duration::from_millis(120));
    bar
}

/// A bar for bytes.
pub(crate) fn bytes_bar(total: Option<u64>, text: &str) -> indicatif::ProgressBar {
    let bar = match total {
        Some(total) => indicatif::ProgressBar::new(total).with_style(
            indicatif::ProgressStyle::with_template(
                "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            )
            .expect("the template is well formed"),
        ),
        None => indicatif::ProgressBar::new_spinner().with_style(
            indicatif::ProgressStyle::with_template("{msg} {spinner} {bytes} {bytes_per_sec}")
                .expect("the template is well formed"),
        ),
    };
    bar.with_message(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_do_not_pass() {
        assert_eq!(plain("a\u{1b}[31mb"), "a\u{fffd}[31mb");
        assert_eq!(cell(&serde_json::json!({"a": {"b": "x\u{7}"}}), "a.b"), "x\u{fffd}");
    }
}
