//! Owner, mode, extended attributes and times of entries.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::AsRawFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::AtFlags,
    sys::{
        stat::{FchmodatFlags, Mode, UtimensatFlags, fchmod, fchmodat, futimens, utimensat},
        time::TimeSpec,
    },
    unistd::{Gid, Uid, fchown, fchownat},
};
use xattr::FileExt;

use super::{refused, tree::Folder};
use crate::{
    error::LayerError,
    tarball::{Entry, Kind, Time},
};

/// What becomes of the extended attributes that a file already has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Existing {
    /// It is new and has none.
    None,
    /// It is a folder of a lower layer; the entry's take the place of its own.
    Replace,
}

/// Owner, mode and extended attributes of an open file or folder, in the order in which none undoes another:
/// a change of owner clears setuid bits and capabilities.
pub(super) fn set_on_file(file: &File, entry: &Entry, existing: Existing) -> Result<(), LayerError> {
    fchown(file, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid))).map_err(refused)?;
    fchmod(file, Mode::from_bits_truncate(entry.mode)).map_err(refused)?;
    if existing == Existing::Replace {
        let listed =
            file.list_xattr().map_err(|error| LayerError::io("listing extended attributes", error))?;
        for name in listed.filter(|name| !entry.xattrs.iter().any(|(kept, _)| kept == name.as_bytes())) {
            file.remove_xattr(&name)
                .map_err(|error| LayerError::io("removing an extended attribute", error))?;
        }
    }
    for (name, value) in &entry.xattrs {
        judge(name, file.set_xattr(OsStr::from_bytes(name), value))?;
    }
    Ok(())
}

/// Owner, mode, extended attributes and times of a symlink, device node or pipe, by its name: none is ever opened.
pub(super) fn set_on_node(folder: &Folder, name: &[u8], entry: &Entry) -> Result<(), LayerError> {
    let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
    fchownat(&folder.file, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW).map_err(refused)?;
    if entry.kind != Kind::Symlink {
        // The node was made a moment ago in a filesystem that nobody else sees: there is no link to follow.
        let mode = Mode::from_bits_truncate(entry.mode);
        fchmodat(&folder.file, name, mode, FchmodatFlags::FollowSymlink).map_err(refused)?;
    }
    if !entry.xattrs.is_empty() {
        // lsetxattr has no *at form before Linux 6.13; the folder's descriptor in /proc takes its place.
        let node = node_path(folder, name);
        for (attribute, value) in &entry.xattrs {
            judge(attribute, xattr::set(&node, OsStr::from_bytes(attribute), value))?;
        }
    }
    let (atime, mtime) = (spec(entry.atime.unwrap_or(entry.mtime)), spec(entry.mtime));
    utimensat(&folder.file, name, &atime, &mtime, UtimensatFlags::NoFollowSymlink).map_err(refused)
}

/// Times of a file whose data is written.
pub(super) fn set_times(file: &File, entry: &Entry) -> Result<(), LayerError> {
    futimens(file, &spec(entry.atime.unwrap_or(entry.mtime)), &spec(entry.mtime)).map_err(refused)
}

/// Times of a folder.
pub(super) fn set_folder_times(file: &File, mtime: Time, atime: Time) -> Result<(), LayerError> {
    futimens(file, &spec(atime), &spec(mtime)).map_err(refused)
}

fn spec(time: Time) -> TimeSpec {
    TimeSpec::new(time.seconds, i64::from(time.nanos))
}

fn node_path(folder: &Folder, name: &[u8]) -> PathBuf {
    let base = format!("/proc/self/fd/{}", folder.file.as_raw_fd());
    Path::new(&base).join(std::ffi::OsString::from_vec(name.to_vec()))
}

/// Lets pass what no filesystem takes: an attribute of a namespace that does not exist, or `user.*` on a symlink or node.
fn judge(name: &[u8], result: io::Result<()>) -> Result<(), LayerError> {
    let Err(error) = result else { return Ok(()) };
    let name = String::from_utf8_lossy(name).into_owned();
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EOPNOTSUPP) => {
            tracing::debug!(attribute = name, "the filesystem has no such attribute, left out");
            Ok(())
        }
        Some(Errno::EPERM) if name.starts_with("user.") => {
            tracing::debug!(attribute = name, "only files and folders have user attributes, left out");
            Ok(())
        }
        Some(Errno::E2BIG | Errno::ENOSPC | Errno::ERANGE | Errno::EINVAL) => {
            Err(LayerError::Damaged(format!("the extended attribute {name:?} does not fit: {error}")))
        }
        _ => Err(LayerError::io(format!("setting the extended attribute {name:?}"), error)),
    }
}
