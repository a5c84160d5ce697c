//! `bench`: what a user waits for, beside what the bare engine takes on the same machine in the same run.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{child, doctor, sandbox_path};
use crate::{
    Outcome,
    args::Bench,
    client::Client,
    envd::Envd,
    error::CliError,
    output::{self, Format},
};

/// Memory that the guest changes before a pause, in MiB.
const DIRTY_MIB: usize = 32;
/// Children of a fork.
const CHILDREN: u32 = 16;

/// Times of one operation, in milliseconds.
struct Series {
    name: &'static str,
    /// The floor that it is compared with, and how many of that floor it consists of.
    floor: (&'static str, f64),
    times: Vec<f64>,
}

impl Series {
    fn new(name: &'static str, floor: (&'static str, f64)) -> Self {
        Self { name, floor, times: Vec::new() }
    }

    fn row(&self, floor: &Value) -> Value {
        let floor_ms = floor[self.floor.0]["p50"].as_f64().map(|ms| ms * self.floor.1);
        let p50 = percentile(&self.times, 50);
        json!({
            "operation": self.name, "n": self.times.len(),
            "p50": round(p50), "p90": round(percentile(&self.times, 90)), "p99": round(percentile(&self.times, 99)),
            "floor": self.floor.0, "floorMs": floor_ms.map(round), "ratio": floor_ms.map(|ms| round(p50 / ms)),
        })
    }
}

pub(super) async fn run(args: Bench, format: Format) -> Outcome {
    if args.n == 0 {
        return Err(CliError::Usage("-n must be at least 1".to_owned()));
    }
    let client = Client::load()?;
    let spinner = output::spinner("measuring the bare engine");
    let floor = doctor::floor(args.server_binary, args.n).unwrap_or(Value::Null);
    if floor.is_null() {
        spinner.println("the bare engine could not be measured here; ratios are left out");
    }
    let rounds = Rounds { client: &client, template: &args.template };
    let mut create = Series::new("create .. first command", ("launch", 1.0));
    let mut command = Series::new("command round trip", ("http", 1.0));
    let mut pause = Series::new("pause, 32 MiB changed", ("write32", 1.0));
    let mut resume = Series::new("resume .. first command", ("launch", 1.0));
    let mut snapshot = Series::new("snapshot, 32 MiB changed", ("write32", 1.0));
    let mut fork = Series::new("fork 16 .. all answer", ("launch", f64::from(CHILDREN)));
    for round in 0..args.n {
        spinner.set_message(format!("round {} of {}", round + 1, args.n));
        rounds.one(&mut create, &mut command, &mut pause, &mut resume, &mut snapshot).await?;
    }
    for round in 0..args.n {
        spinner.set_message(format!("fork {} of {}", round + 1, args.n));
        fork.times.push(rounds.fork().await?);
    }
    spinner.finish_and_clear();
    let rows: Vec<Value> =
        [create, command, pause, resume, snapshot, fork].iter().map(|series| series.row(&floor)).collect();
    match format {
        Format::Json => {
            let report =
                json!({ "machine": machine(&client).await, "unit": "ms", "floor": floor, "results": rows });
            output::one(format, &report);
        }
        Format::Table => {
            let columns = [
                ("OPERATION", "operation"),
                ("N", "n"),
                ("P50 MS", "p50"),
                ("P90", "p90"),
                ("P99", "p99"),
                ("FLOOR", "floor"),
                ("FLOOR MS", "floorMs"),
                ("RATIO", "ratio"),
            ];
            output::rows(format, &rows, &columns);
            output::one(format, &machine(&client).await);
        }
    }
    Ok(0)
}

struct Rounds<'a> {
    client: &'a Client,
    template: &'a str,
}

impl Rounds<'_> {
    async fn one(
        &self,
        create: &mut Series,
        command: &mut Series,
        pause: &mut Series,
        resume: &mut Series,
        snapshot: &mut Series,
    ) -> Result<(), CliError> {
        let began = Instant::now();
        let (id, envd) = self.create().await?;
        envd.shell("true").await?;
        create.times.push(ms(began.elapsed()));
        let outcome = async {
            for _ in 0..3 {
                let began = Instant::now();
                envd.shell("true").await?;
                command.times.push(ms(began.elapsed()));
            }
            self.change_memory(&envd).await?;
            let began = Instant::now();
            self.client.post(&sandbox_path(&id, "/snapshots"), &json!({})).await.inspect(|_| {
                snapshot.times.push(ms(began.elapsed()));
            })?;
            let began = Instant::now();
            self.client.post(&sandbox_path(&id, "/pause"), &json!({})).await?;
            pause.times.push(ms(began.elapsed()));
            let began = Instant::now();
            let connect = format!("/v2{}", sandbox_path(&id, "/connect"));
            let resumed = self.client.post(&connect, &json!({ "timeout": 300 })).await?;
            Envd::new(self.client, &resumed)?.shell("true").await?;
            resume.times.push(ms(began.elapsed()));
            Ok(())
        }
        .await;
        self.client.delete(&sandbox_path(&id, "")).await?;
        outcome
    }

    /// Forks once; milliseconds until every child has answered a command.
    async fn fork(&self) -> Result<f64, CliError> {
        let (id, envd) = self.create().await?;
        self.change_memory(&envd).await?;
        let began = Instant::now();
        let body = json!({ "count": CHILDREN, "timeout": 300 });
        let results = self.client.post(&sandbox_path(&id, "/fork"), &body).await?;
        let children: Vec<Value> = results.as_array().cloned().unwrap_or_default();
        let answers = children.iter().map(|result| async move {
            let sandbox = child(result)?;
            Envd::new(self.client, sandbox)?.shell("true").await
        });
        let answered = futures::future::try_join_all(answers).await;
        let took = ms(began.elapsed());
        for result in &children {
            if let Some(child) = result["sandbox"]["sandboxID"].as_str() {
                self.client.delete(&sandbox_path(child, "")).await?;
            }
        }
        self.client.delete(&sandbox_path(&id, "")).await?;
        answered.map(|_| took)
    }

    async fn create(&self) -> Result<(String, Envd), CliError> {
        let body = json!({ "templateID": self.template, "timeout": 300, "metadata": { "aenv": "bench" } });
        let made = self.client.post("/v2/sandboxes", &body).await?;
        let id = made["sandboxID"].as_str().unwrap_or_default().to_owned();
        Ok((id, Envd::new(self.client, &made)?))
    }

    async fn change_memory(&self, envd: &Envd) -> Result<(), CliError> {
        envd.shell(&format!("head -c {DIRTY_MIB}M /dev/urandom > /dev/shm/aenv-bench")).await.map(drop)
    }
}

/// What it was measured on.
async fn machine(client: &Client) -> Value {
    let nodes = client.get("/nodes").await.unwrap_or(Value::Null);
    let node = &nodes[0];
    json!({
        "cpu": node["machineInfo"]["cpuModelName"], "cores": node["metrics"]["cpuCount"],
        "memoryBytes": node["metrics"]["memoryTotalBytes"], "version": node["version"],
        "engine": node["engine"]["name"], "engineVersion": node["engine"]["version"],
        "virtualization": node["engine"]["virtualization"],
    })
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The nearest-rank percentile; 0 for nothing.
fn percentile(times: &[f64], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let times: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(
            (percentile(&times, 50), percentile(&times, 90), percentile(&times, 99)),
            (10.0, 18.0, 20.0)
        );
        assert_eq!(percentile(&[], 50), 0.0);
    }
}
