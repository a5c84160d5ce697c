//! A node's folders and its blockd.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aenv_blockd::{Client, DiskExport, ExportChoice, ExportKind, Exports, launch};
use aenv_layer::LayerWriter;
use aenv_types::Home;
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

pub(crate) const MIB: u64 = 1 << 20;

/// Long enough for an emulated machine under load.
const LONG: Duration = Duration::from_secs(60);

/// Both go when it is dropped.
pub(crate) struct Node {
    pub(crate) client: Client,
    pub(crate) home: Home,
    folder: tempfile::TempDir,
}

impl Node {
    pub(crate) async fn start(kind: ExportKind) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        fs::create_dir_all(home.layers()).unwrap();
        fs::create_dir_all(home.runtime()).unwrap();
        let client = started(&home, kind).await;
        assert_eq!(client.export().await.unwrap().kind, kind);
        Self { client, home, folder }
    }

    /// A disk of that name with a fresh upper.
    pub(crate) fn disk(&self, name: &str, size: u64) -> DiskExport {
        let upper = Some(self.upper(name));
        DiskExport { name: name.into(), size, layers: vec![], upper }
    }

    pub(crate) fn upper(&self, name: &str) -> PathBuf {
        self.folder.path().join("uppers").join(name)
    }

    pub(crate) fn layer(&self, name: &str) -> PathBuf {
        self.home.layers().join(name)
    }

    /// A layer that has these bytes at its beginning.
    pub(crate) fn layer_of(&self, name: &str, size: u64, bytes: &[u8]) -> PathBuf {
        let path = self.layer(name);
        let mut writer = LayerWriter::create(&path, size).unwrap();
        writer.append(0, bytes).unwrap();
        writer.finish().unwrap();
        path
    }

    pub(crate) async fn pid(&self) -> Pid {
        Pid::from_raw(self.client.pid().await.unwrap() as i32)
    }

    /// Kills blockd, and returns when the one that follows answers.
    pub(crate) async fn kill_blockd(&self) {
        let before = self.pid().await;
        kill(before, Signal::SIGKILL).unwrap();
        let deadline = Instant::now() + LONG;
        loop {
            match self.client.pid().await {
                Ok(pid) if pid as i32 != before.as_raw() => return,
                other => assert!(Instant::now() < deadline, "no other blockd: {other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("logs").join("blockd.log")).unwrap_or_default()
    }
}

pub(crate) async fn started(home: &Home, kind: ExportKind) -> Client {
    let choice = match kind {
        ExportKind::Fuse => ExportChoice::Fuse,
        ExportKind::Ublk => ExportChoice::Ublk,
    };
    launch(home, Path::new(env!("CARGO_BIN_EXE_aenv-blockd")), choice).await.unwrap()
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("blockd's log:\n{}", self.log());
        }
        // Block devices outlive their blockd: what is shown is closed first.
        let client = std::mem::replace(&mut self.client, Client::new(self.home.blockd_socket()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let client = Client::new(self.home.blockd_socket());
                    for export in client.list().await.unwrap_or_default() {
                        let _ = client.close_disk(&export.name).await;
                    }
                });
            });
        });
        // Nobody starts it again once the last client is gone.
        drop(client);
        let pid = fs::read_to_string(self.home.runtime().join("blockd.pid")).unwrap_or_default();
        if let Ok(pid) = pid.trim().parse() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            let lock = File::open(self.home.runtime().join("blockd.pid")).unwrap();
            let _ = eventually(|| lock.try_lock().ok());
        }
        let _ = umount2(&self.home.exports(), MntFlags::MNT_DETACH);
    }
}

pub(crate) fn eventually<T>(mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + LONG;
    loop {
        match check() {
            Some(value) => return Some(value),
            None if Instant::now() > deadline => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Opens a disk as a VMM does that goes past the host's page cache.
pub(crate) fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// Opens it through the page cache.
pub(crate) fn open_cached(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

pub(crate) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).unwrap().file_type().is_block_device()
}

/// Memory that may be read into without the page cache.
pub(crate) struct Aligned {
    space: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(len: usize) -> Self {
        let space = vec![0; len + 4096];
        let start = space.as_ptr().align_offset(4096);
        Self { space, start, len }
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut aligned = Self::new(bytes.len());
        aligned.as_mut().copy_from_slice(bytes);
        aligned
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.space[self.start..self.start + self.len]
    }
}

impl AsMut<[u8]> for Aligned {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.space[self.start..self.start + self.len]
    }
}

/// Numbers that look random and are the same each time.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Bytes that differ from one block to the next.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).to_le_bytes()).collect()
}
