//! A Firecracker's own root, looked at from outside. What the process may have put there is not trusted: no path of it is followed
//! further than to a file of the kind that is expected.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::Path,
};

use tokio::net::UnixStream;

use crate::EngineError;

/// The folder that belongs to the process, and its API socket there.
pub(crate) const FOLDER: &str = "vm";
pub(crate) const SOCKET: &str = "vm/api.sock";
/// The vm state: what is loaded, and what was saved last.
pub(crate) const STATE: &str = "state";
/// What is in the place of the file that memory would be saved in.
pub(crate) const HOLD: &str = "hold";
pub(crate) const MEMORY: &str = "memory";
pub(crate) const KERNEL: &str = "kernel";
pub(crate) const INITRAMFS: &str = "initramfs";
pub(crate) const LOG: &str = "log";
pub(crate) const PROGRAM: &str = "firecracker";

/// A vm state has some tens of kB for each vCPU, of which there are 32 at most.
pub(crate) const LARGEST_STATE: u64 = 8 << 20;

/// How the process finds a file.
pub(crate) fn inside(name: &str) -> String {
    format!("/{name}")
}

/// Name of a disk.
pub(crate) fn drive(index: usize) -> String {
    format!("drives/{index}")
}

/// The root folder, open: it stays this one, whatever becomes of the process and its number.
#[derive(Debug)]
pub(crate) struct Root {
    folder: File,
}

impl Root {
    /// The root of a process that is known to be the right one.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let options = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let folder = File::options().read(true).custom_flags(options).open(format!("/proc/{pid}/root"))?;
        Ok(Self { folder })
    }

    /// Opens a file of it, through no link.
    pub(crate) fn open(&self, name: &str, flags: libc::c_int) -> io::Result<File> {
        // SAFETY: open_how is plain data.
        let mut how: libc::open_how = unsafe { std::mem::zeroed() };
        how.flags = (flags | libc::O_CLOEXEC) as u64;
        how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_NO_MAGICLINKS;
        let name = std::ffi::CString::new(name)?;
        // SAFETY: the name is a C string, and `how` has the size that is told.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_openat2,
                self.folder.as_raw_fd(),
                name.as_ptr(),
                &raw const how,
                size_of::<libc::open_how>(),
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }.into())
    }

    /// Connects to the API. Waiting for a place in its queue is the caller's to bound.
    pub(crate) async fn connect(&self) -> io::Result<UnixStream> {
        let socket = self.open(SOCKET, libc::O_PATH)?;
        if !socket.metadata()?.file_type().is_socket() {
            return Err(io::Error::other("its API socket is none"));
        }
        UnixStream::connect(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd()))).await
    }

    /// The vm state that lies there.
    pub(crate) fn state(&self) -> Result<Vec<u8>, EngineError> {
        let failed = |e: io::Error| EngineError::Start(format!("the vm state of a VMM: {e}"));
        let file = self.open(STATE, libc::O_RDONLY | libc::O_NONBLOCK).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(EngineError::Start("the vm state of a VMM is no file".to_owned()));
        }
        let mut bytes = Vec::new();
        file.take(LARGEST_STATE + 1).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}
