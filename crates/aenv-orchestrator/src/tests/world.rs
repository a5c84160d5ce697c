//! The world: engine, data plane, network and guests that outlive an orchestrator.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aenv_blockd::{DiskExport, Export, ExportError, ExportInfo, ExportKind, Exports, MemoryExport, Sealed};
use aenv_envd_api::InitRequest;
use aenv_memory::Since;
use aenv_net::{Network, NetworkError, Slot, SlotRecord};
use aenv_types::{
    Dial, DialFuture, Digest, EgressPolicy, EngineKind, EngineStamp, SandboxId, Token, Virtualization,
};
use aenv_vmm::{BootSpec, Engine, EngineError, EngineReport, LaunchSpec, RamMapping, Vm, VmRecord, VmSpec};
use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    MetricSample,
    capture::After,
    pressure::HostMemory,
    seams::{AgentError, GuestAgent, Host, Images, TakenMemory},
};

/// All that outlives a server.
#[derive(Default)]
pub(super) struct World {
    pub state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub vms: BTreeMap<i32, Guest>,
    pub disks: HashMap<String, Disk>,
    pub memories: HashMap<String, Vec<PathBuf>>,
    /// Whose guests may share a memory image's pages, by its holder.
    pub groups: HashMap<String, Option<String>>,
    pub slots: BTreeMap<u32, bool>,
    /// Slots whose guest reaches nobody.
    pub isolated: BTreeSet<u32>,
    /// Slots that there can be; 0: any number.
    pub slot_limit: u32,
    next: u32,
    /// The operation that fails: this many from now.
    pub fail_in: Option<u32>,
    /// No guest answers `/init`.
    pub mute: bool,
    /// So many times more `/init` fails.
    pub silent: u32,
    pub warm_ups: WarmUps,
    /// So many VMMs more do not let their vCPUs go on.
    pub stuck: u32,
    /// Which blockd there is.
    pub blockd: u32,
    /// What the host has available, in MiB; 0: plenty.
    pub available_mib: u64,
    /// No guest takes memory back by itself.
    pub rigid: bool,
    /// Rules that were set, and vCPUs that were let go on and stopped, in order.
    pub story: Vec<String>,
}

/// What comes of warming a guest up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WarmUps {
    #[default]
    Answered,
    /// Not before this changes.
    Slow,
    /// An answer does not come.
    Silent,
}

/// A machine.
pub(super) struct Guest {
    pub spec: VmSpec,
    pub running: bool,
    /// What it remembers.
    pub memory: u64,
    /// What its balloon holds, in MiB; part of its vm state.
    pub balloon: u32,
    /// Whether it was written to since it was marked; before the first mark, whether a mark can tell nothing.
    pub written: bool,
    pub token: Option<String>,
    pub inits: Vec<String>,
    pub exited: watch::Sender<Option<String>>,
}

/// A disk that is shown.
pub(super) struct Disk {
    pub layers: Vec<PathBuf>,
    /// What it holds.
    pub value: u64,
    pub dirty: bool,
}

