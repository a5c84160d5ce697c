//! What QEMU can do on this host, and what is missing.

use std::{
    fs,
    path::{Path, PathBuf},
};

use aenv_types::{EngineKind, EngineStamp, Virtualization};

use crate::{
    EngineError, EngineReport, Missing,
    stamp::{self, Here},
    version::{self, parse},
};

/// The oldest release whose machine takes its memory over QMP (`/machine`'s `memory-backend`).
const OLDEST: (u32, u32) = (7, 2);
/// Releases whose vm states load in one another, both ways (measured with 7.2 and 10.0; 11.1 refuses).
const FAMILY: std::ops::RangeInclusive<(u32, u32)> = (7, 2)..=(10, 0);

/// Which virtualization to use: the setting `virtualization_mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VirtualizationSetting {
    /// KVM where a stock kernel can run on it, otherwise emulation.
    #[default]
    Auto,
    /// This one or none.
    Only(Virtualization),
}

/// What was found out once, at the first use.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) version: String,
    pub(crate) virtualization: Virtualization,
    pub(crate) cpu: String,
}

pub(crate) async fn report(binary: &Path, setting: VirtualizationSetting) -> EngineReport {
    let mut missing = Vec::new();
    let mut need = |what: String, mend: &str| missing.push(Missing { what, mend: mend.to_owned() });
    let version = version::of(binary, "QEMU emulator version ").await;
    match version.as_deref().map(parse) {
        None => need(
            format!("{} cannot be run: it starts the VMs", binary.display()),
            "apt-get install -y qemu-system-x86",
        ),
        Some(Some(found)) if found >= OLDEST => {}
        Some(_) => need(
            format!(
                "QEMU {} is too old: {}.{} or newer is needed",
                version.as_deref().unwrap_or("of unknown version"),
                OLDEST.0,
                OLDEST.1
            ),
            "apt-get install -y -t bookworm-backports qemu-system-x86",
        ),
    }
    if !Path::new("/dev/net/tun").exists() {
        need("/dev/net/tun is missing: guests have no network without it".to_owned(), "modprobe tun");
    }
    let virtualization = match virtualization(setting, &kvm()) {
        Ok(found) => Some(found),
        Err(lacking) => {
            missing.push(lacking);
            None
        }
    };
    EngineReport { kind: EngineKind::Qemu, version, virtualization, missing }
}

/// Whether and why KVM can be used for a stock kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kvm {
    Usable,
    Unusable(String),
}

fn kvm() -> Kvm {
    // With kvm_pvm loaded, /dev/kvm opens, but a kernel without PVM support spins in it for ever.
    if Path::new("/sys/module/kvm_pvm").exists() {
        return Kvm::Unusable(
            "only guests built for PVM run on this host's KVM (kvm_pvm is loaded)".to_owned(),
        );
    }
    match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Kvm::Usable,
        Err(error) => Kvm::Unusable(format!("/dev/kvm: {error}")),
    }
}

fn virtualization(setting: VirtualizationSetting, kvm: &Kvm) -> Result<Virtualization, Missing> {
    use Virtualization::{Kvm as Hardware, Pvm, Tcg};
    match (setting, kvm) {
        (VirtualizationSetting::Only(Tcg), _) => Ok(Tcg),
        (VirtualizationSetting::Auto | VirtualizationSetting::Only(Hardware), Kvm::Usable) => Ok(Hardware),
        (VirtualizationSetting::Auto, Kvm::Unusable(why)) => {
            tracing::info!(why, "QEMU emulates the guests' CPUs");
            Ok(Tcg)
        }
        (VirtualizationSetting::Only(Hardware), Kvm::Unusable(why)) => Err(Missing {
            what: format!("virtualization_mode is kvm, which cannot be used: {why}"),
            mend: "set virtualization_mode to auto or tcg, or run on a host with VT-x or AMD-V".to_owned(),
        }),
        (VirtualizationSetting::Only(Pvm), _) => Err(Missing {
            what: "virtualization_mode is pvm, which the engine qemu does not have".to_owned(),
            mend: "set engine to firecracker, or virtualization_mode to auto".to_owned(),
        }),
    }
}

