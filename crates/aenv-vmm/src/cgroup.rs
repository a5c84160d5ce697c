//! A control group for each VMM, where the host lets us make one. Best effort: without it a VMM runs unlimited, as the
//! log says, and nothing else changes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_types::{MachineShape, SandboxId};

const ROOT: &str = "/sys/fs/cgroup";
const FOLDER: &str = "aenv";

/// What the VMM itself may use beyond guest memory: translation buffer, heap, device queues.
const OVERHEAD_MIB: u64 = 256;

/// Puts process `pid` into the group of its sandbox, limited to what its machine can need.
pub(crate) fn join(pid: i32, sandbox: &SandboxId, shape: MachineShape) {
    let memory = (u64::from(shape.memory_mib) + OVERHEAD_MIB) << 20;
    // One thread for each vCPU, and those that serve disks (64 at most) and the main loop.
    let tasks = u64::from(shape.vcpus) + 96;
    for parent in parents() {
        let group = parent.path.join(FOLDER).join(sandbox.as_str());
        let joined = fs::create_dir_all(&group).and_then(|()| {
            for (file, value) in limits(parent.kind, memory, tasks) {
                if let Err(error) = fs::write(group.join(file), value.to_string()) {
                    tracing::debug!(%error, group = %group.display(), file, "no limit");
                }
            }
            fs::write(group.join("cgroup.procs"), pid.to_string())
        });
        if let Err(error) = joined {
            tracing::debug!(%error, group = %group.display(), "no control group");
        }
    }
}

/// Removes the groups of a sandbox whose VMM has ended.
pub(crate) fn remove(sandbox: &SandboxId) {
    for parent in parents() {
        let group = parent.path.join(FOLDER).join(sandbox.as_str());
        match fs::remove_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(%error, group = %group.display(), "a control group stays");
            }
            _ => {}
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unified,
    Memory,
    Pids,
}

struct Parent {
    kind: Kind,
    path: PathBuf,
}

fn limits(kind: Kind, memory: u64, tasks: u64) -> Vec<(&'static str, u64)> {
    match kind {
        Kind::Unified => vec![("memory.max", memory), ("pids.max", tasks)],
        Kind::Memory => vec![("memory.limit_in_bytes", memory)],
        Kind::Pids => vec![("pids.max", tasks)],
    }
}

/// Version 2: one hierarchy, ours directly below its root. Version 1: below the server's own group, so that limits on the server
/// hold for its VMMs too.
fn parents() -> Vec<Parent> {
    let root = Path::new(ROOT);
    if root.join("cgroup.controllers").exists() {
        let folder = root.join(FOLDER);
        for place in [root, &folder] {
            // Refused in a container whose root group holds processes: then there are no limits.
            let _ = fs::create_dir_all(&folder)
                .and_then(|()| fs::write(place.join("cgroup.subtree_control"), "+memory +pids"));
        }
        return vec![Parent { kind: Kind::Unified, path: root.to_owned() }];
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    [(Kind::Memory, "memory"), (Kind::Pids, "pids")]
        .into_iter()
        .filter_map(|(kind, name)| {
            let path = root.join(name).join(own_group(&own, name)?.trim_start_matches('/'));
            path.is_dir().then_some(Parent { kind, path })
        })
        .collect()
}

/// The group of a version 1 controller in `/proc/self/cgroup`: `4:memory:/group`.
fn own_group<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_groups_are_found() {
        let text = "9:name=systemd:/\n8:pids:/\n4:cpu,memory:/a/b\n0::/\n";
        assert_eq!(own_group(text, "pids"), Some("/"));
        assert_eq!(own_group(text, "memory"), Some("/a/b"));
        assert_eq!(own_group(text, "hugetlb"), None);
    }
}
