//! `repo`: what the repository holds, what is wrong with it, and what it can do without.

use futures::StreamExt;
use serde_json::{Value, json};

use crate::{
    Outcome,
    args::RepoCommand,
    client::Client,
    error::CliError,
    output::{self, Format},
};

/// A line of progress is longer than this only when something is wrong; a result may be long.
const LONGEST_LINE: usize = 256 << 20;
/// What is done first.
const READING: &str = "reading the repository";

pub(super) async fn run(command: RepoCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        RepoCommand::Gc { dry_run, grace } => collect(&client, dry_run, grace, format).await,
        RepoCommand::Fsck { deep } => check(&client, deep, format).await,
        RepoCommand::Du => usage(&client, format).await,
    }
}

async fn collect(client: &Client, dry_run: bool, grace: Option<u64>, format: Format) -> Outcome {
    let mut body = json!({ "dryRun": dry_run });
    if let Some(grace) = grace {
        body["graceSecs"] = grace.into();
    }
    let result = follow(client, "/admin/repository/gc", &body, READING, step).await?;
    if format == Format::Json {
        output::one(format, &result);
        return Ok(0);
    }
    let count = |field: &str| result[field].as_array().map_or(0, Vec::len);
    let removed = if dry_run { "would be removed" } else { "removed" };
    output::one(
        format,
        &json!({
            removed: format!("{} blobs, {}", count("removed"), bytes(&result["removedBytes"])),
            "manifests without a name": count("manifests"),
            "kept for too long": count("expired"),
            "kept": result["kept"],
            "too young": result["young"],
        }),
    );
    Ok(0)
}

/// Ends with 1 when something is damaged or missing; what the next collection takes is no damage.
async fn check(client: &Client, deep: bool, format: Format) -> Outcome {
    let result = follow(client, "/admin/repository/fsck", &json!({ "deep": deep }), READING, step).await?;
    let findings = result.as_array().cloned().unwrap_or_default();
    let garbage =
        |finding: &Value| matches!(finding["kind"].as_str(), Some("unreferenced_blob" | "unnamed_manifest"));
    let damaged = findings.iter().any(|finding| !garbage(finding));
    if format == Format::Table && findings.is_empty() {
        println!("nothing is wrong");
        return Ok(0);
    }
    let shown: Vec<Value> = match format {
        Format::Json => findings,
        Format::Table => findings.iter().map(row).collect(),
    };
    let columns = [
        ("FOUND", "kind"),
        ("WHAT", "what"),
        ("BYTES", "bytes"),
        ("TAKES WITH IT", "takes"),
        ("", "message"),
    ];
    output::rows(format, &shown, &columns);
    Ok(i32::from(damaged))
}

fn row(finding: &Value) -> Value {
    let owner = |owner: &Value| {
        let name = owner["names"][0].as_str().or(owner["id"].as_str()).unwrap_or("-");
        format!("{} {}/{name}", owner["kind"].as_str().unwrap_or("-"), owner["team"].as_str().unwrap_or("-"))
    };
    let takes: Vec<String> = finding["takes"].as_array().into_iter().flatten().map(owner).collect();
    let takes = if takes.is_empty() { Value::Null } else { takes.join(", ").into() };
    json!({
        "kind": finding["kind"], "what": finding["what"], "bytes": finding["bytes"], "takes": takes,
        "message": finding.get("message").cloned().unwrap_or_else(|| "".into()),
    })
}

async fn usage(client: &Client, format: Format) -> Outcome {
    let usage = client.get("/admin/repository/usage").await?;
    if format == Format::Json {
        output::one(format, &usage);
        return Ok(0);
    }
    output::one(
        format,
        &json!({
            "blobs": usage["blobs"],
            "bytes": bytes(&usage["bytes"]),
            "checkpoints": usage["checkpoints"],
            "without sharing": bytes(&usage["bytesUnshared"]),
            "for `aenv repo gc`": bytes(&usage["bytesUnreferenced"]),
        }),
    );
    let teams: Vec<Value> = usage["teams"].as_array().into_iter().flatten().cloned().map(readable).collect();
    if !teams.is_empty() {
        println!();
        let columns = [
            ("TEAM", "team"),
            ("TEMPLATES", "templates"),
            ("SNAPSHOTS", "snapshots"),
            ("CHECKPOINTS", "checkpoints"),
            ("BYTES", "bytes"),
        ];
        output::rows(format, &teams, &columns);
    }
    Ok(0)
}

fn readable(mut team: Value) -> Value {
    team["bytes"] = bytes(&team["bytes"]).into();
    team
}

fn bytes(value: &Value) -> String {
    indicatif::HumanBytes(value.as_u64().unwrap_or(0)).to_string()
}

fn step(progress: &Value) -> String {
    let step = progress["step"].as_str().unwrap_or("working");
    format!("{step}: {} of {}", progress["done"], progress["total"])
}

/// Asks for something long, shows how far it is, and returns its result.
pub(super) async fn follow(
    client: &Client,
    path: &str,
    body: &Value,
    first: &'static str,
    step: fn(&Value) -> String,
) -> Result<Value, CliError> {
    let response = client.send(client.request(http::Method::POST, path).json(body)).await?;
    let spinner = output::spinner(first);
    let mut chunks = response.bytes_stream();
    let mut rest = Vec::new();
    while let Some(chunk) = chunks.next().await {
        rest.extend_from_slice(&chunk.map_err(|error| client.unreachable(&error))?);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let said: Value = serde_json::from_slice(&line)
                .map_err(|error| CliError::Sandbox(format!("the server's answer cannot be read: {error}")))?;
            if let Some(error) = said.get("error") {
                return Err(CliError::of_body(error));
            }
            if let Some(result) = said.get("result") {
                spinner.finish_and_clear();
                return Ok(result.clone());
            }
            spinner.set_message(step(&said["progress"]));
        }
        if rest.len() > LONGEST_LINE {
            break;
        }
    }
    Err(CliError::Sandbox("the server broke off before it was done; its log says more".to_owned()))
}
