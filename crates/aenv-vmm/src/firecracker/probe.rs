//! What Firecracker can do on this host, and what is missing.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use aenv_types::{Digest, EngineKind, EngineStamp, Virtualization};

use crate::{
    EngineError, EngineReport, Missing, VirtualizationSetting, jail,
    stamp::{self, Here},
    version::{self, parse},
};

/// The oldest release that this engine is made for.
const OLDEST: (u32, u32) = (1, 13);

/// Where its releases are.
const RELEASES: &str = "https://github.com/firecracker-microvm/firecracker/releases";

/// Capabilities that a server needs to give each process a root of its own.
const NEEDED: [(u32, &str); 3] = [(18, "CAP_SYS_CHROOT"), (21, "CAP_SYS_ADMIN"), (27, "CAP_MKNOD")];

/// What was found out once, at the first use.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) binary: PathBuf,
    pub(crate) version: String,
    pub(crate) virtualization: Virtualization,
    pub(crate) cpu: String,
}

pub(crate) async fn report(binary: &Path, setting: VirtualizationSetting, kvm: &Kvm) -> EngineReport {
    let mut missing = Vec::new();
    let mut need = |what: String, mend: String| missing.push(Missing { what, mend });
    let get =
        || format!("get a release from {RELEASES} and set firecracker.binary_path, or put it into PATH");
    let version = version::of(binary, "Firecracker v").await;
    match version.as_deref().map(parse) {
        None => need(format!("{} cannot be run: it starts the VMs", binary.display()), get()),
        Some(Some(found)) if found >= OLDEST => {
            if is_dynamic(binary) {
                let what = format!("{} needs libraries, which its root does not have", binary.display());
                need(what, format!("use the static binary of a release: {}", get()));
            }
        }
        Some(_) => need(
            format!(
                "Firecracker {} is too old: {}.{} or newer is needed",
                version.as_deref().unwrap_or("of unknown version"),
                OLDEST.0,
                OLDEST.1
            ),
            get(),
        ),
    }
    if !Path::new("/dev/net/tun").exists() {
        need(
            "/dev/net/tun is missing: guests have no network without it".to_owned(),
            "modprobe tun".to_owned(),
        );
    }
    let lacking = jail::lacking(&NEEDED);
    if !lacking.is_empty() {
        need(
            format!("VMMs get no root of their own: the server lacks {lacking}"),
            "run the server as root".to_owned(),
        );
    }
    let virtualization = match virtualization(setting, kvm) {
        Ok(found) => Some(found),
        Err(lacking) => {
            missing.push(lacking);
            None
        }
    };
    EngineReport { kind: EngineKind::Firecracker, version, virtualization, missing }
}

/// What `/dev/kvm` is on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kvm {
    Hardware,
    /// The module `kvm_pvm`: only guests built for it run.
    Pvm,
    Unusable(String),
}

impl Kvm {
    pub(crate) fn of_host(device: &Path, pvm_module: &Path) -> Self {
        match File::options().read(true).write(true).open(device) {
            Err(error) => Self::Unusable(format!("{}: {error}", device.display())),
            Ok(_) if pvm_module.exists() => Self::Pvm,
            Ok(_) => Self::Hardware,
        }
    }
}

fn virtualization(setting: VirtualizationSetting, kvm: &Kvm) -> Result<Virtualization, Missing> {
    use VirtualizationSetting::{Auto, Only};
    let lacking = |what: String, mend: &str| Err(Missing { what, mend: mend.to_owned() });
    match (setting, kvm) {
        (Only(Virtualization::Tcg), _) => lacking(
            "virtualization_mode is tcg, which Firecracker does not have".to_owned(),
            "set engine to qemu, or virtualization_mode to auto",
        ),
        (_, Kvm::Unusable(why)) => lacking(
            format!("Firecracker needs KVM: {why}"),
            "modprobe kvm_intel or kvm_amd, on a host with VT-x or AMD-V; engine = \"qemu\" works without",
        ),
        (Auto | Only(Virtualization::Kvm), Kvm::Hardware) => Ok(Virtualization::Kvm),
        (Only(Virtualization::Pvm), Kvm::Pvm) => Ok(Virtualization::Pvm),
        (Auto | Only(Virtualization::Kvm), Kvm::Pvm) => lacking(
            "only guests built for PVM run on this host's KVM (kvm_pvm is loaded)".to_owned(),
            "set kernel.image_path to a kernel with CONFIG_PVM_GUEST and virtualization_mode to pvm, or use a host with VT-x or AMD-V",
        ),
        (Only(Virtualization::Pvm), Kvm::Hardware) => lacking(
            "virtualization_mode is pvm, and kvm_pvm is not loaded".to_owned(),
            "modprobe kvm_pvm, or set virtualization_mode to auto",
        ),
    }
}

