//! Procedures that change something, but for those that make something. What concerns ownership and folders is done with the
//! user's rights.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, CWD, FileType, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

use super::{
    TRANSFER,
    errors::Status,
    rpc::Call,
    server::{Node, Server, after, before_and_after, name, sealed},
    xdr::{Garbage, Reader, Writer},
};
use crate::{
    sys::{self, Credentials},
    tree,
};

type Done = Result<(), Garbage>;

/// Whether a call that is sent again must not be done again.
pub(super) fn is_done_once(procedure: u32) -> bool {
    matches!(procedure, 2 | 8..=15)
}

#[derive(Clone, Copy, Default)]
pub(super) enum Time {
    #[default]
    Keep,
    Now,
    At(u32, u32),
}

/// `sattr3`.
#[derive(Clone, Copy, Default)]
pub(super) struct Wanted {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Time,
    pub mtime: Time,
}

pub(super) fn wanted(arguments: &mut Reader<'_>) -> Result<Wanted, Garbage> {
    let time = |arguments: &mut Reader<'_>| match arguments.u32()? {
        0 => Ok(Time::Keep),
        1 => Ok(Time::Now),
        2 => Ok(Time::At(arguments.u32()?, arguments.u32()?)),
        _ => Err(Garbage),
    };
    Ok(Wanted {
        mode: arguments.optional(Reader::u32)?,
        uid: arguments.optional(Reader::u32)?,
        gid: arguments.optional(Reader::u32)?,
        size: arguments.optional(Reader::u64)?,
        atime: time(arguments)?,
        mtime: time(arguments)?,
    })
}

