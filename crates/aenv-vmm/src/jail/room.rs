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
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    path::{Path, PathBuf},
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, SFlag, mknod},
    unistd::{chdir, pivot_root},
};

/// Bounds what a process can write into its root: a vm state of many vCPUs, and sockets.
const SIZE: &CStr = c"size=24m,nr_inodes=256,mode=0711";

/// Character devices that a VMM opens.
const DEVICES: [&str; 2] = ["dev/kvm", "dev/net/tun"];

/// What the root will hold. Names are relative to it.
#[derive(Debug)]
pub(crate) struct Room {
    /// Who the process will be; 0: it stays root.
    uid: u32,
    /// A folder of the host over which the root is mounted, in that namespace only.
    place: PathBuf,
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
    pub(crate) fn new(uid: u32, place: PathBuf) -> Self {
        Self { uid, place, mounts: vec![], files: vec![], pipes: vec![], folders: vec![] }
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
        unshare(CloneFlags::CLONE_NEWNS).map_err(io::Error::from).map_err(failed("mount namespace"))?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        fs::create_dir_all(&self.place)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(Some("aenv"), &self.place, Some("tmpfs"), flags, Some(SIZE))
            .map_err(io::Error::from)
            .map_err(failed("its root"))?;
        for mount in &self.mounts {
            self.bind(mount).map_err(failed(&mount.source.display().to_string()))?;
        }
        for (name, contents) in &self.files {
            let path = self.at(name)?;
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(contents)?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for name in &self.pipes {
            let path = self.at(name)?;
            mknod(&path, SFlag::S_IFIFO, Mode::S_IRUSR | Mode::S_IWUSR, 0)?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for name in &self.folders {
            let path = self.at(name)?;
            fs::create_dir(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o700))?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        for (name, number) in devices {
            let path = self.at(name)?;
            mknod(&path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, number)
                .map_err(io::Error::from)
                .map_err(failed(name))?;
            chown(&path, Some(self.uid), Some(self.uid))?;
        }
        chdir(&self.place)?;
        pivot_root(".", ".").map_err(io::Error::from).map_err(failed("enter its root"))?;
        // The host's root lies above the new one now.
        umount2(".", MntFlags::MNT_DETACH)?;
        chdir("/")?;
        Ok(())
    }

    fn bind(&self, file: &Mount) -> io::Result<()> {
        let target = self.at(&file.name)?;
        File::options().write(true).create_new(true).mode(0o600).open(&target)?;
        let none = None::<&str>;
        mount(Some(&file.source), &target, none, MsFlags::MS_BIND, none)?;
        if !file.writable {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
            mount(none, &target, none, flags, none)?;
        }
        Ok(())
    }

    /// A name's place while the host is still to be seen; its folders are made.
    fn at(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.place.join(name);
        let folders: Vec<&Path> = path.ancestors().skip(1).take_while(|a| *a != self.place).collect();
        for folder in folders.into_iter().rev().filter(|folder| !folder.exists()) {
            fs::create_dir(folder)?;
            fs::set_permissions(folder, Permissions::from_mode(0o711))?;
        }
        Ok(path)
    }
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
