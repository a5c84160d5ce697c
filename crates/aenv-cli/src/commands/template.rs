//! `pull` and `template`.

use std::time::Duration;

use serde_json::{Value, json};

use super::lifecycle::absolute_image;
use crate::{
    Outcome,
    args::{Machine, Pull, TemplateCommand},
    client::{Client, segment},
    error::CliError,
    output::{self, Format},
};

/// How often a build is asked how far it is.
const POLL: Duration = Duration::from_millis(300);

pub(super) async fn pull(args: Pull, format: Format) -> Outcome {
    let client = Client::load()?;
    let image = absolute_image(&args.image)?;
    let name = match args.name {
        Some(name) => name,
        None => name_of(&args.image)?,
    };
    let ready = args.probe.map(|port| format!("ss -Hltn 'sport = :{port}' | grep -q ."));
    let start = json!({
        "fromImage": image,
        "steps": [],
        "startCmd": args.start_cmd,
        "readyCmd": args.ready_cmd.or(ready),
    });
    let build = begin(&client, &name, &args.machine, &start).await?;
    if args.detach {
        output::one(format, &build);
        return Ok(0);
    }
    follow(&client, &build, format).await
}

/// `docker.io/library/debian:12` is `debian-12`.
fn name_of(image: &str) -> Result<String, CliError> {
    let last = image.rsplit('/').next().unwrap_or(image);
    let last = last.split('@').next().unwrap_or(last);
    let name: String = last
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' })
        .collect();
    let name = name.trim_matches('-').to_owned();
    if name.is_empty() {
        return Err(CliError::Usage(format!("{image:?} suggests no name; give one with --name")));
    }
    Ok(name)
}

/// Asks for a build and starts it. `start` is the body of the start request.
pub(super) async fn begin(
    client: &Client,
    name: &str,
    machine: &Machine,
    start: &Value,
) -> Result<Value, CliError> {
    let mut body = json!({ "name": name });
    for (field, value) in [("cpuCount", machine.cpu), ("memoryMB", machine.memory)] {
        if let Some(value) = value {
            body[field] = json!(value);
        }
    }
    let build = client.post("/v3/templates", &body).await?;
    if !start.is_null() {
        start_build(client, &build, start).await?;
    }
    Ok(build)
}

/// Starts a build that was asked for.
pub(super) async fn start_build(client: &Client, build: &Value, start: &Value) -> Result<(), CliError> {
    client.post(&format!("/v2/templates/{}", build_path(build)?), start).await.map(drop)
}

fn build_path(build: &Value) -> Result<String, CliError> {
    match (build["templateID"].as_str(), build["buildID"].as_str()) {
        (Some(template), Some(build)) => Ok(format!("{}/builds/{}", segment(template), segment(build))),
        _ => Err(CliError::Sandbox("the server's answer names no build".to_owned())),
    }
}

/// Shows a build's log until it ends, then what was built.
pub(super) async fn follow(client: &Client, build: &Value, format: Format) -> Outcome {
    wait(client, build, format).await?;
    output::one(format, build);
    Ok(0)
}

/// Shows a build's log until it ends.
pub(super) async fn wait(client: &Client, build: &Value, format: Format) -> Result<(), CliError> {
    let path = build_path(build)?;
    let spinner = output::spinner("building");
    let mut offset = 0;
    loop {
        let status = client.get(&format!("/templates/{path}/status?logsOffset={offset}&limit=100")).await?;
        let entries = status["logEntries"].as_array().cloned().unwrap_or_default();
        offset += entries.len();
        for entry in &entries {
            let message = output::plain(entry["message"].as_str().unwrap_or_default());
            match format {
                Format::Table if spinner.is_hidden() => eprintln!("{message}"),
                Format::Table => spinner.println(message),
                Format::Json => eprintln!("{entry}"),
            }
        }
        let state = status["status"].as_str().unwrap_or_default();
        if entries.is_empty() && matches!(state, "ready" | "error") {
            spinner.finish_and_clear();
            if state == "ready" {
                return Ok(());
            }
            let step =
                status["reason"]["step"].as_str().map_or(String::new(), |step| format!(" in step {step}"));
            let message = status["reason"]["message"].as_str().unwrap_or("no reason was given");
            return Err(CliError::Sandbox(format!("the build failed{step}: {message}")));
        }
        if entries.is_empty() {
            tokio::time::sleep(POLL).await;
        }
    }
}

pub(super) async fn run(command: TemplateCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        TemplateCommand::List => {
            let all = client.all("/templates").await?;
            let columns = [
                ("ID", "templateID"),
                ("NAMES", "names"),
                ("STATUS", "buildStatus"),
                ("CPU", "cpuCount"),
                ("MEMORY", "memoryMB"),
                ("UPDATED", "updatedAt"),
            ];
            output::rows(format, &all, &columns);
        }
        TemplateCommand::Show { template } => {
            let found = client.get(&format!("/templates/{}", segment(&template))).await?;
            output::one(format, &found);
        }
        TemplateCommand::Watch { template } => {
            let found = client.get(&format!("/templates/{}", segment(&template))).await?;
            return follow(&client, &found, format).await;
        }
        TemplateCommand::Delete { template } => {
            client.delete(&format!("/templates/{}", segment(&template))).await?
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_suggest_names() {
        assert_eq!(name_of("docker.io/library/debian:12").unwrap(), "debian-12");
        assert_eq!(name_of("oci:/tmp/Base.Image").unwrap(), "base-image");
        assert_eq!(name_of("ubuntu@sha256:abc").unwrap(), "ubuntu");
        assert!(name_of("///").is_err());
    }
}
