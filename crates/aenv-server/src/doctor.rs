//! `aenv-server doctor`: what this host can do, what is missing, and the command that mends it.

use std::path::{Path, PathBuf};

use aenv_blockd::ExportChoice;
use aenv_types::Home;
use aenv_vmm::choose;
use serde::Serialize;

use crate::{artifacts, config::Config, node};

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: &'static str,
    /// How it is.
    pub verdict: Verdict,
    /// What was found.
    pub detail: String,
    /// A command that mends it, or what to do; empty when nothing is to be done.
    pub mend: String,
}

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It can be used.
    Ok,
    /// It works, but not as well as it could.
    Warning,
    /// No sandbox can run.
    Missing,
}

fn finding(
    check: &'static str,
    verdict: Verdict,
    detail: impl Into<String>,
    mend: impl Into<String>,
) -> Finding {
    Finding { check, verdict, detail: detail.into(), mend: mend.into() }
}

/// Looks at everything.
pub async fn examine(config: &Config) -> Vec<Finding> {
    let home = node::home(config);
    let mut findings = vec![kernel(), exports(node::export_choice(config)), capabilities()];
    findings.extend(engines(config, &home).await);
    findings.push(jail(config, &home));
    findings.push(match artifacts::find(&home, config) {
        Ok(found) => guest(config, &found.kernel),
        Err(error) => finding("guest", Verdict::Missing, error.to_string(), "aenv-server setup"),
    });
    findings.push(match node::blockd_binary(config) {
        Ok(path) => finding("blockd", Verdict::Ok, path.display().to_string(), ""),
        Err(error) => finding("blockd", Verdict::Missing, error.to_string(), "make build"),
    });
    findings.push(tracking(node::tracker()));
    for (program, package) in [("nft", "nftables"), ("mkfs.ext4", "e2fsprogs")] {
        findings.push(match in_path(program) {
            true => finding("programs", Verdict::Ok, program, ""),
            false => finding(
                "programs",
                Verdict::Missing,
                format!("{program} is not in PATH"),
                format!("apt-get install {package}"),
            ),
        });
    }
    findings.push(disk(&home, config));
    findings
}

async fn engines(config: &Config, home: &Home) -> Vec<Finding> {
    let reports = node::reports(config, home).await;
    let mut findings = Vec::new();
    match choose(&reports, node::engine_setting(config)) {
        // What another one lacks is in the text.
        Ok((_, why)) => return vec![finding("engine", Verdict::Ok, why, "")],
        Err(error) => findings.push(finding("engine", Verdict::Missing, error.to_string(), "")),
    }
    for report in &reports {
        for missing in &report.missing {
            findings.push(finding("engine", Verdict::Missing, missing.what.clone(), missing.mend.clone()));
        }
    }
    findings
}

fn guest(config: &Config, kernel: &Path) -> Finding {
    let text = format!("kernel {}", kernel.display());
    if config.virtualization_mode != "pvm" {
        return finding("guest", Verdict::Ok, text, "");
    }
    let mend = "set kernel.image_path to a kernel with CONFIG_PVM_GUEST=y (docs/guest-kernel.md)";
    match aenv_guest::supports_pvm(kernel) {
        Ok(true) => finding("guest", Verdict::Ok, format!("{text}, built for PVM"), ""),
        Ok(false) => finding("guest", Verdict::Missing, format!("{text} was not built for PVM"), mend),
        Err(error) => finding("guest", Verdict::Missing, format!("{text}: {error}"), mend),
    }
}

/// What is missing for it, the engine has said.
fn jail(config: &Config, home: &Home) -> Finding {
    let Some(jail) = node::jail(config, home) else {
        let text = "VMMs run as root and see the whole host (qemu.jail.enabled = false)";
        return finding("jail", Verdict::Warning, text, "set qemu.jail.enabled to true");
    };
    if !jail.missing().is_empty() {
        return finding("jail", Verdict::Missing, "VMMs cannot be confined here", "");
    }
    let last = u64::from(jail.first_uid) + u64::from(jail.uids) - 1;
    let text = format!(
        "each VMM has a uid of its own from {} to {last} and sees only {}",
        jail.first_uid,
        jail.root.display()
    );
    finding("jail", Verdict::Ok, text, "")
}

