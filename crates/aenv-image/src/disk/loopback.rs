//! A loop device that clears itself. The one room of this crate that needs `unsafe`: loop devices are set up by ioctls.

use std::{
    fs::{self, File, OpenOptions},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::errno::Errno;

use crate::error::LayerError;

// From <linux/loop.h>.
nix::ioctl_none_bad!(loop_ctl_get_free, 0x4C82);
nix::ioctl_write_ptr_bad!(loop_configure, 0x4C0A, LoopConfig);

const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64` of <linux/loop.h>.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of <linux/loop.h>.
#[repr(C)]
pub(super) struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// The longest that a detached device may stay attached: another process may look at it for a moment.
const DETACH_BOUND: Duration = Duration::from_secs(10);

/// An attached loop device; detached when dropped.
pub(super) struct LoopDevice {
    path: PathBuf,
    /// Present until it is dropped.
    files: Option<Files>,
    /// What the kernel says that it shows.
    attribute: PathBuf,
    shown: String,
}

struct Files {
    device: File,
    backing: File,
}

impl LoopDevice {
    /// Attaches a file to a free loop device.
    pub(super) fn attach(path: &Path) -> Result<Self, LayerError> {
        let backing = open(path)?;
        let control = open(Path::new("/dev/loop-control")).map_err(|error| match error {
            LayerError::Io { context, message } => {
                LayerError::Io { context, message: format!("{message}; load the kernel module `loop`") }
            }
            other => other,
        })?;
        // Another process may take the free device first.
        for _ in 0..64 {
            // SAFETY: the descriptor is open and the ioctl takes no argument.
            let number = unsafe { loop_ctl_get_free(control.as_raw_fd()) }
                .map_err(|error| LayerError::io("finding a free loop device", error))?;
            let device_path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&device_path)?;
            let config = LoopConfig {
                fd: u32::try_from(backing.as_raw_fd()).expect("an open descriptor is not negative"),
                block_size: 4096,
                info: LoopInfo {
                    device: 0,
                    inode: 0,
                    rdevice: 0,
                    offset: 0,
                    size_limit: 0,
                    number: 0,
                    encrypt_type: 0,
                    encrypt_key_size: 0,
                    flags: LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO,
                    file_name: [0; 64],
                    crypt_name: [0; 64],
                    encrypt_key: [0; 32],
                    init: [0; 2],
                },
                reserved: [0; 8],
            };
            // SAFETY: the descriptor is open, and `config` has the layout that the ioctl reads, for as long as it runs.
            match unsafe { loop_configure(device.as_raw_fd(), &raw const config) } {
                Ok(_) => {
                    let attribute = PathBuf::from(format!("/sys/block/loop{number}/loop/backing_file"));
                    let shown = fs::read_to_string(&attribute).unwrap_or_default();
                    let files = Some(Files { device, backing });
                    return Ok(Self { path: device_path, files, attribute, shown });
                }
                Err(Errno::EBUSY) => {}
                Err(error) => {
                    return Err(LayerError::io(
                        format!("attaching {} to a loop device", path.display()),
                        error,
                    ));
                }
            }
        }
        Err(LayerError::Io {
            context: format!("attaching {} to a loop device", path.display()),
            message: "every free loop device was taken by others".to_owned(),
        })
    }

    /// The device.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes everything back to the file, durably, and detaches.
    pub(super) fn detach(self) -> Result<(), LayerError> {
        let Some(files) = &self.files else { return Ok(()) };
        files
            .device
            .sync_all()
            .and_then(|()| files.backing.sync_all())
            .map_err(|error| LayerError::io(format!("writing {} back", self.path.display()), error))
    }
}

/// Its last user's close detaches it. That may be a process that another thread of ours is just starting, which holds
/// copies of all descriptors until it executes its program.
impl Drop for LoopDevice {
    fn drop(&mut self) {
        self.files = None;
        let start = Instant::now();
        while fs::read_to_string(&self.attribute).is_ok_and(|shown| shown == self.shown) {
            if start.elapsed() > DETACH_BOUND {
                tracing::error!(device = %self.path.display(), "a loop device stays attached");
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn open(path: &Path) -> Result<File, LayerError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| LayerError::io(format!("opening {}", path.display()), error))
}
