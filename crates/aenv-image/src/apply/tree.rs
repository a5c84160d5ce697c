//! Folders of the filesystem that is being filled: opening them without leaving it, and removing from them.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::fd::AsFd,
};

use nix::{
    dir::{Dir, Type},
    errno::Errno,
    fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2},
    sys::stat::{FileStat, Mode, SFlag, fstat, fstatat},
    unistd::{UnlinkatFlags, unlinkat},
};

use super::{Place, refused};
use crate::{error::LayerError, tarball::Time};

/// Times that folders get at the end, by inode.
pub(super) type FolderTimes = HashMap<u64, (Vec<u8>, Time, Time)>;

/// An open folder.
pub(super) struct Folder {
    /// Its descriptor.
    pub file: File,
    /// Its inode.
    pub inode: u64,
    /// When its content changed last.
    pub mtime: Time,
    /// When it was read last.
    pub atime: Time,
}

impl Folder {
    /// Of an open folder.
    pub(super) fn of(file: File) -> Result<Self, LayerError> {
        let stat = fstat(&file).map_err(refused)?;
        let time = |seconds, nanos: i64| Time { seconds, nanos: u32::try_from(nanos).unwrap_or(0) };
        Ok(Self {
            file,
            inode: stat.st_ino,
            mtime: time(stat.st_mtime, stat.st_mtime_nsec),
            atime: time(stat.st_atime, stat.st_atime_nsec),
        })
    }
}

/// What becomes of symlinks on the way to a folder.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// `ELOOP`.
    Refuse,
    /// They are followed as a process in the image would, with its root as root.
    InRoot,
}

/// Opens a folder beneath `root`. Whatever the path and the links say, it is inside.
pub(super) fn open(root: &File, path: &[u8], links: Links) -> Result<File, Errno> {
    let mut resolve =
        ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    if links == Links::Refuse {
        resolve |= ResolveFlag::RESOLVE_NO_SYMLINKS;
    }
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    // EAGAIN: the kernel saw a rename elsewhere while it resolved. Nobody renames here; a few attempts are plenty.
    let mut attempts = 0;
    loop {
        match openat2(root, path, OpenHow::new().flags(flags).resolve(resolve)) {
            Err(Errno::EAGAIN) if attempts < 100 => attempts += 1,
            other => return other.map(File::from),
        }
    }
}

/// Opens or makes something in a folder; a symlink there is not followed.
pub(super) fn child(folder: &Folder, name: &[u8], flags: OFlag) -> Result<File, Errno> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(&folder.file, name, flags, Mode::from_bits_truncate(0o600)).map(File::from)
}

/// Whether a name in a folder is a folder.
pub(super) fn is_folder(folder: &Folder, name: &[u8]) -> Result<bool, LayerError> {
    fstatat(&folder.file, name, AtFlags::AT_SYMLINK_NOFOLLOW)
        .map(|stat| is_folder_stat(&stat))
        .map_err(refused)
}

fn is_folder_stat(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFDIR
}

/// Removes what lower layers have at a name; what this layer made there, or beneath it, stays. Missing is no error.
pub(super) fn remove(
    folder: &Folder,
    name: &[u8],
    made: &HashSet<Place>,
    times: &mut FolderTimes,
) -> Result<(), LayerError> {
    let mine = made.contains(&(folder.inode, name.to_vec()));
    let is_folder = match fstatat(&folder.file, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => is_folder_stat(&stat),
        Err(Errno::ENOENT) => return Ok(()),
        Err(error) => return Err(refused(error)),
    };
    if !is_folder {
        if mine {
            return Ok(());
        }
        return unlinkat(&folder.file, name, UnlinkatFlags::NoRemoveDir).map_err(refused);
    }
    let inner = Folder::of(child(folder, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY).map_err(refused)?)?;
    clear(&inner, made, times)?;
    if mine {
        return Ok(());
    }
    match unlinkat(&folder.file, name, UnlinkatFlags::RemoveDir) {
        Ok(()) => {
            times.remove(&inner.inode);
            Ok(())
        }
        Err(Errno::ENOTEMPTY | Errno::EEXIST) => Ok(()),
        Err(error) => Err(refused(error)),
    }
}

/// Removes everything in a folder that lower layers brought; what this layer made stays, at any depth.
///
/// Holds one folder open at a time, whatever the depth.
pub(super) fn clear(
    folder: &Folder,
    made: &HashSet<Place>,
    times: &mut FolderTimes,
) -> Result<(), LayerError> {
    let mut pending: Vec<Vec<u8>> = vec![b".".to_vec()];
    // Folders of lower layers, parents before children.
    let mut doomed: Vec<(Vec<u8>, u64)> = Vec::new();
    while let Some(path) = pending.pop() {
        let inner = Folder::of(open(&folder.file, &path, Links::Refuse).map_err(refused)?)?;
        for (name, inode, is_folder) in children(&inner)? {
            let mine = made.contains(&(inner.inode, name.clone()));
            if is_folder {
                let below = if path == b"." { name } else { [&path[..], b"/", &name].concat() };
                if !mine {
                    doomed.push((below.clone(), inode));
                }
                pending.push(below);
            } else if !mine {
                unlinkat(&inner.file, name.as_slice(), UnlinkatFlags::NoRemoveDir).map_err(refused)?;
            }
        }
    }
    for (path, inode) in doomed.into_iter().rev() {
        match unlinkat(&folder.file, path.as_slice(), UnlinkatFlags::RemoveDir) {
            Ok(()) => {
                times.remove(&inode);
            }
            // This layer has put something into it.
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    Ok(())
}

/// Names in a folder: name, inode, whether it is a folder.
fn children(folder: &Folder) -> Result<Vec<(Vec<u8>, u64, bool)>, LayerError> {
    let own = folder.file.as_fd().try_clone_to_owned().map_err(|e| LayerError::io("listing a folder", e))?;
    let mut listing = Dir::from_fd(own).map_err(refused)?;
    let mut children = Vec::new();
    for item in listing.iter() {
        let item = item.map_err(refused)?;
        let name = item.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let is_folder = match item.file_type() {
            Some(kind) => kind == Type::Directory,
            None => is_folder(folder, name)?,
        };
        children.push((name.to_vec(), item.ino(), is_folder));
    }
    Ok(children)
}