/// The CPU that guests are shown.
pub(crate) fn cpu_baseline(virtualization: Virtualization) -> String {
    match virtualization {
        // QEMU 7.2 emulates cmpxchg16b wrongly now and then: 6.12 kernels crash in their allocator.
        Virtualization::Tcg => "max,cx16=off".to_owned(),
        Virtualization::Kvm | Virtualization::Pvm => "host".to_owned(),
    }
}

/// Whether a vm state of this stamp can be continued here; says why not before anything starts.
pub(crate) fn check_stamp(stamp: &EngineStamp, host: &Host) -> Result<(), EngineError> {
    stamp::check(
        stamp,
        Here { kind: EngineKind::Qemu, virtualization: host.virtualization, cpu: &host.cpu, cpu_mend: "" },
    )?;
    let same = match (parse(&stamp.version), parse(&host.version)) {
        (Some(theirs), Some(ours)) => theirs == ours || (FAMILY.contains(&theirs) && FAMILY.contains(&ours)),
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(stamp::refusal(format!(
        "it was made by QEMU {}, whose vm state QEMU {} cannot load; launch it on a node with that version, or \
         build its template again",
        stamp.version, host.version
    )))
}

/// The binary of Debian's package.
pub(crate) fn default_binary() -> PathBuf {
    "qemu-system-x86_64".into()
}

#[cfg(test)]
mod tests {
    use aenv_types::Digest;

    use super::*;

    fn host(version: &str) -> Host {
        let virtualization = Virtualization::Tcg;
        Host { version: version.to_owned(), virtualization, cpu: cpu_baseline(virtualization) }
    }

    #[test]
    fn states_load_within_the_family_only() {
        let stamp = |version: &str| EngineStamp {
            kind: EngineKind::Qemu,
            version: version.to_owned(),
            virtualization: Virtualization::Tcg,
            cpu_baseline: cpu_baseline(Virtualization::Tcg),
            kernel: Digest::of(b""),
        };
        let fits = |from: &str, to: &str| check_stamp(&stamp(from), &host(to)).is_ok();
        assert!(fits("7.2.22", "7.2.9") && fits("7.2.22", "10.0.2") && fits("10.0.2", "7.2.22"));
        assert!(fits("11.1.3", "11.1.0"));
        assert!(!fits("7.2.22", "11.1.3") && !fits("11.1.3", "10.0.2") && !fits("x", "x"));
        let other = EngineStamp { kind: EngineKind::Firecracker, ..stamp("7.2.22") };
        assert!(check_stamp(&other, &host("7.2.22")).is_err());
        let other = EngineStamp { cpu_baseline: "EPYC".to_owned(), ..stamp("7.2.22") };
        assert!(check_stamp(&other, &host("7.2.22")).is_err());
    }

    #[test]
    fn unusable_kvm_means_emulation_only_when_nobody_insists() {
        let broken = Kvm::Unusable("kvm_pvm".to_owned());
        assert_eq!(virtualization(VirtualizationSetting::Auto, &broken), Ok(Virtualization::Tcg));
        assert_eq!(virtualization(VirtualizationSetting::Auto, &Kvm::Usable), Ok(Virtualization::Kvm));
        let insist = VirtualizationSetting::Only(Virtualization::Kvm);
        assert!(virtualization(insist, &broken).unwrap_err().what.contains("kvm_pvm"));
    }

    #[tokio::test]
    async fn a_missing_binary_is_reported_with_what_mends_it() {
        let report = report(Path::new("/nonexistent/qemu"), VirtualizationSetting::Auto).await;
        assert_eq!(report.version, None);
        assert!(report.missing.iter().any(|missing| missing.mend.contains("apt-get install")));
    }
}
