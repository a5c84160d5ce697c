//! Puts the entries of a layer into a filesystem, exactly, and never touches anything outside of it.
//!
//! How it stays inside: every folder is opened by `openat2` with `RESOLVE_IN_ROOT`, so that `..`, absolute paths and
//! symlinks of any layer end at the image's own root; names are then created, replaced and removed in that folder by
//! `*at` calls that never follow the last component. Device nodes are only recorded, nothing ever opens one.
//!
//! What follows the OCI image specification, "Applying Changesets": whiteouts hide only what lower layers brought;
//! entries replace what a lower layer had, a folder over a folder keeps its content; the same path twice in a layer
//! is refused, except for folders.

mod attributes;
mod tree;

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{Read, Write},
    os::unix::fs::FileExt,
    rc::Rc,
};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag},
    sys::stat::{Mode, SFlag},
    unistd,
};

use self::tree::{Folder, Links, child, is_folder};
use crate::{
    ImageLimits,
    error::LayerError,
    tarball::{Entry, Kind, TarReader, Time},
};

/// A name in a folder: the folder's inode and the name.
type Place = (u64, Vec<u8>);

/// Applies one layer.
pub(crate) struct Applier<'a> {
    root: File,
    limits: &'a ImageLimits,
    /// Largest file that the filesystem could hold.
    max_file: u64,
    /// Every place that this layer filled.
    made: HashSet<Place>,
    /// Symlinks of this layer that lead to an absolute path or upwards.
    outward: HashSet<Place>,
    /// The folder of the last entry.
    cached: Option<(Vec<u8>, Rc<Folder>)>,
    /// Times that folders get at the end, when nothing changes in them any more: inode to path and times.
    times: HashMap<u64, (Vec<u8>, Time, Time)>,
    buffer: Vec<u8>,
}

impl<'a> Applier<'a> {
    /// Into the filesystem whose root folder this is, `disk_size` bytes large.
    pub(crate) fn new(root: File, limits: &'a ImageLimits, disk_size: u64) -> Self {
        Self {
            root,
            limits,
            max_file: disk_size,
            made: HashSet::new(),
            outward: HashSet::new(),
            cached: None,
            times: HashMap::new(),
            buffer: vec![0; 256 << 10],
        }
    }

    /// Applies all entries, then the times of folders. Returns how many entries there were.
    pub(crate) fn apply<R: Read>(mut self, tar: &mut TarReader<R>) -> Result<u64, LayerError> {
        let mut entries = 0;
        while let Some(entry) = tar.next_entry()? {
            entries += 1;
            if entries > self.limits.layer_entries {
                let limit = self.limits.layer_entries;
                return Err(LayerError::Hostile(format!("it has more than {limit} entries")));
            }
            self.put(&entry, tar).map_err(|error| about(&entry, error))?;
        }
        self.settle_times()?;
        Ok(entries)
    }

    fn put<R: Read>(&mut self, entry: &Entry, tar: &mut TarReader<R>) -> Result<(), LayerError> {
        let components = components(&entry.path)?;
        let Some((name, parents)) = components.split_last() else {
            return self.put_root(entry);
        };
        let folder = self.folder(parents, entry.mtime)?;
        if let Some(hidden) = name.strip_prefix(b".wh.") {
            return self.whiteout(&folder, hidden);
        }
        if entry.size > self.max_file {
            return Err(LayerError::Hostile(format!("a file of {} bytes", entry.size)));
        }
        let place = (folder.inode, name.to_vec());
        if entry.kind == Kind::Directory {
            self.put_folder(&folder, name, entry, &components)?;
        } else {
            if self.made.contains(&place) {
                return Err(LayerError::Hostile("it comes twice".to_owned()));
            }
            match self.create(&folder, name, entry, tar) {
                Err(Refusal::Exists) => {
                    self.replace(&folder, name)?;
                    self.create(&folder, name, entry, tar).map_err(Refusal::into_error)?;
                }
                other => other.map_err(Refusal::into_error)?,
            }
            if entry.kind == Kind::Symlink && leads_outward(&entry.link) {
                self.outward.insert(place.clone());
            }
        }
        self.made.insert(place);
        Ok(())
    }