impl World {
    /// Counts an operation; tells whether it has to fail.
    fn step(&self) -> bool {
        let mut state = self.state.lock();
        match &mut state.fail_in {
            Some(0) => {
                state.fail_in = None;
                true
            }
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }

    /// What a running guest remembers, and what its disk holds.
    pub fn values(&self, id: &SandboxId) -> Option<(u64, u64)> {
        let state = self.state.lock();
        let guest = state.vms.values().find(|guest| guest.spec.sandbox == *id && guest.running)?;
        Some((guest.memory, state.disks.get(&format!("{id}-root"))?.value))
    }

    /// The guest changes its memory and its disk.
    pub fn write(&self, id: &SandboxId, value: u64) {
        let mut state = self.state.lock();
        let guest = state.vms.values_mut().find(|guest| guest.spec.sandbox == *id && guest.running);
        let guest = guest.expect("the guest runs");
        (guest.memory, guest.written) = (value, true);
        let disk = state.disks.get_mut(&format!("{id}-root")).expect("the disk is shown");
        (disk.value, disk.dirty) = (value, true);
    }

    /// The guest powers off.
    pub fn power_off(&self, id: &SandboxId) {
        let mut state = self.state.lock();
        let pid = state.vms.iter().find(|(_, guest)| guest.spec.sandbox == *id).map(|(pid, _)| *pid);
        let guest = state.vms.remove(&pid.expect("the guest runs")).unwrap();
        guest.exited.send_replace(Some("the guest powered off".into()));
    }

    /// Sandboxes whose VMM lives, without doubles.
    pub fn alive(&self) -> Vec<SandboxId> {
        self.state.lock().vms.values().map(|guest| guest.spec.sandbox.clone()).collect()
    }

    /// Those whose vCPUs stand.
    pub fn standing(&self) -> Vec<SandboxId> {
        let state = self.state.lock();
        let standing = state.vms.values().filter(|guest| !guest.running);
        standing.map(|guest| guest.spec.sandbox.clone()).collect()
    }

    /// What a guest's balloon holds.
    pub fn balloon(&self, id: &SandboxId) -> u32 {
        let state = self.state.lock();
        let guest = state.vms.values().find(|guest| guest.spec.sandbox == *id);
        guest.expect("the guest runs").balloon
    }

    fn spawn(self: &Arc<Self>, spec: VmSpec, (memory, balloon): (u64, u32), running: bool) -> Box<dyn Vm> {
        let mut state = self.state.lock();
        state.next += 1;
        let pid = i32::try_from(state.next).unwrap();
        let exited = watch::Sender::new(None);
        let spec_of = spec.clone();
        let guest = Guest {
            spec: spec_of,
            running,
            memory,
            balloon,
            written: true,
            token: None,
            inits: Vec::new(),
            exited,
        };
        state.vms.insert(pid, guest);
        Box::new(Machine { world: Arc::clone(self), pid, spec })
    }
}

/// What layers hold: the topmost one that is not empty counts.
fn content(layers: &[PathBuf]) -> io::Result<String> {
    let mut content = String::new();
    for layer in layers {
        let text = std::fs::read_to_string(layer)?;
        content = if text.is_empty() { content } else { text };
    }
    Ok(content)
}

/// What a guest remembers whose memory these layers are, or what a disk holds.
pub(super) fn value(layers: &[PathBuf]) -> io::Result<u64> {
    match content(layers)?.as_str() {
        "" => Ok(0),
        text => text.parse().map_err(io::Error::other),
    }
}

struct Machine {
    world: Arc<World>,
    pid: i32,
    spec: VmSpec,
}

impl Machine {
    fn guest<T>(&self, act: impl FnOnce(&mut Guest) -> T) -> Result<T, EngineError> {
        if self.world.step() {
            return Err(EngineError::Refused { command: "x".into(), message: "injected".into() });
        }
        self.world.state.lock().vms.get_mut(&self.pid).map(act).ok_or(EngineError::Gone)
    }
}

#[async_trait]
impl Vm for Machine {
    fn record(&self) -> VmRecord {
        VmRecord { kind: EngineKind::Qemu, pid: self.pid, start_time: 1, spec: self.spec.clone() }
    }
    fn ram(&self) -> Result<RamMapping, EngineError> {
        Ok(RamMapping { pid: self.pid, start: 0, len: 4096, upper: None })
    }
    async fn pause(&self) -> Result<(), EngineError> {
        self.guest(|guest| guest.running = false)?;
        self.world.state.lock().story.push(format!("stop of {}", self.spec.sandbox));
        Ok(())
    }
    async fn resume(&self) -> Result<(), EngineError> {
        // Never made to fail by a step: a VMM that cannot be let go on is one that has ended.
        let mut state = self.world.state.lock();
        if state.stuck > 0 {
            state.stuck -= 1;
            return Err(EngineError::Exited("injected".into()));
        }
        let slot = self.spec.netns.to_str().and_then(|path| path.rsplit_once('x')?.1.parse().ok());
        let isolated = slot.is_some_and(|slot| state.isolated.contains(&slot));
        let alone = if isolated { ", isolated" } else { "" };
        state.story.push(format!("vCPUs of {}{alone}", self.spec.sandbox));
        state.vms.get_mut(&self.pid).map(|guest| guest.running = true).ok_or(EngineError::Gone)
    }
    async fn save_state(&self, path: &Path) -> Result<(), EngineError> {
        let (running, balloon) = self.guest(|guest| (guest.running, guest.balloon))?;
        assert!(!running, "the vm state was saved while the vCPUs ran");
        std::fs::write(path, balloon.to_string())
            .map_err(|source| EngineError::Io { context: "save".into(), source })
    }
    async fn set_balloon(&self, target_mib: u32) -> Result<(), EngineError> {
        let mut state = self.world.state.lock();
        let guest = state.vms.get_mut(&self.pid).ok_or(EngineError::Gone)?;
        assert!(guest.running, "a balloon was moved while the vCPUs stood");
        guest.balloon = self.spec.shape.memory_mib - target_mib;
        Ok(())
    }
    async fn balloon(&self) -> Result<u32, EngineError> {
        let state = self.world.state.lock();
        state.vms.get(&self.pid).map(|guest| guest.balloon).ok_or(EngineError::Gone)
    }
    async fn balloon_gives_way(&self) -> Result<bool, EngineError> {
        Ok(!self.world.state.lock().rigid)
    }
    async fn end(&self) -> Result<(), EngineError> {
        if let Some(guest) = self.world.state.lock().vms.remove(&self.pid) {
            guest.exited.send_replace(Some("ended".into()));
        }
        Ok(())
    }
    async fn exited(&self) -> String {
        let seen = self.world.state.lock().vms.get(&self.pid).map(|guest| guest.exited.subscribe());
        let Some(mut seen) = seen else { return "gone".into() };
        let seen = seen.wait_for(Option::is_some).await;
        seen.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }
}

/// Engine, data plane, network, agent and images of a world.
#[derive(Clone)]
pub(super) struct In(pub Arc<World>);

#[async_trait]
impl Engine for In {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }
    async fn probe(&self) -> EngineReport {
        EngineReport { kind: EngineKind::Qemu, version: None, virtualization: None, missing: Vec::new() }
    }
    async fn stamp(&self, _: &Path) -> Result<EngineStamp, EngineError> {
        Ok(stamp())
    }
    async fn boot(&self, spec: BootSpec) -> Result<Box<dyn Vm>, EngineError> {
        if self.0.step() {
            return Err(EngineError::Start("injected".into()));
        }
        Ok(self.0.spawn(spec.vm, (0, 0), true))
    }
    async fn launch(&self, spec: LaunchSpec) -> Result<Box<dyn Vm>, EngineError> {
        assert!(spec.state.exists(), "the vm state is missing");
        if self.0.step() {
            return Err(EngineError::Start("injected".into()));
        }
        let read = std::fs::read_to_string(&spec.state);
        let balloon = read.map_err(|source| EngineError::Io { context: "state".into(), source })?;
        let balloon = balloon.parse().expect("a state that a machine saved");
        let layers = self.0.state.lock().memories[spec.vm.sandbox.as_str()].clone();
        let memory = value(&layers).map_err(|source| EngineError::Io { context: "ram".into(), source })?;
        Ok(self.0.spawn(spec.vm, (memory, balloon), false))
    }
    async fn adopt(&self, record: &VmRecord) -> Result<Box<dyn Vm>, EngineError> {
        if !self.0.state.lock().vms.contains_key(&record.pid) {
            return Err(EngineError::Gone);
        }
        Ok(Box::new(Machine { world: Arc::clone(&self.0), pid: record.pid, spec: record.spec.clone() }))
    }
    async fn sweep(&self, keep: &[VmRecord]) -> Result<u32, EngineError> {
        let mut state = self.0.state.lock();
        let before = state.vms.len();
        state.vms.retain(|pid, _| keep.iter().any(|record| record.pid == *pid));
        Ok(u32::try_from(before - state.vms.len()).unwrap())
    }
}

