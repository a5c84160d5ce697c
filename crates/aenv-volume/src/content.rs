//! The files of a volume for those who hold its token: looked at, listed, read, written, removed. All of it blocks.

use std::{fs::File, io, os::fd::OwnedFd};

use chrono::{DateTime, Utc};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use thiserror::Error;

pub use crate::upload::Upload;
use crate::{Volume, VolumePath, sys, tree};

/// Entries that one listing shows at most.
const MAX_ENTRIES: usize = 100_000;
/// Levels that a listing descends at most.
const MAX_DEPTH: u32 = 256;
/// Permissions of folders that name none.
const FOLDER_MODE: u32 = 0o755;

/// Why something could not be done with a file.
#[derive(Debug, Error)]
pub enum ContentError {
    /// Nothing is there.
    #[error("Path {0} not found")]
    NotFound(VolumePath),
    /// It is something else than what was asked for.
    #[error("Path {path} is not a {wanted}")]
    Kind {
        /// The path.
        path: VolumePath,
        /// What it should be.
        wanted: &'static str,
    },
    /// Something is there already.
    #[error("Path {0} already exists")]
    Exists(VolumePath),
    /// The quota, or the host's disk.
    #[error("the volume is full: {0}")]
    Full(String),
    /// More than one answer holds.
    #[error("the listing has more than {MAX_ENTRIES} entries; list its folders one by one")]
    TooLong,
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The path.
        path: VolumePath,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

pub(crate) fn refused(path: &VolumePath) -> impl Fn(io::Error) -> ContentError + '_ {
    move |source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ELOOP) => {
            ContentError::NotFound(path.clone())
        }
        Some(libc::EEXIST | libc::ENOTEMPTY | libc::EISDIR) => ContentError::Exists(path.clone()),
        Some(libc::EDQUOT) => ContentError::Full("its quota (volumes.max_size_mib) is used up".to_owned()),
        Some(libc::ENOSPC) => ContentError::Full("the host's disk has no room".to_owned()),
        _ => ContentError::Io { path: path.clone(), source },
    }
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    File,
    /// A folder.
    Directory,
    /// A link.
    Symlink,
    /// Anything else.
    Unknown,
}

/// What there is to know of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    pub path: VolumePath,
    /// What it is.
    pub kind: Kind,
    /// Bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Read last.
    pub atime: DateTime<Utc>,
    /// Written last.
    pub mtime: DateTime<Utc>,
    /// Changed last.
    pub ctime: DateTime<Utc>,
    /// Where a link leads.
    pub target: Option<String>,
}

/// Owner and permissions that are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Permissions.
    pub mode: Option<u32>,
}

pub(crate) fn kind(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Unknown,
    }
}

pub(crate) fn describe(path: VolumePath, fd: &OwnedFd) -> io::Result<Entry> {
    let stat = sys::stat(fd)?;
    let time = |seconds: i64, nanoseconds: u64| {
        DateTime::from_timestamp(seconds, u32::try_from(nanoseconds).unwrap_or(0)).unwrap_or_default()
    };
    let kind = kind(&stat);
    let target = match kind {
        Kind::Symlink => {
            let target = rustix::fs::readlinkat(fd, "", Vec::new())?;
            Some(String::from_utf8_lossy(target.to_bytes()).into_owned())
        }
        _ => None,
    };
    Ok(Entry {
        path,
        kind,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        target,
    })
}

/// Opens what a path names, a link itself if it is one.
fn locate(volume: &Volume, path: &VolumePath) -> Result<OwnedFd, ContentError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    sys::beneath(volume.root(), path.relative().as_bytes(), flags).map_err(refused(path))
}

/// Opens the folder that a path is in.
pub(crate) fn parent<'a>(volume: &Volume, path: &'a VolumePath) -> Result<(OwnedFd, &'a str), ContentError> {
    let (folder, name) = path.split().ok_or_else(|| ContentError::Exists(path.clone()))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let opened = sys::beneath(volume.root(), folder.relative().as_bytes(), flags).map_err(refused(path))?;
    Ok((opened, name))
}

/// What an entry is.
pub fn stat(volume: &Volume, path: &VolumePath) -> Result<Entry, ContentError> {
    describe(path.clone(), &locate(volume, path)?).map_err(refused(path))
}

/// What is in a folder, down to `depth` levels, each folder before what is in it, by name.
pub fn list(volume: &Volume, path: &VolumePath, depth: u32) -> Result<Vec<Entry>, ContentError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let folder =
        sys::beneath(volume.root(), path.relative().as_bytes(), flags).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ENOTDIR) => ContentError::Kind { path: path.clone(), wanted: "directory" },
                _ => refused(path)(error),
            }
        })?;
    let mut found = Vec::new();
    descend(&folder, path, depth.clamp(1, MAX_DEPTH), &mut found)?;
    Ok(found)
}

