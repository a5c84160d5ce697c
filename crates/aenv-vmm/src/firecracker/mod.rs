//! Upstream Firecracker, unmodified, on KVM.
//!
//! ```text
//!   start in a root of its own --+-- boot: machine, kernel, disks, network, InstanceStart
//!                                +-- launch: load the vm state, vCPUs stand
//! ```
//!
//! It owns Firecracker processes, their roots, API sockets and control groups. It never touches memory images or disks beyond
//! showing them to a process, and never makes network namespaces or taps of sandboxes.

mod api;
mod hold;
mod machine;
mod probe;
mod ram;
mod root;
mod start;
mod vm;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_types::{Digest, EngineKind, EngineStamp, Virtualization};
use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::OnceCell;

use self::{
    probe::Host,
    root::LARGEST_STATE,
    start::{Purpose, Started, start},
    vm::{COMMAND_WAIT, FirecrackerVm},
};
use crate::{
    BootSpec, Engine, EngineError, EngineReport, JailConfig, LaunchSpec, VirtualizationSetting, Vm, VmRecord,
    VmSpec,
    jail::{Jail, in_path},
    kernel::{self, PerKernel},
    process::{self, io_error},
};

/// How to use Firecracker.
#[derive(Clone, Debug)]
pub struct FirecrackerConfig {
    /// The program; a name without a folder is looked up in PATH.
    pub binary: PathBuf,
    /// KVM or PVM.
    pub virtualization: VirtualizationSetting,
    /// The server's runtime folder; marks every process of this engine.
    pub runtime: PathBuf,
    /// Gives its processes uids of their own. Without it they are root in a root of their own.
    pub jail: Option<JailConfig>,
    /// `/dev/kvm`.
    pub kvm: PathBuf,
    /// Exists where only guests built for PVM run on it.
    pub pvm_module: PathBuf,
    /// A file with the body of `PUT /cpu-config`: guests see the same CPU on every host that has it.
    pub cpu_template: Option<PathBuf>,
}

impl FirecrackerConfig {
    /// Firecracker of PATH, without uids of its own.
    pub fn new(runtime: impl Into<PathBuf>) -> Self {
        Self {
            binary: "firecracker".into(),
            virtualization: VirtualizationSetting::Auto,
            runtime: runtime.into(),
            jail: None,
            kvm: "/dev/kvm".into(),
            pvm_module: "/sys/module/kvm_pvm".into(),
            cpu_template: None,
        }
    }
}

/// The engine.
pub struct Firecracker {
    config: FirecrackerConfig,
    jail: Option<Arc<Jail>>,
    host: OnceCell<(Host, Option<Value>)>,
    kernel: PerKernel<Digest>,
    /// Whether it was built for PVM.
    pvm: PerKernel<bool>,
}

impl Firecracker {
    /// Starts nothing.
    pub fn new(config: FirecrackerConfig) -> Self {
        let jail = config.jail.clone().map(|jail| Arc::new(Jail::new(jail, &config.binary)));
        let (kernel, pvm) = (PerKernel::new(kernel::digest), PerKernel::new(aenv_guest::supports_pvm));
        Self { config, jail, host: OnceCell::new(), kernel, pvm }
    }

    /// What was found out of the host, and the CPU template.
    async fn host(&self) -> Result<&(Host, Option<Value>), EngineError> {
        let find = || async {
            let report = self.probe().await;
            match (report.version, report.virtualization) {
                (Some(version), Some(virtualization)) if report.missing.is_empty() => {
                    let template = self.template()?;
                    let cpu = probe::cpu_baseline(template.as_ref().map(|(text, _)| text.as_slice()));
                    let binary = in_path(&self.config.binary);
                    let host = Host { binary, version, virtualization, cpu };
                    Ok((host, template.map(|(_, value)| value)))
                }
                _ => {
                    let each = report.missing.iter().map(|m| format!("{} (mend: {})", m.what, m.mend));
                    Err(EngineError::Unusable(each.collect::<Vec<_>>().join("; ")))
                }
            }
        };
        self.host.get_or_try_init(find).await
    }

    fn template(&self) -> Result<Option<(Vec<u8>, Value)>, EngineError> {
        let Some(path) = &self.config.cpu_template else { return Ok(None) };
        let context = || format!("firecracker.cpu_template {}", path.display());
        let text = fs::read(path).map_err(|e| io_error(context(), e))?;
        let value = serde_json::from_slice(&text);
        let value = value.map_err(|e| EngineError::Unusable(format!("{} is no JSON: {e}", context())))?;
        Ok(Some((text, value)))
    }