    /// The entry `./`.
    fn put_root(&mut self, entry: &Entry) -> Result<(), LayerError> {
        if entry.kind != Kind::Directory {
            return Err(LayerError::Hostile(
                "the root of the image as something else than a folder".to_owned(),
            ));
        }
        let root = Folder::of(tree::open(&self.root, b".", Links::Refuse).map_err(refused)?)?;
        attributes::set_on_file(&root.file, entry, attributes::Existing::Replace)?;
        self.times.insert(root.inode, (b".".to_vec(), entry.mtime, entry.atime.unwrap_or(entry.mtime)));
        Ok(())
    }

    fn put_folder(
        &mut self,
        folder: &Folder,
        name: &[u8],
        entry: &Entry,
        components: &[&[u8]],
    ) -> Result<(), LayerError> {
        let mut existing = attributes::Existing::None;
        match nix::sys::stat::mkdirat(&folder.file, name, Mode::from_bits_truncate(0o700)) {
            Ok(()) => {}
            Err(Errno::EEXIST) if is_folder(folder, name)? => existing = attributes::Existing::Replace,
            Err(Errno::EEXIST) => {
                if self.made.contains(&(folder.inode, name.to_vec())) {
                    return Err(LayerError::Hostile("it comes twice, and not as a folder before".to_owned()));
                }
                self.replace(folder, name)?;
                nix::sys::stat::mkdirat(&folder.file, name, Mode::from_bits_truncate(0o700))
                    .map_err(refused)?;
            }
            Err(error) => return Err(refused(error)),
        }
        let made = Folder::of(child(folder, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY).map_err(refused)?)?;
        attributes::set_on_file(&made.file, entry, existing)?;
        let times = (components.join(&b'/'), entry.mtime, entry.atime.unwrap_or(entry.mtime));
        self.times.insert(made.inode, times);
        Ok(())
    }

    /// Makes anything but a folder where nothing is.
    fn create<R: Read>(
        &mut self,
        folder: &Folder,
        name: &[u8],
        entry: &Entry,
        tar: &mut TarReader<R>,
    ) -> Result<(), Refusal> {
        let node = |kind, (major, minor): (u32, u32)| {
            let device = nix::sys::stat::makedev(u64::from(major), u64::from(minor));
            nix::sys::stat::mknodat(&folder.file, name, kind, Mode::from_bits_truncate(0o600), device)
        };
        match entry.kind {
            Kind::Regular => {
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
                let file = child(folder, name, flags)?;
                self.fill(&file, entry, tar)?;
                attributes::set_on_file(&file, entry, attributes::Existing::None)?;
                attributes::set_times(&file, entry)?;
                return Ok(());
            }
            Kind::HardLink => {
                let (target_folder, target) = self.link_target(entry)?;
                return match unistd::linkat(
                    &target_folder.file,
                    target.as_slice(),
                    &folder.file,
                    name,
                    AtFlags::empty(),
                ) {
                    Err(Errno::EPERM) => {
                        Err(LayerError::Hostile("a hard link to a folder".to_owned()).into())
                    }
                    Err(Errno::ENOENT) => Err(missing_target(entry).into()),
                    other => Ok(other?),
                };
            }
            Kind::Symlink if entry.link.is_empty() => {
                return Err(LayerError::Damaged("a symlink without a target".to_owned()).into());
            }
            Kind::Symlink => unistd::symlinkat(entry.link.as_slice(), &folder.file, name)?,
            Kind::CharDevice => node(SFlag::S_IFCHR, entry.device)?,
            Kind::BlockDevice => node(SFlag::S_IFBLK, entry.device)?,
            Kind::Fifo => node(SFlag::S_IFIFO, (0, 0))?,
            Kind::Directory => unreachable!("folders go through put_folder"),
        }
        attributes::set_on_node(folder, name, entry)?;
        Ok(())
    }

    /// Folder and name of a hard link's target; in the image, like every path.
    fn link_target(&mut self, entry: &Entry) -> Result<(Rc<Folder>, Vec<u8>), LayerError> {
        let target = components(&entry.link)?;
        let Some((name, parents)) = target.split_last() else {
            return Err(LayerError::Hostile("a hard link to the root of the image".to_owned()));
        };
        let path = path_of(parents);
        let file = tree::open(&self.root, &path, Links::InRoot).map_err(|error| match error {
            Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV => missing_target(entry),
            other => refused(other),
        })?;
        Ok((Rc::new(Folder::of(file)?), name.to_vec()))
    }