fn descend(
    folder: &OwnedFd,
    path: &VolumePath,
    depth: u32,
    found: &mut Vec<Entry>,
) -> Result<(), ContentError> {
    let mut names = tree::entries(folder, MAX_ENTRIES + 1).map_err(refused(path))?;
    names.sort();
    for name in names {
        if found.len() == MAX_ENTRIES {
            return Err(ContentError::TooLong);
        }
        // Whoever removes it meanwhile is right.
        let Ok(entry) = sys::entry(folder, &name) else { continue };
        let inside = path.join(&String::from_utf8_lossy(&name));
        let Ok(entry) = describe(inside.clone(), &entry) else { continue };
        let opens = entry.kind == Kind::Directory && depth > 1;
        found.push(entry);
        if opens && let Ok(opened) = tree::folder(folder, &name) {
            descend(&opened, &inside, depth - 1, found)?;
        }
    }
    Ok(())
}

/// Opens a file for reading; also tells its size.
pub fn read(volume: &Volume, path: &VolumePath) -> Result<(File, u64), ContentError> {
    let not_a_file = || ContentError::Kind { path: path.clone(), wanted: "file" };
    let found =
        sys::beneath(volume.root(), path.relative().as_bytes(), OFlags::PATH).map_err(refused(path))?;
    let stat = sys::stat(&found).map_err(refused(path))?;
    if kind(&stat) != Kind::File {
        return Err(not_a_file());
    }
    let file = File::open(sys::by_descriptor(&found)).map_err(refused(path))?;
    Ok((file, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// Makes a folder. `force`: missing parents as well, and one that is there is no error.
pub fn make_folder(
    volume: &Volume,
    path: &VolumePath,
    attributes: Attributes,
    force: bool,
) -> Result<Entry, ContentError> {
    let mut done = path.clone();
    let mut missing = Vec::new();
    if force {
        // The longest part that is there.
        while let Some((folder, name)) = done.split() {
            if locate(volume, &done).is_ok() {
                break;
            }
            missing.push(name.to_owned());
            done = folder;
        }
        if stat(volume, &done)?.kind != Kind::Directory {
            return Err(ContentError::Exists(done));
        }
    } else {
        let (folder, name) = path.split().ok_or_else(|| ContentError::Exists(path.clone()))?;
        missing.push(name.to_owned());
        done = folder;
    }
    for name in missing.iter().rev() {
        done = done.join(name);
        make_one(volume, &done, attributes, force)?;
    }
    stat(volume, path)
}

fn make_one(
    volume: &Volume,
    path: &VolumePath,
    attributes: Attributes,
    force: bool,
) -> Result<(), ContentError> {
    let refused = refused(path);
    let (folder, name) = parent(volume, path)?;
    volume.room(8192).map_err(&refused)?;
    match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o700)) {
        Err(Errno::EXIST) if force => return Ok(()),
        made => made.map_err(|errno| refused(errno.into()))?,
    }
    let made = sys::entry(&folder, name.as_bytes()).map_err(&refused)?;
    let stat = sys::stat(&made).map_err(&refused)?;
    volume.charge(0, tree::cost(&stat));
    let mode = attributes.mode.unwrap_or(FOLDER_MODE);
    apply(
        &made,
        Attributes { mode: Some(mode), uid: attributes.uid.or(Some(0)), gid: attributes.gid.or(Some(0)) },
    )
    .map_err(refused)
}

fn apply(fd: &OwnedFd, attributes: Attributes) -> io::Result<()> {
    if attributes.uid.is_some() || attributes.gid.is_some() {
        sys::chown(fd, attributes.uid, attributes.gid)?;
    }
    // After the owner: a change of it takes setuid and setgid away.
    match attributes.mode {
        Some(mode) => sys::chmod(fd, mode),
        None => Ok(()),
    }
}

/// Changes owner, group or permissions.
pub fn update(volume: &Volume, path: &VolumePath, attributes: Attributes) -> Result<Entry, ContentError> {
    let found = locate(volume, path)?;
    let is_link = kind(&sys::stat(&found).map_err(refused(path))?) == Kind::Symlink;
    // A link has no permissions of its own.
    let attributes = if is_link { Attributes { mode: None, ..attributes } } else { attributes };
    apply(&found, attributes).map_err(refused(path))?;
    describe(path.clone(), &found).map_err(refused(path))
}

/// Removes an entry and all that is in it.
pub fn remove(volume: &Volume, path: &VolumePath) -> Result<(), ContentError> {
    let refused = refused(path);
    if path.split().is_none() {
        return Err(ContentError::NotFound(path.clone()));
    }
    let (folder, name) = parent(volume, path)?;
    // Out of everybody's sight at once; then in its own time.
    let pit = volume.staging_name();
    rustix::fs::mkdirat(volume.staging(), &pit, Mode::from_raw_mode(0o700)).map_err(|e| refused(e.into()))?;
    let removed = (|| {
        let opened = tree::folder(volume.staging(), pit.as_bytes())?;
        rustix::fs::renameat(&folder, name, &opened, "removed")?;
        volume.charge(tree::clear(&opened)?, 0);
        Ok(())
    })();
    // What stays is removed at the next start.
    let _ = rustix::fs::unlinkat(volume.staging(), &pit, AtFlags::REMOVEDIR);
    removed.map_err(refused)
}

#[cfg(test)]
#[path = "content_tests.rs"]
mod tests;