pub(super) fn stamp() -> EngineStamp {
    EngineStamp {
        kind: EngineKind::Qemu,
        version: "1".into(),
        virtualization: Virtualization::Tcg,
        cpu_baseline: "x".into(),
        kernel: Digest::of(b"kernel"),
    }
}

fn injected() -> ExportError {
    ExportError::Io { message: "injected".into() }
}

fn present(layers: &[PathBuf]) -> Result<u64, ExportError> {
    value(layers).map_err(|error| ExportError::Layer {
        path: layers.last().cloned().unwrap_or_default(),
        message: error.to_string(),
    })
}

#[async_trait]
impl Exports for In {
    async fn export(&self) -> Result<Export, ExportError> {
        Ok(Export { kind: ExportKind::Fuse, why: String::new() })
    }
    async fn instance(&self) -> Result<u32, ExportError> {
        Ok(self.0.state.lock().blockd)
    }
    async fn open_disk(&self, export: DiskExport) -> Result<PathBuf, ExportError> {
        if self.0.step() {
            return Err(injected());
        }
        let value = present(&export.layers)?;
        std::fs::create_dir_all(export.upper.as_ref().unwrap()).unwrap();
        let mut state = self.0.state.lock();
        if state.disks.contains_key(&export.name) {
            return Err(ExportError::Exists { name: export.name });
        }
        state.disks.insert(export.name.clone(), Disk { layers: export.layers, value, dirty: false });
        Ok(PathBuf::from(export.name))
    }
    async fn open_memory(&self, export: MemoryExport) -> Result<PathBuf, ExportError> {
        if self.0.step() {
            return Err(injected());
        }
        present(&export.layers)?;
        let mut state = self.0.state.lock();
        state.groups.insert(export.holder.clone(), export.group);
        state.memories.insert(export.holder.clone(), export.layers);
        drop(state);
        Ok(PathBuf::from(export.holder))
    }
    async fn seal(&self, name: &str, target: PathBuf) -> Result<Sealed, ExportError> {
        if self.0.step() {
            return Err(injected());
        }
        let mut state = self.0.state.lock();
        let disk = state.disks.get_mut(name).ok_or(ExportError::NotFound { name: name.into() })?;
        if !disk.dirty {
            return Ok(Sealed { layer: None, size: 0 });
        }
        std::fs::write(&target, disk.value.to_string()).unwrap();
        disk.dirty = false;
        disk.layers.push(target.clone());
        Ok(Sealed { layer: Some(target), size: 1 })
    }
    async fn close_disk(&self, name: &str) -> Result<(), ExportError> {
        self.0.state.lock().disks.remove(name);
        Ok(())
    }
    async fn close_memory(&self, holder: &str) -> Result<(), ExportError> {
        self.0.state.lock().memories.remove(holder);
        Ok(())
    }
    async fn list(&self) -> Result<Vec<ExportInfo>, ExportError> {
        let state = self.0.state.lock();
        let info = |name: &String, memory, layers: &Vec<PathBuf>| {
            let (name, path, layers) = (name.clone(), PathBuf::from(name), layers.clone());
            ExportInfo { name, memory, path, size: 4096, layers }
        };
        let disks = state.disks.iter().map(|(name, disk)| info(name, false, &disk.layers));
        Ok(disks.chain(state.memories.iter().map(|(name, layers)| info(name, true, layers))).collect())
    }
}

