//! What the control plane asks of the data plane.

use std::path::PathBuf;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How exports are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportKind {
    /// A file in blockd's FUSE mount.
    Fuse,
    /// A ublk block device.
    Ublk,
}

/// How exports are to be shown, `blockd.export` in the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExportChoice {
    /// Disks by ublk where the machine has it, by FUSE otherwise.
    #[default]
    Auto,
    /// All by FUSE.
    Fuse,
    /// Disks by ublk, or not at all.
    Ublk,
}

impl std::str::FromStr for ExportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "fuse" => Ok(Self::Fuse),
            "ublk" => Ok(Self::Ublk),
            other => Err(format!("{other} is none of auto, fuse, ublk")),
        }
    }
}

impl std::fmt::Display for ExportChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fuse => "fuse",
            Self::Ublk => "ublk",
        })
    }
}

/// How disks are shown. Memory images are files of the FUSE mount always: they are mapped privately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// How.
    pub kind: ExportKind,
    /// Why so, for a human.
    pub why: String,
}

/// A writable disk to show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskExport {
    /// Its name, `[a-z0-9-]{1,80}`; by convention `<sandbox id>-<drive>`.
    pub name: String,
    /// Bytes; a multiple of 4096. May be larger than the layers' own size: the rest reads as zeros.
    pub size: u64,
    /// Files of sealed layers, base first. May be empty.
    pub layers: Vec<PathBuf>,
    /// Folder of the writable upper; made when missing, taken up where it was when it holds one.
    /// `None` makes the disk read-only.
    pub upper: Option<PathBuf>,
}

/// A memory image to show, read-only, for private mapping. Two exports with equal `layers`, `size` and `group` share one inode,
/// so that VMMs share its page cache; it goes when its last holder has closed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryExport {
    /// Who holds it, `[a-z0-9-]{1,80}`; by convention the sandbox id.
    pub holder: String,
    /// Bytes of guest memory; a multiple of 4096.
    pub size: u64,
    /// Files of sealed layers, base first. Empty: all zeros (a machine that boots cold).
    pub layers: Vec<PathBuf>,
    /// Whose VMMs may share its pages; anybody's where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// A disk's upper that became a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The layer's file (the `target` that was asked for), durable. `None`: nothing was written since the last seal.
    pub layer: Option<PathBuf>,
    /// Its size in bytes.
    pub size: u64,
}

/// What is shown now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportInfo {
    /// Name of a disk, or holder of a memory image.
    pub name: String,
    /// `true` for a memory image.
    pub memory: bool,
    /// What a VMM opens.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// Layers beneath, base first.
    pub layers: Vec<PathBuf>,
}

/// Why an export operation failed. Each has a stable code.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum ExportError {
    /// A disk of this name is shown already.
    #[error("a disk export named {name} exists already")]
    Exists {
        /// The name.
        name: String,
    },
    /// Nothing of this name is shown.
    #[error("no export is named {name}")]
    NotFound {
        /// The name.
        name: String,
    },
    /// A name, size or path that is not allowed.
    #[error("{message}")]
    Invalid {
        /// What is wrong.
        message: String,
    },
    /// No further block device can be made.
    #[error(
        "ublk_drv allows {limit} block devices, and they are in use; raise its parameter ublks_max, or set blockd.export to \"auto\""
    )]
    DeviceLimit {
        /// Its parameter `ublks_max`.
        limit: u32,
    },
    /// A layer is missing, truncated or not a layer.
    #[error("layer {path}: {message}")]
    Layer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A layer is elsewhere, and that place does not answer, or not in time. Later it may.
    #[error("layer {path}: {message}")]
    Away {
        /// The file that it would be.
        path: PathBuf,
        /// What happened.
        message: String,
    },
    /// The operating system refused.
    #[error("{message}")]
    Io {
        /// What was refused.
        message: String,
    },
    /// blockd does not answer.
    #[error("blockd cannot be reached: {message}")]
    Unreachable {
        /// Why.
        message: String,
    },
}

/// The data plane as the control plane sees it. Every call ends within a bound (10 s) and may be repeated.
#[async_trait]
pub trait Exports: Send + Sync {
    /// How disks are shown that are opened now.
    async fn export(&self) -> Result<Export, ExportError>;

    /// Shows a disk and returns the path that a VMM opens.
    async fn open_disk(&self, export: DiskExport) -> Result<PathBuf, ExportError>;

    /// Shows a memory image and returns the file that a VMM maps.
    async fn open_memory(&self, export: MemoryExport) -> Result<PathBuf, ExportError>;

    /// Turns a disk's upper into a sealed layer at `target` (same filesystem as the upper), durable, in O(index), and
    /// starts a fresh upper on top, with I/O in flight kept. What the guest had acknowledged before the call is in it.
    async fn seal(&self, name: &str, target: PathBuf) -> Result<Sealed, ExportError>;

    /// Stops showing a disk. The upper's files stay; missing is no error.
    async fn close_disk(&self, name: &str) -> Result<(), ExportError>;

    /// Lets go of a memory image; missing is no error.
    async fn close_memory(&self, holder: &str) -> Result<(), ExportError>;

    /// Which process shows them: what a VMM opened of an earlier one is lost to it. (0 where there is never another.)
    async fn instance(&self) -> Result<u32, ExportError> {
        Ok(0)
    }

    /// Everything that is shown.
    async fn list(&self) -> Result<Vec<ExportInfo>, ExportError>;
}
