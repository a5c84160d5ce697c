//! A running QEMU.

use std::{path::Path, time::Duration};

use aenv_types::EngineKind;
use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::{
    prepared::{COMMAND_WAIT, Parts, tokio_stream},
    qmp::Qmp,
    sockets,
    state::SavedStates,
};
use crate::{
    EngineError, RamMapping, Vm, VmRecord, VmSpec, cgroup, console,
    maps::{self, FoundRam},
    process::{Process, io_error},
};

const ADOPT_WAIT: Duration = Duration::from_secs(10);

pub(crate) struct QemuVm {
    spec: VmSpec,
    process: Process,
    qmp: Qmp,
    ram: FoundRam,
    saved: SavedStates,
    /// A guest agrees to features once, when it boots.
    gives_way: OnceCell<bool>,
}

impl QemuVm {
    pub(crate) fn new(spec: VmSpec, parts: Parts) -> Result<Self, EngineError> {
        let Parts { process, qmp, console } = parts;
        let (ram, saved, gives_way) = (FoundRam::default(), SavedStates::default(), OnceCell::new());
        let vm = Self { spec, process, qmp, ram, saved, gives_way };
        vm.follow_console(console)?;
        Ok(vm)
    }

    /// Connects to the sockets of a VM that outlived the server.
    pub(crate) async fn adopt(record: &VmRecord) -> Result<Self, EngineError> {
        let runtime = &record.spec.runtime;
        let log = std::fs::File::open(runtime.join(sockets::LOG)).ok();
        let process = Process::attach(record.pid, record.start_time, log)?;
        let connect = |name: &str| {
            sockets::connect(runtime, name)
                .map_err(|e| io_error(format!("connect to {}", runtime.join(name).display()), e))
        };
        let qmp = Qmp::open(tokio_stream(connect(sockets::QMP)?)?, ADOPT_WAIT, ADOPT_WAIT).await?;
        let status = qmp.execute("query-status", json!({}), &[], ADOPT_WAIT).await?;
        // A server that died within a launch leaves a machine without a state.
        if matches!(status["status"].as_str(), Some("inmigrate" | "prelaunch" | "preconfig")) {
            process.end().await?;
            return Err(EngineError::Gone);
        }
        let parts = Parts { process, qmp, console: connect(sockets::CONSOLE)? };
        Self::new(record.spec.clone(), parts)
    }

    fn follow_console(&self, stream: std::os::unix::net::UnixStream) -> Result<(), EngineError> {
        let own_log = self.spec.runtime.join(sockets::LOG);
        console::follow(tokio_stream(stream)?, self.spec.serial_log.clone(), own_log);
        Ok(())
    }

    async fn ask(&self, command: &str, arguments: Value) -> Result<Value, EngineError> {
        match self.qmp.execute(command, arguments, &[], COMMAND_WAIT).await {
            Err(EngineError::Exited(_)) => Err(self.ended().await),
            answer => answer,
        }
    }

    /// A closed connection says little; the process's end says why.
    async fn ended(&self) -> EngineError {
        let reason = tokio::time::timeout(Duration::from_secs(2), self.process.ended()).await;
        EngineError::Exited(reason.unwrap_or_else(|_| "its control socket is closed".to_owned()))
    }
}

#[async_trait]
impl Vm for QemuVm {
    fn record(&self) -> VmRecord {
        VmRecord {
            kind: EngineKind::Qemu,
            pid: self.process.pid,
            start_time: self.process.start_time,
            spec: self.spec.clone(),
        }
    }

    fn ram(&self) -> Result<RamMapping, EngineError> {
        let find = || maps::find(self.process.pid, &self.spec.ram, self.spec.shape.memory_bytes());
        self.ram.or_find(find)
    }

    async fn pause(&self) -> Result<(), EngineError> {
        self.ask("stop", json!({})).await.map(drop)
    }

    async fn resume(&self) -> Result<(), EngineError> {
        self.ask("cont", json!({})).await?;
        self.saved.forget(&self.qmp).await;
        Ok(())
    }

    async fn save_state(&self, path: &Path) -> Result<(), EngineError> {
        match self.saved.save(&self.qmp, path).await {
            Err(EngineError::Exited(_)) => Err(self.ended().await),
            other => other,
        }
    }

    async fn set_balloon(&self, target_mib: u32) -> Result<(), EngineError> {
        self.ask("balloon", json!({ "value": u64::from(target_mib) << 20 })).await.map(drop)
    }

    async fn balloon(&self) -> Result<u32, EngineError> {
        let left = self.ask("query-balloon", json!({})).await?["actual"].as_u64().unwrap_or_default() >> 20;
        Ok(self.spec.shape.memory_mib.saturating_sub(u32::try_from(left).unwrap_or(u32::MAX)))
    }

    async fn balloon_gives_way(&self) -> Result<bool, EngineError> {
        let asked = self.ask("x-query-virtio-status", json!({ "path": "/machine/peripheral/balloon" }));
        let agreed = self.gives_way.get_or_try_init(|| async {
            let features = &asked.await?["guest-features"]["dev-features"];
            let names = features.as_array().into_iter().flatten().filter_map(Value::as_str);
            Ok(names.into_iter().any(|name| name.starts_with("VIRTIO_BALLOON_F_DEFLATE_ON_OOM")))
        });
        agreed.await.copied()
    }

    async fn end(&self) -> Result<(), EngineError> {
        self.process.end().await?;
        cgroup::remove(&self.spec.sandbox);
        Ok(())
    }

    async fn exited(&self) -> String {
        self.process.ended().await
    }
}
