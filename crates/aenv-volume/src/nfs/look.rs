//! Procedures that change nothing.

use std::os::fd::AsFd;

use rustix::fs::{FileType, OFlags};

use super::{
    TRANSFER,
    errors::Status,
    rpc::Call,
    server::{Node, Server, after, attributes as encode, name, sealed},
    xdr::{Garbage, Reader, Writer},
};
use crate::sys::{self, Credentials};

type Done = Result<(), Garbage>;

/// What a caller may ask to be allowed to (RFC 1813, 3.3.4).
mod right {
    pub const READ: u32 = 1;
    pub const LOOKUP: u32 = 2;
    pub const MODIFY: u32 = 4;
    pub const EXTEND: u32 = 8;
    pub const DELETE: u32 = 16;
    pub const EXECUTE: u32 = 32;
}

/// GETATTR.
pub(super) fn attributes(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    match server.node(sealed(arguments)?) {
        Ok(node) => {
            out.u32(0);
            encode(out, node.volume, &node.stat);
        }
        Err(status) => out.u32(status.0),
    }
    Ok(())
}

/// LOOKUP.
pub(super) fn lookup(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let folder = server.node(sealed(arguments)?);
    let mut whole = Reader(arguments.0);
    let (name, raw) = (name(arguments)?, whole.opaque(4096)?);
    let found = folder.as_ref().map_err(|status| *status).and_then(|folder| {
        folder.must_be_folder()?;
        let fd = match (raw, name) {
            (b".", _) => sys::entry(&folder.fd, b".")?,
            // The root is its own parent.
            (b"..", _) => {
                let root = sys::stat(folder.volume.root())?;
                let same = (root.st_dev, root.st_ino) == (folder.stat.st_dev, folder.stat.st_ino);
                sys::entry(&folder.fd, if same { b"." } else { b".." })?
            }
            (_, name) => sys::entry(&folder.fd, name?)?,
        };
        let (handle, stat) = (sys::handle_of(fd.as_fd())?, sys::stat(&fd)?);
        Ok((folder.volume, handle, stat))
    });
    match found {
        Ok((volume, handle, stat)) => {
            out.u32(0);
            out.opaque(&volume.seal(&handle));
            out.flag(true);
            encode(out, volume, &stat);
        }
        Err(status) => out.u32(status.0),
    }
    after(out, folder.as_ref().ok());
    Ok(())
}

/// Which of read, write and execute (4, 2, 1) a user has.
fn rights(who: &Credentials, node: &Node<'_>) -> u32 {
    let mode = node.stat.st_mode;
    if who.uid == 0 {
        let runs = node.kind() == FileType::Directory || mode & 0o111 != 0;
        return 6 | u32::from(runs);
    }
    let shift = if who.uid == node.stat.st_uid {
        6
    } else if who.gid == node.stat.st_gid || who.groups.contains(&node.stat.st_gid) {
        3
    } else {
        0
    };
    mode >> shift & 7
}

/// ACCESS.
pub(super) fn access(server: &Server, call: &Call, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let asked = arguments.u32()?;
    out.u32(node.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if let Ok(node) = &node {
        let rights = rights(&call.who, node);
        let is_folder = node.kind() == FileType::Directory;
        let mut granted = 0;
        if rights & 4 != 0 {
            granted |= right::READ;
        }
        if rights & 2 != 0 {
            granted |= right::MODIFY | right::EXTEND | if is_folder { right::DELETE } else { 0 };
        }
        if rights & 1 != 0 {
            granted |= if is_folder { right::LOOKUP } else { right::EXECUTE };
        }
        out.u32(asked & granted);
    }
    Ok(())
}

/// READLINK.
pub(super) fn read_link(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let target = node.as_ref().map_err(|status| *status).and_then(|node| match node.kind() {
        FileType::Symlink => Ok(rustix::fs::readlinkat(&node.fd, "", Vec::new())?),
        _ => Err(Status::INVAL),
    });
    out.u32(target.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if let Ok(target) = target {
        out.opaque(target.to_bytes());
    }
    Ok(())
}

/// READ.
pub(super) fn read(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let (offset, count) = (arguments.u64()?, arguments.u32()?.min(TRANSFER));
    let read = node.as_ref().map_err(|status| *status).and_then(|node| {
        node.must_be_file()?;
        let file = node.reopen(OFlags::RDONLY)?;
        let mut bytes = vec![0; count as usize];
        let mut length = 0;
        while length < bytes.len() {
            match rustix::io::pread(&file, &mut bytes[length..], offset + length as u64)? {
                0 => break,
                more => length += more,
            }
        }
        bytes.truncate(length);
        let size = u64::try_from(sys::stat(&file)?.st_size).unwrap_or(0);
        Ok((bytes, size))
    });
    out.u32(read.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if let Ok((bytes, size)) = read {
        out.u32(u32::try_from(bytes.len()).unwrap_or(0));
        out.flag(offset.saturating_add(bytes.len() as u64) >= size);
        out.opaque(&bytes);
    }
    Ok(())
}

/// FSSTAT: the quota is the filesystem's size.
pub(super) fn filesystem(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    let room = node.as_ref().map_err(|status| *status).and_then(|node| {
        let disk = rustix::fs::fstatvfs(node.volume.root())?;
        let free = node.volume.quota().saturating_sub(node.volume.used());
        Ok((node.volume.quota(), free.min(disk.f_bavail.saturating_mul(disk.f_frsize)), disk))
    });
    out.u32(room.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if let Ok((total, free, disk)) = room {
        for value in [total, free, free, disk.f_files, disk.f_ffree, disk.f_favail] {
            out.u64(value);
        }
        out.u32(0);
    }
    Ok(())
}

/// FSINFO.
pub(super) fn limits(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    /// Hard links, symbolic links, the same for all files, times can be set.
    const PROPERTIES: u32 = 0x1b;
    let node = server.node(sealed(arguments)?);
    out.u32(node.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if node.is_ok() {
        for value in [TRANSFER, TRANSFER, 4096, TRANSFER, TRANSFER, 4096, 64 << 10] {
            out.u32(value);
        }
        out.u64(i64::MAX.unsigned_abs());
        out.u32(0);
        out.u32(1);
        out.u32(PROPERTIES);
    }
    Ok(())
}

/// PATHCONF.
pub(super) fn names(server: &Server, arguments: &mut Reader<'_>, out: &mut Writer) -> Done {
    let node = server.node(sealed(arguments)?);
    out.u32(node.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if node.is_ok() {
        out.u32(32_000);
        out.u32(255);
        // Too long names are refused; only root gives files away; names keep their case, and it matters.
        for value in [true, true, false, true] {
            out.flag(value);
        }
    }
    Ok(())
}
