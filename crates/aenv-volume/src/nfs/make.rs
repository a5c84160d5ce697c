//! CREATE, MKDIR, SYMLINK, MKNOD: what is made is the user's.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Dev, FileType, Mode, OFlags};

use super::{
    change::{Time, Wanted, apply, resize, wanted},
    errors::Status,
    rpc::Call,
    server::{Node, Server, attributes, before_and_after, name, sealed},
    xdr::{Garbage, Reader, Writer},
};
use crate::{
    sys::{self, Credentials},
    tree,
};

/// What CREATE, MKDIR, SYMLINK and MKNOD make.
enum Made<'a> {
    File {
        wanted: Wanted,
        takes_existing: bool,
    },
    /// A file that the client recognises by this mark if it has to ask again.
    Exclusive {
        mark: [u32; 2],
    },
    Folder(Wanted),
    Link {
        wanted: Wanted,
        target: &'a [u8],
    },
    Special {
        wanted: Wanted,
        kind: FileType,
    },
    Nothing(Status),
}

fn made<'a>(call: &Call, arguments: &mut Reader<'a>) -> Result<Made<'a>, Garbage> {
    Ok(match call.procedure {
        8 => match arguments.u32()? {
            0 => Made::File { wanted: wanted(arguments)?, takes_existing: true },
            1 => Made::File { wanted: wanted(arguments)?, takes_existing: false },
            2 => Made::Exclusive { mark: [arguments.u32()?, arguments.u32()?] },
            _ => return Err(Garbage),
        },
        9 => Made::Folder(wanted(arguments)?),
        10 => {
            let (wanted, target) = (wanted(arguments)?, arguments.opaque(4095)?);
            if target.is_empty() || target.contains(&0) {
                Made::Nothing(Status::INVAL)
            } else {
                Made::Link { wanted, target }
            }
        }
        _ => match arguments.u32()? {
            6 => Made::Special { wanted: wanted(arguments)?, kind: FileType::Socket },
            7 => Made::Special { wanted: wanted(arguments)?, kind: FileType::Fifo },
            _ => Made::Nothing(Status::NOTSUPP),
        },
    })
}

/// CREATE, MKDIR, SYMLINK, MKNOD.
pub(super) fn make(
    server: &Server,
    call: &Call,
    arguments: &mut Reader<'_>,
    out: &mut Writer,
) -> Result<(), Garbage> {
    let folder = server.node(sealed(arguments)?);
    let name = name(arguments)?;
    let what = made(call, arguments)?;
    let outcome = folder.as_ref().map_err(|status| *status).and_then(|folder| {
        folder.must_be_folder()?;
        let fd = put(folder, name?, &call.who, what)?;
        Ok((folder.volume, sys::handle_of(fd.as_fd())?, sys::stat(&fd)?))
    });
    match &outcome {
        Ok((volume, handle, stat)) => {
            out.u32(0);
            out.flag(true);
            out.opaque(&volume.seal(handle));
            out.flag(true);
            attributes(out, volume, stat);
        }
        Err(status) => out.u32(status.0),
    }
    before_and_after(out, folder.as_ref().ok());
    Ok(())
}

fn put(folder: &Node<'_>, name: &[u8], who: &Credentials, what: Made<'_>) -> Result<OwnedFd, Status> {
    let (volume, at) = (folder.volume, &folder.fd);
    volume.room(4096)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Permissions are set below, whatever this process's mask is.
    let mode = Mode::from_raw_mode(0o600);
    let made = match &what {
        Made::File { .. } | Made::Exclusive { .. } => sys::as_user(who, || {
            rustix::fs::openat(at, name, flags, mode)?;
            Ok(())
        }),
        Made::Folder(_) => {
            sys::as_user(who, || Ok(rustix::fs::mkdirat(at, name, Mode::from_raw_mode(0o700))?))
        }
        Made::Link { target, .. } => sys::as_user(who, || Ok(rustix::fs::symlinkat(*target, at, name)?)),
        Made::Special { kind, .. } => {
            sys::as_user(who, || Ok(rustix::fs::mknodat(at, name, *kind, mode, Dev::default())?))
        }
        Made::Nothing(status) => return Err(*status),
    };
    if let Err(error) = made {
        return if error.kind() == std::io::ErrorKind::AlreadyExists {
            existing(folder, name, &what)
        } else {
            Err(error.into())
        };
    }
    let fd = sys::entry(at, name)?;
    let stat = sys::stat(&fd)?;
    volume.charge(0, tree::cost(&stat));
    let wanted = match what {
        Made::Exclusive { mark: [first, second] } => Wanted {
            atime: Time::At(first & 0x7fff_ffff, 0),
            mtime: Time::At(second & 0x7fff_ffff, 0),
            ..Wanted::default()
        },
        Made::File { wanted, .. } => Wanted { mode: wanted.mode.or(Some(0o644)), ..wanted },
        Made::Folder(wanted) => Wanted { mode: wanted.mode.or(Some(0o755)), ..wanted },
        Made::Link { wanted, .. } => wanted,
        Made::Special { wanted, .. } => Wanted { mode: wanted.mode.or(Some(0o644)), ..wanted },
        Made::Nothing(status) => return Err(status),
    };
    // A folder with the setgid bit gives it to folders in it.
    let inherited = if stat.st_mode & 0o2000 != 0 { 0o2000 } else { 0 };
    apply(&fd, &stat, who, Wanted { mode: wanted.mode.map(|mode| mode | inherited), ..wanted })?;
    Ok(fd)
}

/// Something is there under this name: whether that will do.
fn existing(folder: &Node<'_>, name: &[u8], what: &Made<'_>) -> Result<OwnedFd, Status> {
    let fd = sys::entry(&folder.fd, name)?;
    let stat = sys::stat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Status::EXIST);
    }
    match what {
        Made::File { wanted, takes_existing: true } => {
            if let Some(size) = wanted.size {
                let handle = sys::handle_of(fd.as_fd())?;
                let again = sys::entry(&folder.fd, name)?;
                resize(&Node { volume: folder.volume, fd: again, handle, stat }, size)?;
            }
            Ok(fd)
        }
        Made::Exclusive { mark: [first, second] } => {
            let marks = [i64::from(first & 0x7fff_ffff), i64::from(second & 0x7fff_ffff)];
            if [stat.st_atime, stat.st_mtime] == marks { Ok(fd) } else { Err(Status::EXIST) }
        }
        _ => Err(Status::EXIST),
    }
}
