//! The few kernel settings that differ from the kernel's own defaults, each with its reason.

use std::fs;

use crate::say;

const SETTINGS: &[(&str, &str)] = &[
    // Development servers and editors watch whole source trees.
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "1024"),
    // Search engines and language runtimes with many mappings refuse to start below this.
    ("vm/max_map_count", "262144"),
    // `ping` for every user, without a setuid binary.
    ("net/ipv4/ping_group_range", "0 2147483647"),
    // A sandbox belongs to one user: its own programs may serve port 80.
    ("net/ipv4/ip_unprivileged_port_start", "0"),
];

/// Applies them; one that this kernel does not know is passed over.
pub fn apply() {
    for (name, value) in SETTINGS {
        if let Err(error) = fs::write(format!("/proc/sys/{name}"), value) {
            say(format_args!("sysctl {name} stays as it is: {error}"));
        }
    }
    if let Err(errno) = nix::unistd::sethostname("sandbox") {
        say(format_args!("the hostname stays as it is: {errno}"));
    }
}
