//! Whole trees that a hostile guest may have made: any depth, any links. Nothing here recurses, follows a link, or holds more than
//! a few descriptors.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use crate::sys::{self, Handle};

/// What a file costs besides its blocks, so that many empty files are not free.
const EACH: u64 = 512;

/// What a file counts against the quota.
pub(crate) fn cost(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512 + EACH
}

/// Opens a folder's entry for reading, if it is a folder.
pub(crate) fn folder(parent: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

/// Entries of an open folder, without `.` and `..`, at most `limit`.
pub(crate) fn entries(folder: impl AsFd, limit: usize) -> io::Result<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push(name.to_owned());
            if found.len() == limit {
                break;
            }
        }
    }
    Ok(found)
}

/// What all files below `root` count.
pub(crate) fn measure(root: impl AsFd) -> io::Result<u64> {
    let mut sum = 0;
    let mut folders: Vec<Handle> = vec![sys::handle_of(root.as_fd())?];
    while let Some(next) = folders.pop() {
        let folder = match sys::open_handle(root.as_fd(), &next, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(folder) => folder,
            // Removed meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => continue,
            Err(error) => return Err(error),
        };
        for entry in Dir::read_from(&folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(stat) = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let links = stat.st_nlink.max(1);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                sum += cost(&stat);
                if let Ok(inside) = sys::entry(&folder, name.to_bytes()) {
                    folders.push(sys::handle_of(inside.as_fd())?);
                }
            } else {
                // A file with several names counts in parts.
                sum += cost(&stat) / links;
            }
        }
    }
    Ok(sum)
}

/// Removes everything in a folder; returns what it counted. Folders are taken up level by level, so that depth does not matter.
pub(crate) fn clear(root: impl AsFd) -> io::Result<u64> {
    let root = root.as_fd();
    let mut freed = 0;
    let mut number = 0_u64;
    loop {
        let names = entries(root, 1024)?;
        if names.is_empty() {
            return Ok(freed);
        }
        for name in names {
            let stat = rustix::fs::statat(root, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                rustix::fs::unlinkat(root, &name[..], AtFlags::empty())?;
                freed += if stat.st_nlink <= 1 { cost(&stat) } else { 0 };
                continue;
            }
            let inside = folder(root, &name)?;
            for child in entries(&inside, usize::MAX)? {
                let stat = rustix::fs::statat(&inside, &child[..], AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                    rustix::fs::unlinkat(&inside, &child[..], AtFlags::empty())?;
                    freed += if stat.st_nlink <= 1 { cost(&stat) } else { 0 };
                    continue;
                }
                loop {
                    number += 1;
                    let up = format!(".removed-{number}");
                    let flags = rustix::fs::RenameFlags::NOREPLACE;
                    match rustix::fs::renameat_with(&inside, &child[..], root, up, flags) {
                        Err(Errno::EXIST) => {}
                        other => break other?,
                    }
                }
            }
            rustix::fs::unlinkat(root, &name[..], AtFlags::REMOVEDIR)?;
            freed += cost(&stat);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_depth_is_measured_and_removed() {
        let outer = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(outer.path()).unwrap();
        std::fs::write(outer.path().join("f"), vec![1; 10_000]).unwrap();
        std::fs::hard_link(outer.path().join("f"), outer.path().join("g")).unwrap();
        let mut at: OwnedFd = root.try_clone().unwrap().into();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&at, "d", Mode::from_raw_mode(0o700)).unwrap();
            at = folder(&at, b"d").unwrap();
        }
        rustix::fs::symlinkat("/", &at, "link").unwrap();
        drop(at);
        let used = measure(&root).unwrap();
        assert!(used >= 10_000 + 3000 * EACH, "{used}");
        let freed = clear(&root).unwrap();
        assert!(freed >= 10_000 + 3000 * EACH, "{freed}");
        assert!(entries(&root, 10).unwrap().is_empty());
        assert_eq!(measure(&root).unwrap(), 0);
    }
}
