//! One file for each group of commands.

mod access;
mod bench;
mod build;
mod demo;
mod dockerfile;
mod doctor;
mod exec;
mod files;
mod image;
mod lifecycle;
mod query;
mod repo;
mod template;
mod volume;

use std::collections::BTreeMap;

use clap::CommandFactory;
use serde_json::Value;

use crate::{
    Outcome,
    args::{Args, Command},
    client::{Client, segment},
    envd::Envd,
    error::CliError,
    output::Format,
};

/// Runs a command.
pub(crate) async fn run(args: Args) -> Outcome {
    let format = Format::or_default(args.output);
    match args.command {
        Command::Auth(auth) => access::auth(auth, format).await,
        Command::Key(key) => access::key(key, format).await,
        Command::Pull(pull) => template::pull(pull, format).await,
        Command::Build(build) => build::run(build, format).await,
        Command::Template(command) => template::run(command, format).await,
        Command::Start(start) => lifecycle::start(start, format).await,
        Command::Connect(connect) => exec::connect(connect).await,
        Command::Exec(exec) => exec::run(exec).await,
        Command::Upload(upload) => files::upload(upload).await,
        Command::Download(download) => files::download(download).await,
        Command::Pause(id) => lifecycle::pause(&id.id).await,
        Command::Resume(resume) => lifecycle::resume(resume, format).await,
        Command::Timeout(timeout) => lifecycle::timeout(timeout).await,
        Command::Fork(fork) => lifecycle::fork(fork, format).await,
        Command::Snapshot(command) => lifecycle::snapshot(command, format).await,
        Command::Rollback(rollback) => lifecycle::rollback(rollback, format).await,
        Command::Delete(delete) => lifecycle::delete(delete).await,
        Command::Network(network) => lifecycle::network(network).await,
        Command::Volume(command) => volume::run(command, format).await,
        Command::List(list) => query::list(list, format).await,
        Command::Info(id) => query::info(&id.id, format).await,
        Command::Logs(logs) => query::logs(logs, format).await,
        Command::Metrics(id) => query::metrics(&id.id, format).await,
        Command::Node(command) => query::node(command, format).await,
        Command::Image(command) => image::run(command, format).await,
        Command::Repo(command) => repo::run(command, format).await,
        Command::Bench(bench) => bench::run(bench, format).await,
        Command::Demo(demo) => demo::run(demo).await,
        Command::Doctor(doctor) => doctor::run(doctor, format),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Args::command(), "aenv", &mut std::io::stdout());
            Ok(0)
        }
    }
}

/// `KEY=VALUE` arguments as a map.
fn pairs(given: &[String]) -> Result<BTreeMap<String, String>, CliError> {
    let split = |text: &String| match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(CliError::Usage(format!("{text:?} is not KEY=VALUE"))),
    };
    given.iter().map(split).collect()
}

/// `/sandboxes/{id}` and what follows.
fn sandbox_path(id: &str, rest: &str) -> String {
    format!("/sandboxes/{}{rest}", segment(id))
}

/// The envd of a sandbox that runs; a paused one is resumed first.
async fn envd_of(client: &Client, id: &str) -> Result<Envd, CliError> {
    let info = client.get(&sandbox_path(id, "")).await?;
    if info["state"] == "paused" {
        let resumed =
            client.post(&format!("/v2{}", sandbox_path(id, "/connect")), &serde_json::json!({})).await?;
        return Envd::new(client, &resumed);
    }
    Envd::new(client, &info)
}

/// What one child of a fork became.
fn child(result: &Value) -> Result<&Value, CliError> {
    match (&result["sandbox"], &result["error"]) {
        (sandbox @ Value::Object(_), _) => Ok(sandbox),
        (_, error @ Value::Object(_)) => Err(CliError::of_body(error)),
        _ => Err(CliError::Sandbox("the server's answer has neither a sandbox nor an error".to_owned())),
    }
}

/// A program that is installed beside this one, or in PATH.
fn beside(asked: Option<std::path::PathBuf>, name: &str) -> std::path::PathBuf {
    asked.unwrap_or_else(|| {
        let own = std::env::current_exe().ok().and_then(|path| path.parent().map(|folder| folder.join(name)));
        own.filter(|path| path.exists()).unwrap_or_else(|| name.into())
    })
}