struct FakeSlot(u32, Arc<World>);

impl Dial for FakeSlot {
    fn dial(&self, _: u16) -> DialFuture<'_> {
        Box::pin(async { Err(io::ErrorKind::ConnectionRefused.into()) })
    }
}

#[async_trait]
impl Slot for FakeSlot {
    fn record(&self) -> SlotRecord {
        SlotRecord { index: self.0, netns: PathBuf::from(format!("/run/netns/x{}", self.0)) }
    }
    async fn set_policy(&self, policy: &EgressPolicy) -> Result<(), NetworkError> {
        if self.1.step() {
            return Err(NetworkError::Kernel { step: "x", message: "injected".into() });
        }
        let mut state = self.1.state.lock();
        state.isolated.remove(&self.0);
        state.story.push(format!("rules {:?}", policy.dns_servers));
        Ok(())
    }
    async fn isolate(&self) -> Result<(), NetworkError> {
        if self.1.step() {
            return Err(NetworkError::Kernel { step: "x", message: "injected".into() });
        }
        self.1.state.lock().isolated.insert(self.0);
        Ok(())
    }
    async fn listen(&self, _: u16) -> Result<tokio::net::TcpListener, NetworkError> {
        let made = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        made.map_err(|error| NetworkError::Kernel { step: "x", message: error.to_string() })
    }
    async fn traffic(&self) -> Result<(u64, u64), NetworkError> {
        Ok((0, 0))
    }
}

#[async_trait]
impl Network for In {
    async fn acquire(&self) -> Result<Arc<dyn Slot>, NetworkError> {
        if self.0.step() {
            return Err(NetworkError::Kernel { step: "x", message: "injected".into() });
        }
        let mut state = self.0.state.lock();
        let limit = state.slot_limit;
        if limit > 0 && state.slots.len() >= limit as usize {
            return Err(NetworkError::Exhausted { limit });
        }
        state.next += 1;
        let index = state.next;
        state.slots.insert(index, true);
        Ok(Arc::new(FakeSlot(index, Arc::clone(&self.0))))
    }
    async fn adopt(&self, record: &SlotRecord) -> Result<Arc<dyn Slot>, NetworkError> {
        match self.0.state.lock().slots.get_mut(&record.index) {
            Some(held) => *held = true,
            None => return Err(NetworkError::Gone { index: record.index, message: "x".into() }),
        }
        Ok(Arc::new(FakeSlot(record.index, Arc::clone(&self.0))))
    }
    async fn release(&self, slot: Arc<dyn Slot>) {
        self.0.state.lock().slots.remove(&slot.record().index);
    }
    async fn sweep(&self) -> Result<u32, NetworkError> {
        let mut state = self.0.state.lock();
        let before = state.slots.len();
        state.slots.retain(|_, held| *held);
        Ok(u32::try_from(before - state.slots.len()).unwrap())
    }
    async fn close(&self) {}
}

