//! The guest's kernel and initramfs: made by `setup`, found by `serve`.

use std::path::{Path, PathBuf};

use aenv_guest::{InitramfsSpec, MODULES, VOLUME_MODULES};
use aenv_types::Home;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::config::Config;

/// Debian's package for virtual machines.
pub const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
/// Where the guest's static programs are, beside the server's binary and in a build's folder.
const GUEST_FOLDERS: [&str; 3] = [".", "guest", "../x86_64-unknown-linux-musl/guest"];

/// Kernel and initramfs of new sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifacts {
    /// ELF vmlinux.
    pub kernel: PathBuf,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Modules for volumes; older setups made none.
    #[serde(default)]
    pub modules: Option<PathBuf>,
}

/// Why there are no artifacts.
#[derive(Debug, Error)]
pub enum ArtifactsError {
    /// Nobody has run `setup`.
    #[error(
        "there is no guest kernel yet: run `aenv-server setup` first, or set kernel.image_path and kernel.initramfs_path"
    )]
    NotMade,
    /// A configured or made file is gone.
    #[error(
        "{0} does not exist: run `aenv-server setup` again, or correct kernel.image_path and kernel.initramfs_path"
    )]
    Missing(PathBuf),
    /// init or envd is not where it should be.
    #[error(
        "{0} was not found beside the server: build it with `make guest`, or pass its folder with --guest"
    )]
    NoProgram(&'static str),
    /// The kernel package cannot be had.
    #[error(transparent)]
    Package(#[from] aenv_guest::PackageError),
    /// It cannot be used.
    #[error(transparent)]
    Kernel(#[from] aenv_guest::KernelError),
    /// The initramfs cannot be made.
    #[error(transparent)]
    Initramfs(#[from] aenv_guest::InitramfsError),
    /// A file of ours.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

fn record(home: &Home) -> PathBuf {
    home.artifacts().join("guest.json")
}

/// The configured files, or those that `setup` made.
pub fn find(home: &Home, config: &Config) -> Result<Artifacts, ArtifactsError> {
    let made =
        std::fs::read(record(home)).ok().and_then(|text| serde_json::from_slice::<Artifacts>(&text).ok());
    // They fit the kernel that they were made with, and no other.
    let own_kernel = config.kernel.image_path.is_none();
    let modules = made.as_ref().filter(|_| own_kernel).and_then(|made| made.modules.clone());
    let kernel = config.kernel.image_path.clone().or_else(|| made.as_ref().map(|made| made.kernel.clone()));
    let initramfs = config.kernel.initramfs_path.clone().or_else(|| made.map(|made| made.initramfs));
    let (Some(kernel), Some(initramfs)) = (kernel, initramfs) else { return Err(ArtifactsError::NotMade) };
    for path in [&kernel, &initramfs] {
        if !path.exists() {
            return Err(ArtifactsError::Missing(path.clone()));
        }
    }
    Ok(Artifacts { kernel, initramfs, modules })
}

/// Makes them: fetches and unpacks the kernel package (or takes `package`), and packs the initramfs. A second run changes nothing.
pub fn make(
    home: &Home,
    package: Option<&Path>,
    guest: Option<&Path>,
    say: impl Fn(&str),
) -> Result<Artifacts, ArtifactsError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| ArtifactsError::Io { path, source }
    };
    home.create().map_err(io(home.path()))?;
    let folder = home.artifacts();
    let package = match package {
        Some(package) => package.to_owned(),
        None => {
            say(&format!("fetching {KERNEL_PACKAGE}"));
            aenv_guest::download_kernel_package(KERNEL_PACKAGE, &folder)?
        }
    };
    say(&format!("unpacking {}", package.display()));
    let kernel = aenv_guest::unpack_kernel(&package, &folder)?;
    say(&format!("kernel {}: {}", kernel.release, kernel.vmlinux.display()));
    let spec = InitramfsSpec {
        modules: &kernel.modules,
        wanted: MODULES,
        init: &program("aenv-init", guest)?,
        envd: &program("aenv-envd", guest)?,
    };
    let initramfs = aenv_guest::build_initramfs(&spec, &folder)?;
    say(&format!("initramfs: {}", initramfs.path.display()));
    let modules = aenv_guest::build_bundle(&kernel.modules, VOLUME_MODULES, &folder)?;
    say(&format!("modules for volumes: {}", modules.display()));
    let artifacts = Artifacts { kernel: kernel.vmlinux, initramfs: initramfs.path, modules: Some(modules) };
    let path = record(home);
    let text = serde_json::to_vec_pretty(&artifacts).expect("two paths are JSON");
    aenv_durable::write(&path, &text).map_err(io(&path))?;
    Ok(artifacts)
}

fn program(name: &'static str, folder: Option<&Path>) -> Result<PathBuf, ArtifactsError> {
    let own = std::env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    let folders = match folder {
        Some(folder) => vec![folder.to_owned()],
        None => own.iter().flat_map(|own| GUEST_FOLDERS.map(|relative| own.join(relative))).collect(),
    };
    // A program for the host lies beside the server in a build's folder under the same name; the static one is wanted.
    let found = folders.into_iter().rev().map(|folder| folder.join(name)).find(|path| path.exists());
    found.ok_or(ArtifactsError::NoProgram(name))
}
