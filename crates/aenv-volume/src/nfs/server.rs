//! Which procedure, on which file: the frame of every call, and the attributes that most answers carry.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::fs::{FileType, OFlags, Stat};

use super::{
    change,
    errors::Status,
    folders, look, make, mount,
    replies::Replies,
    rpc::{self, Accepted, Call},
    xdr::{Garbage, Reader, Writer},
};
use crate::{
    Volume,
    sys::{self, Handle},
};

const PROGRAM: u32 = 100_003;
const VERSION: u32 = 3;
/// Longest handle on the wire.
const MAX_SEALED: usize = 64;

/// The volumes of one guest.
pub(super) struct Server {
    volumes: Vec<Arc<Volume>>,
    /// Changes with each server: unstable writes of an earlier one have to be sent again.
    pub(super) verifier: [u8; 8],
    replies: Mutex<Replies>,
}

/// A file that a guest named.
pub(super) struct Node<'a> {
    pub volume: &'a Volume,
    /// `O_PATH`.
    pub fd: OwnedFd,
    pub handle: Handle,
    /// As it was when it was opened.
    pub stat: Stat,
}

impl Node<'_> {
    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Opens it for reading or writing: regular files and folders only, so that no device and no pipe can be waited for.
    pub(super) fn reopen(&self, flags: OFlags) -> Result<OwnedFd, Status> {
        Ok(sys::open_handle(self.volume.root().as_fd(), &self.handle, flags | OFlags::NONBLOCK)?)
    }

    /// As it is now.
    pub(super) fn now(&self) -> Option<Stat> {
        sys::stat(&self.fd).ok()
    }

    pub(super) fn must_be_folder(&self) -> Result<(), Status> {
        if self.kind() == FileType::Directory { Ok(()) } else { Err(Status::NOTDIR) }
    }

    pub(super) fn must_be_file(&self) -> Result<(), Status> {
        match self.kind() {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Status::ISDIR),
            _ => Err(Status::INVAL),
        }
    }
}

impl Server {
    pub(super) fn new(volumes: Vec<Arc<Volume>>) -> Self {
        Self { volumes, verifier: rand::random(), replies: Mutex::default() }
    }

    pub(super) fn volumes(&self) -> &[Arc<Volume>] {
        &self.volumes
    }

    /// The file that is named by what a guest sent.
    pub(super) fn node(&self, sealed: &[u8]) -> Result<Node<'_>, Status> {
        let found = self.volumes.iter().find_map(|volume| Some((volume, volume.unseal(sealed)?)));
        let (volume, handle) = found.ok_or(Status::BADHANDLE)?;
        if volume.is_removed() {
            return Err(Status::STALE);
        }
        let fd = sys::open_handle(volume.root().as_fd(), &handle, OFlags::PATH)?;
        let stat = sys::stat(&fd)?;
        Ok(Node { volume, fd, handle, stat })
    }

    /// The record that answers a record; `None` when it is no call at all.
    pub(super) fn answer(&self, record: &[u8]) -> Option<Vec<u8>> {
        let mut arguments = Reader(record);
        let call = match rpc::head(&mut arguments).ok()? {
            Ok(call) => call,
            Err(id) => return Some(rpc::record(rpc::wrong_version(id))),
        };
        let once = call.program == PROGRAM && change::is_done_once(call.procedure);
        let plain = arguments.0;
        if once && let Some(answer) = self.replies.lock().find(&call, plain) {
            return Some(answer);
        }
        let mut out = rpc::success(call.id);
        let outcome = self.dispatch(&call, &mut arguments, &mut out);
        let answer = rpc::record(match outcome {
            Ok(()) => out,
            Err(why) => rpc::refusal(call.id, why),
        });
        if once {
            self.replies.lock().keep(&call, plain, &answer);
        }
        Some(answer)
    }

    fn dispatch(&self, call: &Call, arguments: &mut Reader<'_>, out: &mut Writer) -> Result<(), Accepted> {
        match (call.program, call.version) {
            (mount::PROGRAM, mount::VERSION) => {
                return mount::answer(self, call.procedure, arguments, out);
            }
            (PROGRAM, VERSION) => {}
            (mount::PROGRAM, _) => return Err(Accepted::NoVersion(mount::VERSION)),
            (PROGRAM, _) => return Err(Accepted::NoVersion(VERSION)),
            _ => return Err(Accepted::NoProgram),
        }
        let done = match call.procedure {
            0 => Ok(()),
            1 => look::attributes(self, arguments, out),
            2 => change::set_attributes(self, call, arguments, out),
            3 => look::lookup(self, arguments, out),
            4 => look::access(self, call, arguments, out),
            5 => look::read_link(self, arguments, out),
            6 => look::read(self, arguments, out),
            7 => change::write(self, arguments, out),
            8..=11 => make::make(self, call, arguments, out),
            12 | 13 => change::remove(self, call, arguments, out),
            14 => change::rename(self, call, arguments, out),
            15 => change::link(self, call, arguments, out),
            16 | 17 => folders::read(self, call, arguments, out),
            18 => look::filesystem(self, arguments, out),
            19 => look::limits(self, arguments, out),
            20 => look::names(self, arguments, out),
            21 => change::commit(self, arguments, out),
            _ => return Err(Accepted::NoProcedure),
        };
        done.map_err(|Garbage| Accepted::Garbage)
    }
}

