//! Where things lie on a node. One place decides each path.

use std::path::{Path, PathBuf};

use crate::{CheckpointId, LayerName, SandboxId};

/// The two folders of a node: `home` survives reboots, `runtime` does not.
///
/// ```text
/// <home>/journal.db                 the node's journal (SQLite)
/// <home>/layers/<name>              sealed layers and vm states, by LayerName::file_name
/// <home>/layers/<name>.remote       where a layer is that is not here: it is read from there, by ranges
/// <home>/checkpoints/<id>.json      manifests of checkpoints that only this node has
/// <home>/sandboxes/<id>/            a sandbox's own: disk uppers, serial log
/// <home>/staging/                   half-made things; emptied at start
/// <home>/repository/                the committed repository of the posix_fs backend, unless configured elsewhere
/// <home>/artifacts/                 guest kernels, initramfs, engines
/// <home>/cache/                     derived things; may be deleted at any time
/// <home>/volumes/<id>/              0700: a volume's document and its files
/// <home>/secrets/                   0700: API key, signing key
/// <home>/server.lock                one server for each home, with its pid
/// <runtime>/blockd.sock, blockd.pid
/// <runtime>/jail/                   0711: all that a VMM sees of the host, see `aenv-vmm`
/// <runtime>/jail/exports/           blockd's FUSE mount
/// <runtime>/sandboxes/<id>/         sockets of a running VMM
/// ```
#[derive(Clone, Debug)]
pub struct Home {
    home: PathBuf,
    runtime: PathBuf,
}

impl Home {
    /// From the two configured folders (`home_path`, `runtime_path`).
    pub fn new(home: impl Into<PathBuf>, runtime: impl Into<PathBuf>) -> Self {
        Self { home: home.into(), runtime: runtime.into() }
    }

    /// `<home>`.
    pub fn path(&self) -> &Path {
        &self.home
    }

    /// `<runtime>`.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// Makes every folder (0700 for secrets and volumes, 0711 for the jail, 0755 for the rest) but [`Home::exports`], which blockd makes when it mounts it: what
    /// a dead blockd left mounted there cannot even be looked at.
    pub fn create(&self) -> std::io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let folders = [
            self.layers(),
            self.checkpoints(),
            self.sandboxes(),
            self.staging(),
            self.artifacts(),
            self.cache(),
        ];
        for folder in folders {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::create_dir_all(self.runtime.join("sandboxes"))?;
        std::fs::DirBuilder::new().recursive(true).mode(0o711).create(self.jail())?;
        for private in [self.secrets(), self.volumes()] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(private)?;
        }
        Ok(())
    }

    /// The id of the node, by which other nodes know it.
    pub fn node_id(&self) -> PathBuf {
        self.home.join("node-id")
    }

    /// The journal.
    pub fn journal(&self) -> PathBuf {
        self.home.join("journal.db")
    }

    /// Folder of sealed layers and vm states.
    pub fn layers(&self) -> PathBuf {
        self.home.join("layers")
    }

    /// One sealed layer or vm state.
    pub fn layer(&self, name: &LayerName) -> PathBuf {
        self.layers().join(name.file_name())
    }

    /// Says where the bytes of a layer are that has no file here.
    pub fn remote_layer(&self, name: &LayerName) -> PathBuf {
        self.layers().join(format!("{}.remote", name.file_name()))
    }

    /// Whether a layer can be read on this node: it is here, or it is known where it is.
    pub fn has_layer(&self, name: &LayerName) -> bool {
        self.layer(name).exists() || self.remote_layer(name).exists()
    }

    /// Folder of local checkpoint manifests.
    pub fn checkpoints(&self) -> PathBuf {
        self.home.join("checkpoints")
    }

    /// One local checkpoint manifest.
    pub fn checkpoint(&self, id: &CheckpointId) -> PathBuf {
        self.checkpoints().join(format!("{id}.json"))
    }

    /// Folder of sandboxes' own things.
    pub fn sandboxes(&self) -> PathBuf {
        self.home.join("sandboxes")
    }

    /// One sandbox's own things.
    pub fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    /// Sockets of a running VMM.
    pub fn sandbox_runtime(&self, id: &SandboxId) -> PathBuf {
        self.runtime.join("sandboxes").join(id.as_str())
    }

    /// Half-made things.
    pub fn staging(&self) -> PathBuf {
        self.home.join("staging")
    }

    /// Guest kernels, initramfs, engines.
    pub fn artifacts(&self) -> PathBuf {
        self.home.join("artifacts")
    }

    /// Derived things.
    pub fn cache(&self) -> PathBuf {
        self.home.join("cache")
    }

    /// Default folder of the `posix_fs` repository.
    pub fn repository(&self) -> PathBuf {
        self.home.join("repository")
    }

    /// API key and signing key, 0700.
    pub fn secrets(&self) -> PathBuf {
        self.home.join("secrets")
    }

    /// Volumes, 0700.
    pub fn volumes(&self) -> PathBuf {
        self.home.join("volumes")
    }

    /// blockd's control socket.
    pub fn blockd_socket(&self) -> PathBuf {
        self.runtime.join("blockd.sock")
    }

    /// What blockd needs to read layers that are elsewhere; has secrets in it.
    pub fn blockd_remotes(&self) -> PathBuf {
        self.runtime.join("blockd.remotes.json")
    }

    /// blockd's FUSE mount.
    pub fn exports(&self) -> PathBuf {
        self.jail().join("exports")
    }

    /// The root folder of VMM processes.
    pub fn jail(&self) -> PathBuf {
        self.runtime.join("jail")
    }

    /// The lock that keeps a second server off this home.
    pub fn server_lock(&self) -> PathBuf {
        self.home.join("server.lock")
    }
}
