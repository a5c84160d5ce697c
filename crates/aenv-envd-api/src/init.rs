//! The body of `POST /init`: everything that a guest must be told after a boot or a launch, in one round trip.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Sent by the host after every boot and every launch, before any other traffic. envd refuses it from anywhere but the
/// gateway address of the guest's link, and the public proxy answers 404 to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InitRequest {
    /// Environment of every process that is started from now on.
    pub env_vars: BTreeMap<String, String>,
    /// The token that envd asks for from now on; `None`: none.
    pub access_token: Option<String>,
    /// Wall clock, RFC 3339 with nanoseconds, as it was when the request was sent.
    pub timestamp: Option<String>,
    /// User of processes and files that name none.
    pub default_user: Option<String>,
    /// Working folder of processes that name none; the user's home when absent.
    pub default_workdir: Option<String>,
    /// The sandbox's host name; also the source of its machine-id.
    pub hostname: Option<String>,
    /// 32 lowercase hex digits, written to `/etc/machine-id`.
    pub machine_id: Option<String>,
    /// 32 to 512 random bytes, base64, mixed into the kernel's RNG, which is then reseeded.
    pub entropy: Option<String>,
    /// Resolvers, written to `/etc/resolv.conf`. Absent: left as it is.
    pub dns_servers: Option<Vec<String>>,
    /// PEM of a CA to trust, for the egress proxy.
    pub ca_bundle: Option<String>,
    /// Network filesystems that this sandbox has; those of an earlier launch that are not among them are let go.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Changes with each launch; the same id twice is answered without doing the work again.
    #[serde(rename = "lifecycleID")]
    pub lifecycle_id: Option<String>,
}

/// A network filesystem, as `mount(2)` takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Host and path.
    pub source: String,
    /// Where it is mounted; made when missing.
    pub path: String,
    /// Options of the filesystem.
    pub options: String,
}

/// On the answer to an `/init` with mounts: they are there. An older envd knows nothing of them and does not say so.
pub const MOUNTED_HEADER: &str = "x-aenv-mounted";
