//! QEMU's `microvm` machine, unmodified, on KVM or by emulation.
//!
//! ```text
//!   start (or take a warm one) --> furnish: memory, disks, tap --+-- boot: the kernel begins
//!                                                               +-- launch: load the vm state, vCPUs stand
//! ```
//!
//! It owns QEMU processes, their QMP and console sockets, and their control groups. It never touches memory files or disks
//! beyond handing their paths on, and never makes namespaces or taps of sandboxes.

mod command;
mod prepared;
mod probe;
mod qmp;
mod ram;
mod sockets;
mod state;
mod tsc;
mod vm;
mod warm;

use std::{
    fs::File,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aenv_types::{Digest, EngineKind, EngineStamp, MachineShape};
use async_trait::async_trait;
use tokio::sync::OnceCell;

pub use probe::VirtualizationSetting;

use self::{
    command::Form,
    prepared::{Prepared, Starter},
    probe::Host,
    vm::QemuVm,
    warm::Pool,
};
use crate::{
    BootSpec, Engine, EngineError, EngineReport, JailConfig, LaunchSpec, Vm, VmRecord, VmSpec, cgroup,
    jail::Jail,
    kernel::{self, PerKernel},
    process::{self, io_error},
    tap::Tap,
};

/// Disks that one machine can have: its 24 virtio slots less entropy, balloon and network.
const MAX_DRIVES: usize = 21;

/// A process that waited takes its memory, disks and network within this (it takes milliseconds), or another one is used.
const WARM_WAIT: Duration = Duration::from_secs(3);
/// The same for one that was started for this VM.
const COLD_WAIT: Duration = Duration::from_secs(10);
/// Processes that are started for one VM before it has failed. Now and then a QEMU 7.2 greets and then never answers, under load in
/// one of some hundred starts: its monitor's threads lose each other. Another process does answer.
const COLD_ATTEMPTS: u32 = 3;

/// How to use QEMU.
#[derive(Clone, Debug)]
pub struct QemuConfig {
    /// The program, such as `qemu-system-x86_64`.
    pub binary: PathBuf,
    /// KVM or emulation.
    pub virtualization: VirtualizationSetting,
    /// The server's runtime folder; marks every process of this engine, and holds the sockets of those that wait. On
    /// the same filesystem as the sandboxes' runtime folders.
    pub runtime: PathBuf,
    /// Confines its processes. Their memory files and disks have to lie in its folder.
    pub jail: Option<JailConfig>,
    /// Processes that wait for work, for each form of machine that was used lately. 0: none.
    pub warm: usize,
    /// `libaenv_track.so`, loaded into each process so that a capture can count from the one before. `None`: each counts from the
    /// launch.
    pub tracker: Option<PathBuf>,
}

impl QemuConfig {
    /// The distribution's QEMU, with two processes waiting for each form, not confined.
    pub fn new(runtime: impl Into<PathBuf>) -> Self {
        Self {
            binary: probe::default_binary(),
            virtualization: VirtualizationSetting::Auto,
            runtime: runtime.into(),
            jail: None,
            warm: 2,
            tracker: None,
        }
    }
}

/// The engine.
pub struct Qemu {
    config: QemuConfig,
    pool: Arc<Pool>,
    host: OnceCell<Host>,
    kernel: PerKernel<Digest>,
}

impl Qemu {
    /// Starts nothing.
    pub fn new(config: QemuConfig) -> Self {
        let jail = config.jail.clone().map(|jail| Arc::new(Jail::new(jail, &config.binary)));
        let pool = Pool::new(&config, jail);
        Self { config, pool: Arc::new(pool), host: OnceCell::new(), kernel: PerKernel::new(kernel::digest) }
    }

    /// Starts processes that wait for launches of this shape with `drives` disks. Returns at once.
    pub async fn prewarm(&self, shape: MachineShape, drives: usize) -> Result<(), EngineError> {
        let form = Form { vcpus: shape.vcpus, memory_mib: shape.memory_mib, drives };
        self.pool.refill(form, self.host().await?.clone(), Duration::ZERO);
        Ok(())
    }

    /// How many processes wait for a launch of this shape.
    pub fn warm(&self, shape: MachineShape, drives: usize) -> usize {
        self.pool.ready(&Form { vcpus: shape.vcpus, memory_mib: shape.memory_mib, drives })
    }

    /// Ends the processes that wait for work; running VMs stay.
    pub fn close(&self) {
        self.pool.empty_out();
    }

    async fn host(&self) -> Result<&Host, EngineError> {
        let find = || async {
            let report = self.probe().await;
            match (report.version, report.virtualization) {
                (Some(version), Some(virtualization)) if report.missing.is_empty() => {
                    Ok(Host { version, virtualization, cpu: probe::cpu_baseline(virtualization) })
                }
                _ => {
                    let each = report.missing.iter().map(|m| format!("{} (mend: {})", m.what, m.mend));
                    Err(EngineError::Unusable(each.collect::<Vec<_>>().join("; ")))
                }
            }
        };
        self.host.get_or_try_init(find).await
    }

    /// A process in the sandbox's own namespace and folder.
    async fn start_cold(&self, spec: &VmSpec, boot: Option<&BootSpec>) -> Result<Prepared, EngineError> {
        let host = self.host().await?;
        let netns =
            File::open(&spec.netns).map_err(|e| io_error(format!("open {}", spec.netns.display()), e))?;
        let jail = self.pool.jail.as_ref();
        let starter = Starter { config: &self.config, host, netns: netns.as_fd(), jail };
        Prepared::start(&starter, Form::of(spec.shape, &spec.drives), &spec.runtime, boot).await
    }

    /// A process that has memory, disks and network of this VM: one that waited, or a new one where none does or answers.
    async fn furnished(&self, spec: &VmSpec) -> Result<Prepared, EngineError> {
        while let Some(mut prepared) = self.pool.take(&Form::of(spec.shape, &spec.drives)) {
            let usable = async {
                prepared
                    .move_to(&spec.runtime)
                    .map_err(|e| io_error("move the sockets of a waiting VMM", e))?;
                furnish(spec, &prepared).await
            };
            let error = match tokio::time::timeout(WARM_WAIT, usable).await {
                Ok(Ok(())) => return Ok(prepared),
                Ok(Err(error @ (EngineError::Exited(_) | EngineError::TimedOut { .. }))) => error,
                Ok(Err(error)) => {
                    self.give_up(spec, prepared).await;
                    return Err(error);
                }
                Err(_) => {
                    EngineError::TimedOut { command: "furnishing".to_owned(), secs: WARM_WAIT.as_secs() }
                }
            };
            tracing::warn!(%error, sandbox = %spec.sandbox, threads = ?prepared.threads(), "a waiting VMM is of no use, another one is taken");
            self.give_up(spec, prepared).await;
        }
        self.furnished_cold(spec, None).await
    }

    /// The same with a new process; the only place that tries another one when one does not answer.
    async fn furnished_cold(&self, spec: &VmSpec, boot: Option<&BootSpec>) -> Result<Prepared, EngineError> {
        let mut attempt = 1;
        loop {
            match self.furnished_once(spec, boot).await {
                Err(error @ EngineError::TimedOut { .. }) if attempt < COLD_ATTEMPTS => {
                    tracing::warn!(%error, attempt, sandbox = %spec.sandbox, "a VMM does not answer, another one is started");
                    attempt += 1;
                }
                outcome => return outcome,
            }
        }
    }

    async fn furnished_once(&self, spec: &VmSpec, boot: Option<&BootSpec>) -> Result<Prepared, EngineError> {
        let prepared = self.start_cold(spec, boot).await?;
        let timed_out =
            || EngineError::TimedOut { command: "furnishing".to_owned(), secs: COLD_WAIT.as_secs() };
        let furnished = tokio::time::timeout(COLD_WAIT, furnish(spec, &prepared)).await;
        match furnished.unwrap_or_else(|_| Err(timed_out())) {
            Ok(()) => Ok(prepared),
            Err(error) => {
                if matches!(error, EngineError::TimedOut { .. }) {
                    tracing::warn!(sandbox = %spec.sandbox, threads = ?prepared.threads(), "a VMM stopped answering");
                }
                self.give_up(spec, prepared).await;
                Err(error)
            }
        }
    }

    async fn give_up(&self, spec: &VmSpec, prepared: Prepared) {
        prepared.discard().await;
        cgroup::remove(&spec.sandbox);
    }

    fn check(spec: &VmSpec) -> Result<(), EngineError> {
        if spec.drives.len() > MAX_DRIVES {
            return Err(EngineError::Start(format!(
                "{} disks: this machine has slots for {MAX_DRIVES}",
                spec.drives.len()
            )));
        }
        ram::check(&spec.ram, spec.shape.memory_bytes())
    }
}

/// Opens the VM's tap and gives the process all that it needs to build its machine.
async fn furnish(spec: &VmSpec, prepared: &Prepared) -> Result<(), EngineError> {
    let tap = Tap::open(&spec.netns, aenv_net::guest::TAP).await?;
    if let Some(pid) = prepared.pid() {
        cgroup::join(pid, &spec.sandbox, spec.shape);
    }
    prepared.furnish(spec, &tap).await
}

fn running(spec: VmSpec, prepared: Prepared) -> Result<Box<dyn Vm>, EngineError> {
    let parts = prepared.into_parts().ok_or(EngineError::Gone)?;
    Ok(Box::new(QemuVm::new(spec, parts)?))
}

#[async_trait]
impl Engine for Qemu {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    async fn probe(&self) -> EngineReport {
        let mut report = probe::report(&self.config.binary, self.config.virtualization).await;
        report.missing.extend(self.config.jail.iter().flat_map(JailConfig::missing));
        report
    }

    async fn stamp(&self, kernel: &Path) -> Result<EngineStamp, EngineError> {
        let host = self.host().await?;
        Ok(EngineStamp {
            kind: EngineKind::Qemu,
            version: host.version.clone(),
            virtualization: host.virtualization,
            cpu_baseline: host.cpu.clone(),
            kernel: self.kernel.of(kernel)?,
        })
    }

    async fn boot(&self, spec: BootSpec) -> Result<Box<dyn Vm>, EngineError> {
        Self::check(&spec.vm)?;
        // Measures the TSC the first time, which blocks.
        tokio::task::spawn_blocking(tsc::host_khz).await.map_err(|e| EngineError::Start(e.to_string()))?;
        let prepared = self.furnished_cold(&spec.vm, Some(&spec)).await?;
        running(spec.vm, prepared)
    }

    async fn launch(&self, spec: LaunchSpec) -> Result<Box<dyn Vm>, EngineError> {
        let host = self.host().await?;
        probe::check_stamp(&spec.stamp, host)?;
        Self::check(&spec.vm)?;
        let state = state::pipe_with(&spec.state).await?;
        let form = Form::of(spec.vm.shape, &spec.vm.drives);
        let launched = async {
            let prepared = self.furnished(&spec.vm).await?;
            if let Err(error) = prepared.load(state).await {
                self.give_up(&spec.vm, prepared).await;
                return Err(error);
            }
            running(spec.vm, prepared)
        };
        let launched = launched.await;
        self.pool.refill(form, host.clone(), warm::AFTER_LAUNCH);
        launched
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Box<dyn Vm>, EngineError> {
        if record.kind != EngineKind::Qemu {
            return Err(EngineError::Incompatible(format!("the VM runs in engine {:?}", record.kind)));
        }
        Ok(Box::new(QemuVm::adopt(record).await?))
    }

    async fn sweep(&self, keep: &[VmRecord]) -> Result<u32, EngineError> {
        let waiting = self.pool.pids();
        let ended = process::sweep(&self.config.runtime, keep, &waiting).await?;
        if waiting.is_empty() {
            warm::remove(&self.pool.folder());
        }
        Ok(ended)
    }
}
