//! Every configuration key, once: its name, what it takes and what it is for. Files, environment and flags are read by it.

/// What a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// A text that is never printed.
    Secret,
    /// A whole number, not negative.
    Integer,
    /// A number, not negative, with or without a fraction.
    Number,
    /// `true` or `false`.
    Bool,
    /// A list of texts; comma-separated in the environment.
    List,
    /// One of these.
    Choice(&'static [&'static str]),
}

/// A configuration key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Dotted name, as in the file.
    pub name: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// What it is for.
    pub about: &'static str,
}

impl Key {
    /// Its environment variable: `AENV_` and the name in capitals, dots as underscores.
    pub fn variable(&self) -> String {
        format!("AENV_{}", self.name.to_ascii_uppercase().replace('.', "_"))
    }
}

const fn key(name: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { name, kind, about }
}

use Kind::{Bool, Choice, Integer, List, Number, Secret, Text};

/// All of them, in the order in which they are printed.
pub const KEYS: &[Key] = &[
    key("api_addr", Text, "address and port of the API and the data plane"),
    key("tls.cert_path", Text, "certificate chain (PEM) of api_addr; plain HTTP when unset"),
    key("tls.key_path", Text, "its private key (PEM)"),
    key("tls.names", List, "names and addresses of a certificate that the server makes by itself"),
    key("home_path", Text, "what survives a reboot"),
    key("runtime_path", Text, "sockets and mounts of this boot"),
    key("virtualization_mode", Choice(&["auto", "kvm", "pvm", "tcg"]), "what runs the guests' instructions"),
    key("engine", Choice(&["auto", "firecracker", "qemu"]), "the VMM of new sandboxes"),
    key("firecracker.binary_path", Text, "the firecracker binary; found in PATH when unset"),
    key(
        "firecracker.cpu_template",
        Text,
        "a CPU template (JSON) that hosts share; the host's own CPU when unset",
    ),
    key("qemu.binary_path", Text, "the qemu-system binary; found in PATH when unset"),
    key("qemu.warm", Integer, "QEMU processes that wait for work"),
    key("qemu.jail.enabled", Bool, "each VMM process has a uid of its own and sees nothing of the host"),
    key("qemu.jail.first_uid", Integer, "the first of these uids (and gids); nobody else may use them"),
    key("qemu.jail.uids", Integer, "how many there are"),
    key("blockd.binary_path", Text, "the aenv-blockd binary; found beside the server when unset"),
    key(
        "blockd.export",
        Choice(&["auto", "ublk", "fuse"]),
        "how disks are shown; auto: ublk where the machine has it",
    ),
    key("kernel.image_path", Text, "guest kernel (ELF vmlinux); the one of `aenv-server setup` when unset"),
    key("kernel.initramfs_path", Text, "guest initramfs; the one of `aenv-server setup` when unset"),
    key("machine.vcpu_count", Integer, "vCPUs of a machine that names none"),
    key("machine.mem_size_mib", Integer, "memory of a machine that names none"),
    key("machine.disk_size_mib", Integer, "root disk of a machine that names none"),
    key("orchestrator.default_sandbox_timeout_secs", Integer, "time to live of a sandbox that names none"),
    key("orchestrator.max_sandbox_timeout_secs", Integer, "longest time to live that a client may ask for"),
    key(
        "orchestrator.auto_resume_min_sandbox_timeout_secs",
        Integer,
        "least time to live after an auto-resume",
    ),
    key(
        "orchestrator.default_on_timeout",
        Choice(&["pause", "kill"]),
        "at the deadline of a sandbox that does not say",
    ),
    key(
        "orchestrator.stand_after_deadline_secs",
        Integer,
        "the VMM of a sandbox that was paused at its deadline stands for so long; 0: it ends",
    ),
    key("orchestrator.max_running", Integer, "sandboxes that may run at once"),
    key(
        "orchestrator.memory_mib",
        Integer,
        "guest memory that sandboxes may take; from the host's memory when unset",
    ),
    key("orchestrator.memory_overcommit", Number, "so many times that may be promised to them"),
    key(
        "orchestrator.memory_reserve_mib",
        Integer,
        "memory of the host that is kept available; 5 % of it when unset, 0: not looked at",
    ),
    key(
        "orchestrator.memory_idle_secs",
        Integer,
        "guests without traffic for so long give memory back when the host has less",
    ),
    key(
        "orchestrator.share_memory_across_teams",
        Bool,
        "guests of different teams share pages of a memory image that both were launched from",
    ),
    key("orchestrator.disk_reserve_mib", Integer, "free space below which new work is refused"),
    key(
        "orchestrator.parallel_launches",
        Integer,
        "launches under way at once; twice the number of cores when unset",
    ),
    key(
        "orchestrator.standby.count",
        Integer,
        "sandboxes that are launched ahead for each template in use; 0: none",
    ),
    key("orchestrator.standby.templates", Integer, "templates (and snapshots) that have them; 0: none"),
    key("orchestrator.standby.keep_secs", Integer, "how long they are kept after the last create"),
    key("snapshot.repository_backend", Choice(&["posix_fs", "oss"]), "where committed snapshots lie"),
    key("snapshot.gc_interval_secs", Integer, "between two garbage collections; 0: none by itself"),
    key("snapshot.gc_grace_secs", Integer, "what is younger is not collected"),
    key(
        "snapshot.on_demand",
        Choice(&["auto", "always", "never"]),
        "layers are read when a guest needs them, not fetched before a launch; auto: with oss",
    ),
    key("snapshot.background_fill", Bool, "fetch the rest of such layers in the background"),
    key("snapshot.remote_read_timeout_secs", Integer, "a read of a remote layer fails after so long"),
    key(
        "snapshot.publish_paused",
        Bool,
        "paused sandboxes go to the repository, and any node that shares it resumes them",
    ),
    key(
        "retention.max_age_secs",
        Integer,
        "unnamed snapshots and untagged builds that are older go; never when unset",
    ),
    key(
        "retention.max_count",
        Integer,
        "how many of them stay, of a team and of a template; any number when unset",
    ),
    key(
        "backend.posix_fs.snapshot_store",
        Text,
        "folder of the posix_fs repository; <home_path>/repository when unset",
    ),
    key("backend.oss.endpoint", Text, "URL of the object store; the provider's own when unset"),
    key("backend.oss.bucket", Text, "bucket"),
    key("backend.oss.prefix", Text, "prefix of every key"),
    key("backend.oss.region", Text, "region; required with oss"),
    key("backend.oss.addressing_style", Choice(&["path", "virtual"]), "host/bucket, or bucket.host"),
    key("backend.oss.access_key_id", Text, "static key; environment and instance roles when unset"),
    key("backend.oss.access_key_secret", Secret, "its secret"),
    key("image.resolver.default_image", Text, "image of a template that names none"),
    key("image.resolver.search_registries", List, "registries at which short names are tried, in order"),
    key("image.resolver.allowed_registries", List, "registries that may be pulled from; all when empty"),
    key("volumes.max_size_mib", Integer, "most that the files of one volume may take"),
    key("volumes.max_per_team", Integer, "volumes that one team may have"),
    key(
        "image.cache.root_dir",
        Text,
        "folder of the cache of remote layers; <home_path>/cache/blocks when unset",
    ),
    key(
        "image.cache.capacity_gb",
        Integer,
        "what the cache of remote layers may take, and as much again local images, cached steps and copies of blobs",
    ),
    key("image.max_layer_table_mib", Integer, "index or jump table of a layer in overlaybd format"),
    key("pool.low_watermark", Integer, "network slots that are kept ready"),
    key("pool.high_watermark", Integer, "network slots that are kept at most"),
    key("network.egress.always_denied_cidrs", List, "what no sandbox reaches, besides the host itself"),
    key(
        "network.egress.extra_ca",
        Text,
        "PEM file of CAs that hosts with header rules are believed by, besides the system's",
    ),
    key("network.internal.host_interaction_cidr", Text, "addresses by which the host reaches guests"),
    key("network.internal.veth_cidr", Text, "addresses of the links between namespaces and host"),
    key("sandbox_proxy.domains", List, "domains of <port>-<sandboxID>.<domain>; any when empty"),
    key("p2p.enabled", Bool, "fetch blobs from other nodes first"),
    key("p2p.transport", Choice(&["iroh"]), "how"),
    key("p2p.listen_addr", Text, "address of the peer-to-peer endpoint"),
    key("cluster.etcd_endpoints", List, "etcd of the cluster; none: a node of its own"),
    key("cluster.scheduler_endpoint", Text, "scheduler of the cluster"),
    key("cluster.advertise_addr", Text, "address by which others reach this node"),
    key("limits.max_running_sandboxes", Integer, "sandboxes that a team may have running"),
    key("limits.max_memory_mib", Integer, "memory of a team's running sandboxes"),
    key("limits.max_starting_sandboxes", Integer, "sandboxes of a team that may start at once"),
    key("limits.max_requests_per_second", Integer, "calls of the API that a team may make"),
    key("limits.max_templates", Integer, "templates of a team"),
    key("limits.max_snapshots", Integer, "snapshots of a team"),
    key("limits.max_repository_mib", Integer, "what a team's templates and snapshots may take"),
    key("node_identity.id", Text, "id of this node; its host name when unset"),
    key("node_identity.cluster_id", Text, "id of its cluster"),
    key("log.filter", Text, "what is logged (RUST_LOG)"),
    key("log.format", Choice(&["compact", "pretty", "json"]), "how (AENV_LOG_FORMAT)"),
];

