//! What the standard library does not offer: file handles that outlive a process, and work with a user's rights.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use rustix::{
    fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

/// Longest handle that is used (`btrfs` has 20 bytes, the others less).
pub(crate) const MAX_HANDLE: usize = 40;

/// The kernel's name for an inode of a filesystem, valid across restarts and reboots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub kind: i32,
    pub bytes: Vec<u8>,
}

/// `struct file_handle` with room for its bytes.
#[repr(C)]
struct FileHandle {
    length: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE],
}

/// The handle of an open file (`O_PATH` will do).
pub(crate) fn handle_of(fd: BorrowedFd<'_>) -> io::Result<Handle> {
    let mut handle = FileHandle { length: MAX_HANDLE as u32, kind: 0, bytes: [0; MAX_HANDLE] };
    let mut mount: libc::c_int = 0;
    // SAFETY: the kernel reads an empty string, writes at most `length` bytes of the handle, and one int.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    let length = (handle.length as usize).min(MAX_HANDLE);
    Ok(Handle { kind: handle.kind, bytes: handle.bytes[..length].to_vec() })
}

/// Opens what a handle names, on the filesystem of `root`. Links are never followed.
pub(crate) fn open_handle(root: BorrowedFd<'_>, handle: &Handle, flags: OFlags) -> io::Result<OwnedFd> {
    let stale = || io::Error::from_raw_os_error(libc::ESTALE);
    let mut raw = FileHandle { length: 0, kind: handle.kind, bytes: [0; MAX_HANDLE] };
    raw.bytes.get_mut(..handle.bytes.len()).ok_or_else(stale)?.copy_from_slice(&handle.bytes);
    raw.length = u32::try_from(handle.bytes.len()).map_err(|_| stale())?;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // SAFETY: the kernel reads the handle, of which `length` bytes are set.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            &raw mut raw,
            flags.bits() as libc::c_int,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = libc::c_int::try_from(fd).map_err(|_| stale())?;
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens an entry of a folder without following it. `name` is one component.
pub(crate) fn entry(folder: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, name, flags, Mode::empty())?)
}

/// Opens a path below `root`. Links on the way are followed as long as they stay below it.
pub(crate) fn beneath(root: impl AsFd, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    // The kernel gives up when somebody renames folders meanwhile: then it is asked again.
    for _ in 0..16 {
        match rustix::fs::openat2(root.as_fd(), path, flags | OFlags::CLOEXEC, Mode::empty(), how) {
            Err(Errno::AGAIN) => {}
            // A link that leads out: nothing is there for whoever asks.
            Err(Errno::XDEV) => return Err(Errno::NOENT.into()),
            other => return Ok(other?),
        }
    }
    Err(Errno::AGAIN.into())
}

/// What an open file is.
pub(crate) fn stat(fd: impl AsFd) -> io::Result<Stat> {
    Ok(rustix::fs::fstat(fd)?)
}

/// The path by which an `O_PATH` descriptor can be handed to calls that take none.
pub(crate) fn by_descriptor(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Sets owner and group of what is open.
pub(crate) fn chown(fd: impl AsFd, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
    let (uid, gid) = (uid.map(rustix::fs::Uid::from_raw), gid.map(rustix::fs::Gid::from_raw));
    Ok(rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH)?)
}

/// Sets the permissions of what is open.
pub(crate) fn chmod(fd: impl AsFd, mode: u32) -> io::Result<()> {
    Ok(rustix::fs::chmod(by_descriptor(&fd), Mode::from_raw_mode(mode & 0o7777))?)
}

/// On whose behalf something is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Does `work` with a user's rights on files: the kernel decides what is allowed, and whose new files are.
pub(crate) fn as_user<T>(who: &Credentials, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let _switched = Switched::to(who)?;
    work()
}

/// This thread's file system identity is another one until this is dropped.
struct Switched {
    uid: Uid,
    gid: Gid,
    groups: Vec<rustix::process::Gid>,
}

impl Switched {
    fn to(who: &Credentials) -> io::Result<Self> {
        let groups: Vec<_> = who.groups.iter().map(|gid| rustix::process::Gid::from_raw(*gid)).collect();
        let before = rustix::process::getgroups()?;
        // The thread's groups only: the C library's call would change all threads.
        rustix::thread::set_thread_groups(&groups)?;
        let (uid, gid) = (Uid::from_raw(who.uid), Gid::from_raw(who.gid));
        let switched = Self { gid: setfsgid(gid), uid: setfsuid(uid), groups: before };
        // These calls tell of no failure; asked again, they tell what holds now.
        if (setfsgid(gid), setfsuid(uid)) == (gid, uid) { Ok(switched) } else { Err(Errno::PERM.into()) }
    }
}

impl Drop for Switched {
    fn drop(&mut self) {
        setfsuid(self.uid);
        setfsgid(self.gid);
        if let Err(error) = rustix::thread::set_thread_groups(&self.groups) {
            tracing::error!(%error, "a thread could not take its groups back");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_finds_the_file_again_under_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(folder.path()).unwrap();
        std::fs::write(folder.path().join("a"), "text").unwrap();
        let handle = handle_of(entry(&root, b"a").unwrap().as_fd()).unwrap();
        std::fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
        let again = open_handle(root.as_fd(), &handle, OFlags::PATH).unwrap();
        assert_eq!(stat(again).unwrap().st_size, 4);
        std::fs::remove_file(folder.path().join("b")).unwrap();
        let gone = open_handle(root.as_fd(), &handle, OFlags::PATH).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESTALE));
        let long = Handle { kind: 1, bytes: vec![0; 1000] };
        assert!(open_handle(root.as_fd(), &long, OFlags::PATH).is_err());
    }

    #[test]
    fn nothing_leads_out() {
        let outer = tempfile::tempdir().unwrap();
        let inner = outer.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(outer.path().join("secret"), "x").unwrap();
        std::fs::write(inner.join("mine"), "x").unwrap();
        for (link, target) in [("up", ".."), ("abs", "/etc"), ("file", "../secret"), ("ok", "mine")] {
            std::os::unix::fs::symlink(target, inner.join(link)).unwrap();
        }
        let root = std::fs::File::open(&inner).unwrap();
        for path in ["..", "../secret", "up/secret", "abs/passwd", "file", "/etc/passwd"] {
            let error = beneath(&root, path.as_bytes(), OFlags::RDONLY).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{path}");
        }
        assert!(beneath(&root, b"ok", OFlags::RDONLY).is_ok());
    }

    #[test]
    fn a_user_has_a_users_rights_and_the_thread_gets_its_own_back() {
        if !Uid::effective().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(folder.path()).unwrap();
        let make = |name: &str| {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
            rustix::fs::openat(&root, name, flags, Mode::from_raw_mode(0o644)).map_err(io::Error::from)
        };
        let user = Credentials { uid: 4242, gid: 4243, groups: vec![4244] };
        assert_eq!(as_user(&user, || make("no")).unwrap_err().raw_os_error(), Some(libc::EACCES));
        chmod(&root, 0o777).unwrap();
        let made = stat(as_user(&user, || make("yes")).unwrap()).unwrap();
        assert_eq!((made.st_uid, made.st_gid), (4242, 4243));
        assert_eq!(stat(make("own").unwrap()).unwrap().st_uid, 0);
    }
}
