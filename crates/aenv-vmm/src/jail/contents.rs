//! The files that VMMs open in the jail: copies, which nobody but root can change.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::sync::{Mutex, OnceCell};

use crate::{EngineError, process::io_error};

/// Where the process finds its firmware.
pub(crate) const FIRMWARE: &str = "/firmware";
/// Where it finds parts of QEMU, before it looks where they are installed.
pub(crate) const MODULES: &str = "/modules";
const BOOT: &str = "/boot";

/// The BIOS of the machine `microvm`, and what starts a kernel that was given.
const FIRMWARE_FILES: [&str; 3] = ["bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin"];
/// Emulation, where the distribution builds it as a module. KVM is always built in.
const MODULE_FILES: [&str; 1] = ["accel-tcg-x86_64.so"];

const HELP_WAIT: Duration = Duration::from_secs(20);

/// Contents of the folder, but for the exports.
#[derive(Debug)]
pub(super) struct Contents {
    root: PathBuf,
    binary: PathBuf,
    /// The QEMU whose files are there.
    filled: Mutex<Option<Identity>>,
    /// Whether the folder of kernels is there, without those of an earlier server.
    emptied: OnceCell<()>,
}

/// What a file is, as long as nobody writes to it.
type Identity = (u64, u64, i64, i64, u64);

fn identity(path: &Path) -> Result<Identity, EngineError> {
    let meta = fs::metadata(path).map_err(|e| io_error(path.display().to_string(), e))?;
    Ok((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.size()))
}

impl Contents {
    pub(super) fn new(root: PathBuf, binary: PathBuf) -> Self {
        Self { root, binary, filled: Mutex::new(None), emptied: OnceCell::new() }
    }

    /// Puts in what this QEMU needs; again when another one was installed in its place.
    pub(super) async fn fill(&self) -> Result<(), EngineError> {
        let binary = in_path(&self.binary);
        let installed = identity(&binary)?;
        let mut filled = self.filled.lock().await;
        if *filled == Some(installed) {
            return Ok(());
        }
        let sources = sources(&binary).await?;
        let root = self.root.clone();
        blocking(move || {
            folder(&root, 0o711)?;
            for name in [FIRMWARE, MODULES] {
                folder(&below(&root, name), 0o755)?;
            }
            for (source, name) in sources {
                copy(&source, &below(&root, name))?;
            }
            Ok(())
        })
        .await?;
        *filled = Some(installed);
        Ok(())
    }

    /// A copy of a file for cold boots, and the path by which it is found from within.
    pub(super) async fn lend(&self, file: &Path, role: &str) -> Result<PathBuf, EngineError> {
        self.emptied.get_or_try_init(|| self.empty()).await?;
        let (device, inode, seconds, nanos, size) = identity(file)?;
        let name = format!("{role}-{device:x}-{inode:x}-{seconds:x}.{nanos:x}-{size:x}");
        let inside = Path::new(BOOT).join(&name);
        let target = below(&self.root, BOOT).join(name);
        let file = file.to_owned();
        blocking(move || if target.exists() { Ok(()) } else { copy_to(&file, &target) }).await?;
        Ok(inside)
    }

    /// Where the host has what a process finds at `inside`.
    pub(super) fn outside(&self, inside: &Path) -> PathBuf {
        below(&self.root, &inside.to_string_lossy())
    }

    /// Makes the folder of kernels anew: an earlier server's are booted no more.
    async fn empty(&self) -> Result<(), EngineError> {
        let root = self.root.clone();
        blocking(move || {
            let boot = below(&root, BOOT);
            match fs::remove_dir_all(&boot) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(io_error(boot.display().to_string(), error));
                }
                _ => {}
            }
            folder(&root, 0o711)?;
            folder(&boot, 0o755)
        })
        .await
    }
}

/// The path of the host to what the process finds at `inside`.
fn below(root: &Path, inside: &str) -> PathBuf {
    root.join(inside.trim_start_matches('/'))
}

async fn blocking(
    work: impl FnOnce() -> Result<(), EngineError> + Send + 'static,
) -> Result<(), EngineError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| EngineError::Start(e.to_string()))?
}

