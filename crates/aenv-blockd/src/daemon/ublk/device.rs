//! One device, from its addition or recovery to its removal.

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use io_uring::{IoUring, squeue};
use libublk::{
    UblkFlags,
    ctrl::{UblkCtrl, UblkCtrlBuilder},
    io::UblkDev,
    sys::{
        UBLK_ATTR_READ_ONLY, UBLK_ATTR_VOLATILE_CACHE, UBLK_PARAM_TYPE_BASIC, UBLK_PARAM_TYPE_DEVT,
        UBLK_PARAM_TYPE_DISCARD, ublk_param_basic, ublk_param_discard, ublk_params,
    },
};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use tracing::{debug, warn};

use super::{FLAGS, Pools, UblkFailure, done, limit, queue};
use crate::daemon::node::{Node, NodeKind};

/// Hardware queues of a device, each with a thread: as many processors can wait for it without meeting.
const QUEUES: u16 = 2;

/// Requests in flight in each queue.
const DEPTH: u16 = 64;

/// Largest request in bytes.
const MAX_REQUEST: u32 = 512 << 10;

/// Entries of a thread's ring for control calls, of which one is in flight.
const CONTROL_CALLS: u32 = 4;

/// What a stack keeps account of.
const BLOCK: u32 = 4096;
const BLOCK_SHIFT: u8 = 12;
const SECTOR_SHIFT: u8 = 9;

/// Largest discard in sectors: 1 GiB. It costs an entry of the index.
const MAX_DISCARD: u32 = 1 << 21;

/// A device that the driver knows and nobody serves yet.
pub(super) struct Idle {
    ctrl: UblkCtrl,
}

/// A device that is served.
pub(crate) struct Device {
    ctrl: UblkCtrl,
    id: u32,
    number: u32,
    served: Option<Served>,
}

struct Served {
    device: Arc<UblkDev>,
    queues: Vec<JoinHandle<()>>,
}

/// A new device with a mark.
pub(super) fn add(mark: u64) -> Result<Idle, UblkFailure> {
    let built = UblkCtrlBuilder::default()
        .name("aenv")
        .nr_queues(QUEUES.min(processors()))
        .depth(DEPTH)
        .io_buf_bytes(MAX_REQUEST)
        .ctrl_flags(u64::from(FLAGS))
        .ctrl_target_flags(mark)
        .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
        .build();
    match built {
        Ok(ctrl) => {
            // It is removed when we say so, and not when this goes away: a blockd may follow that needs it.
            ctrl.disown();
            Ok(Idle { ctrl })
        }
        Err(error) if at_limit(super::errno(&error), super::present().count(), limit()) => {
            Err(UblkFailure::Limit { limit: limit().unwrap_or_default() })
        }
        Err(error) => Err(UblkFailure::refused("no block device can be added")(error)),
    }
}

/// Whether the driver refused a device because there are as many as it allows. Some kernels count only devices of users without
/// rights against the limit, and never say this to root.
fn at_limit(errno: Option<i32>, present: usize, limit: Option<u32>) -> bool {
    matches!(errno, Some(libc::EACCES | libc::ENOSPC)) && limit.is_some_and(|limit| present >= limit as usize)
}

/// A device that exists and has this mark.
pub(super) fn find(id: u32, mark: u64) -> Result<Idle, UblkFailure> {
    existing(id, mark, UblkFlags::empty())
}

/// A device that exists and has this mark, made ready to be served by us instead of the process that died.
pub(super) fn recover(id: u32, mark: u64) -> Result<Idle, UblkFailure> {
    let idle = existing(id, mark, UblkFlags::UBLK_DEV_F_RECOVER_DEV)?;
    done("the block device cannot be taken over", idle.ctrl.start_user_recover())?;
    Ok(idle)
}

fn existing(id: u32, mark: u64, flags: UblkFlags) -> Result<Idle, UblkFailure> {
    let gone = || UblkFailure::Gone { id };
    let number = i32::try_from(id).map_err(|_| gone())?;
    let ctrl =
        UblkCtrlBuilder::default().name("aenv").id(number).dev_flags(flags).build().map_err(|error| {
            debug!(device = id, %error, "not there");
            gone()
        })?;
    if ctrl.dev_info().ublksrv_flags == mark { Ok(Idle { ctrl }) } else { Err(gone()) }
}

fn processors() -> u16 {
    thread::available_parallelism().map_or(1, |count| count.get().min(usize::from(u16::MAX)) as u16)
}

impl Idle {
    /// Takes the device away. Whoever has it open gets errors.
    pub(super) fn delete(self) -> Result<(), UblkFailure> {
        done("the block device cannot be stopped", self.ctrl.kill_dev())?;
        // Not waited for: who has it open may keep it for long.
        done("the block device cannot be deleted", self.ctrl.del_dev_async())
    }

    /// Serves it with the bytes of a disk. One that cannot be served is gone.
    pub(super) fn start(self, node: &Arc<Node>, pools: &Pools) -> Result<Device, UblkFailure> {
        match self.serve(node, pools) {
            Ok((served, number)) => {
                let id = self.ctrl.dev_info().dev_id;
                Ok(Device { ctrl: self.ctrl, id, number, served: Some(served) })
            }
            Err(error) => {
                if let Err(stays) = self.delete() {
                    warn!(error = %stays, "a block device that could not be started stays");
                }
                Err(error)
            }
        }
    }