    /// Writes a file's data, holes left out.
    fn fill<R: Read>(
        &mut self,
        file: &File,
        entry: &Entry,
        tar: &mut TarReader<R>,
    ) -> Result<(), LayerError> {
        let Some(extents) = &entry.extents else {
            let mut out = file;
            loop {
                let got = tar.read_data(&mut self.buffer)?;
                if got == 0 {
                    return Ok(());
                }
                out.write_all(&self.buffer[..got])
                    .map_err(|error| LayerError::io("writing a file", error))?;
            }
        };
        for extent in extents {
            let (mut at, mut left) = (extent.offset, extent.len);
            while left > 0 {
                let want = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let got = tar.read_data(&mut self.buffer[..want])?;
                if got == 0 {
                    return Err(LayerError::Damaged("a sparse file is shorter than its map".to_owned()));
                }
                file.write_all_at(&self.buffer[..got], at)
                    .map_err(|error| LayerError::io("writing a file", error))?;
                at += got as u64;
                left -= got as u64;
            }
        }
        file.set_len(entry.size).map_err(|error| LayerError::io("sizing a sparse file", error))
    }

    /// `.wh.<hidden>`.
    fn whiteout(&mut self, folder: &Folder, hidden: &[u8]) -> Result<(), LayerError> {
        match hidden {
            b".wh..opq" => {
                self.cached = None;
                tree::clear(folder, &self.made, &mut self.times)
            }
            // Bookkeeping of AUFS, which older builders left in layers.
            _ if hidden.starts_with(b".wh.") => Ok(()),
            b"" | b"." | b".." => Err(LayerError::Hostile("a whiteout of a folder itself".to_owned())),
            name => {
                self.cached = None;
                tree::remove(folder, name, &self.made, &mut self.times)
            }
        }
    }

    /// Removes what a lower layer has where this layer puts something else.
    fn replace(&mut self, folder: &Folder, name: &[u8]) -> Result<(), LayerError> {
        self.cached = None;
        tree::remove(folder, name, &self.made, &mut self.times)?;
        match nix::sys::stat::fstatat(&folder.file, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => Ok(()),
            Err(error) => Err(refused(error)),
            Ok(_) => Err(LayerError::Hostile("the same layer has entries beneath it".to_owned())),
        }
    }

    /// The folder at these components, made where it is missing.
    fn folder(&mut self, components: &[&[u8]], mtime: Time) -> Result<Rc<Folder>, LayerError> {
        let path = path_of(components);
        if let Some((cached, folder)) = &self.cached
            && *cached == path
        {
            return Ok(folder.clone());
        }
        let folder = match tree::open(&self.root, &path, Links::Refuse) {
            Ok(file) => Folder::of(file)?,
            Err(Errno::ELOOP | Errno::ENOENT) => self.walk(components, mtime)?,
            Err(Errno::ENOTDIR) => {
                return Err(LayerError::Hostile("its parent is no folder".to_owned()));
            }
            Err(error) => return Err(refused(error)),
        };
        self.times.entry(folder.inode).or_insert_with(|| (path.clone(), folder.mtime, folder.atime));
        let folder = Rc::new(folder);
        self.cached = Some((path, folder.clone()));
        Ok(folder)
    }