#[async_trait]
impl GuestAgent for In {
    async fn init(&self, _: Arc<dyn Dial>, request: &InitRequest, bound: Duration) -> Result<(), AgentError> {
        if self.0.state.lock().mute {
            tokio::time::sleep(bound).await;
        }
        if self.0.step() {
            return Err(AgentError::Silent("injected".into()));
        }
        let mut state = self.0.state.lock();
        if state.silent > 0 {
            state.silent -= 1;
            return Err(AgentError::Silent("injected".into()));
        }
        let host = request.hostname.clone().unwrap_or_default();
        let guest = state.vms.values_mut().find(|guest| guest.spec.sandbox.as_str() == host && guest.running);
        let guest = guest.ok_or(AgentError::Silent("nothing runs".into()))?;
        guest.token = request.access_token.clone();
        guest.inits.push(request.lifecycle_id.clone().unwrap_or_default());
        Ok(())
    }
    async fn warm_up(&self, _: Arc<dyn Dial>, request: &InitRequest, _: Duration) -> Result<(), AgentError> {
        assert!(request.entropy.is_some() && request.access_token.is_some());
        loop {
            let warm_ups = self.0.state.lock().warm_ups;
            match warm_ups {
                WarmUps::Answered => return Ok(()),
                WarmUps::Silent => return Err(AgentError::Silent("injected".into())),
                WarmUps::Slow => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }
    async fn sync(&self, _: Arc<dyn Dial>, _: Option<&Token>, _: Duration) -> Result<(), AgentError> {
        match self.0.step() {
            true => Err(AgentError::Silent("injected".into())),
            false => Ok(()),
        }
    }
    async fn metrics(
        &self,
        _: Arc<dyn Dial>,
        _: Option<&Token>,
        _: Duration,
    ) -> Result<MetricSample, AgentError> {
        Err(AgentError::Silent("not in this world".into()))
    }
}

impl Host for In {
    fn memory(&self) -> Option<HostMemory> {
        let available_mib = match self.0.state.lock().available_mib {
            0 => 1 << 30,
            some => some,
        };
        Some(HostMemory { available_mib, stalled_pct: 0.0 })
    }
    fn anonymous_mib(&self, pid: i32) -> Option<u64> {
        let state = self.0.state.lock();
        let guest = state.vms.get(&pid)?;
        Some(u64::from(guest.spec.shape.memory_mib - guest.balloon))
    }
}

#[async_trait]
impl Images for In {
    async fn take(
        &self,
        ram: RamMapping,
        target: PathBuf,
        after: After,
        since: Since,
    ) -> Result<Box<dyn TakenMemory>, String> {
        let mut state = self.0.state.lock();
        let guest = state.vms.get_mut(&ram.pid).ok_or("gone")?;
        assert!(!guest.running, "memory was taken while the vCPUs ran");
        let changed = since == Since::Mapping || guest.written;
        let memory = if changed { guest.memory.to_string() } else { String::new() };
        let next = match after {
            After::GoOn => Since::Mark,
            After::End => Since::Mapping,
        };
        // The marks are set, whether or not the rest succeeds.
        guest.written &= after == After::End;
        drop(state);
        if self.0.step() {
            return Err("injected".into());
        }
        Ok(Box::new(Taken { world: Arc::clone(&self.0), memory, target, since, next }))
    }
    async fn merge(&self, layers: Vec<PathBuf>, target: PathBuf) -> Result<u64, String> {
        if self.0.step() {
            return Err("injected".into());
        }
        let merged = content(&layers).map_err(|error| error.to_string())?;
        std::fs::write(target, merged).map_err(|error| error.to_string())?;
        Ok(1)
    }
}

struct Taken {
    world: Arc<World>,
    memory: String,
    target: PathBuf,
    since: Since,
    next: Since,
}

#[async_trait]
impl TakenMemory for Taken {
    fn since(&self) -> Since {
        self.since
    }
    fn next(&self) -> Since {
        self.next
    }
    async fn write(self: Box<Self>) -> Result<u64, String> {
        if self.world.step() {
            return Err("injected".into());
        }
        std::fs::write(&self.target, self.memory).map_err(|error| error.to_string())?;
        Ok(1)
    }
}
