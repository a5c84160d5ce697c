//! What a VMM process may do and see: a uid of its own, and one folder as its root.
//!
//! QEMU drops its rights itself, once it has opened what it needs of the host (`/dev/kvm`, its libraries) and before it answers the
//! first command: it enters the folder, then becomes the uid, without groups or capabilities. `no_new_privs` is set before it is
//! even started. Everything that it opens later lies in the folder:
//!
//! ```text
//! <root>/                 0711, root's
//! <root>/exports/         blockd's mount. A disk belongs to the uid of its VMM; the name of a memory image is what opens it
//! <root>/firmware/        what the machine's memory begins with
//! <root>/modules/         parts of QEMU that it loads when it builds the machine
//! <root>/boot/            guest kernels and initramfs of cold boots
//! ```
//!
//! Not a mount namespace for each: the same files would have to be brought into every one.
//! Nothing here is writable for a VMM but its own disks.

mod contents;
mod uids;

pub(crate) use contents::FIRMWARE;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use self::{contents::Contents, uids::Uids};
use crate::{BootSpec, Drive, EngineError, Missing, process::io_error};

/// Open files of a VMM: its disks, sockets and event descriptors are some dozens.
const MOST_FILES: libc::rlim_t = 1024;

/// Capabilities that the server needs for it, by their numbers in linux/capability.h.
const NEEDED: [(u32, &str); 7] = [
    (0, "CAP_CHOWN"),
    (1, "CAP_DAC_OVERRIDE"),
    (5, "CAP_KILL"),
    (6, "CAP_SETGID"),
    (7, "CAP_SETUID"),
    (18, "CAP_SYS_CHROOT"),
    (19, "CAP_SYS_PTRACE"),
];

/// How VMM processes are confined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JailConfig {
    /// Their root folder, an absolute path. blockd's mount lies in it.
    pub root: PathBuf,
    /// The first of the uids (and gids) that they get; nobody else on the host uses them.
    pub first_uid: u32,
    /// How many there are: as many VMMs can run at once.
    pub uids: u32,
}

impl JailConfig {
    /// What this process lacks to make it.
    pub fn missing(&self) -> Vec<Missing> {
        let mend = "give the server what is missing, or set qemu.jail.enabled = false: VMMs are root then";
        let need = |what: String| Missing { what, mend: mend.to_owned() };
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let has = effective_capabilities(&status);
        let lacking = NEEDED.iter().filter(|(bit, _)| has & (1 << bit) == 0).map(|(_, name)| *name);
        let lacking = lacking.collect::<Vec<_>>().join(", ");
        let mut missing = Vec::new();
        if !lacking.is_empty() {
            missing.push(need(format!("VMMs cannot be confined: the server lacks {lacking}")));
        }
        for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
            let text = fs::read_to_string(map).unwrap_or_default();
            if !covers(&text, self.first_uid, self.uids) {
                let last = u64::from(self.first_uid) + u64::from(self.uids) - 1;
                let range = format!("{} to {last}", self.first_uid);
                missing.push(need(format!("VMMs cannot be confined: {map} has not all of {range}")));
            }
        }
        missing
    }
}

fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// Whether one line of a uid_map (`inside outside length`) has all of the range.
fn covers(map: &str, first: u32, count: u32) -> bool {
    let end = u64::from(first) + u64::from(count);
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_ascii_whitespace().filter_map(|n| n.parse().ok()).collect();
        matches!(numbers[..], [inside, _, length] if inside <= u64::from(first) && inside + length >= end)
    })
}

/// The folder and the uids.
#[derive(Debug)]
pub(crate) struct Jail {
    root: PathBuf,
    contents: Contents,
    uids: Arc<Uids>,
}

impl Jail {
    /// Makes nothing yet. `binary` is the QEMU that will run in it.
    pub(crate) fn new(config: JailConfig, binary: &Path) -> Self {
        let contents = Contents::new(config.root.clone(), binary.to_owned());
        let uids = Arc::new(Uids::new(config.first_uid, config.uids));
        Self { root: config.root, contents, uids }
    }

