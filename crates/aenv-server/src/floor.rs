//! The floor of `aenv bench`: what the bare engine takes on this host, driven by the shortest program that does only that.
//!
//! It has a data plane and a network of its own, beside those of the server that may run, and launches the checkpoint of a
//! template with nothing around it: no journal, no admission, no identity.

use std::{
    collections::BTreeMap,
    io::Write,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_blockd::{DiskExport, Exports, MemoryExport};
use aenv_envd_api::EnvdClient;
use aenv_net::{InstanceTag, Network, Slots};
use aenv_repository::Repository;
use aenv_template::Catalog;
use aenv_types::{Checkpoint, Home, LayerRef, SandboxId, TeamId};
use aenv_vmm::{Drive, Engine, LaunchSpec, Qemu, VmSpec};
use anyhow::Context;
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::{config::Config, node, serve::on_signal};

/// Bytes that are written at once.
const WRITE_BYTES: usize = 1 << 20;
/// How long a guest may take to answer.
const ANSWER: Duration = Duration::from_secs(30);

/// Measures; the keys of the result are the floors that `aenv bench` names, in milliseconds: `launch`, `http`, and for each
/// of `write_mib` the write of so many MiB with fsync, `write32`.
///
/// SIGINT or SIGTERM end it early, with an error. Nothing that it made stays either way.
pub async fn measure(config: &Config, template: &str, n: usize, write_mib: &[u32]) -> anyhow::Result<Value> {
    anyhow::ensure!(n > 0, "-n must be at least 1");
    let interrupted = on_signal(CancellationToken::new())?;
    let home = node::home(config);
    let repository = Repository::open(node::backend(config, &home)?, home.clone()).await?;
    let resolved = Catalog::new(repository).resolve(&TeamId::default_team(), template).await?;
    let checkpoint = resolved.checkpoint;
    anyhow::ensure!(checkpoint.has_memory(), "template '{template}' has no memory to launch from");

    let own = tempfile::Builder::new()
        .prefix("floor-")
        .tempdir_in(home.path())
        .context("a folder for the measurement")?;
    let runtime =
        tempfile::Builder::new().prefix("aenv-floor-").tempdir_in("/run").context("a runtime folder")?;
    let private = Home::new(own.path(), runtime.path());
    private.create().context("a folder for the measurement")?;
    let blockd = node::blockd_binary(config)?;
    let exports = Arc::new(aenv_blockd::launch(&private, &blockd, node::export_choice(config)).await?);
    let mut network = node::network(config, &private)?;
    network.tag = InstanceTag::of_home(private.path());
    let slots = Slots::open(network).await?;

    let engine = node::qemu(config, &private);
    let bench =
        Floor { home: &home, private: &private, exports: &*exports, slots: &slots, checkpoint: &checkpoint };
    let outcome = tokio::select! {
        outcome = bench.run(&engine, n, write_mib) => outcome,
        () = interrupted => Err(anyhow::anyhow!("interrupted")),
    };
    engine.close();
    // Those of a round that did not come to its end.
    let swept = engine.sweep(&[]).await;
    slots.close().await;
    let pid = exports.pid().await?;
    drop(exports);
    end(i32::try_from(pid)?).await;
    swept.context("a VMM of the measurement could not be ended")?;
    outcome
}

/// Ends the measurement's own blockd, which unmounts before it goes.
async fn end(pid: i32) {
    let pid = nix::unistd::Pid::from_raw(pid);
    if nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).is_err() {
        return;
    }
    for _ in 0..100 {
        if nix::sys::signal::kill(pid, None).is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

struct Floor<'a> {
    home: &'a Home,
    private: &'a Home,
    exports: &'a dyn Exports,
    slots: &'a Slots,
    checkpoint: &'a Checkpoint,
}

impl Floor<'_> {
    async fn run(&self, engine: &Qemu, n: usize, write_mib: &[u32]) -> anyhow::Result<Value> {
        engine.prewarm(self.checkpoint.shape, self.checkpoint.disks.len()).await?;
        let (mut launch, mut http) = (Vec::new(), Vec::new());
        let mut writes: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for _ in 0..n {
            // The processes that wait are made between the rounds, not within one.
            for _ in 0..200 {
                if engine.warm(self.checkpoint.shape, self.checkpoint.disks.len()) > 0 {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.round(engine, &mut launch, &mut http).await?;
            for mib in write_mib {
                let times = writes.entry(*mib).or_default();
                let path = self.private.path().join(format!("write{mib}-{}", times.len()));
                times.push(write_durably(&path, *mib)?);
            }
        }
        let writes = writes.into_iter().map(|(mib, times)| (format!("write{mib}"), series(times)));
        let mut floor: Map<String, Value> = writes.collect();
        floor.insert("launch".to_owned(), series(launch));
        floor.insert("http".to_owned(), series(http));
        Ok(Value::Object(floor))
    }

    async fn round(
        &self,
        engine: &dyn Engine,
        launch: &mut Vec<f64>,
        http: &mut Vec<f64>,
    ) -> anyhow::Result<()> {
        let sandbox = SandboxId::random();
        let slot = self.slots.acquire().await?;
        let files = |layers: &[LayerRef]| layers.iter().map(|layer| self.home.layer(&layer.name)).collect();
        let memory = self.checkpoint.memory.as_ref().context("no memory")?;
        let (holder, layers) = (sandbox.to_string(), files(&memory.layers));
        let export = MemoryExport { holder, size: memory.size, layers, group: None };
        let ram = self.exports.open_memory(export).await?;
        let mut drives = Vec::new();
        for disk in &self.checkpoint.disks {
            let name = format!("{sandbox}-{}", disk.drive);
            let upper = Some(self.private.sandbox(&sandbox).join(&disk.drive));
            let export = DiskExport { name, size: disk.size, layers: files(&disk.layers), upper };
            drives.push(Drive { path: self.exports.open_disk(export).await?, read_only: false });
        }
        let runtime = self.private.sandbox_runtime(&sandbox);
        std::fs::create_dir_all(&runtime)?;
        let spec = LaunchSpec {
            vm: VmSpec {
                sandbox: sandbox.clone(),
                shape: self.checkpoint.shape,
                ram,
                drives,
                netns: slot.record().netns,
                serial_log: runtime.join("serial.log"),
                runtime,
            },
            state: self.home.layer(&self.checkpoint.vm_state.context("no vm state")?.name),
            stamp: self.checkpoint.engine.clone().context("no engine stamp")?,
        };
        let envd = EnvdClient::new(slot.clone(), None);
        let began = Instant::now();
        let vm = engine.launch(spec).await?;
        vm.resume().await?;
        envd.health(ANSWER).await?;
        launch.push(ms(began.elapsed()));
        for _ in 0..3 {
            let began = Instant::now();
            envd.health(ANSWER).await?;
            http.push(ms(began.elapsed()));
        }
        vm.end().await?;
        for disk in &self.checkpoint.disks {
            self.exports.close_disk(&format!("{sandbox}-{}", disk.drive)).await?;
        }
        self.exports.close_memory(sandbox.as_str()).await?;
        self.slots.release(slot).await;
        Ok(())
    }
}

/// The file stays, as a checkpoint does: memory that a removed one gave back is cheaper to write to than memory that was never used.
fn write_durably(path: &Path, mib: u32) -> anyhow::Result<f64> {
    let bytes = vec![0xa5; WRITE_BYTES];
    let began = Instant::now();
    let mut file = std::fs::File::create(path)?;
    for _ in 0..mib {
        file.write_all(&bytes)?;
    }
    file.sync_all()?;
    Ok(ms(began.elapsed()))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Nearest-rank percentiles, as `aenv bench` has them: the command links no room of the server, so that each has its own.
fn series(mut times: Vec<f64>) -> Value {
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
    json!({ "n": times.len(), "p50": at(50), "p90": at(90), "p99": at(99) })
}
