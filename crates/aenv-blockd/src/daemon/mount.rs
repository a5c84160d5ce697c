//! The mount itself. Made here and not by fuser, so that the connection's descriptor is ours.

use std::{
    fs::{self, OpenOptions},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::{major, minor, stat},
};
use thiserror::Error;
use tracing::warn;

/// Largest read that the kernel asks for, in bytes.
pub(crate) const MAX_READ: u32 = 1 << 20;

/// Mounts that may lie over each other at one place before something else is wrong.
const MOST_STALE: usize = 16;

/// Why the exports could not be mounted.
#[derive(Debug, Error)]
pub enum MountError {
    /// The folder could not be made.
    #[error("{path}: {source}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel has no FUSE, or it may not be used.
    #[error("/dev/fuse: {source}; load it with `modprobe fuse`")]
    Device {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Mounting was refused.
    #[error("cannot mount on {path}: {source}; blockd needs CAP_SYS_ADMIN")]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: Errno,
    },
    /// A mount of an earlier blockd does not go away.
    #[error("cannot unmount what is left on {path}: {source}")]
    Stale {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: Errno,
    },
}

/// Takes away the mounts that a dead blockd left at `path`. Files that are open in them stay open, and dead.
pub(crate) fn detach(path: &Path) -> Result<(), MountError> {
    for _ in 0..MOST_STALE {
        match umount2(path, MntFlags::MNT_DETACH) {
            Ok(()) => warn!(path = %path.display(), "unmounted what a blockd before had left"),
            // Nothing is mounted there, or nothing is there.
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(source) => return Err(MountError::Stale { path: path.to_owned(), source }),
        }
    }
    Err(MountError::Stale { path: path.to_owned(), source: Errno::EBUSY })
}

/// Mounts a FUSE file system at `path` and returns the kernel's end of it. Everybody may use it, within what owners and modes of
/// its files allow, which the kernel judges. Device nodes in it work, for disks that are shown by ublk; only blockd makes files there.
pub(crate) fn attach(path: &Path) -> Result<OwnedFd, MountError> {
    fs::create_dir_all(path).map_err(|source| MountError::Folder { path: path.to_owned(), source })?;
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(|source| MountError::Device { source })?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={MAX_READ}",
        device.as_raw_fd()
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
    mount(Some("aenv-blockd"), path, Some("fuse.aenv"), flags, Some(options.as_str()))
        .map_err(|source| MountError::Mount { path: path.to_owned(), source })?;
    Ok(device.into())
}

/// Sets how far the kernel reads ahead in files of the mount at `path`, in KiB. Works once the session is up. FUSE itself
/// only lets a daemon ask for less than the kernel's 128 KiB.
pub(crate) fn set_readahead(path: &Path, kib: u32) -> io::Result<()> {
    let device = stat(path)?.st_dev;
    let file = format!("/sys/class/bdi/{}:{}/read_ahead_kb", major(device), minor(device));
    fs::write(file, kib.to_string())
}