    /// A place in it for a process that is about to start.
    pub(crate) async fn admit(self: &Arc<Self>) -> Result<Jailed, EngineError> {
        self.contents.fill().await?;
        let uids = Arc::clone(&self.uids);
        let claimed = tokio::task::spawn_blocking(move || uids.claim()).await;
        let claim = claimed.map_err(|e| EngineError::Start(e.to_string()))?.ok_or_else(|| {
            EngineError::Start("all uids of VMMs are in use; raise qemu.jail.uids".to_owned())
        })?;
        Ok(Jailed { jail: Arc::clone(self), uid: claim.uid(), claim: Some(claim) })
    }

    /// The boot with the paths that a process in the jail finds its kernel and initramfs by.
    pub(crate) async fn boot(&self, spec: &BootSpec) -> Result<BootSpec, EngineError> {
        self.contents.fill().await?;
        let kernel = self.contents.lend(&spec.kernel, "kernel").await?;
        let initramfs = self.contents.lend(&spec.initramfs, "initramfs").await?;
        Ok(BootSpec { kernel, initramfs, ..spec.clone() })
    }
}

/// One process in the jail.
#[derive(Debug)]
pub(crate) struct Jailed {
    jail: Arc<Jail>,
    uid: u32,
    claim: Option<uids::Claim>,
}

impl Jailed {
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    pub(crate) fn root(&self) -> &Path {
        &self.jail.root
    }

    /// The process runs as its uid, as everybody can see: the uid need not be kept for it any more.
    pub(crate) fn entered(&mut self) {
        self.claim = None;
    }

    /// A path of the host as the process sees it.
    pub(crate) fn inside(&self, path: &Path) -> Result<PathBuf, EngineError> {
        match path.strip_prefix(&self.jail.root) {
            Ok(below) => Ok(Path::new("/").join(below)),
            Err(_) => Err(EngineError::Start(format!(
                "{} is not below {}, which is all that a VMM sees",
                path.display(),
                self.jail.root.display()
            ))),
        }
    }

    /// Makes the disks the process's own, and tells how it sees them.
    pub(crate) fn give(&self, drives: &[Drive]) -> Result<Vec<Drive>, EngineError> {
        let give = |drive: &Drive| {
            let path = self.inside(&drive.path)?;
            std::os::unix::fs::chown(&drive.path, Some(self.uid), Some(self.uid))
                .map_err(|e| io_error(format!("give away the disk {}", drive.path.display()), e))?;
            Ok(Drive { path, ..drive.clone() })
        };
        drives.iter().map(give).collect()
    }
}

/// Variables of the environment of a process in the jail.
pub(crate) const ENVIRONMENT: [(&str, &str); 1] = [("QEMU_MODULE_DIR", contents::MODULES)];

/// What is set before the program starts. Makes system calls only: it runs between fork and exec.
pub(crate) fn restrict() -> io::Result<()> {
    let limits = [(libc::RLIMIT_CORE, 0), (libc::RLIMIT_NOFILE, MOST_FILES)];
    for (resource, most) in limits {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is live for both calls.
        let set = unsafe {
            libc::getrlimit(resource, &raw mut limit) == 0 && {
                limit.rlim_max = limit.rlim_max.min(most);
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(resource, &raw const limit) == 0
            }
        };
        if !set {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: the call has no memory effects.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jail(root: &str) -> Arc<Jail> {
        let config = JailConfig { root: root.into(), first_uid: 1_900_000_000, uids: 8 };
        Arc::new(Jail::new(config, Path::new("/bin/true")))
    }

    #[test]
    fn paths_are_translated_and_others_refused() {
        let jailed = Jailed { jail: jail("/run/x/jail"), uid: 1, claim: None };
        let inside = jailed.inside(Path::new("/run/x/jail/exports/a.disk")).unwrap();
        assert_eq!(inside, Path::new("/exports/a.disk"));
        for outside in ["/run/x/jailer/a", "/run/x", "/etc/shadow"] {
            let error = jailed.inside(Path::new(outside)).unwrap_err().to_string();
            assert!(error.contains(outside) && error.contains("/run/x/jail"), "{error}");
        }
    }

    #[test]
    fn what_is_missing_is_read_from_proc() {
        assert_eq!(effective_capabilities("CapPrm:\tff\nCapEff:\t00000000000000c3\n"), 0xc3);
        assert_eq!(effective_capabilities(""), 0);
        let whole = "         0          0 4294967295\n";
        assert!(covers(whole, 1_900_000_000, 65536));
        let small = "         0     100000      65536\n";
        assert!(covers(small, 1000, 64536) && !covers(small, 1000, 64537));
    }
}
