//! The processes of a server on this machine, read from `/proc`: whose they are, what memory they hold, what CPU they use.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The variable that every VMM has; its value is the runtime folder of the server that it belongs to.
const OWNER: &str = "AENV_VMM_OWNER=";
/// Ticks of `/proc/PID/stat` in a second: `USER_HZ`, which is 100 on every architecture that Linux offers this on.
const TICKS: f64 = 100.0;

/// A VMM.
pub(super) struct Vmm {
    pub(super) pid: u32,
    /// Runtime folder of its server.
    pub(super) owner: PathBuf,
    /// What it has open.
    files: Vec<PathBuf>,
}

/// Memory of a process in MiB, what it shares with others divided among them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Memory {
    /// Proportional set size.
    pub(super) pss: f64,
    /// The part of it that no file stands behind.
    pub(super) anonymous: f64,
}

impl Vmm {
    /// Every VMM whose environment this user may read.
    pub(super) fn all() -> Vec<Self> {
        pids().filter_map(Self::of).collect()
    }

    fn of(pid: u32) -> Option<Self> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let owner =
            environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(OWNER.as_bytes()))?;
        let owner = PathBuf::from(String::from_utf8_lossy(owner).into_owned());
        let files = entries(format!("/proc/{pid}/fd")).filter_map(|file| fs::read_link(file).ok());
        Some(Self { pid, owner, files: files.collect() })
    }

    /// Whether it runs this sandbox: it has its disk open.
    pub(super) fn runs(&self, sandbox: &str) -> bool {
        self.files.iter().any(|file| file.to_string_lossy().contains(sandbox))
    }

    /// Whether it waits for a sandbox: it has nothing open of what blockd serves.
    pub(super) fn waits(&self) -> bool {
        let exports = self.owner.join("exports");
        !self.files.iter().any(|file| file.starts_with(&exports))
    }

    /// The blockd that serves its disks.
    pub(super) fn blockd(&self) -> Option<u32> {
        fs::read_to_string(self.owner.join("blockd.pid")).ok()?.trim().parse().ok()
    }

    /// The server that watches it: the one that holds a descriptor of this process.
    pub(super) fn server(&self) -> Option<u32> {
        let line = format!("Pid:\t{}", self.pid);
        let watches = |pid: &u32| {
            let mut descriptors = entries(format!("/proc/{pid}/fdinfo"));
            descriptors.any(|info| {
                fs::read_to_string(info).is_ok_and(|text| text.lines().any(|found| found == line))
            })
        };
        pids().filter(|pid| name(*pid).is_some_and(|name| name == "aenv-server")).find(watches)
    }
}

/// What a process holds; nothing when it has ended or belongs to somebody else.
pub(super) fn memory(pid: u32) -> Option<Memory> {
    rollup(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
}

/// Seconds of CPU that a process has used.
pub(super) fn cpu_seconds(pid: u32) -> Option<f64> {
    ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn rollup(text: &str) -> Option<Memory> {
    let mib = |wanted: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(wanted))?;
        Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
    };
    Some(Memory { pss: mib("Pss:")?, anonymous: mib("Pss_Anon:")? })
}

/// User and system time: the 14th and 15th field. The second one, the name, may contain anything, blanks too.
fn ticks(stat: &str) -> Option<f64> {
    let mut after_name = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (f64, f64) = (after_name.next()?.parse().ok()?, after_name.next()?.parse().ok()?);
    Some((user + system) / TICKS)
}

fn name(pid: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}

fn pids() -> impl Iterator<Item = u32> {
    entries("/proc").filter_map(|entry| entry.file_name()?.to_str()?.parse().ok())
}

fn entries(folder: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_forms() {
        let text = "00400000-7ff0 ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nPss:                2048 kB\nPss_Anon:           512 kB\n";
        assert_eq!(rollup(text), Some(Memory { pss: 2.0, anonymous: 0.5 }));
        assert_eq!(rollup(""), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 150 50 0 0 20 0 3 0 99";
        assert_eq!(ticks(stat), Some(2.0));
        assert_eq!(ticks("7 (a"), None);
    }

    #[test]
    fn this_process_can_be_read() {
        let own = std::process::id();
        assert!(memory(own).is_some_and(|memory| memory.pss > 0.0));
        assert!(cpu_seconds(own).is_some());
    }
}