/// PAGEMAP_SCAN came with Linux 6.7.
fn kernel() -> Finding {
    let release =
        nix::sys::utsname::uname().map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (6, 7) {
        return finding("kernel", Verdict::Ok, format!("Linux {release} has PAGEMAP_SCAN"), "");
    }
    let mend = "use Linux 6.7 or later, such as Debian's linux-image-amd64 from bookworm-backports";
    finding(
        "kernel",
        Verdict::Missing,
        format!("Linux {release} has no PAGEMAP_SCAN: memory cannot be captured"),
        mend,
    )
}

/// blockd decides when it starts, and makes a device to be sure; this says what it will find.
fn exports(choice: ExportChoice) -> Finding {
    let (ublk, fuse) = (Path::new("/dev/ublk-control").exists(), Path::new("/dev/fuse").exists());
    match (choice, ublk) {
        _ if !fuse => finding("exports", Verdict::Missing, "/dev/fuse does not exist", "modprobe fuse"),
        (ExportChoice::Fuse, _) => finding("exports", Verdict::Ok, "FUSE: blockd.export says so", ""),
        (_, true) => {
            finding("exports", Verdict::Ok, "disks by ublk, memory images by FUSE: ublk_drv is there", "")
        }
        (ExportChoice::Auto, false) => {
            finding("exports", Verdict::Ok, "FUSE: this kernel has no ublk_drv, or it is not loaded", "")
        }
        (ExportChoice::Ublk, false) => {
            let what = "blockd.export is \"ublk\", and there is no /dev/ublk-control";
            finding("exports", Verdict::Missing, what, "modprobe ublk_drv, or set blockd.export to \"auto\"")
        }
    }
}

fn tracking(library: Option<PathBuf>) -> Finding {
    let without = "libaenv_track.so does not lie beside the server, in a path without spaces and colons: each capture of a \
                   sandbox costs all that it changed since its launch";
    match library {
        Some(path) => finding("tracking", Verdict::Ok, path.display().to_string(), ""),
        None => finding("tracking", Verdict::Warning, without, "make build"),
    }
}

fn capabilities() -> Finding {
    if nix::unistd::geteuid().is_root() {
        finding("rights", Verdict::Ok, "running as root", "")
    } else {
        finding(
            "rights",
            Verdict::Missing,
            "namespaces, mounts and taps need root",
            "sudo aenv-server doctor",
        )
    }
}

fn disk(home: &Home, config: &Config) -> Finding {
    let folder = home.path().ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    let Ok(stat) = nix::sys::statvfs::statvfs(folder) else {
        return finding("disk", Verdict::Warning, format!("{} cannot be looked at", folder.display()), "");
    };
    let free = (stat.blocks_available() * stat.fragment_size()) >> 20;
    let text = format!("{free} MiB free on {}", folder.display());
    if free > config.orchestrator.disk_reserve_mib * 4 {
        finding("disk", Verdict::Ok, text, "")
    } else {
        finding("disk", Verdict::Warning, text, "free some space, or set home_path to a larger disk")
    }
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|folder| folder.join(program).exists())
}

/// The findings as text.
pub fn text(findings: &[Finding]) -> String {
    let mut out = String::new();
    for finding in findings {
        let mark = match finding.verdict {
            Verdict::Ok => "ok     ",
            Verdict::Warning => "warning",
            Verdict::Missing => "MISSING",
        };
        out.push_str(&format!("{mark}  {:<9} {}\n", finding.check, finding.detail));
        if !finding.mend.is_empty() {
            out.push_str(&format!("{:>20} mend it: {}\n", "", finding.mend));
        }
    }
    out
}
