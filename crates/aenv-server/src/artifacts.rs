//! The guest's kernel and initramfs, and Firecracker: got and made by `setup`, found by `serve`.

use std::path::{Path, PathBuf};

use aenv_artifacts::{FetchError, Fetcher, Manifest, Program, unpack_program};
use aenv_guest::{InitramfsSpec, MODULES, VOLUME_MODULES};
use aenv_types::Home;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{config::Config, node};

/// What apt is asked for when the manifest's kernel is not to be had: Debian's package for virtual machines.
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
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
    /// The Firecracker of the manifest, where it was wanted.
    #[serde(default)]
    pub firecracker: Option<PathBuf>,
}

/// What `setup` was told.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// A kernel package (.deb, or a folder it was unpacked into) instead of the manifest's.
    pub kernel_package: Option<PathBuf>,
    /// Folder of the static aenv-init and aenv-envd.
    pub guest: Option<PathBuf>,
    /// A folder with the manifest's files: nothing is asked of the network.
    pub from: Option<PathBuf>,
    /// Another manifest than the server's own.
    pub manifest: Option<PathBuf>,
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
    /// There is no manifest.
    #[error(transparent)]
    Manifest(#[from] aenv_artifacts::ManifestError),
    /// One of its files cannot be had.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// An archive of it is not what was expected.
    #[error(transparent)]
    Archive(#[from] aenv_artifacts::ArchiveError),
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

/// What the last `setup` left.
fn made(home: &Home) -> Option<Artifacts> {
    std::fs::read(record(home)).ok().and_then(|text| serde_json::from_slice(&text).ok())
}

/// The Firecracker that `setup` got.
pub fn firecracker(home: &Home) -> Option<PathBuf> {
    made(home)?.firecracker.filter(|binary| binary.exists())
}

/// The configured files, or those that `setup` made.
pub fn find(home: &Home, config: &Config) -> Result<Artifacts, ArtifactsError> {
    let made = made(home);
    // They fit the kernel that they were made with, and no other.
    let own_kernel = config.kernel.image_path.is_none();
    let modules = made.as_ref().filter(|_| own_kernel).and_then(|made| made.modules.clone());
    let firecracker = made.as_ref().and_then(|made| made.firecracker.clone());
    let kernel = config.kernel.image_path.clone().or_else(|| made.as_ref().map(|made| made.kernel.clone()));
    let initramfs = config.kernel.initramfs_path.clone().or_else(|| made.map(|made| made.initramfs));
    let (Some(kernel), Some(initramfs)) = (kernel, initramfs) else { return Err(ArtifactsError::NotMade) };
    for path in [&kernel, &initramfs] {
        if !path.exists() {
            return Err(ArtifactsError::Missing(path.clone()));
        }
    }
    Ok(Artifacts { kernel, initramfs, modules, firecracker })
}

/// Gets and makes them: kernel package, initramfs, and Firecracker where it can run. A second run changes nothing.
pub async fn make(
    config: &Config,
    setup: &Setup,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Artifacts, ArtifactsError> {
    let home = node::home(config);
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| ArtifactsError::Io { path, source }
    };
    home.create().map_err(io(home.path()))?;
    let folder = home.artifacts();
    let manifest = setup.manifest.as_deref().map_or_else(Manifest::own, Manifest::read)?;
    let fetcher = Fetcher::new(&folder, setup.from.as_deref());
    let package = match &setup.kernel_package {
        Some(package) => package.clone(),
        None => kernel_package(&manifest, &fetcher, setup, &folder, say).await?,
    };
    say(&format!("unpacking {}", package.display()));
    let kernel = aenv_guest::unpack_kernel(&package, &folder)?;
    say(&format!("kernel {}: {}", kernel.release, kernel.vmlinux.display()));
    let spec = InitramfsSpec {
        modules: &kernel.modules,
        wanted: MODULES,
        init: &program("aenv-init", setup.guest.as_deref())?,
        envd: &program("aenv-envd", setup.guest.as_deref())?,
    };
    let initramfs = aenv_guest::build_initramfs(&spec, &folder)?;
    say(&format!("initramfs: {}", initramfs.path.display()));
    let modules = aenv_guest::build_bundle(&kernel.modules, VOLUME_MODULES, &folder)?;
    say(&format!("modules for volumes: {}", modules.display()));
    let firecracker = match wanted(config, &home).await {
        Wanted::No(why) => {
            say(&format!("Firecracker is not fetched: {why}"));
            firecracker(&home)
        }
        Wanted::IfPossible => {
            let got = get_firecracker(&manifest.firecracker, &fetcher, &folder, say).await;
            got.map_err(|error| say(&format!("no Firecracker, so that QEMU will be used: {error}"))).ok()
        }
        Wanted::Yes => Some(get_firecracker(&manifest.firecracker, &fetcher, &folder, say).await?),
    };
    let artifacts =
        Artifacts { kernel: kernel.vmlinux, initramfs: initramfs.path, modules: Some(modules), firecracker };
    let path = record(&home);
    let text = serde_json::to_vec_pretty(&artifacts).expect("paths are JSON");
    aenv_durable::write(&path, &text).map_err(io(&path))?;
    Ok(artifacts)
}

/// The manifest's. What an archive does not have any more, and what cannot be reached, apt may have in a newer version.
async fn kernel_package(
    manifest: &Manifest,
    fetcher: &Fetcher,
    setup: &Setup,
    folder: &Path,
    say: &(dyn Fn(&str) + Sync),
) -> Result<PathBuf, ArtifactsError> {
    match fetcher.get(&manifest.kernel, say).await {
        Err(error @ FetchError::Unreachable { .. }) if setup.from.is_none() => {
            say(&format!("{error}"));
            say(&format!("taking {KERNEL_PACKAGE} as apt has it instead"));
            Ok(aenv_guest::download_kernel_package(KERNEL_PACKAGE, folder)?)
        }
        other => Ok(other?),
    }
}

async fn get_firecracker(
    program: &Program,
    fetcher: &Fetcher,
    folder: &Path,
    say: &(dyn Fn(&str) + Sync),
) -> Result<PathBuf, ArtifactsError> {
    let archive = fetcher.get(&program.archive(), say).await?;
    let target = folder.join(format!("firecracker-{}", program.version));
    let there = unpack_program(&archive, &program.member, &target)?;
    let how = if there { "is there" } else { "unpacked" };
    say(&format!("Firecracker {} {how}: {}", program.version, target.display()));
    Ok(target)
}

/// Whether a node is to have Firecracker.
enum Wanted {
    /// And why not.
    No(String),
    IfPossible,
    Yes,
}

async fn wanted(config: &Config, home: &Home) -> Wanted {
    if let Some(binary) = &config.firecracker.binary_path {
        return Wanted::No(format!("firecracker.binary_path is {}", binary.display()));
    }
    match config.engine.as_str() {
        "firecracker" => Wanted::Yes,
        "qemu" => Wanted::No("engine is qemu".to_owned()),
        _ if node::runs_on_kvm(config, home).await => Wanted::IfPossible,
        _ => Wanted::No(
            "this machine's KVM cannot be used (`aenv-server doctor` says why); --set engine=firecracker gets it all the same"
                .to_owned(),
        ),
    }
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
