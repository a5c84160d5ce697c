//! A node with a blockd of its own, and images made by hand.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use aenv_blockd::{
    Client, DiskExport, ExportChoice, Exports,
    daemon::{Config, Daemon, remotes::Remotes, stacks::Stacks},
};
use aenv_image::{ImageError, ImageReference, ImageSettings, Images, PullProgress, PulledImage};
use aenv_types::{Digest, Home};
use serde_json::json;
use tokio::sync::oneshot;

/// A node: folders, a blockd in a thread, and `Images` over it. All of it goes when it is dropped.
pub struct Node {
    pub home: Home,
    pub exports: Arc<dyn Exports>,
    pub images: Images,
    stop: Option<oneshot::Sender<()>>,
    blockd: Option<JoinHandle<()>>,
    folder: tempfile::TempDir,
}

impl Node {
    pub fn start() -> Self {
        Self::with(ImageSettings::default())
    }

    pub fn with(settings: ImageSettings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        home.create().unwrap();
        let config = Config {
            socket: home.blockd_socket(),
            mount: home.exports(),
            state: home.runtime().join("blockd.state"),
            workers: 4,
            export: ExportChoice::Fuse,
        };
        let reached = aenv_remote::Remotes {
            repository: aenv_remote::StoreConfig::Folder(home.path().to_owned()),
            cache: aenv_remote::CacheSettings {
                folder: home.cache().join("blocks"),
                capacity: 256 << 20,
                reserve: 0,
            },
            read_ms: 20_000,
            table_bytes: aenv_remote::DEFAULT_TABLE_BYTES,
            fill: false,
        };
        let remotes = home.blockd_remotes();
        fs::write(&remotes, serde_json::to_vec(&reached).unwrap()).unwrap();
        let (stop, stopped) = oneshot::channel();
        let (up, is_up) = std::sync::mpsc::channel();
        let blockd = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let remotes = Remotes::new(remotes, tokio::runtime::Handle::current());
                let daemon = Daemon::start(config, Stacks::with_remotes(remotes)).unwrap();
                up.send(()).unwrap();
                daemon.run(async { stopped.await.unwrap_or(()) }).await.unwrap();
            });
        });
        is_up.recv().unwrap();
        let exports: Arc<dyn Exports> = Arc::new(Client::new(home.blockd_socket()));
        let images = Images::with_settings(home.clone(), exports.clone(), settings);
        Self { home, exports, images, stop: Some(stop), blockd: Some(blockd), folder }
    }

    /// A folder for the test's own things.
    pub fn scratch(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub async fn pull(&self, reference: &str) -> Result<(PulledImage, Vec<PullProgress>), ImageError> {
        let reference: ImageReference = reference.parse().unwrap();
        let seen = Mutex::new(Vec::new());
        let pulled =
            self.images.pull(&reference, None, &|progress| seen.lock().unwrap().push(progress)).await?;
        Ok((pulled, seen.into_inner().unwrap()))
    }

    /// Mounts a pulled image read-only.
    pub async fn mount(&self, image: &PulledImage) -> Mounted {
        let name = format!("look-{}", uuid::Uuid::new_v4().simple());
        let export = DiskExport {
            name: name.clone(),
            size: image.disk_size,
            layers: image.layers.iter().map(|layer| self.home.layer(&layer.name)).collect(),
            upper: None,
        };
        let file = self.exports.open_disk(export).await.unwrap();
        let check = Command::new("e2fsck").args(["-n", "-f"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&check.stdout);
        assert!(check.status.success(), "e2fsck finds: {said}{}", String::from_utf8_lossy(&check.stderr));
        let point = self.scratch(&name);
        run(Command::new("mount").args(["-o", "ro,loop"]).arg(&file).arg(&point));
        Mounted { point, exports: self.exports.clone(), name }
    }

    /// Nothing half-made is left: no export, no staging folder, no loop device, no layer beyond those that are expected.
    pub async fn assert_clean(&self, layers: usize) {
        let shown = self.exports.list().await.unwrap();
        assert!(shown.is_empty(), "exports are left: {shown:?}");
        assert_eq!(names(&self.home.staging()), Vec::<String>::new(), "staging is not empty");
        assert_eq!(names(&self.home.layers()).len(), layers, "layers are left over or missing");
        // Of what the tests themselves had mounted, the kernel lets go a little after umount(8) has ended.
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Some(backing) = self.loop_device() {
            assert!(Instant::now() < deadline, "a loop device is left on {backing}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What a loop device shows of this node.
    fn loop_device(&self) -> Option<String> {
        let home = self.folder.path().to_str().unwrap();
        let devices = fs::read_dir("/sys/block").unwrap().flatten();
        let mut shown = devices.flat_map(|one| fs::read_to_string(one.path().join("loop/backing_file")));
        shown.find(|backing| backing.contains(home))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        let _ = self.blockd.take().unwrap().join();
    }
}

/// A mounted image.
pub struct Mounted {
    pub point: PathBuf,
    exports: Arc<dyn Exports>,
    name: String,
}

impl Mounted {
    pub async fn unmount(self) {
        run(Command::new("umount").arg(&self.point));
        self.exports.close_disk(&self.name).await.unwrap();
    }
}

pub fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|item| item.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// How a layer's blob is packed.
#[derive(Clone, Copy)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// Writes an OCI layout by hand.
pub struct Layout {
    pub folder: PathBuf,
    pub diff_ids: Vec<Digest>,
    pub layers: Vec<serde_json::Value>,
}

impl Layout {
    pub fn new(folder: PathBuf) -> Self {
        fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
        Self { folder, diff_ids: Vec::new(), layers: Vec::new() }
    }

    pub fn blob(&self, bytes: &[u8]) -> (Digest, usize) {
        let digest = Digest::of(bytes);
        fs::write(self.blob_path(&digest), bytes).unwrap();
        (digest, bytes.len())
    }

    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs/sha256").join(digest.hex())
    }

    /// Adds a layer and returns the digest of its blob.
    pub fn layer(&mut self, tar: &[u8], packing: Packing) -> Digest {
        let (packed, suffix) = match packing {
            Packing::Plain => (tar.to_vec(), ""),
            Packing::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(tar).unwrap();
                (encoder.finish().unwrap(), "+gzip")
            }
            Packing::Zstd => (zstd::encode_all(tar, 1).unwrap(), "+zstd"),
        };
        let (digest, size) = self.blob(&packed);
        self.diff_ids.push(Digest::of(tar));
        self.layers.push(json!({
            "mediaType": format!("application/vnd.oci.image.layer.v1.tar{suffix}"),
            "digest": digest.to_string(),
            "size": size,
        }));
        digest
    }

    /// Writes config, manifest and index; returns the reference.
    pub fn finish(&self) -> String {
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": { "Env": ["PATH=/bin"], "Cmd": ["/bin/true"] },
            "rootfs": { "type": "layers", "diff_ids": self.diff_ids.iter().map(Digest::to_string).collect::<Vec<_>>() },
        });
        let (config, config_size) = self.blob(config.to_string().as_bytes());
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config.to_string(), "size": config_size,
            },
            "layers": self.layers,
        });
        let (manifest, manifest_size) = self.blob(manifest.to_string().as_bytes());
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest.to_string(), "size": manifest_size,
            "annotations": { "org.opencontainers.image.ref.name": "test" },
        }]});
        fs::write(self.folder.join("index.json"), index.to_string()).unwrap();
        fs::write(self.folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        format!("oci:{}:test", self.folder.display())
    }
}

