//! A guard against a way to lose data.
//!
//! When a guest gives memory back, QEMU punches a hole into the *file* behind it, although the mapping is private: every
//! sibling that shares the file then reads zeroes. Only files that survive this may become guest memory: a file in a
//! FUSE mount whose `FALLOCATE` changes nothing (blockd's memory exports), or a memfd that is sealed against writing.

use std::{fs::File, os::fd::AsRawFd, path::Path};

use crate::{EngineError, process::io_error};

/// `FUSE_SUPER_MAGIC` of linux/magic.h.
const FUSE: libc::c_long = 0x6573_5546;

/// Checks kind and size of a memory file.
pub(crate) fn check(path: &Path, bytes: u64) -> Result<(), EngineError> {
    let context = || format!("the memory file {}", path.display());
    let file = File::open(path).map_err(|e| io_error(context(), e))?;
    let length = file.metadata().map_err(|e| io_error(context(), e))?.len();
    if length != bytes {
        return Err(EngineError::Start(format!(
            "{} has {length} bytes, the machine's memory has {bytes}",
            context()
        )));
    }
    // SAFETY: statfs is plain data; the descriptor is open and the struct is live.
    let on_fuse = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        libc::fstatfs(file.as_raw_fd(), &raw mut stat) == 0 && stat.f_type == FUSE
    };
    // SAFETY: the call has no memory effects.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if on_fuse || (seals >= 0 && seals & libc::F_SEAL_WRITE != 0) {
        return Ok(());
    }
    Err(EngineError::Start(format!(
        "{} is an ordinary file: memory that the guest gives back would be cut out of it, for its siblings too; \
         use an export of blockd or a sealed memfd",
        context()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_files_and_wrong_sizes_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let error = check(file.path(), 4096).unwrap_err().to_string();
        assert!(error.contains("ordinary file"), "{error}");
        let error = check(file.path(), 8192).unwrap_err().to_string();
        assert!(error.contains("4096 bytes"), "{error}");
    }
}
