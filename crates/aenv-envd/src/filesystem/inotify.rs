//! Changes below a folder, from the kernel's inotify. inotify watches single folders; a tree is one watch for each.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
    path::{Path, PathBuf},
};

use aenv_envd_api::proto::filesystem::EventType;
use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Most changes that are taken at once.
const BATCH: usize = 1024;

/// What of a tree is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The folder.
    Folder,
    /// The folder and everything below, what is made later included.
    Tree,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where, relative to the watched folder; `.` is that folder itself.
    pub name: PathBuf,
    /// What.
    pub kind: EventType,
}

/// A watched folder. It is armed from the moment that it exists.
pub struct Watched {
    kernel: AsyncFd<Kernel>,
    root: PathBuf,
    depth: Depth,
    folders: HashMap<WatchDescriptor, PathBuf>,
    /// What was found in new folders while their own events may still be queued.
    announced: HashSet<PathBuf>,
}

struct Kernel(Inotify);

impl AsRawFd for Kernel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Watched {
    /// Arms a watch on `root`, which must be a folder.
    pub fn arm(root: &Path, depth: Depth) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // SAFETY: `Kernel` owns one descriptor, names it in `as_raw_fd`, and never closes it before it is dropped.
        let kernel = unsafe { AsyncFd::register_with_interest(Kernel(inotify), Interest::READABLE) }?;
        let mut watched =
            Self { kernel, root: root.to_owned(), depth, folders: HashMap::new(), announced: HashSet::new() };
        watched.add(Path::new(""))?;
        if depth == Depth::Tree {
            watched.add_below(Path::new(""), &mut None)?;
        }
        Ok(watched)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Waits for changes. Can be cancelled without losing any.
    pub async fn next(&mut self) -> io::Result<Vec<Change>> {
        loop {
            let mut guard = self.kernel.readable().await?;
            guard.retain_ready();
            let mut changes = Vec::new();
            while changes.len() < BATCH {
                let read = self.kernel.try_io(Interest::READABLE, |kernel| Ok(kernel.0.read_events()?));
                match read {
                    Ok(events) => {
                        for event in events {
                            self.take(event, &mut changes);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        // Everything that was queued while new folders were looked through has been seen.
                        self.announced.clear();
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    fn take(&mut self, event: InotifyEvent, changes: &mut Vec<Change>) {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            tracing::warn!(root = %self.root.display(), "changes came faster than they were read: some are lost");
            return;
        }
        let Some(folder) = self.folders.get(&event.wd).cloned() else { return };
        if event.mask.contains(AddWatchFlags::IN_IGNORED) {
            self.folders.remove(&event.wd);
            return;
        }
        let Some(name) = event.name else {
            // About the folder itself: its parent's watch tells it, except where there is no parent.
            let kind = if event.mask.contains(AddWatchFlags::IN_DELETE_SELF) {
                EventType::EVENT_TYPE_REMOVE
            } else if event.mask.contains(AddWatchFlags::IN_MOVE_SELF) {
                EventType::EVENT_TYPE_RENAME
            } else {
                return;
            };
            if folder.as_os_str().is_empty() {
                changes.push(Change { name: PathBuf::from("."), kind });
            }
            return;
        };
        let name = folder.join(name);
        let is_folder = event.mask.contains(AddWatchFlags::IN_ISDIR);
        if event.mask.intersects(AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO) {
            if !self.announced.remove(&name) {
                changes.push(Change { name: name.clone(), kind: EventType::EVENT_TYPE_CREATE });
            }
            if is_folder && self.depth == Depth::Tree {
                self.follow(&name, changes);
            }
        }
        if event.mask.contains(AddWatchFlags::IN_ATTRIB) {
            changes.push(Change { name: name.clone(), kind: EventType::EVENT_TYPE_CHMOD });
        }
        if event.mask.contains(AddWatchFlags::IN_MODIFY) {
            changes.push(Change { name: name.clone(), kind: EventType::EVENT_TYPE_WRITE });
        }
        if event.mask.contains(AddWatchFlags::IN_DELETE) {
            changes.push(Change { name, kind: EventType::EVENT_TYPE_REMOVE });
        } else if event.mask.contains(AddWatchFlags::IN_MOVED_FROM) {
            if is_folder {
                self.forget_below(&name);
            }
            changes.push(Change { name, kind: EventType::EVENT_TYPE_RENAME });
        }
    }

    /// Watches a new folder, and tells what came into it before it was watched.
    fn follow(&mut self, folder: &Path, changes: &mut Vec<Change>) {
        let mut found = Some(Vec::new());
        let followed = self.add(folder).and_then(|()| self.add_below(folder, &mut found));
        if let Err(error) = followed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(folder = %folder.display(), %error, "a new folder is not watched");
        }
        for name in found.unwrap_or_default() {
            self.announced.insert(name.clone());
            changes.push(Change { name, kind: EventType::EVENT_TYPE_CREATE });
        }
    }

    fn add(&mut self, folder: &Path) -> io::Result<()> {
        let what = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let path = if folder.as_os_str().is_empty() { self.root.clone() } else { self.root.join(folder) };
        match self.kernel.get_ref().0.add_watch(&path, what) {
            Ok(descriptor) => {
                self.folders.insert(descriptor, folder.to_owned());
                Ok(())
            }
            Err(Errno::ENOSPC) => Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "the kernel has no more watches: raise fs.inotify.max_user_watches or watch fewer folders",
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Watches the folders below one that is watched; notes every entry in `found`, if there is one.
    fn add_below(&mut self, folder: &Path, found: &mut Option<Vec<PathBuf>>) -> io::Result<()> {
        for entry in fs::read_dir(self.root.join(folder))? {
            let entry = entry?;
            let name = folder.join(entry.file_name());
            if let Some(found) = found {
                found.push(name.clone());
            }
            if entry.file_type()?.is_dir() {
                match self.add(&name).and_then(|()| self.add_below(&name, found)) {
                    // It went away in between.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    added => added?,
                }
            }
        }
        Ok(())
    }

    /// A folder that was moved is watched anew under its new name, if that is in the tree.
    fn forget_below(&mut self, folder: &Path) {
        let gone: Vec<_> =
            self.folders.iter().filter(|(_, path)| path.starts_with(folder)).map(|(wd, _)| *wd).collect();
        for descriptor in gone {
            self.folders.remove(&descriptor);
            // The kernel may have dropped it already.
            let _ = self.kernel.get_ref().0.rm_watch(descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    async fn changes(watched: &mut Watched, until: &str) -> Vec<String> {
        let mut seen = Vec::new();
        while !seen.iter().any(|change: &String| change == until) {
            let next = tokio::time::timeout(Duration::from_secs(10), watched.next()).await;
            let next = next.unwrap_or_else(|_| panic!("{until} did not come, only {seen:?}")).unwrap();
            seen.extend(next.iter().map(|change| {
                format!("{:?} {}", change.kind, change.name.display()).replace("EVENT_TYPE_", "")
            }));
        }
        seen
    }

    #[tokio::test]
    async fn a_file_is_created_and_written_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = Watched::arm(folder.path(), Depth::Folder).unwrap();
        fs::write(folder.path().join("f"), "x").unwrap();
        fs::rename(folder.path().join("f"), folder.path().join("g")).unwrap();
        fs::remove_file(folder.path().join("g")).unwrap();
        let seen = changes(&mut watched, "REMOVE g").await;
        assert_eq!(seen, ["CREATE f", "WRITE f", "RENAME f", "CREATE g", "REMOVE g"]);
    }

    #[tokio::test]
    async fn folders_that_are_made_later_are_watched() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("old")).unwrap();
        let mut watched = Watched::arm(folder.path(), Depth::Tree).unwrap();
        fs::create_dir_all(folder.path().join("new/deep")).unwrap();
        fs::write(folder.path().join("new/deep/early"), "x").unwrap();
        changes(&mut watched, "CREATE new/deep/early").await;
        fs::write(folder.path().join("new/deep/late"), "x").unwrap();
        changes(&mut watched, "WRITE new/deep/late").await;
        fs::write(folder.path().join("old/f"), "x").unwrap();
        changes(&mut watched, "WRITE old/f").await;
        // A folder that moves keeps being watched, under its new name.
        fs::rename(folder.path().join("new"), folder.path().join("moved")).unwrap();
        changes(&mut watched, "CREATE moved").await;
        fs::write(folder.path().join("moved/deep/again"), "x").unwrap();
        let seen = changes(&mut watched, "WRITE moved/deep/again").await;
        assert_eq!(
            seen.iter().filter(|change| change.as_str() == "CREATE moved/deep/again").count(),
            1,
            "{seen:?}"
        );
    }

    #[tokio::test]
    async fn the_folder_itself_goes() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        let mut watched = Watched::arm(&root, Depth::Tree).unwrap();
        fs::remove_dir(&root).unwrap();
        assert_eq!(changes(&mut watched, "REMOVE .").await, ["REMOVE ."]);
    }
}
