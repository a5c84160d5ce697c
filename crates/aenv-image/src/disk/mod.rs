//! The filesystem that layers are applied to: an ext4 in an export of blockd, mounted where nobody sees it.
//!
//! The mount is detached: it has no place in any namespace and lives as long as its descriptor. The loop device
//! clears itself. A process that dies leaves neither behind.

mod format;
mod loopback;

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::sys::statvfs::fstatvfs;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

pub(crate) use self::format::format;
use self::loopback::LoopDevice;
use crate::error::LayerError;

/// The longest that the kernel may take to let go of a filesystem.
const UNMOUNT_BOUND: Duration = Duration::from_secs(60);

/// A mounted ext4.
pub(crate) struct MountedDisk {
    mount: Option<File>,
    device: PathBuf,
    loopback: Option<LoopDevice>,
}

impl MountedDisk {
    /// Mounts the ext4 in an export: a file, through a loop device, or a block device.
    pub(crate) fn mount(export: &Path) -> Result<Self, LayerError> {
        let kind = std::fs::metadata(export)
            .map_err(|error| LayerError::io(format!("opening {}", export.display()), error))?
            .file_type();
        let loopback = if kind.is_block_device() { None } else { Some(LoopDevice::attach(export)?) };
        let device = loopback.as_ref().map_or_else(|| export.to_owned(), |found| found.path().to_owned());
        let mount = mount_detached(&device)
            .map_err(|error| LayerError::io(format!("mounting the ext4 on {}", device.display()), error))?;
        Ok(Self { mount: Some(mount), device, loopback })
    }

    /// Its root folder.
    pub(crate) fn root(&self) -> Result<File, LayerError> {
        let mount = self.mount.as_ref().expect("it is taken only by unmount, which consumes the disk");
        nix::fcntl::openat(
            mount,
            ".",
            nix::fcntl::OFlag::O_RDONLY | nix::fcntl::OFlag::O_DIRECTORY | nix::fcntl::OFlag::O_CLOEXEC,
            nix::sys::stat::Mode::empty(),
        )
        .map(File::from)
        .map_err(|error| LayerError::io("opening the image's root", error))
    }

    /// Whether blocks or inodes have run out.
    pub(crate) fn is_full(&self) -> bool {
        self.mount
            .as_ref()
            .and_then(|mount| fstatvfs(mount).ok())
            .is_some_and(|state| state.blocks_available() < 64 || state.files_available() == 0)
    }

    /// Writes everything back and unmounts. Afterwards the export holds a clean ext4. Every descriptor in it must be
    /// closed by then.
    pub(crate) fn unmount(mut self) -> Result<(), LayerError> {
        let root = self.root()?;
        nix::unistd::syncfs(&root)
            .map_err(|error| LayerError::io("writing the image's filesystem", error))?;
        drop(root);
        self.mount = None;
        self.wait_until_free()?;
        if let Some(loopback) = self.loopback.take() {
            return loopback.detach();
        }
        File::open(&self.device)
            .and_then(|device| device.sync_all())
            .map_err(|error| LayerError::io(format!("writing {}", self.device.display()), error))
    }

    /// Waits until no filesystem holds the device: only then can it be opened exclusively.
    fn wait_until_free(&self) -> Result<(), LayerError> {
        let start = Instant::now();
        loop {
            match OpenOptions::new().read(true).custom_flags(nix::libc::O_EXCL).open(&self.device) {
                Ok(_) => return Ok(()),
                Err(error)
                    if error.raw_os_error() == Some(nix::libc::EBUSY) && start.elapsed() < UNMOUNT_BOUND =>
                {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => {
                    return Err(LayerError::io(
                        format!("waiting for {} to be unmounted", self.device.display()),
                        error,
                    ));
                }
            }
        }
    }
}

/// A disk that is given up: the kernel must let go of the export before anybody closes that.
impl Drop for MountedDisk {
    fn drop(&mut self) {
        if self.mount.take().is_some()
            && let Err(error) = self.wait_until_free()
        {
            tracing::error!(device = %self.device.display(), %error, "an image's filesystem stays mounted");
        }
    }
}

fn mount_detached(device: &Path) -> rustix::io::Result<File> {
    let context = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device)?;
    // One commit at the end instead of one every five seconds; nobody reads this filesystem before that.
    fsconfig_set_string(&context, "commit", "300")?;
    fsconfig_set_flag(&context, "noinit_itable")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOATIME
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map(File::from)
}
