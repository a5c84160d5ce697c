//! `demo`: the main job, in front of the user, with what each step took.

use std::time::{Duration, Instant};

use comfy_table::{Table, presets::NOTHING};
use serde_json::{Value, json};

use super::{child, sandbox_path};
use crate::{Outcome, args::Demo, client::Client, envd::Envd, error::CliError, output};

struct Steps {
    done: Vec<(String, Duration, String)>,
}

impl Steps {
    /// Runs one step, shows it and remembers its time.
    async fn run<T>(
        &mut self,
        what: &str,
        step: impl Future<Output = Result<(T, String), CliError>>,
    ) -> Result<T, CliError> {
        let spinner = output::spinner(what);
        let began = Instant::now();
        let outcome = step.await;
        let took = began.elapsed();
        spinner.finish_and_clear();
        let (value, said) = outcome?;
        eprintln!("{what:<44} {:>8.0} ms   {}", took.as_secs_f64() * 1000.0, output::plain(&said));
        self.done.push((what.to_owned(), took, said));
        Ok(value)
    }
}

pub(super) async fn run(args: Demo) -> Outcome {
    let client = Client::load()?;
    let mut made = Vec::new();
    let outcome = show(&client, &args, &mut made).await;
    // Whatever happened, nothing of the demonstration stays.
    for id in &made {
        match client.delete(&sandbox_path(id, "")).await {
            Ok(()) | Err(CliError::Api { status: 404, .. }) => {}
            Err(error) => eprintln!("aenv: {id} could not be deleted: {error}"),
        }
    }
    let steps = outcome?;
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(["STEP", "MS", "RESULT"]);
    for (what, took, said) in steps.done {
        table.add_row([what, format!("{:.0}", took.as_secs_f64() * 1000.0), output::plain(&said)]);
    }
    println!("\n{table}\n");
    println!(
        "The server goes on at {url}. To go on from here:\n\n  \
         aenv start {template}            a sandbox with a terminal\n  aenv list\n\n  \
         export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY={key}\n  \
         python3 -c 'from e2b import Sandbox; s = Sandbox.create(\"{template}\"); print(s.commands.run(\"uname -a\").stdout)'\n",
        url = client.url(),
        key = client.key_in_shell(),
        template = args.template,
    );
    Ok(0)
}

async fn show(client: &Client, args: &Demo, made: &mut Vec<String>) -> Result<Steps, CliError> {
    let mut steps = Steps { done: Vec::new() };
    let (id, envd) = steps
        .run("create a sandbox", async {
            let body = json!({ "templateID": args.template, "timeout": 600, "metadata": { "aenv": "demo" } });
            let sandbox = client.post("/v2/sandboxes", &body).await?;
            let id = id_of(&sandbox)?;
            made.push(id.clone());
            Ok(((id.clone(), Envd::new(client, &sandbox)?), id))
        })
        .await?;
    steps
        .run("run a command", async {
            let kernel = envd.shell("uname -sr").await?;
            Ok(((), format!("its own kernel: {}", kernel.trim())))
        })
        .await?;
    let pid = steps
        .run("write a file, start a process", async {
            let pid = envd
                .shell("echo 'written before the pause' > ~/a.txt; sleep 86400 >/dev/null 2>&1 & echo $!")
                .await?;
            let pid = pid.trim().to_owned();
            Ok((pid.clone(), format!("pid {pid}")))
        })
        .await?;
    steps
        .run("pause", async {
            client.post(&sandbox_path(&id, "/pause"), &json!({})).await?;
            Ok(((), "memory and disk are on this machine's disk".to_owned()))
        })
        .await?;
    steps
        .run("resume", async {
            client.post(&format!("/v2{}", sandbox_path(&id, "/connect")), &json!({ "timeout": 600 })).await?;
            Ok(((), String::new()))
        })
        .await?;
    steps
        .run("find the file and the running process", async {
            let found = envd.shell(&format!("cat ~/a.txt; cat /proc/{pid}/comm")).await?;
            let found = found.trim().replace('\n', ", ");
            if found != "written before the pause, sleep" {
                return Err(CliError::Sandbox(format!("after the resume there was {found:?}")));
            }
            Ok(((), found))
        })
        .await?;
    let children = steps
        .run(&format!("fork into {}", args.children), async {
            let body = json!({ "count": args.children, "timeout": 600 });
            let results = client.post(&sandbox_path(&id, "/fork"), &body).await?;
            let results = results.as_array().cloned().unwrap_or_default();
            made.extend(
                results
                    .iter()
                    .filter_map(|result| result["sandbox"]["sandboxID"].as_str().map(str::to_owned)),
            );
            let children =
                results.iter().map(|result| child(result).cloned()).collect::<Result<Vec<Value>, _>>()?;
            let count = children.len();
            Ok((children, format!("{count} copies, each with the file and the process")))
        })
        .await?;
    steps
        .run("each child goes its own way", async {
            let ways = children.iter().enumerate().map(|(number, sandbox)| {
                let pid = &pid;
                async move {
                    let line = format!("echo {number} > ~/own; cat /proc/{pid}/comm ~/own /proc/sys/kernel/random/uuid; hostname");
                    Envd::new(client, sandbox)?.shell(&line).await
                }
            });
            let mut seen = futures::future::try_join_all(ways).await?;
            seen.sort();
            seen.dedup();
            if seen.len() != children.len() {
                return Err(CliError::Sandbox("two children are the same".to_owned()));
            }
            Ok(((), format!("{} different answers", seen.len())))
        })
        .await?;
    steps
        .run("delete all", async {
            let all: Vec<String> = made.clone();
            let deletions = all.iter().map(|id| {
                let path = sandbox_path(id, "");
                async move { client.delete(&path).await }
            });
            futures::future::try_join_all(deletions).await?;
            made.clear();
            Ok(((), format!("{} sandboxes", all.len())))
        })
        .await?;
    Ok(steps)
}

fn id_of(sandbox: &Value) -> Result<String, CliError> {
    let id = sandbox["sandboxID"].as_str();
    id.map(str::to_owned).ok_or_else(|| CliError::Sandbox("the server's answer names no sandbox".to_owned()))
}
