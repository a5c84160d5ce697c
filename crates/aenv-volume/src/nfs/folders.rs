//! READDIR and READDIRPLUS. A cookie is the host filesystem's own position, so that nothing is kept between two calls.

use std::{mem::MaybeUninit, os::fd::AsFd};

use rustix::fs::{AtFlags, OFlags, RawDir, SeekFrom, Stat};

use super::{
    TRANSFER,
    errors::Status,
    rpc::Call,
    server::{Node, Server, after, attributes, sealed},
    xdr::{Garbage, Reader, Writer},
};
use crate::sys;

const PLUS: u32 = 17;
/// What surrounds the entries of an answer.
const AROUND: usize = 128;

struct Asked {
    cookie: u64,
    /// Bytes of names, cookies and numbers.
    names: usize,
    /// Bytes in all.
    all: usize,
    plus: bool,
}

/// Answers either.
pub(super) fn read(
    server: &Server,
    call: &Call,
    arguments: &mut Reader<'_>,
    out: &mut Writer,
) -> Result<(), Garbage> {
    let plus = call.procedure == PLUS;
    let node = server.node(sealed(arguments)?);
    let cookie = arguments.u64()?;
    arguments.fixed(8)?;
    let first = arguments.u32()?.min(TRANSFER) as usize;
    let all = if plus { arguments.u32()?.min(TRANSFER) as usize } else { first };
    let asked = Asked { cookie, names: first, all: all.saturating_sub(AROUND), plus };
    let found = node.as_ref().map_err(|status| *status).and_then(|node| entries(node, &asked));
    out.u32(found.as_ref().map_or_else(|status| status.0, |_| 0));
    after(out, node.as_ref().ok());
    if let Ok((list, complete)) = found {
        out.u64(0);
        out.0.extend_from_slice(&list.0);
        out.flag(false);
        out.flag(complete);
    }
    Ok(())
}

/// As many entries as fit, and whether these are the last ones.
fn entries(node: &Node<'_>, asked: &Asked) -> Result<(Writer, bool), Status> {
    node.must_be_folder()?;
    let folder = node.reopen(OFlags::RDONLY | OFlags::DIRECTORY)?;
    if asked.cookie != 0 {
        rustix::fs::seek(&folder, SeekFrom::Start(asked.cookie))?;
    }
    let root = sys::stat(node.volume.root())?;
    let mut list = Writer::default();
    let mut names = 0;
    let mut buffer = [MaybeUninit::uninit(); 16 << 10];
    let mut raw = RawDir::new(&folder, &mut buffer);
    while let Some(entry) = raw.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        let cost = 24 + name.len().next_multiple_of(4);
        let mut one = Writer::default();
        one.flag(true);
        // What is above the root is nobody's business.
        let is_root = node.stat.st_ino == root.st_ino;
        one.u64(if name == b".." && is_root { root.st_ino } else { entry.ino() });
        one.opaque(name);
        one.u64(entry.next_entry_cookie());
        if asked.plus {
            more(&mut one, node, name);
        }
        if names + cost > asked.names || list.0.len() + one.0.len() > asked.all {
            return if list.0.is_empty() { Err(Status::TOOSMALL) } else { Ok((list, false)) };
        }
        names += cost;
        list.0.extend_from_slice(&one.0);
    }
    Ok((list, true))
}

/// Attributes and handle of an entry, where they can be had.
fn more(out: &mut Writer, node: &Node<'_>, name: &[u8]) {
    let found = if matches!(name, b"." | b"..") { None } else { look(node, name) };
    out.flag(found.is_some());
    if let Some((stat, _)) = &found {
        attributes(out, node.volume, stat);
    }
    out.flag(found.is_some());
    if let Some((_, sealed)) = &found {
        out.opaque(sealed);
    }
}

fn look(node: &Node<'_>, name: &[u8]) -> Option<(Stat, Vec<u8>)> {
    let fd = sys::entry(&node.fd, name).ok()?;
    let stat = rustix::fs::statat(&fd, "", AtFlags::EMPTY_PATH).ok()?;
    Some((stat, node.volume.seal(&sys::handle_of(fd.as_fd()).ok()?)))
}
