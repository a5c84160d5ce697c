//! The configuration: a TOML file, then the environment, then flags. Each value knows where it came from.
//!
//! [`keys::KEYS`] names every key; [`load`] reads them; [`Config`] is what the rest of the server sees.

pub mod check;
pub mod keys;
pub mod load;

use std::path::PathBuf;

use serde::Deserialize;

pub use load::{ConfigError, Loaded, Origin, Sources};

/// The effective configuration. Names and meanings are those of [`keys::KEYS`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Config {
    pub api_addr: String,
    #[serde(default)]
    pub tls: Tls,
    pub home_path: PathBuf,
    pub runtime_path: PathBuf,
    pub virtualization_mode: String,
    pub engine: String,
    #[serde(default)]
    pub firecracker: Firecracker,
    pub qemu: Qemu,
    pub blockd: Blockd,
    #[serde(default)]
    pub kernel: Kernel,
    pub machine: Machine,
    pub orchestrator: Orchestrator,
    pub snapshot: Snapshot,
    #[serde(default)]
    pub retention: Retention,
    #[serde(default)]
    pub backend: Backend,
    pub image: Image,
    pub volumes: Volumes,
    pub pool: Pool,
    pub network: Network,
    pub sandbox_proxy: SandboxProxy,
    pub p2p: P2p,
    pub cluster: Cluster,
    #[serde(default)]
    pub node_identity: NodeIdentity,
    pub log: Log,
    #[serde(default)]
    pub limits: Limits,
}

macro_rules! section {
    ($($name:ident { $($(#[$attr:meta])* $field:ident: $ty:ty),* $(,)? })*) => {$(
        /// A section of the configuration; see [`keys::KEYS`].
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(missing_docs)]
        pub struct $name { $($(#[$attr])* pub $field: $ty),* }
    )*};
}

section! {
    Tls { cert_path: Option<PathBuf>, key_path: Option<PathBuf>, names: Vec<String> }
    Firecracker { binary_path: Option<PathBuf>, cpu_template: Option<PathBuf> }
    Qemu { binary_path: Option<PathBuf>, warm: Option<u64>, jail: QemuJail }
    QemuJail { enabled: bool, first_uid: u32, uids: u32 }
    Blockd { binary_path: Option<PathBuf>, export: String }
    Kernel { image_path: Option<PathBuf>, initramfs_path: Option<PathBuf> }
    Machine { vcpu_count: u32, mem_size_mib: u32, disk_size_mib: u32 }
    Orchestrator {
        default_sandbox_timeout_secs: u64,
        max_sandbox_timeout_secs: u64,
        auto_resume_min_sandbox_timeout_secs: u64,
        default_on_timeout: String,
        stand_after_deadline_secs: u64,
        max_running: u32,
        memory_mib: Option<u64>,
        memory_overcommit: f64,
        memory_reserve_mib: Option<u64>,
        memory_idle_secs: u64,
        share_memory_across_teams: bool,
        disk_reserve_mib: u64,
        parallel_launches: Option<usize>,
        standby: Standby,
    }
    Standby { count: usize, templates: usize, keep_secs: u64 }
    Snapshot {
        repository_backend: String,
        gc_interval_secs: u64,
        gc_grace_secs: u64,
        on_demand: String,
        background_fill: bool,
        remote_read_timeout_secs: u64,
        publish_paused: bool,
    }
    Retention { max_age_secs: Option<u64>, max_count: Option<usize> }
    Backend { #[serde(default)] posix_fs: PosixFs, #[serde(default)] oss: Oss }
    PosixFs { snapshot_store: Option<PathBuf> }
    Oss {
        endpoint: Option<String>,
        bucket: Option<String>,
        prefix: Option<String>,
        region: Option<String>,
        addressing_style: Option<String>,
        access_key_id: Option<String>,
        access_key_secret: Option<String>,
    }
    Image { max_layer_table_mib: u64, resolver: Resolver, cache: ImageCache }
    Resolver { default_image: String, search_registries: Vec<String>, allowed_registries: Vec<String> }
    ImageCache { root_dir: Option<PathBuf>, capacity_gb: u64 }
    Volumes { max_size_mib: u64, max_per_team: u64 }
    Pool { low_watermark: u32, high_watermark: u32 }
    Network { egress: Egress, internal: Internal }
    Egress { always_denied_cidrs: Vec<String>, extra_ca: Option<PathBuf> }
    Internal { host_interaction_cidr: String, veth_cidr: String }
    SandboxProxy { domains: Vec<String> }
    P2p { enabled: bool, transport: String, listen_addr: Option<String> }
    Cluster {
        etcd_endpoints: Vec<String>,
        scheduler_endpoint: Option<String>,
        advertise_addr: Option<String>,
    }
    NodeIdentity { id: Option<String>, cluster_id: Option<String> }
    Log { filter: String, format: String }
    Limits {
        max_running_sandboxes: Option<u32>,
        max_memory_mib: Option<u32>,
        max_starting_sandboxes: Option<u32>,
        max_requests_per_second: Option<u32>,
        max_templates: Option<u32>,
        max_snapshots: Option<u32>,
        max_repository_mib: Option<u32>,
    }
}

/// Values of the keys that have one when nobody sets them, as TOML.
pub const DEFAULTS: &str = r#"
api_addr = "0.0.0.0:8000"
home_path = "/var/lib/aenv"
runtime_path = "/run/aenv"
virtualization_mode = "auto"
engine = "auto"

[tls]
names = []

[qemu.jail]
enabled = true
first_uid = 1900000000
uids = 65536

[blockd]
export = "auto"

[machine]
vcpu_count = 2
mem_size_mib = 1024
disk_size_mib = 10240

[orchestrator]
default_sandbox_timeout_secs = 300
max_sandbox_timeout_secs = 86400
auto_resume_min_sandbox_timeout_secs = 300
default_on_timeout = "pause"
stand_after_deadline_secs = 0
max_running = 1000
memory_overcommit = 1.0
memory_idle_secs = 60
share_memory_across_teams = true
disk_reserve_mib = 1024

[orchestrator.standby]
count = 2
templates = 4
keep_secs = 600

[snapshot]
repository_backend = "posix_fs"
gc_interval_secs = 21600
gc_grace_secs = 86400
on_demand = "auto"
background_fill = false
remote_read_timeout_secs = 30
publish_paused = false

[image]
max_layer_table_mib = 64

[image.resolver]
default_image = "docker.io/library/debian:12"
search_registries = ["docker.io"]
allowed_registries = []

[image.cache]
capacity_gb = 100

[volumes]
max_size_mib = 10240
max_per_team = 100

[pool]
low_watermark = 2
high_watermark = 64

[network.egress]
always_denied_cidrs = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]

[network.internal]
host_interaction_cidr = "169.254.0.20/30"
veth_cidr = "10.200.0.0/16"

[sandbox_proxy]
domains = []

[p2p]
enabled = false
transport = "iroh"

[cluster]
etcd_endpoints = []

[log]
filter = "info"
format = "compact"
"#;