/// Writes a tar by hand, entry by entry.
#[derive(Default)]
pub struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    /// An entry of any type, with names that the `tar` crate would refuse.
    pub fn entry(mut self, kind: u8, path: &str, link: &str, data: &[u8]) -> Self {
        let mut header = tar::Header::new_ustar();
        let raw = header.as_mut_bytes();
        raw[..path.len()].copy_from_slice(path.as_bytes());
        raw[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(data);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    pub fn file(self, path: &str, data: &[u8]) -> Self {
        self.entry(b'0', path, "", data)
    }

    pub fn folder(self, path: &str) -> Self {
        self.entry(b'5', path, "", b"")
    }

    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(b'2', path, target, b"")
    }

    pub fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(b'1', path, target, b"")
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }
}

/// Everything that can be told apart about every file beneath a folder.
pub fn listing(folder: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut links: BTreeMap<u64, String> = BTreeMap::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(path) = pending.pop() {
        let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let content = if kind.is_dir() {
            let mut children: Vec<PathBuf> =
                fs::read_dir(&path).unwrap().map(|item| item.unwrap().path()).collect();
            children.sort();
            children.reverse();
            pending.extend(children);
            "folder".to_owned()
        } else if kind.is_symlink() {
            format!("-> {}", fs::read_link(&path).unwrap().display())
        } else if kind.is_file() {
            let bytes = fs::read(&path).unwrap();
            let sparse = meta.blocks() * 512 < meta.len() / 2;
            format!("{} bytes {} sparse={sparse}", bytes.len(), Digest::of(&bytes))
        } else if kind.is_fifo() {
            "fifo".to_owned()
        } else {
            format!("device {:x} block={}", meta.rdev(), kind.is_block_device())
        };
        let mut xattrs: Vec<String> = xattr::list(&path)
            .unwrap()
            .map(|key| format!("{key:?}={:?}", xattr::get(&path, &key).unwrap().unwrap()))
            .collect();
        xattrs.sort();
        let twin = if kind.is_dir() || meta.nlink() == 1 {
            String::new()
        } else {
            let first = links.entry(meta.ino()).or_insert_with(|| name.clone());
            format!("nlink={} first={first}", meta.nlink())
        };
        let line = format!(
            "{content} mode={:o} {}:{} mtime={}.{:09} {xattrs:?} {twin}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
        );
        all.insert(name, line);
    }
    all
}
