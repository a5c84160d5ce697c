//! What a VMM process may do and see: a uid of its own, and a root of few files.
//!
//! Both engines get their uid, their limits and `no_new_privs` here. They differ in their root. A vm state of Firecracker holds the
//! paths of its disks, so that each process finds its own at the same paths: it is started in a [`Room`] of its own. QEMU is
//! told its disks when it has been running for a while already, and all of them share one folder.
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
//! Not a mount namespace for each QEMU: a process that waits does not know yet which files it will need.
//! Nothing here is writable for a VMM but its own disks.

mod contents;
mod room;
mod uids;

pub(crate) use contents::{FIRMWARE, in_path};
pub(crate) use room::{Mount, Room};

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use self::{
    contents::Contents,
    uids::{Claim, Uids},
};
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
        let lacking = lacking(&NEEDED);
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

/// Names of those capabilities that this process does not have.
pub(crate) fn lacking(needed: &[(u32, &'static str)]) -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let has = effective_capabilities(&status);
    let lacking = needed.iter().filter(|(bit, _)| has & (1 << bit) == 0).map(|(_, name)| *name);
    lacking.collect::<Vec<_>>().join(", ")
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
    /// Uids for the next processes that ask: finding some takes longer than all the rest of a place.
    spare: Mutex<Vec<(Instant, Claim)>>,
}

/// So long a spare uid may lie: another server that shares the range does not see it.
const SPARE: Duration = Duration::from_secs(10);
/// How many are found at once; of a small range a small part.
const SPARES: u32 = 16;

impl Jail {
    /// Makes nothing yet. `binary` is the VMM that will run in it.
    pub(crate) fn new(config: JailConfig, binary: &Path) -> Self {
        let contents = Contents::new(config.root.clone(), binary.to_owned());
        let uids = Arc::new(Uids::new(config.first_uid, config.uids));
        Self { root: config.root, contents, uids, spare: Mutex::default() }
    }

    /// A place for a QEMU that is about to start, with what it needs.
    pub(crate) async fn admit(self: &Arc<Self>) -> Result<Jailed, EngineError> {
        self.contents.fill().await?;
        self.claim().await
    }

    /// A uid for a process that is about to start.
    pub(crate) async fn claim(self: &Arc<Self>) -> Result<Jailed, EngineError> {
        let claim = match self.take_spare() {
            Some(claim) => claim,
            None => {
                let jail = Arc::clone(self);
                let found = tokio::task::spawn_blocking(move || jail.find_spares()).await;
                found.map_err(|e| EngineError::Start(e.to_string()))?.ok_or_else(|| {
                    EngineError::Start("all uids of VMMs are in use; raise qemu.jail.uids".to_owned())
                })?
            }
        };
        if self.spare().is_empty() {
            let jail = Arc::clone(self);
            tokio::task::spawn_blocking(move || {
                let one = jail.find_spares();
                jail.spare().extend(one.map(|claim| (Instant::now(), claim)));
            });
        }
        Ok(Jailed { jail: Arc::clone(self), uid: claim.uid(), claim: Some(claim) })
    }

    /// The boot with the paths of the host to the same copies.
    pub(crate) async fn lend(&self, spec: &BootSpec) -> Result<BootSpec, EngineError> {
        let inside = self.boot(spec).await?;
        let [kernel, initramfs] = [&inside.kernel, &inside.initramfs].map(|path| self.contents.outside(path));
        Ok(BootSpec { kernel, initramfs, ..inside })
    }

    /// One that was found lately; older ones go.
    fn take_spare(&self) -> Option<Claim> {
        let mut spare = self.spare();
        spare.retain(|(found, _)| found.elapsed() < SPARE);
        spare.pop().map(|(_, claim)| claim)
    }

    /// Looks for some, and returns one of them.
    fn find_spares(&self) -> Option<Claim> {
        let found = Instant::now();
        let most = (self.uids.count() / 16).clamp(1, SPARES) as usize;
        let mut claims = self.uids.claim(most);
        let one = claims.pop();
        self.spare().extend(claims.into_iter().map(|claim| (found, claim)));
        one
    }

    fn spare(&self) -> MutexGuard<'_, Vec<(Instant, Claim)>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The boot with the paths that a process in the jail finds its kernel and initramfs by.
    pub(crate) async fn boot(&self, spec: &BootSpec) -> Result<BootSpec, EngineError> {
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
    claim: Option<Claim>,
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
            self.own(&drive.path)?;
            Ok(Drive { path, ..drive.clone() })
        };
        drives.iter().map(give).collect()
    }

    /// Makes a file the process's own.
    pub(crate) fn own(&self, file: &Path) -> Result<(), EngineError> {
        std::os::unix::fs::chown(file, Some(self.uid), Some(self.uid))
            .map_err(|e| io_error(format!("give {} to a VMM", file.display()), e))
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

/// Becomes a user without groups, for good; its capabilities go with the program that it starts. Makes system calls only, for this
/// thread only: the functions of libc would tell all threads.
pub(crate) fn become_user(uid: u32) -> io::Result<()> {
    // SAFETY: the calls read no memory: the list of groups is empty.
    let done = unsafe {
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) == 0
            && libc::syscall(libc::SYS_setresgid, uid, uid, uid) == 0
            && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
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
