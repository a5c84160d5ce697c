//! What there is, and what it does.

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;

use super::{pairs, sandbox_path};
use crate::{
    Outcome,
    args::{List, Logs, NodeCommand},
    client::{Client, segment},
    output::{self, Format},
};

pub(super) async fn list(args: List, format: Format) -> Outcome {
    let client = Client::load()?;
    let mut query = Vec::new();
    if let Some(state) = &args.state {
        query.push(format!("state={}", segment(state)));
    }
    let wanted: BTreeMap<String, String> = pairs(&args.metadata)?;
    if !wanted.is_empty() {
        // Encoded twice, as E2B's clients do: keys and values, then the whole.
        let inner: Vec<String> = wanted
            .iter()
            .map(|(key, value)| format!("{}={}", segment(&segment(key)), segment(&segment(value))))
            .collect();
        query.push(format!("metadata={}", segment(&inner.join("&"))));
    }
    let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
    let all = client.all(&format!("/v2/sandboxes{query}")).await?;
    let columns = [
        ("ID", "sandboxID"),
        ("STATE", "state"),
        ("TEMPLATE", "alias"),
        ("CPU", "cpuCount"),
        ("MEMORY", "memoryMB"),
        ("STARTED", "startedAt"),
        ("ENDS", "endAt"),
        ("METADATA", "metadata"),
    ];
    output::rows(format, &all, &columns);
    Ok(0)
}

pub(super) async fn info(id: &str, format: Format) -> Outcome {
    let client = Client::load()?;
    let mut info = client.get(&sandbox_path(id, "")).await?;
    if format == Format::Table {
        // A token has no place on a screen.
        if let Some(fields) = info.as_object_mut() {
            fields.remove("envdAccessToken");
        }
    }
    output::one(format, &info);
    Ok(0)
}

pub(super) async fn logs(args: Logs, format: Format) -> Outcome {
    let client = Client::load()?;
    let mut cursor: i64 = 0;
    let mut shown: Vec<Value> = Vec::new();
    loop {
        let path =
            format!("/v2{}?limit=1000&direction=forward&cursor={cursor}", sandbox_path(&args.id, "/logs"));
        let answer = client.get(&path).await?;
        let entries = answer["logs"].as_array().cloned().unwrap_or_default();
        let fresh: Vec<&Value> = entries.iter().filter(|entry| !shown.contains(entry)).collect();
        for entry in &fresh {
            print_log(entry, format);
        }
        let last = entries
            .iter()
            .filter_map(|entry| entry["timestamp"].as_str())
            .filter_map(|text| text.parse().ok());
        let newest = last.map(|at: chrono::DateTime<chrono::Utc>| at.timestamp_millis()).max();
        if fresh.is_empty() && !args.follow {
            return Ok(0);
        }
        if let Some(newest) = newest {
            cursor = newest;
            let of_last_instant = entries.iter().filter(|entry| {
                let at =
                    entry["timestamp"].as_str().and_then(|t| t.parse::<chrono::DateTime<chrono::Utc>>().ok());
                at.is_some_and(|at| at.timestamp_millis() == newest)
            });
            shown = of_last_instant.cloned().collect();
        }
        if args.follow {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

fn print_log(entry: &Value, format: Format) {
    match format {
        Format::Json => println!("{entry}"),
        Format::Table => println!(
            "{} {:5} {}",
            entry["timestamp"].as_str().unwrap_or("-"),
            entry["level"].as_str().unwrap_or("-"),
            output::plain(entry["message"].as_str().unwrap_or_default())
        ),
    }
}

pub(super) async fn metrics(id: &str, format: Format) -> Outcome {
    let client = Client::load()?;
    let samples = client.all(&sandbox_path(id, "/metrics")).await?;
    let columns = [
        ("TIME", "timestamp"),
        ("CPU %", "cpuUsedPct"),
        ("MEMORY", "memUsed"),
        ("OF", "memTotal"),
        ("DISK", "diskUsed"),
        ("OF", "diskTotal"),
    ];
    output::rows(format, &samples, &columns);
    Ok(0)
}

pub(super) async fn node(command: NodeCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        NodeCommand::List => {
            let nodes = client.all("/nodes").await?;
            let columns = [
                ("ID", "id"),
                ("STATUS", "status"),
                ("SANDBOXES", "sandboxCount"),
                ("CPU", "metrics.cpuCount"),
                ("MEMORY", "metrics.memoryTotalBytes"),
                ("PROMISED", "memory.promisedBytes"),
                ("OVERCOMMIT", "memory.overcommit"),
                ("VERSION", "version"),
            ];
            output::rows(format, &nodes, &columns);
        }
        NodeCommand::Show { id } => {
            let node = client.get(&format!("/nodes/{}", segment(&id))).await?;
            output::one(format, &node);
        }
    }
    Ok(0)
}
