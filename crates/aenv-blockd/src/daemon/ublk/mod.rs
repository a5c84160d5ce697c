//! Disks as ublk block devices.
//!
//! A device is the kernel's and not this process's: when a blockd dies, requests wait in it until the next one has taken it
//! over, and whoever has it open notices a delay. Which devices are ours the kernel itself remembers: each carries the mark
//! that the list of exports names. Devices with another mark, or none, are nobody's business here.
//!
//! ```text
//! device    one disk: added or taken over, started, removed   -> control calls of the driver
//! queue     a thread for each hardware queue                   -> takes requests, answers them
//! request   what a request asks of a disk                      -> BlockDevice
//! ```
//!
//! A queue's thread serves what is alone and cannot wait long, and hands the rest to threads that all devices share, so that
//! neither a slow disk nor a slow registry stalls a queue.

mod device;
mod queue;
mod request;

use std::{collections::HashSet, fs, path::Path, sync::Arc};

use libublk::{
    UblkError,
    ctrl::UblkCtrl,
    sys::{UBLK_F_USER_COPY, UBLK_F_USER_RECOVERY, UBLK_F_USER_RECOVERY_REISSUE},
};
use thiserror::Error;
use tracing::{debug, info, warn};

pub(crate) use self::device::Device;
use super::{files::MOST_WAITING, node::Node, pool::Pool};

const CONTROL: &str = "/dev/ublk-control";
const DEVICES: &str = "/sys/class/ublk-char";
const LIMIT: &str = "/sys/module/ublk_drv/parameters/ublks_max";

/// What is asked of the driver: copying by whoever serves a request instead of into buffers of each tag (Linux 6.5), devices that
/// outlive us, and in them the requests that we had not answered.
const FLAGS: u32 = UBLK_F_USER_COPY | UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE;

/// Why a disk is not shown by ublk.
#[derive(Debug, Error)]
pub(crate) enum UblkFailure {
    /// The kernel has no driver for it.
    #[error("there is no {CONTROL}: this kernel has no ublk_drv, or it is not loaded (modprobe ublk_drv)")]
    NoDriver,
    /// The driver is too old.
    #[error("this kernel's ublk_drv lacks features that are needed ({missing:#x}); Linux 6.9 has them")]
    Lacks {
        /// Bits of `UBLK_F_*`.
        missing: u32,
    },
    /// As many devices exist as the driver allows.
    #[error("ublk_drv allows {limit} devices and has them")]
    Limit {
        /// Its parameter `ublks_max`.
        limit: u32,
    },
    /// The device that an earlier blockd had is not there any more.
    #[error("the device {id} is gone, or is somebody else's by now")]
    Gone {
        /// Its number.
        id: u32,
    },
    /// The driver refused.
    #[error("{what}: {message}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// What it said.
        message: String,
    },
}

impl UblkFailure {
    fn refused(what: &'static str) -> impl Fn(UblkError) -> Self {
        move |error| Self::Refused { what, message: describe(&error) }
    }
}

/// The library puts the number of an error into fields that its texts leave out.
fn describe(error: &UblkError) -> String {
    match errno(error) {
        Some(number) => std::io::Error::from_raw_os_error(number).to_string(),
        None => error.to_string(),
    }
}

fn errno(error: &UblkError) -> Option<i32> {
    match error {
        UblkError::UringIOError(number) | UblkError::OtherError(number) => Some(number.abs()),
        UblkError::IOError(error) => error.raw_os_error(),
        _ => None,
    }
}

/// Calls that the driver would not carry out now are no error to the library.
fn done(what: &'static str, result: Result<i32, UblkError>) -> Result<(), UblkFailure> {
    match result {
        Ok(code) if code >= 0 => Ok(()),
        Ok(code) => Err(UblkFailure::refused(what)(UblkError::UringIOError(code))),
        Err(error) => Err(UblkFailure::refused(what)(error)),
    }
}

/// All devices of one blockd.
pub(crate) struct Devices {
    mark: u64,
    pools: Pools,
}

/// Threads that all devices share.
#[derive(Clone)]
struct Pools {
    /// For the host's own disk.
    local: Pool,
    /// For what may wait for another machine.
    remote: Pool,
}

impl Devices {
    /// Those with a mark, when the driver is there and lets a device be made. `workers` serve the host's own disk.
    pub(crate) fn open(mark: u64, workers: usize) -> Result<Self, UblkFailure> {
        if !Path::new(CONTROL).exists() {
            return Err(UblkFailure::NoDriver);
        }
        let has = UblkCtrl::get_features().unwrap_or(0);
        let missing = FLAGS & !(has as u32);
        if missing != 0 {
            return Err(UblkFailure::Lacks { missing });
        }
        let pools = Pools {
            local: Pool::new(workers.max(1), protect_from_reclaim),
            remote: Pool::new(MOST_WAITING, protect_from_reclaim),
        };
        Ok(Self { mark, pools })
    }

    /// Tries whether a device can be made.
    pub(crate) fn probe(&self) -> Result<(), UblkFailure> {
        device::add(self.mark)?.delete()
    }

    /// A new device that shows a disk.
    pub(crate) fn add(&self, node: &Arc<Node>) -> Result<Device, UblkFailure> {
        let device = device::add(self.mark)?;
        device.start(node, &self.pools)
    }

    /// The device that an earlier blockd of ours had for a disk; requests in it go on.
    pub(crate) fn take_over(&self, id: u32, node: &Arc<Node>) -> Result<Device, UblkFailure> {
        device::recover(id, self.mark)?.start(node, &self.pools)
    }

    /// Removes devices of ours that are none of `known`: what a blockd left that died between two steps. Requests in them fail.
    pub(crate) fn sweep(&self, known: &HashSet<u32>) {
        for id in present().filter(|id| !known.contains(id)) {
            match device::find(id, self.mark) {
                Ok(device) => match device.delete() {
                    Ok(()) => info!(device = id, "removed a block device that nobody listed"),
                    Err(error) => warn!(device = id, %error, "a block device that nobody listed stays"),
                },
                Err(error) => debug!(device = id, %error, "not ours"),
            }
        }
    }
}

/// Numbers of the devices of the machine, whosever they are.
fn present() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok())
}

/// Memory that is given back by writing to one of our devices must not be waited for by those who serve it.
fn protect_from_reclaim() {
    UblkCtrl::init_queue_thread();
}

fn limit() -> Option<u32> {
    fs::read_to_string(LIMIT).ok()?.trim().parse().ok()
}
