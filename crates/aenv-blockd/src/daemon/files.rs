//! The FUSE file system: one folder of files, a file for each export.

use std::{
    cell::RefCell,
    ffi::OsStr,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use tracing::warn;

use super::{
    bytes,
    mount::MAX_READ,
    node::{Node, NodeKind, Owner},
    pool::Pool,
    table::{ROOT, Table},
};

/// How long the kernel may remember a disk's name: not at all, for it may be shown again as another disk.
const DISK_NAME_TTL: Duration = Duration::ZERO;

/// A memory image's name is never used twice, and a launch is faster if the kernel knows it.
const MEMORY_NAME_TTL: Duration = Duration::from_secs(3600);

/// Nothing about a file changes as long as it lives but its owner, and the kernel sees that change: it asks for it.
const ATTRIBUTE_TTL: Duration = Duration::from_secs(3600);

/// Requests that the kernel may have in flight in the background (readahead, asynchronous I/O).
const MAX_BACKGROUND: u16 = 128;

const PAGE: u64 = 4096;

/// Threads for reads that may wait for another machine, beside the workers.
pub(crate) const MOST_WAITING: usize = 64;

thread_local! {
    /// What a read is answered from; one for each worker thread, used again.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reads and answers.
fn answer(node: &Node, offset: u64, len: usize, reply: ReplyData) {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let buffer = &mut buffer[..len];
        match node.with_device(|device| bytes::read(device, buffer, offset)) {
            Some(Ok(())) => reply.data(buffer),
            Some(Err(error)) => reply.error(errno(node.errno("read", &error))),
            None => reply.error(Errno::EIO),
        }
    });
}

pub(crate) struct Files {
    table: Arc<Table>,
    started: SystemTime,
    waiting: Pool,
    /// Reads that may wait for another machine and are served by a worker now.
    may_wait: AtomicUsize,
    /// How many of them there may be: the other workers are for those that do not wait.
    may_wait_most: usize,
}

impl Files {
    pub(crate) fn new(table: Arc<Table>, workers: usize) -> Self {
        let started = SystemTime::now();
        Self {
            table,
            started,
            waiting: Pool::new(MOST_WAITING, || ()),
            may_wait: AtomicUsize::new(0),
            may_wait_most: workers / 2,
        }
    }

    fn attributes(&self, node: &Node) -> FileAttr {
        let perm = match node.kind {
            NodeKind::Disk => 0o600,
            NodeKind::ReadOnlyDisk => 0o400,
            // Every VMM of its checkpoint opens it, and QEMU does so for writing. Who knows its name may; it cannot be guessed.
            NodeKind::Memory => 0o666,
        };
        let Owner { uid, gid } = node.owner();
        match node.block_device() {
            // The kernel opens the device itself; what this mount says of it is whose it is.
            Some(rdev) => FileAttr { uid, gid, rdev, ..self.attr(node.ino, 0, FileType::BlockDevice, perm) },
            None => FileAttr { uid, gid, ..self.attr(node.ino, node.size, FileType::RegularFile, perm) },
        }
    }

    /// Others than root pass through it to what they know the name of, and cannot list it.
    fn root(&self) -> FileAttr {
        self.attr(ROOT, 0, FileType::Directory, 0o711)
    }

