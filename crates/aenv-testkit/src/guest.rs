//! A guest for tests that boot real VMs: kernel, initramfs and a root filesystem, made once and kept.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use aenv_guest::{InitramfsSpec, MODULES};
use anyhow::{Context, bail, ensure};

const KERNEL: &str = "linux-image-cloud-amd64";

/// Which program the initramfs starts as its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestDaemon {
    /// The product's own `aenv-envd`.
    Envd,
    /// The stand-in of `aenv-init`'s examples: one line in, one line out, on envd's port.
    Agent,
}

/// Files to boot a guest from.
#[derive(Clone, Debug)]
pub struct GuestArtifacts {
    /// ELF vmlinux.
    pub kernel: PathBuf,
    /// Initramfs with the daemon that was asked for.
    pub initramfs: PathBuf,
}

/// Kernel and initramfs, made in [`cache_folder`] the first time (which downloads the kernel package with apt and builds
/// the guest's programs with cargo) and found there after that. Processes that ask at the same time wait for one another.
pub fn guest_artifacts(daemon: GuestDaemon) -> anyhow::Result<GuestArtifacts> {
    let cache = cache_folder();
    fs::create_dir_all(&cache)?;
    let lock = fs::File::create(cache.join("lock"))?;
    // The lock goes when the file is closed.
    lock.lock().with_context(|| format!("cannot lock {}", cache.display()))?;

    let package = match aenv_guest::cached_kernel_package(KERNEL, &cache) {
        Some(package) => package,
        None => aenv_guest::download_kernel_package(KERNEL, &cache)?,
    };
    let kernel = aenv_guest::unpack_kernel(&package, &cache)?;
    let programs = build_guest_programs(daemon)?;
    let spec = InitramfsSpec {
        modules: &kernel.modules,
        wanted: MODULES,
        init: &programs.join("aenv-init"),
        envd: &match daemon {
            GuestDaemon::Envd => programs.join("aenv-envd"),
            GuestDaemon::Agent => programs.join("examples/agent"),
        },
    };
    let initramfs = aenv_guest::build_initramfs(&spec, &cache)?;
    Ok(GuestArtifacts { kernel: kernel.vmlinux, initramfs: initramfs.path })
}

/// `$AENV_TEST_CACHE`, or `guest-artifacts` in the target folder.
pub fn cache_folder() -> PathBuf {
    match env::var_os("AENV_TEST_CACHE") {
        Some(folder) => folder.into(),
        None => target_folder().join("guest-artifacts"),
    }
}

fn target_folder() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => folder.into(),
        None => workspace().join("target"),
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A stand-in for Firecracker that speaks its API, static: the example `firecracker` of `aenv-init`.
pub fn firecracker_double() -> anyhow::Result<PathBuf> {
    let programs = build_static(&["-p", "aenv-init", "--example", "firecracker"])?;
    Ok(programs.join("examples/firecracker"))
}

fn build_guest_programs(daemon: GuestDaemon) -> anyhow::Result<PathBuf> {
    let init = ["-p", "aenv-init", "--bin", "aenv-init"];
    match daemon {
        GuestDaemon::Envd => build_static(&[&init[..], &["-p", "aenv-envd", "--bin", "aenv-envd"]].concat()),
        GuestDaemon::Agent => build_static(&[&init[..], &["--example", "agent"]].concat()),
    }
}

/// Builds static programs and returns their folder; `$AENV_TEST_PROGRAMS`, where they are already and cargo is not.
fn build_static(which: &[&str]) -> anyhow::Result<PathBuf> {
    const TARGET: &str = "x86_64-unknown-linux-musl";
    if let Some(folder) = env::var_os("AENV_TEST_PROGRAMS") {
        return Ok(folder.into());
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(workspace()).args(["build", "--quiet", "--profile", "guest", "--target", TARGET]);
    command.args(which);
    let output = command.output().context("run cargo for the guest's programs")?;
    if !output.status.success() {
        bail!("building the guest's programs failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(target_folder().join(TARGET).join("guest"))
}

/// Makes an ext4 filesystem of `size_mib` in `image` that holds nothing but `/bin/busybox` and `/bin/sh`: no `/proc`, no
/// `/dev`, no `/etc`. Needs `mke2fs` and `/bin/busybox` (Debian: e2fsprogs, busybox-static).
pub fn tiny_root(image: &Path, size_mib: u32) -> anyhow::Result<()> {
    let tree = tempfile::tempdir()?;
    let bin = tree.path().join("bin");
    fs::create_dir(&bin)?;
    fs::copy("/bin/busybox", bin.join("busybox")).context("copy /bin/busybox (busybox-static)")?;
    std::os::unix::fs::symlink("busybox", bin.join("sh"))?;
    let mut file = fs::File::create(image)?;
    file.flush()?;
    file.set_len(u64::from(size_mib) << 20)?;
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .arg(tree.path())
        .arg(image)
        .output()
        .context("run mke2fs (e2fsprogs)")?;
    ensure!(output.status.success(), "mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