/// Whether an ELF program asks for a dynamic linker (a program header of type `PT_INTERP`).
fn is_dynamic(binary: &Path) -> bool {
    const PT_INTERP: u32 = 3;
    let mut head = Vec::new();
    let read = File::open(binary).and_then(|file| file.take(4096).read_to_end(&mut head));
    if read.is_err() || !head.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = head.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let (Some(first), Some(size), Some(count)) = (number(32, 8), number(54, 2), number(56, 2)) else {
        return false;
    };
    (0..count).any(|index| {
        let at = usize::try_from(first + index * size).unwrap_or(usize::MAX - 4);
        number(at, 4) == Some(u64::from(PT_INTERP))
    })
}

/// The CPU that guests see: a template, or this host's own, by what distinguishes hosts.
pub(crate) fn cpu_baseline(template: Option<&[u8]>) -> String {
    if let Some(text) = template {
        return format!("template:{}", &Digest::of(text).hex()[..16]);
    }
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    host_cpu(&text)
}

fn host_cpu(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("", |(_, value)| value.trim())
    };
    let flags = &Digest::of(field("flags").as_bytes()).hex()[..16];
    let [vendor, family, model] = ["vendor_id", "cpu family", "model"].map(field);
    format!("host:{vendor}-{family}-{model}-{flags}")
}

/// Whether a vm state of this stamp can be continued here; says why not before anything starts.
pub(crate) fn check_stamp(stamp: &EngineStamp, host: &Host) -> Result<(), EngineError> {
    stamp::check(
        stamp,
        Here {
            kind: EngineKind::Firecracker,
            virtualization: host.virtualization,
            cpu: &host.cpu,
            cpu_mend: "; hosts that share checkpoints need one firecracker.cpu_template",
        },
    )?;
    match (parse(&stamp.version), parse(&host.version)) {
        (Some(theirs), Some(ours)) if theirs == ours => Ok(()),
        _ => Err(stamp::refusal(format!(
            "it was made by Firecracker {}, whose vm state Firecracker {} is not known to load; launch it on a node with that \
             version, or build its template again",
            stamp.version, host.version
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host {
            binary: "firecracker".into(),
            version: "1.16.1".to_owned(),
            virtualization: Virtualization::Kvm,
            cpu: "host:x".to_owned(),
        }
    }

    fn stamp(version: &str) -> EngineStamp {
        EngineStamp {
            kind: EngineKind::Firecracker,
            version: version.to_owned(),
            virtualization: Virtualization::Kvm,
            cpu_baseline: "host:x".to_owned(),
            kernel: Digest::of(b""),
        }
    }

    #[test]
    fn only_what_fits_is_launched() {
        let why = |stamp: &EngineStamp| check_stamp(stamp, &host()).err().map(|error| error.to_string());
        assert_eq!(why(&stamp("1.16.0")), None);
        assert!(why(&stamp("1.15.1")).unwrap().contains("1.15.1"));
        assert!(why(&stamp("x")).is_some());
        let pvm = EngineStamp { virtualization: Virtualization::Pvm, ..stamp("1.16.1") };
        assert!(why(&pvm).unwrap().contains("Pvm"));
        let cpu = EngineStamp { cpu_baseline: "host:y".to_owned(), ..stamp("1.16.1") };
        assert!(why(&cpu).unwrap().contains("cpu_template"));
        let qemu = EngineStamp { kind: EngineKind::Qemu, ..stamp("1.16.1") };
        assert!(why(&qemu).unwrap().contains("Qemu"));
    }

    #[test]
    fn pvm_is_used_only_by_who_asks_for_it() {
        use VirtualizationSetting::{Auto, Only};
        let what = |setting, kvm: &Kvm| virtualization(setting, kvm).map_err(|lacking| lacking.what);
        assert_eq!(what(Auto, &Kvm::Hardware), Ok(Virtualization::Kvm));
        assert!(what(Auto, &Kvm::Pvm).unwrap_err().contains("kvm_pvm"));
        assert_eq!(what(Only(Virtualization::Pvm), &Kvm::Pvm), Ok(Virtualization::Pvm));
        assert!(what(Only(Virtualization::Pvm), &Kvm::Hardware).is_err());
        assert!(what(Only(Virtualization::Tcg), &Kvm::Hardware).is_err());
        assert!(what(Auto, &Kvm::Unusable("no".to_owned())).unwrap_err().contains("no"));
    }

    #[test]
    fn a_cpu_is_known_by_its_flags() {
        let info = "vendor_id\t: AuthenticAMD\ncpu family\t: 23\nmodel\t\t: 1\nmodel name\t: EPYC\nflags\t\t: fpu sse\n";
        let own = host_cpu(info);
        assert!(own.starts_with("host:AuthenticAMD-23-1-"), "{own}");
        assert_ne!(host_cpu(&info.replace("sse", "sse avx")), own);
        assert!(cpu_baseline(Some(b"{}")).starts_with("template:"));
    }

    #[test]
    fn programs_that_need_libraries_are_known() {
        assert!(is_dynamic(&std::env::current_exe().unwrap()));
        assert!(!is_dynamic(Path::new("/bin/busybox")), "busybox-static");
        assert!(!is_dynamic(Path::new("/proc/self/cmdline")));
    }
}
