//! One file of the mount.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use aenv_store::{BlockDevice, DeviceError};
use parking_lot::{Mutex, RwLock};
use tracing::error;

/// What a file of the mount is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    /// A disk that can be written to.
    Disk,
    /// A disk without an upper.
    ReadOnlyDisk,
    /// A memory image.
    Memory,
}

/// Who may open a disk besides root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// One file of the mount: an inode number and, as long as it is shown or open, a device.
pub(crate) struct Node {
    pub(crate) ino: u64,
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) kind: NodeKind,
    /// Serialises writes to parts of one sector.
    pub(crate) partial: Mutex<()>,
    /// Root's at first, whatever a disk of the same name had: an inode is never another export's.
    owner: Mutex<Owner>,
    device: RwLock<Option<Arc<dyn BlockDevice>>>,
    /// Number of the ublk device that shows it.
    block_device: OnceLock<u32>,
    opens: AtomicU64,
    complaints: Complaints,
}

impl Node {
    pub(crate) fn new(
        ino: u64,
        name: String,
        size: u64,
        kind: NodeKind,
        device: Arc<dyn BlockDevice>,
    ) -> Self {
        Self {
            ino,
            name,
            size,
            kind,
            partial: Mutex::new(()),
            owner: Mutex::default(),
            device: RwLock::new(Some(device)),
            block_device: OnceLock::new(),
            opens: AtomicU64::new(0),
            complaints: Complaints::default(),
        }
    }

    /// Shows it as the block device of this number, from its first moment in the mount to its last.
    pub(crate) fn becomes_block_device(&self, number: u32) {
        let _ = self.block_device.set(number);
    }

    /// The number of the block device as which it is shown, if it is.
    pub(crate) fn block_device(&self) -> Option<u32> {
        self.block_device.get().copied()
    }

    pub(crate) fn owner(&self) -> Owner {
        *self.owner.lock()
    }

    /// Takes over what is `Some`. A memory image has many users and no owner: it stays root's.
    pub(crate) fn give(&self, uid: Option<u32>, gid: Option<u32>) {
        if self.kind == NodeKind::Memory {
            return;
        }
        let mut owner = self.owner.lock();
        *owner = Owner { uid: uid.unwrap_or(owner.uid), gid: gid.unwrap_or(owner.gid) };
    }

    /// What logs call it: the name of a memory image is what opens it.
    fn label(&self) -> String {
        match self.kind {
            NodeKind::Memory => format!("memory image {}", self.ino),
            NodeKind::Disk | NodeKind::ReadOnlyDisk => self.name.clone(),
        }
    }

    /// Runs an operation on the device; `None` when the node is no longer served.
    pub(crate) fn with_device<T>(&self, operation: impl FnOnce(&dyn BlockDevice) -> T) -> Option<T> {
        self.device.read().as_deref().map(operation)
    }

    /// Whether a read may have to wait for another machine.
    pub(crate) fn may_wait(&self) -> bool {
        self.with_device(|device| device.may_wait()).unwrap_or(false)
    }

    pub(crate) fn is_served(&self) -> bool {
        self.device.read().is_some()
    }

    /// Serves the node again.
    pub(crate) fn restore(&self, device: Arc<dyn BlockDevice>) {
        *self.device.write() = Some(device);
    }

    /// Waits for operations in flight and refuses all later ones.
    pub(crate) fn revoke(&self) {
        self.device.write().take();
    }

    /// One more open file.
    pub(crate) fn opened(&self) {
        self.opens.fetch_add(1, Ordering::Relaxed);
    }

    /// One open file less; `true` for the last one.
    pub(crate) fn released(&self) -> bool {
        self.opens.fetch_sub(1, Ordering::Relaxed) == 1
    }

    pub(crate) fn is_open(&self) -> bool {
        self.opens.load(Ordering::Relaxed) > 0
    }

    /// The errno of a failed operation, which is logged here, and only here.
    pub(crate) fn errno(&self, operation: &'static str, failure: &DeviceError) -> i32 {
        self.complaints.log(&self.label(), operation, failure);
        match failure {
            DeviceError::NoSpace => libc::ENOSPC,
            DeviceError::ReadOnly => libc::EROFS,
            DeviceError::OutOfRange { .. } => libc::EINVAL,
            DeviceError::Source(_) | DeviceError::Io { .. } => libc::EIO,
        }
    }
}

/// Keeps a guest that runs into the same error for ever from filling the log.
#[derive(Default)]
struct Complaints {
    state: Mutex<(Option<Instant>, u64)>,
}

impl Complaints {
    const SECONDS_BETWEEN: u64 = 10;

    fn log(&self, name: &str, operation: &'static str, failure: &DeviceError) {
        let mut state = self.state.lock();
        let (last, suppressed) = &mut *state;
        if last.is_some_and(|last| last.elapsed().as_secs() < Self::SECONDS_BETWEEN) {
            *suppressed += 1;
            return;
        }
        error!(export = name, operation, error = %failure, suppressed = *suppressed, "I/O failed");
        *state = (Some(Instant::now()), 0);
    }
}
