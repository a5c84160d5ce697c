//! What a launch takes of the host besides memory and disk: processes and open files, the server's and blockd's.
//!
//! They run out for all that runs on the host, and for a guest that is up when the server cannot open a connection to it any more. So a
//! launch is refused while some are left.

use std::{
    fs,
    path::{Path, PathBuf},
};

use aenv_types::Home;

/// Open files that are left alone, of each process. A launch takes about twenty.
const FILES_LEFT: u64 = 128;
/// Processes and threads that are left alone. A VMM has one for each vCPU, and up to a hundred while its disks are busy.
const TASKS_LEFT: u64 = 128;
/// Where control groups are.
const GROUPS: &str = "/sys/fs/cgroup";

/// What the host has too little of for another launch; `None`: of nothing. What cannot be looked at counts as enough.
pub(crate) fn lacking(home: &Home) -> Option<String> {
    let short = |left: Option<u64>, least: u64| left.filter(|left| *left < least);
    if let Some(left) = short(files_left("self"), FILES_LEFT) {
        return Some(format!("the server may open {left} more files, and {FILES_LEFT} are kept in reserve"));
    }
    let blockd = fs::read_to_string(home.runtime().join("blockd.pid")).ok();
    if let Some(left) = short(blockd.and_then(|pid| files_left(pid.trim())), FILES_LEFT) {
        return Some(format!("blockd may open {left} more files, and {FILES_LEFT} are kept in reserve"));
    }
    if let Some(left) = short(tasks_left(), TASKS_LEFT) {
        return Some(format!(
            "the host may have {left} more processes, and {TASKS_LEFT} are kept in reserve"
        ));
    }
    None
}

/// Files that a process may open still.
fn files_left(pid: &str) -> Option<u64> {
    let process = Path::new("/proc").join(pid);
    let limit = open_files(&fs::read_to_string(process.join("limits")).ok()?)?;
    let open = fs::read_dir(process.join("fd")).ok()?.count() as u64;
    Some(limit.saturating_sub(open))
}

/// The soft limit of open files in `/proc/<pid>/limits` (proc_pid_limits(5)).
fn open_files(limits: &str) -> Option<u64> {
    let values = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    values.split_whitespace().next()?.parse().ok()
}

/// Processes and threads that the host, or a control group of the server's, may have still.
fn tasks_left() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let there = fs::read_to_string("/proc/loadavg").ok().as_deref().and_then(tasks);
    let host = ["/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max"].map(number);
    let host = host.into_iter().flatten().map(|limit| limit.saturating_sub(there.unwrap_or_default()));
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    host.chain(groups(&own).iter().filter_map(|group| left_in(group))).min()
}

/// All processes and threads, as `/proc/loadavg` counts them (proc_loadavg(5)).
fn tasks(loadavg: &str) -> Option<u64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

/// The groups with a limit of processes that a process is in, by its `/proc/<pid>/cgroup` (cgroups(7)).
fn groups(cgroup: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let mount = match controllers {
            "" => PathBuf::from(GROUPS),
            named if named.split(',').any(|name| name == "pids") => Path::new(GROUPS).join(named),
            _ => continue,
        };
        let mut group = mount.join(path.trim_start_matches('/'));
        while group.starts_with(&mount) {
            found.push(group.clone());
            group.pop();
        }
    }
    found
}

/// Processes that may be added to a group; `None`: it has no limit.
fn left_in(group: &Path) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    Some(number("pids.max")?.saturating_sub(number("pids.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             1000                 1000                 processes \n\
                      Max open files            1024                 524288               files     \n";
        assert_eq!(open_files(limits), Some(1024));
        assert_eq!(open_files("Max open files            unlimited  unlimited  files"), None);
        assert_eq!(tasks("0.20 0.18 0.12 1/80 11206"), Some(80));
        let own = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let left = files_left("self").unwrap();
        let limit = open_files(&fs::read_to_string("/proc/self/limits").unwrap()).unwrap();
        assert!(left < limit && left + 4 * own >= limit, "{left} of {limit}, with {own} open");
        assert_eq!(files_left("0"), None);
        assert!(tasks_left().unwrap() > 0);
    }

    #[test]
    fn groups_are_found_up_to_their_mount() {
        let found = groups("12:cpu,cpuacct:/a\n8:pids:/a/b\n0::/c\n");
        let expected = ["pids/a/b", "pids/a", "pids", "c", ""];
        assert_eq!(found, expected.map(|path| Path::new(GROUPS).join(path)));
        let group = tempfile::tempdir().unwrap();
        assert_eq!(left_in(group.path()), None);
        fs::write(group.path().join("pids.max"), "100\n").unwrap();
        fs::write(group.path().join("pids.current"), "30\n").unwrap();
        assert_eq!(left_in(group.path()), Some(70));
        fs::write(group.path().join("pids.max"), "max\n").unwrap();
        assert_eq!(left_in(group.path()), None);
    }
}
