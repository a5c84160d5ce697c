//! A running Firecracker.

use std::{path::Path, sync::Arc, time::Duration};

use aenv_types::EngineKind;
use async_trait::async_trait;
use serde_json::{Value, json};

use super::{
    api::{Api, Call},
    hold::{Hold, let_go},
    ram,
    root::Root,
    start::{OWN_LOG, Running, explain, follow_console},
};
use crate::{
    EngineError, MemoryOrder, RamMapping, Vm, VmRecord, VmSpec, cgroup, maps::FoundRam, process::Process,
};

/// Any single command.
pub(crate) const COMMAND_WAIT: Duration = Duration::from_secs(15);
const ADOPT_WAIT: Duration = Duration::from_secs(10);

pub(crate) struct FirecrackerVm {
    spec: VmSpec,
    process: Process,
    root: Arc<Root>,
    api: Api,
    hold: Hold,
    ram: FoundRam,
}

impl FirecrackerVm {
    pub(crate) fn new(spec: VmSpec, running: Running) -> Self {
        let Running { process, root, api } = running;
        Self { spec, process, root, api, hold: Hold::default(), ram: FoundRam::default() }
    }

    /// Takes over a VM that outlived the server, also one that was held by it.
    pub(crate) async fn adopt(record: &VmRecord) -> Result<Self, EngineError> {
        let log = std::fs::File::open(record.spec.runtime.join(OWN_LOG)).ok();
        let process = Process::attach(record.pid, record.start_time, log)?;
        let root = Root::of(record.pid).map_err(|_| EngineError::Gone)?;
        let root = Arc::new(root);
        let api = Api::new(Arc::clone(&root));
        let asked = let_go(&root, api.call(Call::get("/"), ADOPT_WAIT)).await;
        let state = match asked {
            Ok(answer) => answer["state"].as_str().unwrap_or_default().to_owned(),
            Err(error) => return Err(explain(&process, error).await),
        };
        // A server that died within a launch leaves a machine without a state.
        if state == "Not started" {
            process.end().await?;
            return Err(EngineError::Gone);
        }
        follow_console(&record.spec)?;
        Ok(Self::new(record.spec.clone(), Running { process, root, api }))
    }

    async fn call(&self, call: Call) -> Result<Value, EngineError> {
        match self.api.call(call, COMMAND_WAIT).await {
            Err(error) => Err(explain(&self.process, error).await),
            answer => answer,
        }
    }
}

#[async_trait]
impl Vm for FirecrackerVm {
    fn record(&self) -> VmRecord {
        VmRecord {
            kind: EngineKind::Firecracker,
            pid: self.process.pid,
            start_time: self.process.start_time,
            spec: self.spec.clone(),
        }
    }

    fn ram(&self) -> Result<RamMapping, EngineError> {
        let find = || ram::find(self.process.pid, &self.spec.ram, self.spec.shape.memory_bytes());
        self.ram.or_find(find)
    }

    async fn pause(&self) -> Result<(), EngineError> {
        if self.hold.is_held().await {
            return Ok(());
        }
        self.call(Call::patch("/vm", json!({ "state": "Paused" }))).await.map(drop)
    }

    async fn resume(&self) -> Result<(), EngineError> {
        self.hold.release(&self.root).await?;
        self.call(Call::patch("/vm", json!({ "state": "Resumed" }))).await.map(drop)
    }

    fn memory_order(&self) -> MemoryOrder {
        MemoryOrder::AfterState
    }

    async fn save_state(&self, path: &Path) -> Result<(), EngineError> {
        let saved = self.hold.save(&self.api, &self.root, self.process.pid, path).await;
        match saved {
            Err(error) => Err(explain(&self.process, error).await),
            Ok(()) => Ok(()),
        }
    }

    async fn set_balloon(&self, target_mib: u32) -> Result<(), EngineError> {
        self.hold.release(&self.root).await?;
        let amount = self.spec.shape.memory_mib.saturating_sub(target_mib);
        self.call(Call::patch("/balloon", json!({ "amount_mib": amount }))).await.map(drop)
    }

    async fn balloon(&self) -> Result<u32, EngineError> {
        self.hold.release(&self.root).await?;
        let held = self.call(Call::get("/balloon")).await?["amount_mib"].as_u64();
        Ok(held.and_then(|held| u32::try_from(held).ok()).unwrap_or_default())
    }

    /// Each machine is given such a balloon.
    async fn balloon_gives_way(&self) -> Result<bool, EngineError> {
        Ok(true)
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
