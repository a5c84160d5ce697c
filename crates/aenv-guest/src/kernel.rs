//! A kernel package becomes a vmlinux and a module tree.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use aenv_types::Digest;
use thiserror::Error;

use crate::{bzimage, bzimage::ExtractError};

/// An unpacked guest kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestKernel {
    /// ELF vmlinux.
    pub vmlinux: PathBuf,
    /// Its module tree: the folder that holds `kernel/` and `modules.builtin`.
    pub modules: PathBuf,
    /// Its release, such as `6.1.0-57-cloud-amd64`.
    pub release: String,
}

/// Why a kernel package could not be used.
#[derive(Debug, Error)]
pub enum KernelError {
    /// The package holds no kernel, or several.
    #[error("{path} holds {found} kernels (boot/vmlinuz-*), one is needed")]
    Kernels {
        /// The package.
        path: PathBuf,
        /// How many.
        found: usize,
    },
    /// The kernel's modules are not there.
    #[error("the modules of kernel {release} are not in {path} (lib/modules/{release})")]
    NoModules {
        /// The package.
        path: PathBuf,
        /// The kernel.
        release: String,
    },
    /// The kernel image cannot be used.
    #[error("{path} cannot be used as a guest kernel: {source}")]
    Image {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: ExtractError,
    },
    /// `dpkg-deb` failed.
    #[error("unpacking {path} failed: {message}")]
    Unpack {
        /// The package.
        path: PathBuf,
        /// What it said.
        message: String,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

fn refused(path: &Path) -> impl FnOnce(io::Error) -> KernelError {
    move |source| KernelError::Io { path: path.to_owned(), source }
}

/// Unpacks `package` (a `.deb`, or a folder that one was unpacked into) below `out`, into a folder that is named by the
/// package's content; when that folder is there, nothing is done. Needs `dpkg-deb` for a `.deb`.
pub fn unpack_kernel(package: &Path, out: &Path) -> Result<GuestKernel, KernelError> {
    fs::create_dir_all(out).map_err(refused(out))?;
    if package.is_dir() {
        return from_tree(package, out);
    }
    let digest = digest_of(package).map_err(refused(package))?.hex();
    let folder = out.join(format!("kernel-{}", &digest[..16]));
    if folder.is_dir() {
        return from_tree(&folder, &folder);
    }
    let beside = out.join(format!(".kernel-{}.{}", &digest[..16], std::process::id()));
    let unpacked = unpack_deb(package, &beside).and_then(|()| {
        from_tree(&beside, &beside)?;
        match fs::rename(&beside, &folder) {
            // Another process was quicker; what it made is the same.
            Err(_) if folder.is_dir() => Ok(()),
            other => other.map_err(refused(&folder)),
        }
    });
    if beside.exists() {
        // The error that matters is the first one.
        let _ = fs::remove_dir_all(&beside);
    }
    unpacked?;
    from_tree(&folder, &folder)
}

fn unpack_deb(package: &Path, into: &Path) -> Result<(), KernelError> {
    let failed = |message: String| KernelError::Unpack { path: package.to_owned(), message };
    let output = Command::new("dpkg-deb")
        .arg("-x")
        .arg(package)
        .arg(into)
        .output()
        .map_err(|error| failed(format!("dpkg-deb cannot be run: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Finds kernel and modules below `tree`; the vmlinux is put into `out` unless it is there.
fn from_tree(tree: &Path, out: &Path) -> Result<GuestKernel, KernelError> {
    let boot = tree.join("boot");
    let entries = fs::read_dir(&boot).map_err(refused(&boot))?.flatten();
    let images: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((entry.path(), name.strip_prefix("vmlinuz-")?.to_owned()))
        })
        .collect();
    let [(image, release)] = &images[..] else {
        return Err(KernelError::Kernels { path: tree.to_owned(), found: images.len() });
    };
    let places = ["lib/modules", "usr/lib/modules"].map(|place| tree.join(place).join(release));
    let Some(modules) = places.into_iter().find(|place| place.join("kernel").is_dir()) else {
        return Err(KernelError::NoModules { path: tree.to_owned(), release: release.clone() });
    };
    let vmlinux = out.join(format!("vmlinux-{release}"));
    if !vmlinux.is_file() {
        let bytes = fs::read(image).map_err(refused(image))?;
        let elf =
            bzimage::vmlinux(&bytes).map_err(|source| KernelError::Image { path: image.clone(), source })?;
        aenv_durable::write(&vmlinux, &elf).map_err(refused(&vmlinux))?;
    }
    Ok(GuestKernel { vmlinux, modules, release: release.clone() })
}

impl GuestKernel {
    /// Digest of the vmlinux, as an engine stamp carries it.
    pub fn digest(&self) -> Result<Digest, KernelError> {
        digest_of(&self.vmlinux).map_err(refused(&self.vmlinux))
    }
}

fn digest_of(path: &Path) -> io::Result<Digest> {
    Ok(Digest::of_reader(fs::File::open(path)?)?.0)
}