fn folder(path: &Path, mode: u32) -> Result<(), EngineError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .map_err(|e| io_error(path.display().to_string(), e))
}

fn copy(file: &Path, folder: &Path) -> Result<(), EngineError> {
    match file.file_name() {
        Some(name) => copy_to(file, &folder.join(name)),
        None => Ok(()),
    }
}

/// Whole or not at all.
fn copy_to(file: &Path, target: &Path) -> Result<(), EngineError> {
    let mut half = target.as_os_str().to_owned();
    half.push(format!(".{}", uuid::Uuid::new_v4().simple()));
    let half = PathBuf::from(half);
    let made = fs::copy(file, &half)
        .and_then(|_| fs::set_permissions(&half, fs::Permissions::from_mode(0o444)))
        .and_then(|()| fs::rename(&half, target));
    made.map_err(|e| io_error(format!("copy {} to {}", file.display(), target.display()), e))
}

/// Files of this QEMU, each with the folder of the jail that it belongs in. What is not found is built in, or the machine is not built,
/// and QEMU says what it misses.
async fn sources(binary: &Path) -> Result<Vec<(PathBuf, &'static str)>, EngineError> {
    let folders = firmware_folders(binary).await?;
    let first = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    let firmware = FIRMWARE_FILES.iter().filter_map(|name| Some((first(name)?, FIRMWARE)));
    let modules = module_folders(binary);
    let module = |name: &str| modules.iter().map(|folder| folder.join(name)).find(|path| path.exists());
    let modules = MODULE_FILES.iter().filter_map(|name| Some((module(name)?, MODULES)));
    Ok(firmware.chain(modules).collect())
}

/// Where this QEMU looks for firmware, as it says itself.
async fn firmware_folders(binary: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let mut command = tokio::process::Command::new(binary);
    command.args(["-L", "help"]).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(HELP_WAIT, command.output()).await {
        Ok(output) => output.map_err(|e| io_error(binary.display().to_string(), e))?,
        Err(_) => {
            let command = format!("{} -L help", binary.display());
            return Err(EngineError::TimedOut { command, secs: HELP_WAIT.as_secs() });
        }
    };
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())
}

/// Where distributions put QEMU's modules: `lib/qemu` and `lib64/qemu` beside `bin`, or in the folder of the architecture.
fn module_folders(binary: &Path) -> Vec<PathBuf> {
    let binary = fs::canonicalize(binary).unwrap_or_else(|_| binary.to_owned());
    let Some(prefix) = binary.parent().and_then(Path::parent) else { return Vec::new() };
    let libraries = [prefix.join("lib"), prefix.join("lib64")];
    let architecture = prefix.join("lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
    libraries.into_iter().chain([architecture]).map(|folder| folder.join("qemu")).collect()
}

/// A name without a folder is looked up as a shell would.
pub(crate) fn in_path(binary: &Path) -> PathBuf {
    if binary.components().count() > 1 {
        return binary.to_owned();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(binary)).find(|path| path.is_file());
    found.unwrap_or_else(|| binary.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kernel_is_copied_once_for_each_version_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("vmlinux");
        fs::write(&kernel, "one").unwrap();
        fs::create_dir(folder.path().join("boot")).unwrap();
        let contents = Contents::new(folder.path().to_owned(), "/bin/true".into());
        let first = contents.lend(&kernel, "kernel").await.unwrap();
        assert_eq!(contents.lend(&kernel, "kernel").await.unwrap(), first);
        fs::write(&kernel, "another").unwrap();
        let second = contents.lend(&kernel, "kernel").await.unwrap();
        assert_ne!(first, second);
        let text =
            |inside: &Path| fs::read_to_string(below(folder.path(), inside.to_str().unwrap())).unwrap();
        assert_eq!((text(&first).as_str(), text(&second).as_str()), ("one", "another"));
    }

    #[test]
    fn modules_lie_beside_the_program() {
        let folders = module_folders(Path::new("/nonexistent/bin/qemu"));
        assert!(folders.contains(&"/nonexistent/lib/qemu".into()), "{folders:?}");
    }
}