/// Variables that belong to AgentENV but are no configuration keys.
pub const OTHER_VARIABLES: &[&str] =
    &["AENV_API_KEY", "AENV_API_KEY_FILE", "AENV_CA_CERT", "AENV_CONFIG_PATH", "AENV_URL", "AENV_LOG_FORMAT"];

/// The key of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The name among `KEYS` that is most like this one, if any is like it at all.
pub fn nearest(name: &str) -> Option<&'static str> {
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let score = |key: &Key| {
        let whole = strsim::normalized_damerau_levenshtein(name, key.name);
        whole.max(strsim::normalized_damerau_levenshtein(&last(name), &last(key.name)) * 0.95)
    };
    let best = KEYS.iter().max_by(|a, b| score(a).total_cmp(&score(b)))?;
    (score(best) > 0.6).then_some(best.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_variables_are_unique() {
        let mut variables: Vec<_> = KEYS.iter().map(Key::variable).collect();
        variables.sort();
        variables.dedup();
        assert_eq!(variables.len(), KEYS.len());
        for other in OTHER_VARIABLES {
            assert!(*other == "AENV_LOG_FORMAT" || !variables.contains(&(*other).to_owned()), "{other}");
        }
    }

    #[test]
    fn a_slip_of_the_pen_is_recognised() {
        assert_eq!(nearest("home_pth"), Some("home_path"));
        assert_eq!(
            nearest("orchestrator.default_timeout_secs"),
            Some("orchestrator.default_sandbox_timeout_secs")
        );
        assert_eq!(nearest("machine.vcpus_count"), Some("machine.vcpu_count"));
        assert_eq!(nearest("zzzzqqqq"), None);
    }
}