    async fn start(&self, spec: &VmSpec, purpose: Purpose<'_>) -> Result<Started, EngineError> {
        let (host, _) = self.host().await?;
        start(&host.binary, &self.config.runtime, self.jail.as_ref(), spec, purpose).await
    }

    /// On PVM a kernel that was not built for it spins in its first instructions for ever.
    fn check_kernel(&self, virtualization: Virtualization, kernel: &Path) -> Result<(), EngineError> {
        if virtualization != Virtualization::Pvm || self.pvm.of(kernel)? {
            return Ok(());
        }
        Err(EngineError::Kernel(format!(
            "{0} was not built for PVM, and only such guests run on this host's KVM; set kernel.image_path to one with \
             CONFIG_PVM_GUEST=y, and with the configuration in it or beside it as {0}.config",
            kernel.display()
        )))
    }

    fn check(spec: &VmSpec) -> Result<(), EngineError> {
        let limits = [
            ("disks", spec.drives.len(), machine::MOST_DRIVES),
            ("vCPUs", spec.shape.vcpus as usize, machine::MOST_VCPUS as usize),
            ("MiB of memory", spec.shape.memory_mib as usize, machine::MOST_MEMORY_MIB as usize),
        ];
        match limits.into_iter().find(|(_, wanted, most)| wanted > most) {
            None => Ok(()),
            Some((what, wanted, most)) => Err(EngineError::Start(format!(
                "{wanted} {what}: a machine of the engine firecracker has {most} at most"
            ))),
        }
    }
}

#[async_trait]
impl Engine for Firecracker {
    fn kind(&self) -> EngineKind {
        EngineKind::Firecracker
    }

    async fn probe(&self) -> EngineReport {
        let binary = in_path(&self.config.binary);
        let kvm = probe::Kvm::of_host(&self.config.kvm, &self.config.pvm_module);
        let mut report = probe::report(&binary, self.config.virtualization, &kvm).await;
        report.missing.extend(self.config.jail.iter().flat_map(JailConfig::missing));
        report
    }

    async fn stamp(&self, kernel: &Path) -> Result<EngineStamp, EngineError> {
        let (host, _) = self.host().await?;
        Ok(EngineStamp {
            kind: EngineKind::Firecracker,
            version: host.version.clone(),
            virtualization: host.virtualization,
            cpu_baseline: host.cpu.clone(),
            kernel: self.kernel.of(kernel)?,
        })
    }

    async fn boot(&self, spec: BootSpec) -> Result<Box<dyn Vm>, EngineError> {
        Self::check(&spec.vm)?;
        let (host, template) = self.host().await?;
        self.check_kernel(host.virtualization, &spec.kernel)?;
        let lent = match &self.jail {
            Some(jail) => Some(jail.lend(&spec).await?),
            None => None,
        };
        let files = lent.as_ref().unwrap_or(&spec);
        let purpose = Purpose::Boot { kernel: &files.kernel, initramfs: &files.initramfs };
        let started = self.start(&spec.vm, purpose).await?;
        let version = crate::version::parse(&host.version).unwrap_or_default();
        for call in machine::boot(&spec, version, template.as_ref()) {
            if let Err(error) = started.api()?.call(call, COMMAND_WAIT).await {
                return Err(started.fail(error, &spec.vm).await);
            }
        }
        let running = started.into_running(&spec.vm)?;
        Ok(Box::new(FirecrackerVm::new(spec.vm, running)))
    }

    async fn launch(&self, spec: LaunchSpec) -> Result<Box<dyn Vm>, EngineError> {
        let (host, _) = self.host().await?;
        probe::check_stamp(&spec.stamp, host)?;
        Self::check(&spec.vm)?;
        let context = || format!("the vm state {}", spec.state.display());
        let state = tokio::fs::read(&spec.state).await.map_err(|e| io_error(context(), e))?;
        if state.is_empty() || state.len() as u64 > LARGEST_STATE {
            return Err(EngineError::Incompatible(format!("{} has {} bytes", context(), state.len())));
        }
        let started = self.start(&spec.vm, Purpose::Load { state }).await?;
        if let Err(error) = started.api()?.call(machine::load(), COMMAND_WAIT).await {
            return Err(started.fail(error, &spec.vm).await);
        }
        let running = started.into_running(&spec.vm)?;
        Ok(Box::new(FirecrackerVm::new(spec.vm, running)))
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Box<dyn Vm>, EngineError> {
        if record.kind != EngineKind::Firecracker {
            return Err(EngineError::Incompatible(format!("the VM runs in engine {:?}", record.kind)));
        }
        Ok(Box::new(FirecrackerVm::adopt(record).await?))
    }

    async fn sweep(&self, keep: &[VmRecord]) -> Result<u32, EngineError> {
        process::sweep(&self.config.runtime, keep, &[]).await
    }
}