    fn attr(&self, ino: u64, size: u64, kind: FileType, perm: u16) -> FileAttr {
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size / 512,
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

fn errno(number: i32) -> Errno {
    Errno::from(io::Error::from_raw_os_error(number))
}

/// The part of a range of `len` bytes at `offset` that lies inside a node.
fn inside(node: &Node, offset: u64, len: usize) -> usize {
    node.size.saturating_sub(offset).min(len as u64) as usize
}

impl Filesystem for Files {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for wanted in [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS] {
            if config.add_capabilities(wanted).is_err() {
                warn!(?wanted, "this kernel's FUSE lacks a feature; I/O is slower");
            }
        }
        if let Err(nearest) = config.set_max_write(MAX_READ) {
            warn!(nearest, "this kernel's FUSE takes smaller writes");
        }
        if config.set_max_background(MAX_BACKGROUND).is_err() {
            warn!("this kernel's FUSE takes fewer background requests");
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let node = name.to_str().filter(|_| parent.0 == ROOT).and_then(|name| self.table.lookup(name));
        match node {
            Some(node) => {
                let name_ttl = if node.kind == NodeKind::Memory { MEMORY_NAME_TTL } else { DISK_NAME_TTL };
                let attributes = self.attributes(&node);
                reply.entry_with_ttls(&ATTRIBUTE_TTL, &name_ttl, &attributes, Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        if ino.0 == ROOT {
            return reply.attr(&ATTRIBUTE_TTL, &self.root());
        }
        match self.table.node(ino.0) {
            Some(node) => reply.attr(&ATTRIBUTE_TTL, &self.attributes(&node)),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Owners of disks are kept; the kernel lets only root change them. Size is fixed; modes and times are taken and mean nothing.
    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match self.table.node(ino.0) {
            Some(node) if size.is_none_or(|size| size == node.size) => {
                node.give(uid, gid);
                reply.attr(&ATTRIBUTE_TTL, &self.attributes(&node));
            }
            Some(_) => reply.error(Errno::EPERM),
            None if ino.0 == ROOT => reply.attr(&ATTRIBUTE_TTL, &self.root()),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(node) = self.table.node(ino.0).filter(|node| node.is_served()) else {
            return reply.error(Errno::ENOENT);
        };
        let options = match node.kind {
            // The page cache holds the layers' files, once for all disks, and not each disk as well.
            NodeKind::Disk => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            NodeKind::ReadOnlyDisk if flags.acc_mode() != OpenAccMode::O_RDONLY => {
                return reply.error(Errno::EROFS);
            }
            NodeKind::ReadOnlyDisk => FopenFlags::FOPEN_DIRECT_IO,
            // VMMs open it for writing and map it privately.
            NodeKind::Memory => FopenFlags::FOPEN_KEEP_CACHE,
        };
        node.opened();
        reply.opened(FileHandle(0), options | FopenFlags::FOPEN_NOFLUSH);
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(node) = self.table.node(ino.0) {
            self.table.released(&node);
        }
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(node) = self.table.node(ino.0) else { return reply.error(Errno::EIO) };
        let len = inside(&node, offset, size.min(MAX_READ) as usize);
        if len == 0 {
            return reply.data(&[]);
        }
        if !node.may_wait() {
            return answer(&node, offset, len, reply);
        }
        if self.may_wait.fetch_add(1, Ordering::Relaxed) < self.may_wait_most {
            answer(&node, offset, len, reply);
        } else {
            self.waiting.run(move || answer(&node, offset, len, reply));
        }
        self.may_wait.fetch_sub(1, Ordering::Relaxed);
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(node) = self.table.node(ino.0) else { return reply.error(Errno::EIO) };
        if node.kind != NodeKind::Disk {
            reply.error(Errno::EROFS);
            if node.kind == NodeKind::Memory {
                self.table.spoiled(&node);
            }
            return;
        }
        let len = inside(&node, offset, data.len());
        if len == 0 && !data.is_empty() {
            return reply.error(Errno::ENOSPC);
        }
        let synchronous = flags.0 & libc::O_DSYNC != 0;
        let written = node.with_device(|device| {
            bytes::write(device, &node.partial, &data[..len], offset)?;
            if synchronous { device.flush() } else { Ok(()) }
        });
        match written {
            Some(Ok(())) => reply.written(len as u32),
            Some(Err(error)) => reply.error(errno(node.errno("write", &error))),
            None => reply.error(Errno::EIO),
        }
    }

    /// Closing a file promises nothing about its bytes.
    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let Some(node) = self.table.node(ino.0) else { return reply.error(Errno::EIO) };
        if node.kind != NodeKind::Disk {
            return reply.ok();
        }
        match node.with_device(|device| device.flush()) {
            Some(Ok(())) => reply.ok(),
            Some(Err(error)) => reply.error(errno(node.errno("flush", &error))),
            None => reply.error(Errno::EIO),
        }
    }

    /// Discards on a disk. On a memory image it succeeds and does nothing: VMMs punch holes where a balloon grew, before
    /// they drop their own private pages, and the image is its siblings' too.
    fn fallocate(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(node) = self.table.node(ino.0) else { return reply.error(Errno::EIO) };
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) == 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match node.kind {
            // The kernel drops the pages, which are read again, but clears parts of pages where they lie, for all siblings.
            NodeKind::Memory if !offset.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) => {
                return reply.error(Errno::EINVAL);
            }
            NodeKind::Memory if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 => {
                return reply.error(Errno::EOPNOTSUPP);
            }
            NodeKind::Memory => return reply.ok(),
            NodeKind::ReadOnlyDisk => return reply.error(Errno::EROFS),
            NodeKind::Disk => {}
        }
        // The kernel would take the file for longer than it is.
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 && offset.saturating_add(length) > node.size {
            return reply.error(Errno::ENOSPC);
        }
        let len = length.min(node.size.saturating_sub(offset));
        if len == 0 {
            return reply.ok();
        }
        match node.with_device(|device| bytes::zero(device, &node.partial, offset, len)) {
            Some(Ok(())) => reply.ok(),
            Some(Err(error)) => reply.error(errno(node.errno("discard", &error))),
            None => reply.error(Errno::EIO),
        }
    }

    /// All is data, as on a disk.
    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Some(node) = self.table.node(ino.0) else { return reply.error(Errno::EIO) };
        let size = node.size as i64;
        match whence {
            _ if !(0..size).contains(&offset) => reply.error(Errno::ENXIO),
            libc::SEEK_DATA => reply.offset(offset),
            libc::SEEK_HOLE => reply.offset(size),
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino.0 != ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        // An entry's offset is its inode number, which keeps its place when others come and go.
        if offset < 1 && reply.add(INodeNo(ROOT), 1, FileType::Directory, ".") {
            return reply.ok();
        }
        for (ino, name) in self.table.names() {
            let device = self.table.node(ino).is_some_and(|node| node.block_device().is_some());
            let kind = if device { FileType::BlockDevice } else { FileType::RegularFile };
            if ino > offset.max(ROOT) && reply.add(INodeNo(ino), ino, kind, &name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let files = self.table.names().len() as u64;
        reply.statfs(0, 0, 0, files, 0, 4096, 255, 4096);
    }

    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn getxattr(&self, _request: &Request, _ino: INodeNo, _name: &OsStr, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _request: &Request, _ino: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        _command: u32,
        _input: &[u8],
        _output_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn copy_file_range(
        &self,
        _request: &Request,
        _source: INodeNo,
        _source_handle: FileHandle,
        _source_offset: u64,
        _target: INodeNo,
        _target_handle: FileHandle,
        _target_offset: u64,
        _len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::EOPNOTSUPP);
    }
}
