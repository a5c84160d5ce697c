//! From start to delete.

use serde_json::{Value, json};

use super::{child, pairs, sandbox_path};
use crate::{
    Outcome,
    args::{Connect, Delete, Fork, Network, Resume, Rollback, SnapshotCommand, Start, Timeout},
    client::{Client, segment},
    error::CliError,
    output::{self, Format},
};

pub(super) async fn start(args: Start, format: Format) -> Outcome {
    let client = Client::load()?;
    let mut body =
        json!({ "metadata": pairs(&args.metadata)?, "envVars": pairs(&args.env)?, "secure": !args.insecure });
    if let Some(timeout) = args.timeout {
        body["timeout"] = json!(timeout);
    }
    if args.cold && !args.volume.is_empty() {
        return Err(CliError::Usage("--volume goes with a template, not with --cold".to_owned()));
    }
    let spinner = output::spinner(if args.cold { "booting" } else { "starting" });
    let made = if args.cold {
        body["image"] = json!(absolute_image(&args.target)?);
        for (name, value) in [
            ("cpuCount", args.machine.cpu),
            ("memoryMB", args.machine.memory),
            ("diskSizeMB", args.disk_size_mb),
        ] {
            if let Some(value) = value {
                body[name] = json!(value);
            }
        }
        client.post("/sandboxes-cold", &body).await
    } else {
        if args.machine.cpu.is_some() || args.machine.memory.is_some() || args.disk_size_mb.is_some() {
            return Err(CliError::Usage(
                "a template has its machine already; --cpu, --memory and --disk-size-mb go with --cold, pull and build"
                    .to_owned(),
            ));
        }
        body["templateID"] = json!(args.target);
        body["volumeMounts"] = super::volume::mounts(&args.volume)?;
        client.post("/sandboxes", &body).await
    };
    spinner.finish_and_clear();
    let made = made?;
    let id = made["sandboxID"].as_str().unwrap_or_default().to_owned();
    if args.detach || format == Format::Json {
        output::one(format, &made);
        return Ok(0);
    }
    eprintln!("sandbox {id}; it goes on when you leave (aenv connect {id}, aenv delete {id})");
    super::exec::connect(Connect { id, user: None }).await
}

/// A local path is made absolute: the server has its own working folder.
pub(super) fn absolute_image(image: &str) -> Result<String, CliError> {
    for scheme in ["oci:", "oci-archive:", "docker-archive:"] {
        if let Some(path) = image.strip_prefix(scheme) {
            let (path, tag) = match path.rsplit_once(':') {
                Some((path, tag)) if !tag.contains('/') => (path, format!(":{tag}")),
                _ => (path, String::new()),
            };
            let full = std::fs::canonicalize(path).map_err(CliError::io(path.to_owned()))?;
            return Ok(format!("{scheme}{}{tag}", full.display()));
        }
    }
    Ok(image.to_owned())
}

pub(super) async fn pause(id: &str) -> Outcome {
    let client = Client::load()?;
    match client.post(&sandbox_path(id, "/pause"), &json!({})).await {
        // Paused already is what was wanted.
        Ok(_) | Err(CliError::Api { status: 409, .. }) => Ok(0),
        Err(error) => Err(error),
    }
}

pub(super) async fn resume(args: Resume, format: Format) -> Outcome {
    let client = Client::load()?;
    let body = args.timeout.map_or(json!({}), |timeout| json!({ "timeout": timeout }));
    let resumed = client.post(&format!("/v2{}", sandbox_path(&args.id, "/connect")), &body).await?;
    output::one(format, &resumed);
    Ok(0)
}

pub(super) async fn timeout(args: Timeout) -> Outcome {
    let client = Client::load()?;
    client.post(&sandbox_path(&args.id, "/timeout"), &json!({ "timeout": args.seconds })).await?;
    Ok(0)
}

pub(super) async fn fork(args: Fork, format: Format) -> Outcome {
    let client = Client::load()?;
    let mut body = json!({ "count": args.count });
    body["timeout"] = json!(args.timeout.unwrap_or(300));
    let results = client.post(&sandbox_path(&args.id, "/fork"), &body).await?;
    let results = results.as_array().cloned().unwrap_or_default();
    let failed = results.iter().filter(|result| child(result).is_err()).count();
    let columns =
        [("ID", "sandbox.sandboxID"), ("TEMPLATE", "sandbox.templateID"), ("ERROR", "error.message")];
    output::rows(format, &results, &columns);
    Ok(i32::from(failed > 0))
}

pub(super) async fn snapshot(command: SnapshotCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        SnapshotCommand::Create { id, name } => {
            let body = name.map_or(json!({}), |name| json!({ "name": name }));
            let made = client.post(&sandbox_path(&id, "/snapshots"), &body).await?;
            output::one(format, &made);
        }
        SnapshotCommand::List { sandbox } => {
            let query = sandbox.map_or(String::new(), |id| format!("?sandboxID={}", segment(&id)));
            let all = client.all(&format!("/snapshots{query}")).await?;
            let columns = [
                ("ID", "snapshotID"),
                ("NAMES", "names"),
                ("SANDBOX", "sandboxID"),
                ("CPU", "cpuCount"),
                ("MEMORY", "memoryMB"),
                ("CREATED", "createdAt"),
            ];
            output::rows(format, &all, &columns);
        }
        SnapshotCommand::Delete { snapshot } => {
            client.delete(&format!("/templates/{}", segment(&snapshot))).await?
        }
    }
    Ok(0)
}

pub(super) async fn rollback(args: Rollback, format: Format) -> Outcome {
    let client = Client::load()?;
    let body = json!({ "snapshotID": args.snapshot });
    let back = client.post(&sandbox_path(&args.id, "/rollback"), &body).await?;
    output::one(format, &back);
    Ok(0)
}

pub(super) async fn delete(args: Delete) -> Outcome {
    let client = Client::load()?;
    let mut ids = args.ids;
    if args.all || !args.metadata.is_empty() {
        let wanted = pairs(&args.metadata)?;
        for sandbox in client.all("/v2/sandboxes").await? {
            let has =
                |(key, value): (&String, &String)| sandbox["metadata"][key] == Value::String(value.clone());
            if args.all || wanted.iter().all(has) {
                ids.extend(sandbox["sandboxID"].as_str().map(str::to_owned));
            }
        }
    }
    let mut worst = 0;
    for id in &ids {
        match client.delete(&sandbox_path(id, "")).await {
            Ok(()) => println!("{id}"),
            Err(error) => {
                eprintln!("aenv: {id}: {}", output::plain(&error.to_string()));
                worst = error.exit_code();
            }
        }
    }
    Ok(worst)
}

pub(super) async fn network(args: Network) -> Outcome {
    let client = Client::load()?;
    let mut body = json!({ "allowOut": args.allow, "denyOut": args.deny });
    if args.no_internet {
        body["allow_internet_access"] = json!(false);
    }
    client.put(&sandbox_path(&args.id, "/network"), &body).await?;
    Ok(0)
}