/// The bytes of a handle.
pub(super) fn sealed<'a>(arguments: &mut Reader<'a>) -> Result<&'a [u8], Garbage> {
    arguments.opaque(MAX_SEALED)
}

/// One name in a folder.
pub(super) fn name<'a>(arguments: &mut Reader<'a>) -> Result<Result<&'a [u8], Status>, Garbage> {
    let name = arguments.opaque(4096)?;
    Ok(match name {
        [] | b"." | b".." => Err(Status::INVAL),
        _ if name.len() > 255 => Err(Status::NAMETOOLONG),
        _ if name.iter().any(|byte| matches!(byte, 0 | b'/')) => Err(Status::INVAL),
        _ => Ok(name),
    })
}

/// `fattr3`.
pub(super) fn attributes(out: &mut Writer, volume: &Volume, stat: &Stat) {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => 2,
        FileType::BlockDevice => 3,
        FileType::CharacterDevice => 4,
        FileType::Symlink => 5,
        FileType::Socket => 6,
        FileType::Fifo => 7,
        _ => 1,
    };
    out.u32(kind);
    out.u32(stat.st_mode & 0o7777);
    out.u32(u32::try_from(stat.st_nlink).unwrap_or(u32::MAX));
    out.u32(stat.st_uid);
    out.u32(stat.st_gid);
    out.u64(u64::try_from(stat.st_size).unwrap_or(0));
    out.u64(u64::try_from(stat.st_blocks).unwrap_or(0) * 512);
    out.u64(0);
    out.u64(volume_number(volume));
    out.u64(stat.st_ino);
    times(out, stat.st_atime, stat.st_atime_nsec);
    times(out, stat.st_mtime, stat.st_mtime_nsec);
    times(out, stat.st_ctime, stat.st_ctime_nsec);
}

/// What tells one volume from another (FNV-1a of its id).
fn volume_number(volume: &Volume) -> u64 {
    let id = volume.id().as_str().bytes();
    id.fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn times(out: &mut Writer, seconds: i64, nanoseconds: u64) {
    out.u32(u32::try_from(seconds).unwrap_or(0));
    out.u32(u32::try_from(nanoseconds).unwrap_or(0));
}

/// `post_op_attr` of a node.
pub(super) fn after(out: &mut Writer, node: Option<&Node<'_>>) {
    let now = node.and_then(|node| Some((node.volume, node.now()?)));
    out.flag(now.is_some());
    if let Some((volume, stat)) = now {
        attributes(out, volume, &stat);
    }
}

/// `wcc_data` of a node: as it was before and as it is now, so that a client knows its own changes from others'.
pub(super) fn before_and_after(out: &mut Writer, node: Option<&Node<'_>>) {
    out.flag(node.is_some());
    if let Some(node) = node {
        out.u64(u64::try_from(node.stat.st_size).unwrap_or(0));
        times(out, node.stat.st_mtime, node.stat.st_mtime_nsec);
        times(out, node.stat.st_ctime, node.stat.st_ctime_nsec);
    }
    after(out, node);
}
