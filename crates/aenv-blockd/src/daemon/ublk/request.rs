//! What a request asks of a disk.

use std::{cell::RefCell, fs::File, io, os::unix::fs::FileExt};

use libublk::{
    io::{UblkIOCtx, UblkQueue},
    sys::{UBLK_IO_OP_DISCARD, UBLK_IO_OP_FLUSH, UBLK_IO_OP_READ, UBLK_IO_OP_WRITE, UBLK_IO_OP_WRITE_ZEROES},
};
use tracing::debug;

use crate::daemon::{
    bytes,
    node::{Node, NodeKind},
};

const SECTOR: u64 = 512;

/// The lowest bits of `op_flags`.
const OPERATION: u32 = 0xff;

thread_local! {
    /// What bytes pass through; one for each thread, used again.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Flush,
    /// Discards and zeroes: both read as zeros afterwards, and give space back.
    Zero,
    Unknown(u32),
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) operation: Operation,
    offset: u64,
    len: u64,
    /// Where its bytes are in the device's file.
    place: u64,
}

impl Request {
    /// The one that a tag of a queue has now.
    pub(super) fn of(queue: &UblkQueue<'_>, tag: u16) -> Self {
        let io = queue.get_iod(tag);
        let operation = match io.op_flags & OPERATION {
            UBLK_IO_OP_READ => Operation::Read,
            UBLK_IO_OP_WRITE => Operation::Write,
            UBLK_IO_OP_FLUSH => Operation::Flush,
            UBLK_IO_OP_DISCARD | UBLK_IO_OP_WRITE_ZEROES => Operation::Zero,
            other => Operation::Unknown(other),
        };
        Self {
            operation,
            offset: io.start_sector * SECTOR,
            len: u64::from(io.nr_sectors) * SECTOR,
            place: UblkIOCtx::ublk_user_copy_pos(queue.get_qid(), tag, 0),
        }
    }

    /// Whether it is done soon where the disk's layers are here.
    pub(super) fn is_short(&self) -> bool {
        matches!(self.operation, Operation::Read | Operation::Write)
    }

    /// Does it. What the driver is told: bytes, or a negative errno.
    pub(super) fn perform(&self, node: &Node, data: &File) -> i32 {
        match self.operation {
            Operation::Read => with_buffer(self.len, |buffer| {
                served(node, "read", |device| bytes::read(device, buffer, self.offset))?;
                data.write_all_at(buffer, self.place).map_err(|error| copy_failed(&error))
            }),
            _ if node.kind != NodeKind::Disk && self.operation != Operation::Flush => Err(libc::EROFS),
            Operation::Write => with_buffer(self.len, |buffer| {
                data.read_exact_at(buffer, self.place).map_err(|error| copy_failed(&error))?;
                served(node, "write", |device| bytes::write(device, &node.partial, buffer, self.offset))
            }),
            Operation::Flush => served(node, "flush", |device| device.flush()),
            Operation::Zero => {
                served(node, "discard", |device| bytes::zero(device, &node.partial, self.offset, self.len))
            }
            Operation::Unknown(operation) => {
                debug!(operation, "an unknown request");
                Err(libc::EOPNOTSUPP)
            }
        }
        .map_or_else(|errno| -errno, |()| self.moved())
    }

    /// Bytes that it moved.
    fn moved(&self) -> i32 {
        match self.operation {
            Operation::Read | Operation::Write => i32::try_from(self.len).unwrap_or(i32::MAX),
            _ => 0,
        }
    }
}

fn with_buffer(len: u64, work: impl FnOnce(&mut [u8]) -> Result<(), i32>) -> Result<(), i32> {
    BUFFER.with_borrow_mut(|buffer| {
        let len = len as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        work(&mut buffer[..len])
    })
}

fn served(
    node: &Node,
    operation: &'static str,
    work: impl FnOnce(&dyn aenv_store::BlockDevice) -> Result<(), aenv_store::DeviceError>,
) -> Result<(), i32> {
    match node.with_device(work) {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(node.errno(operation, &error)),
        None => Err(libc::EIO),
    }
}

/// The request is gone, with its device.
fn copy_failed(error: &io::Error) -> i32 {
    debug!(%error, "the bytes of a request cannot be copied");
    libc::EIO
}
