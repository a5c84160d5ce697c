//! Registers guest memory for marks that a page loses when it is written to, from outside the VMM.
//!
//! A VMM that was started with `libaenv_track.so` (the crate `aenv-track`) has a userfaultfd open. A duplicate of it registers
//! the memory, and [`mark`](crate::mark) sets the marks. Constants are those of `include/uapi/linux/userfaultfd.h`.
//!
//! Memory that is registered has its pages mapped one by one as they are read, no longer their neighbours with them. So it is
//! registered at its first capture, and not before: most guests are never captured.

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::ram::Ram;

/// `UFFDIO_REGISTER_MODE_WP`.
const WRITE_PROTECT: u64 = 1 << 1;

/// `struct uffdio_register`.
#[repr(C)]
struct Registration {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

mod ioctl {
    nix::ioctl_readwrite!(uffdio_register, 0xaa, 0x00, super::Registration);
}

/// Registers a guest's memory; once more changes nothing. Fails for a VMM that has no userfaultfd.
pub(crate) fn register(ram: &Ram) -> io::Result<()> {
    let descriptor = userfaultfd_of(ram.pid)?;
    for piece in ram.pieces() {
        let mut registration =
            Registration { start: piece.start, len: piece.len, mode: WRITE_PROTECT, ioctls: 0 };
        // SAFETY: the structure is the one that the ioctl reads and writes. The range belongs to the process that opened the
        // descriptor, whose contents and accesses it does not change.
        unsafe { ioctl::uffdio_register(descriptor.as_raw_fd(), &mut registration) }?;
    }
    Ok(())
}

/// A duplicate of a process's userfaultfd.
fn userfaultfd_of(pid: u32) -> io::Result<OwnedFd> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let is_one =
        |path: &Path| fs::read_link(path).is_ok_and(|to| to == Path::new("anon_inode:[userfaultfd]"));
    let mut numbers = entries
        .filter(|entry| is_one(&entry.path()))
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let missing = || io::Error::new(io::ErrorKind::NotFound, "the VMM has no userfaultfd open");
    let number = numbers.next().ok_or_else(missing)?;
    let process = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(process, PidfdFlags::empty())?;
    Ok(pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?)
}