    /// Goes to a folder step by step: through links of lower layers, and making what is missing.
    fn walk(&mut self, components: &[&[u8]], mtime: Time) -> Result<Folder, LayerError> {
        let mut folder = Folder::of(tree::open(&self.root, b".", Links::Refuse).map_err(refused)?)?;
        for depth in 1..=components.len() {
            let (name, path) = (components[depth - 1], path_of(&components[..depth]));
            if self.outward.contains(&(folder.inode, name.to_vec())) {
                return Err(LayerError::Hostile(
                    "it leads through a link out that the same layer made".to_owned(),
                ));
            }
            let file = match tree::open(&self.root, &path, Links::InRoot) {
                Ok(file) => file,
                Err(Errno::ENOENT) => {
                    self.times
                        .entry(folder.inode)
                        .or_insert_with(|| (path_of(&components[..depth - 1]), folder.mtime, folder.atime));
                    match nix::sys::stat::mkdirat(&folder.file, name, Mode::from_bits_truncate(0o755)) {
                        Ok(()) => {}
                        Err(Errno::EEXIST) => {
                            return Err(LayerError::Hostile("it leads through a link to nothing".to_owned()));
                        }
                        Err(error) => return Err(refused(error)),
                    }
                    self.made.insert((folder.inode, name.to_vec()));
                    let made = child(&folder, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY).map_err(refused)?;
                    nix::sys::stat::fchmod(&made, Mode::from_bits_truncate(0o755)).map_err(refused)?;
                    let inode = nix::sys::stat::fstat(&made).map_err(refused)?.st_ino;
                    self.times.insert(inode, (path.clone(), mtime, mtime));
                    made
                }
                Err(Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV) => {
                    return Err(LayerError::Hostile("its parent is no folder".to_owned()));
                }
                Err(error) => return Err(refused(error)),
            };
            folder = Folder::of(file)?;
        }
        Ok(folder)
    }

    /// Gives folders their times, now that nothing changes in them any more.
    fn settle_times(&mut self) -> Result<(), LayerError> {
        for (inode, (path, mtime, atime)) in self.times.drain() {
            let file = match tree::open(&self.root, &path, Links::InRoot) {
                Ok(file) => file,
                // It was removed or replaced after its time was noted.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
                Err(error) => return Err(refused(error)),
            };
            let folder = Folder::of(file)?;
            if folder.inode == inode {
                attributes::set_folder_times(&folder.file, mtime, atime)?;
            }
        }
        Ok(())
    }
}

/// Why something could not be created.
enum Refusal {
    /// Something is there already.
    Exists,
    /// Anything else.
    Error(LayerError),
}

impl Refusal {
    fn into_error(self) -> LayerError {
        match self {
            Self::Exists => LayerError::Hostile("it comes twice".to_owned()),
            Self::Error(error) => error,
        }
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        match error {
            Errno::EEXIST => Self::Exists,
            other => Self::Error(refused(other)),
        }
    }
}

impl From<LayerError> for Refusal {
    fn from(error: LayerError) -> Self {
        Self::Error(error)
    }
}

/// An error of the filesystem that is being filled.
fn refused(error: Errno) -> LayerError {
    match error {
        Errno::ENAMETOOLONG => LayerError::Hostile("a path that is too long".to_owned()),
        Errno::EMLINK => LayerError::Hostile("more hard links to a file than a filesystem has".to_owned()),
        other => LayerError::io("writing to the image's filesystem", other),
    }
}

fn missing_target(entry: &Entry) -> LayerError {
    LayerError::Hostile(format!(
        "a hard link to {:?}, which is not in the image",
        String::from_utf8_lossy(&entry.link)
    ))
}

/// Says which entry an error is about.
fn about(entry: &Entry, error: LayerError) -> LayerError {
    let name: String = String::from_utf8_lossy(&entry.path).chars().take(200).collect();
    match error {
        LayerError::Damaged(message) => LayerError::Damaged(format!("entry {name:?}: {message}")),
        LayerError::Hostile(message) => LayerError::Hostile(format!("entry {name:?}: {message}")),
        LayerError::Io { context, message } => {
            LayerError::Io { context: format!("entry {name:?}: {context}"), message }
        }
        other => other,
    }
}

/// The components of a path in a layer. Leading slashes mean nothing, as with `tar -x`; `..` is refused.
fn components(path: &[u8]) -> Result<Vec<&[u8]>, LayerError> {
    let components: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if components.contains(&&b".."[..]) {
        return Err(LayerError::Hostile("a path that leads upwards".to_owned()));
    }
    if components.iter().any(|part| part.len() > 255) {
        return Err(LayerError::Hostile("a name of more than 255 bytes".to_owned()));
    }
    Ok(components)
}

fn path_of(components: &[&[u8]]) -> Vec<u8> {
    if components.is_empty() { b".".to_vec() } else { components.join(&b'/') }
}

fn leads_outward(target: &[u8]) -> bool {
    target.starts_with(b"/") || target.split(|byte| *byte == b'/').any(|part| part == b"..")
}
