//! A root of its own for one process: a small filesystem in memory, in a mount namespace that nobody else is in. It holds what
//! the process needs and nothing else, and goes with it, whoever is there to see it end.
//!
//! ```text
//! /                  0711, root's; a few MiB at most
//! /<name>            files of the host that were mounted here, and files with contents of ours
//! /<folder>/         the process's own: it makes its sockets here
//! /dev/kvm /dev/net/tun
//! ```

use std::{
    ffi::CStr,
    fs::{self, File, Permissions},
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    sync::OnceLock,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::stat::{Mode, SFlag, mknod},
    unistd::{chdir, chroot, pivot_root},
};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

/// Bounds what a process can write into its root: a vm state of many vCPUs, and sockets.
const SIZE: &CStr = c"size=24m,nr_inodes=256,mode=0711";

/// Where a root is made, in the empty namespace.
const PLACE: &str = "/room";
/// Bounds the filesystem of that namespace, which has that folder and nothing else.
const EMPTY_SIZE: &CStr = c"size=4k,nr_inodes=2,mode=0711";

/// Character devices that a VMM opens.
const DEVICES: [&str; 2] = ["dev/kvm", "dev/net/tun"];

/// What the root will hold. Names are relative to it.
#[derive(Debug)]
pub(crate) struct Room {
    /// Who the process will be; 0: it stays root.
    uid: u32,
    mounts: Vec<Mount>,
    files: Vec<(String, Vec<u8>)>,
    pipes: Vec<String>,
    folders: Vec<String>,
}

/// A file of the host in the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) source: PathBuf,
    pub(crate) name: String,
    pub(crate) writable: bool,
}

impl Room {
    pub(crate) fn new(uid: u32) -> Self {
        Self { uid, mounts: vec![], files: vec![], pipes: vec![], folders: vec![] }
    }

    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Shows a file or device of the host.
    pub(crate) fn mount(&mut self, mount: Mount) {
        self.mounts.push(mount);
    }

    /// A file that belongs to the process. Its folder does not: nothing else can take its name.
    pub(crate) fn file(&mut self, name: &str, contents: Vec<u8>) {
        self.files.push((name.to_owned(), contents));
    }

    /// The same, a named pipe.
    pub(crate) fn pipe(&mut self, name: &str) {
        self.pipes.push(name.to_owned());
    }

    /// A folder that belongs to the process.
    pub(crate) fn folder(&mut self, name: &str) {
        self.folders.push(name.to_owned());
    }

    /// Makes it, and makes it the root of this thread, which has no way back.
    pub(crate) fn enter(&self) -> io::Result<()> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |e: io::Error| io::Error::new(e.kind(), format!("{what}: {e}"))
        };
        let devices = devices()?;
        let empty = empty().map_err(failed("an empty mount namespace"))?;
        // Taken along: they cannot be found by their names from there.
        let take = |mount: &Mount| {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let taken = open_tree(rustix::fs::CWD, &mount.source, flags).map_err(io::Error::from);
            taken.map_err(failed(&mount.source.display().to_string()))
        };
        let taken: Vec<OwnedFd> = self.mounts.iter().map(take).collect::<io::Result<_>>()?;
        enter_copy(empty).map_err(failed("mount namespace"))?;
        let none = None::<&str>;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(Some("aenv"), PLACE, Some("tmpfs"), flags, Some(SIZE))
            .map_err(io::Error::from)
            .map_err(failed("its root"))?;
        for (mount, tree) in self.mounts.iter().zip(taken) {
            bind(mount, &tree).map_err(failed(&mount.source.display().to_string()))?;
        }
        mount(none, PLACE, none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        for (name, contents) in &self.files {
            let path = at(name)?;
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(contents)?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for name in &self.pipes {
            let path = at(name)?;
            mknod(&path, SFlag::S_IFIFO, Mode::S_IRUSR | Mode::S_IWUSR, 0)?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for name in &self.folders {
            let path = at(name)?;
            fs::create_dir(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o700))?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for (name, number) in devices {
            let path = at(name)?;
            mknod(&path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, number)
                .map_err(io::Error::from)
                .map_err(failed(name))?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        chdir(PLACE)?;
        mount(Some("."), "/", none, MsFlags::MS_MOVE, none)
            .map_err(io::Error::from)
            .map_err(failed("enter its root"))?;
        chroot(".")?;
        chdir("/")?;
        Ok(())
    }
}

fn bind(file: &Mount, tree: &OwnedFd) -> io::Result<()> {
    let target = at(&file.name)?;
    File::options().write(true).create_new(true).mode(0o600).open(&target)?;
    move_mount(tree, "", rustix::fs::CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    if !file.writable {
        let none = None::<&str>;
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
        mount(none, &target, none, flags, none)?;
    }
    Ok(())
}

/// A name's place while the root is made; its folders are made.
fn at(name: &str) -> io::Result<PathBuf> {
    let path = Path::new(PLACE).join(name);
    let folders: Vec<&Path> = path.ancestors().skip(1).take_while(|a| *a != Path::new(PLACE)).collect();
    for folder in folders.into_iter().rev().filter(|folder| !folder.exists()) {
        fs::create_dir(folder)?;
        fs::set_permissions(folder, Permissions::from_mode(0o711))?;
    }
    Ok(path)
}

/// A mount namespace with nothing in it, which all roots are made in copies of. A copy of the host's would cost more the more mounts
/// the host has, and taking the host out of it again takes the kernel milliseconds, in which it waits for all CPUs.
fn empty() -> io::Result<&'static File> {
    static EMPTY: OnceLock<File> = OnceLock::new();
    if let Some(empty) = EMPTY.get() {
        return Ok(empty);
    }
    // Its thread is of no other use afterwards.
    let made = std::thread::spawn(make_empty).join();
    let made = made.unwrap_or_else(|_| Err(io::Error::other("its thread ended early")))?;
    Ok(EMPTY.get_or_init(|| made))
}

fn make_empty() -> io::Result<File> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let own = File::open("/proc/thread-self/ns/mnt")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // Over any folder that is there, in this namespace only.
    mount(Some("aenv"), "/proc", Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, Some(EMPTY_SIZE))?;
    chdir("/proc")?;
    fs::create_dir(PLACE.trim_start_matches('/'))?;
    pivot_root(".", ".")?;
    // The host's root lies above the new one now.
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
    mount(none, "/", none, flags | MsFlags::MS_NOEXEC, none)?;
    Ok(own)
}

/// Puts this thread into a namespace of its own that is like `namespace`.
fn enter_copy(namespace: &File) -> io::Result<()> {
    // The kernel lets nobody in who shares root and folder with other threads.
    unshare(CloneFlags::CLONE_FS)?;
    setns(namespace, CloneFlags::CLONE_NEWNS)?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    Ok(())
}

/// Devices of the host, by their numbers.
fn devices() -> io::Result<Vec<(&'static str, libc::dev_t)>> {
    let number = |name: &'static str| {
        let path = Path::new("/").join(name);
        match fs::metadata(&path) {
            Ok(meta) => Some(Ok((name, meta.rdev()))),
            // The VMM says what it lacks.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(Err(error)),
        }
    };
    DEVICES.into_iter().filter_map(number).collect()
}
