//! What a pull takes and gives.

use aenv_remote::{AwsKey, Credentials, DEFAULT_TABLE_BYTES};
use aenv_store::SourceError;
use aenv_types::{Digest, GuestContext, LayerRef, Token};
use serde::{Deserialize, Serialize};

use crate::ImageError;

/// An image, ready to boot.
#[derive(Clone, Debug)]
pub struct PulledImage {
    /// The reference, normalized.
    pub reference: String,
    /// Digest of its manifest.
    pub manifest: Digest,
    /// Sealed layers of an ext4 root disk, base first, in `<home>/layers`, or notes there that say where they are.
    pub layers: Vec<LayerRef>,
    /// Size of the disk's filesystem in bytes. A larger disk is grown by the guest's init (`resize2fs` online).
    pub disk_size: u64,
    /// Env, user, workdir, ports and labels of the image's config; start command from entrypoint and cmd.
    pub guest: GuestContext,
}

/// What a pull is doing, for progress bars and build logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullProgress {
    /// The manifest was read: so many layers, so many compressed bytes in all.
    Resolved {
        /// Layers.
        layers: usize,
        /// Bytes.
        bytes: u64,
    },
    /// A layer was found ready from an earlier pull.
    Reused {
        /// Its number, from 0.
        index: usize,
    },
    /// A layer is being applied.
    Applying {
        /// Its number, from 0.
        index: usize,
        /// Compressed bytes read so far.
        done: u64,
        /// Compressed bytes in all.
        total: u64,
    },
    /// A layer is in overlaybd format and stays where it is; its blocks are read when they are needed.
    InPlace {
        /// Its number, from 0.
        index: usize,
    },
    /// A layer is sealed.
    Sealed {
        /// Its number, from 0.
        index: usize,
    },
}

/// As whom a registry is asked in one pull. Serialized it holds the secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RegistryAuth {
    /// As a user.
    Password {
        /// User.
        username: String,
        /// Password or token.
        password: Token,
    },
    /// As whom Amazon says for this key.
    Aws(AwsKey),
}

impl RegistryAuth {
    /// User and password, of which those for a key of Amazon's are fetched.
    pub(crate) async fn credentials(&self, reference: &str) -> Result<Credentials, ImageError> {
        let reference = || reference.to_owned();
        match self {
            Self::Password { username, password } => {
                Ok(Credentials { user: username.clone(), password: password.expose().to_owned() })
            }
            Self::Aws(key) => key.login().await.map_err(|error| match error {
                SourceError::Denied { message, .. } => ImageError::Denied { reference: reference(), message },
                other => ImageError::Unreachable { reference: reference(), message: other.to_string() },
            }),
        }
    }
}

/// Limits against hostile layers.
#[derive(Clone, Debug)]
pub struct ImageLimits {
    /// Bytes of one layer, unpacked.
    pub layer_bytes: u64,
    /// Entries of one layer.
    pub layer_entries: u64,
    /// Layers of one image.
    pub layers: usize,
    /// Bytes of the index and of the jump table of a layer in overlaybd format, which are held in memory.
    pub table_bytes: u64,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self { layer_bytes: 10 << 30, layer_entries: 600_000, layers: 250, table_bytes: DEFAULT_TABLE_BYTES }
    }
}

/// How a node pulls images.
#[derive(Clone, Debug)]
pub struct ImageSettings {
    /// Limits against hostile layers.
    pub limits: ImageLimits,
    /// Bytes of the filesystem that an image is unpacked into; sparse, a multiple of 4096. Images whose disks differ in size share no layers.
    pub disk_size: u64,
    /// Registries at which short names (`debian:12`) are tried, in order.
    pub search_registries: Vec<String>,
    /// Registries that may be used; empty allows all.
    pub allowed_registries: Vec<String>,
    /// Docker's `config.json` with credentials; `None` takes `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`.
    pub docker_config: Option<std::path::PathBuf>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            limits: ImageLimits::default(),
            disk_size: 10 << 30,
            search_registries: vec!["docker.io".to_owned()],
            allowed_registries: Vec::new(),
            docker_config: None,
        }
    }
}