    fn serve(&self, node: &Arc<Node>, pools: &Pools) -> Result<(Served, u32), UblkFailure> {
        let describe = |device: &mut UblkDev| {
            let params = params(node);
            device.tgt.dev_size = node.size;
            device.tgt.params = params;
            // Room for the wake-ups of the queue's thread beside one completion for each tag.
            device.tgt.sq_depth = device.dev_info.queue_depth * 2;
            device.tgt.cq_depth = device.dev_info.queue_depth * 2;
            Ok(())
        };
        let device = UblkDev::new("aenv".to_owned(), describe, &self.ctrl)
            .map_err(UblkFailure::refused("the block device cannot be opened"))?;
        let data = data(&device)?;
        let device = Arc::new(device);
        let mut served = Served { device: Arc::clone(&device), queues: Vec::new() };
        let (ready, started) = mpsc::channel();
        for id in 0..device.dev_info.nr_hw_queues {
            let (device, ready) = (Arc::clone(&device), ready.clone());
            let (node, pools, data) = (Arc::clone(node), pools.clone(), Arc::clone(&data));
            let queue = thread::Builder::new()
                .name(format!("ublk{}.{id}", device.dev_info.dev_id))
                .spawn(move || queue::serve(id, &device, queue::Target { node, pools, data }, &ready))
                .map_err(|error| refused("no thread for a queue", &error))?;
            served.queues.push(queue);
        }
        drop(ready);
        // The driver would wait for ever for a queue that nobody serves.
        for _ in 0..served.queues.len() {
            match started.recv() {
                Ok(outcome) => outcome?,
                Err(error) => return Err(refused("a queue ended at once", &error)),
            }
        }
        done("the block device cannot be started", self.ctrl.start_dev(&device))?;
        let mut known = ublk_params { types: UBLK_PARAM_TYPE_DEVT, ..ublk_params::default() };
        done("the block device has no number", self.ctrl.get_params(&mut known))?;
        Ok((served, number(known.devt.disk_major, known.devt.disk_minor)))
    }
}

impl Device {
    /// What the driver calls it.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// The number by which the kernel opens it, as an inode has it.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Where the host's own programs find it.
    pub(crate) fn path(&self) -> PathBuf {
        self.ctrl.get_bdev_path().into()
    }

    /// Takes the device away, when what is in flight is done. Whoever has it open gets errors from then on.
    pub(crate) fn remove(mut self) {
        if let Err(error) = control_calls().and_then(|()| done("stop", self.ctrl.kill_dev())) {
            warn!(device = self.id, %error, "a block device cannot be stopped");
            return;
        }
        if let Some(served) = self.served.take() {
            for queue in served.queues {
                if queue.join().is_err() {
                    warn!(device = self.id, "a queue's thread panicked");
                }
            }
            drop(served.device);
        }
        if let Err(error) = done("delete", self.ctrl.del_dev_async()) {
            warn!(device = self.id, %error, "a block device cannot be deleted");
        }
    }
}

/// Control calls go through a ring that each thread has for itself, and that the library makes only where a device is added.
fn control_calls() -> Result<(), UblkFailure> {
    let made = libublk::ublk_init_ctrl_task_ring(|ring| {
        if ring.is_none() {
            *ring = Some(IoUring::<squeue::Entry128>::builder().build(CONTROL_CALLS)?);
        }
        Ok(())
    });
    made.map_err(UblkFailure::refused("no ring for control calls"))
}

/// The number of a device as inodes have it.
fn number(major: u32, minor: u32) -> u32 {
    (major << 8) | (minor & 0xff) | ((minor & !0xff) << 12)
}

fn refused(what: &'static str, error: &dyn std::fmt::Display) -> UblkFailure {
    UblkFailure::Refused { what, message: error.to_string() }
}

/// What the bytes of requests are read from and written to. The library has the only descriptor and does not lend it, and the device
/// is opened only once; so it is copied by its number, as from another process.
fn data(device: &UblkDev) -> Result<Arc<File>, UblkFailure> {
    let copied = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|own| pidfd_getfd(own, device.tgt.fds[0], PidfdGetfdFlags::empty()));
    let copied: OwnedFd = copied.map_err(|error| refused("no descriptor of the block device", &error))?;
    Ok(Arc::new(File::from(copied)))
}

/// What the kernel is told of a disk.
fn params(node: &Node) -> ublk_params {
    let read_only = if node.kind == NodeKind::Disk { 0 } else { UBLK_ATTR_READ_ONLY };
    ublk_params {
        types: UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD,
        basic: ublk_param_basic {
            attrs: UBLK_ATTR_VOLATILE_CACHE | read_only,
            logical_bs_shift: SECTOR_SHIFT,
            physical_bs_shift: BLOCK_SHIFT,
            io_opt_shift: BLOCK_SHIFT,
            io_min_shift: BLOCK_SHIFT,
            max_sectors: MAX_REQUEST >> SECTOR_SHIFT,
            dev_sectors: node.size >> SECTOR_SHIFT,
            ..ublk_param_basic::default()
        },
        discard: ublk_param_discard {
            discard_granularity: BLOCK,
            max_discard_sectors: MAX_DISCARD,
            max_write_zeroes_sectors: MAX_DISCARD,
            max_discard_segments: 1,
            ..ublk_param_discard::default()
        },
        ..ublk_params::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_devices_is_told_from_other_refusals() {
        assert!(at_limit(Some(libc::EACCES), 64, Some(64)));
        assert!(!at_limit(Some(libc::EACCES), 63, Some(64)));
        assert!(!at_limit(Some(libc::EINVAL), 64, Some(64)));
        assert!(!at_limit(Some(libc::EACCES), 64, None));
    }

    #[test]
    fn numbers_are_what_the_kernel_has_in_inodes() {
        assert_eq!(number(259, 3), 0x10303);
        assert_eq!(u64::from(number(259, 0x12345)), libc::makedev(259, 0x12345));
    }
}