/// Applies attributes to what is open as `O_PATH`; `now` is how it is.
pub(super) fn apply(fd: &OwnedFd, now: &Stat, who: &Credentials, wanted: Wanted) -> Result<(), Status> {
    let uid = wanted.uid.filter(|uid| *uid != now.st_uid);
    let gid = wanted.gid.filter(|gid| *gid != now.st_gid);
    let spec = |time| {
        let (seconds, nanoseconds) = match time {
            Time::Keep => (0, UTIME_OMIT),
            Time::Now => (0, UTIME_NOW),
            Time::At(seconds, nanoseconds) => (seconds.into(), nanoseconds.into()),
        };
        Timespec { tv_sec: seconds, tv_nsec: nanoseconds }
    };
    let has_times = !matches!((wanted.atime, wanted.mtime), (Time::Keep, Time::Keep));
    let is_link = FileType::from_raw_mode(now.st_mode) == FileType::Symlink;
    sys::as_user(who, || {
        if uid.is_some() || gid.is_some() {
            sys::chown(fd, uid, gid)?;
        }
        if let Some(mode) = wanted.mode.filter(|_| !is_link) {
            sys::chmod(fd, mode)?;
        }
        if has_times {
            let times = Timestamps { last_access: spec(wanted.atime), last_modification: spec(wanted.mtime) };
            rustix::fs::utimensat(fd, "", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    })?;
    Ok(())
}

pub(super) fn resize(node: &Node<'_>, size: u64) -> Result<(), Status> {
    node.must_be_file()?;
    let file = node.reopen(OFlags::WRONLY)?;
    rustix::fs::ftruncate(&file, size)?;
    node.volume.charge(tree::cost(&node.stat), tree::cost(&sys::stat(&file)?));
    Ok(())
}

/// SETATTR.
pub(super) fn set_attributes(
    server: &Server,
    call: &Call,
    arguments: &mut Reader<'_>,
    out: &mut Writer,
) -> Done {
    let node = server.node(sealed(arguments)?);
    let wanted = wanted(arguments)?;
    let guard = arguments.optional(|arguments| Ok((arguments.u32()?, arguments.u32()?)))?;
    let outcome = node.as_ref().map_err(|status| *status).and_then(|node| {
        let ctime = (node.stat.st_ctime, node.stat.st_ctime_nsec);
        if guard.is_some_and(|(seconds, nanoseconds)| ctime != (seconds.into(), nanoseconds.into())) {
            return Err(Status::NOT_SYNC);
        }
        if let Some(size) = wanted.size {
            // Whether the user may was asked when the file was opened.
            resize(node, size)?;
        }
        apply(&node.fd, &node.stat, &call.who, wanted)
    });
    out.u32(outcome.map_or_else(|status| status.0, |()| 0));
    before_and_after(out, node.as_ref().ok());
    Ok(())
}

/// WRITE.
pub(super) fn write(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let (offset, count, stable) = (arguments.u64()?, arguments.u32()?, arguments.u32()?);
    let bytes = arguments.opaque(TRANSFER as usize)?;
    let bytes = &bytes[..bytes.len().min(count as usize)];
    let written = node.as_ref().map_err(|status| *status).and_then(|node| {
        node.must_be_file()?;
        node.volume.room(bytes.len() as u64)?;
        let file = node.reopen(OFlags::WRONLY)?;
        let mut length = 0;
        while length < bytes.len() {
            match rustix::io::pwrite(&file, &bytes[length..], offset.saturating_add(length as u64)) {
                Ok(more) => length += more,
                Err(_) if length > 0 => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        match stable {
            0 => {}
            1 => rustix::fs::fdatasync(&file)?,
            _ => rustix::fs::fsync(&file)?,
        }
        node.volume.charge(tree::cost(&node.stat), tree::cost(&sys::stat(&file)?));
        Ok(length)
    });
    out.u32(written.map_or_else(|status| status.0, |_| 0));
    before_and_after(out, node.as_ref().ok());
    if let Ok(length) = written {
        out.u32(u32::try_from(length).unwrap_or(0));
        out.u32(stable.min(2));
        out.fixed(&server.verifier);
    }
    Ok(())
}

/// COMMIT.
pub(super) fn commit(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    arguments.u64()?;
    arguments.u32()?;
    let outcome = node.as_ref().map_err(|status| *status).and_then(|node| {
        node.must_be_file()?;
        Ok(rustix::fs::fsync(node.reopen(OFlags::WRONLY)?)?)
    });
    out.u32(outcome.map_or_else(|status| status.0, |()| 0));
    before_and_after(out, node.as_ref().ok());
    if outcome.is_ok() {
        out.fixed(&server.verifier);
    }
    Ok(())
}

/// What is freed when this name goes.
fn freed(folder: &Node<'_>, name: &[u8]) -> u64 {
    let stat = rustix::fs::statat(&folder.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok();
    let last =
        |stat: &Stat| stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    stat.filter(last).map_or(0, |stat| tree::cost(&stat))
}

/// REMOVE, RMDIR.
pub(super) fn remove(server: &Server, call: &Call, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let folder = server.node(sealed(arguments)?);
    let name = name(arguments)?;
    let flags = if call.procedure == 13 { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    let outcome = folder.as_ref().map_err(|status| *status).and_then(|folder| {
        let name = name?;
        let before = freed(folder, name);
        sys::as_user(&call.who, || Ok(rustix::fs::unlinkat(&folder.fd, name, flags)?))?;
        folder.volume.charge(before, 0);
        Ok(())
    });
    out.u32(outcome.map_or_else(|status: Status| status.0, |()| 0));
    before_and_after(out, folder.as_ref().ok());
    Ok(())
}

/// RENAME.
pub(super) fn rename(server: &Server, call: &Call, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let from = server.node(sealed(arguments)?);
    let from_name = name(arguments)?;
    let to = server.node(sealed(arguments)?);
    let to_name = name(arguments)?;
    let both =
        from.as_ref().map_err(|status| *status).and_then(|from| Ok((from, to.as_ref().map_err(|s| *s)?)));
    let outcome = both.and_then(|(from, to)| {
        let (from_name, to_name) = (from_name?, to_name?);
        if from.volume.id() != to.volume.id() {
            return Err(Status(libc::EXDEV.unsigned_abs()));
        }
        let before = freed(to, to_name);
        let same =
            || rustix::fs::statat(&from.fd, from_name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_ino);
        let target = rustix::fs::statat(&to.fd, to_name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_ino);
        let is_itself = target.is_ok() && same() == target;
        sys::as_user(&call.who, || Ok(rustix::fs::renameat(&from.fd, from_name, &to.fd, to_name)?))?;
        if !is_itself {
            from.volume.charge(before, 0);
        }
        Ok(())
    });
    out.u32(outcome.map_or_else(|status: Status| status.0, |()| 0));
    before_and_after(out, from.as_ref().ok());
    before_and_after(out, to.as_ref().ok());
    Ok(())
}

/// LINK.
pub(super) fn link(server: &Server, call: &Call, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let folder = server.node(sealed(arguments)?);
    let name = name(arguments)?;
    let both =
        node.as_ref().map_err(|status| *status).and_then(|node| Ok((node, folder.as_ref().map_err(|s| *s)?)));
    let outcome = both.and_then(|(node, folder)| {
        let name = name?;
        if node.volume.id() != folder.volume.id() {
            return Err(Status(libc::EXDEV.unsigned_abs()));
        }
        let path = sys::by_descriptor(&node.fd);
        let flags = AtFlags::SYMLINK_FOLLOW;
        Ok(sys::as_user(&call.who, || Ok(rustix::fs::linkat(CWD, path, &folder.fd, name, flags)?))?)
    });
    out.u32(outcome.map_or_else(|status| status.0, |()| 0));
    after(out, node.as_ref().ok());
    before_and_after(out, folder.as_ref().ok());
    Ok(())
}
