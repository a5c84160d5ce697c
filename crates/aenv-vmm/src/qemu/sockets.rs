//! The two sockets of a QEMU: QMP and the serial console. We make the listening ends and pass them, so that connecting
//! never has to wait for QEMU to come up, and a restarted server connects to the same path again.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::OpenOptionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
};

/// The QMP socket in a VM's runtime folder.
pub(crate) const QMP: &str = "qmp.sock";
/// The console's.
pub(crate) const CONSOLE: &str = "console.sock";
/// What QEMU itself says.
pub(crate) const LOG: &str = "qemu.log";
/// All files of a VM's runtime folder.
pub(crate) const FILES: [&str; 3] = [QMP, CONSOLE, LOG];

/// A listening socket for QEMU and our end of its first connection.
pub(crate) struct Pair {
    pub(crate) listener: OwnedFd,
    pub(crate) stream: UnixStream,
}

/// Makes the socket `name` in `folder`, in place of what an ended QEMU left there, and connects to it.
pub(crate) fn listen(folder: &Path, name: &str) -> io::Result<Pair> {
    in_folder(folder, name, |path| {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let stream = UnixStream::connect(path)?;
        Ok(Pair { listener: listener.into(), stream })
    })
}

/// Connects to the socket `name` in `folder`.
pub(crate) fn connect(folder: &Path, name: &str) -> io::Result<UnixStream> {
    in_folder(folder, name, |path| UnixStream::connect(path))
}

/// Socket paths end at 107 bytes, folders do not: the path goes through a descriptor of the folder.
fn in_folder<T>(folder: &Path, name: &str, work: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let options = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let handle = File::options().read(true).custom_flags(options).open(folder)?;
    work(Path::new(&format!("/proc/self/fd/{}/{name}", handle.as_raw_fd())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_may_have_long_names() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("a".repeat(200));
        std::fs::create_dir(&long).unwrap();
        let pair = listen(&long, QMP).unwrap();
        connect(&long, QMP).unwrap();
        drop(pair);
        assert!(connect(&long, QMP).is_err());
        listen(&long, QMP).unwrap();
    }
}
