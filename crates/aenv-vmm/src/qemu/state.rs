//! A vm state on its way into QEMU: a pipe that already holds all of it, so that loading waits for nobody.

use std::{
    fs,
    io::Write,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use crate::{EngineError, process::io_error};

/// A vm state has tens of kB; what is larger than any pipe is none.
const LIMIT: u64 = 1 << 20;

/// The reading end of a pipe that holds the file, with the writing end closed.
pub(crate) async fn pipe_with(state: &Path) -> Result<OwnedFd, EngineError> {
    let path = state.to_owned();
    let filled = tokio::task::spawn_blocking(move || fill(&path)).await;
    filled.map_err(|e| EngineError::Start(e.to_string()))?
}

fn fill(path: &Path) -> Result<OwnedFd, EngineError> {
    let context = || format!("the vm state {}", path.display());
    let bytes = fs::read(path).map_err(|e| io_error(context(), e))?;
    if bytes.is_empty() || bytes.len() as u64 > LIMIT {
        return Err(EngineError::Incompatible(format!("{} has {} bytes", context(), bytes.len())));
    }
    let (reader, mut writer) = std::io::pipe().map_err(|e| io_error("make a pipe", e))?;
    let size = bytes.len().next_power_of_two().max(4096);
    // SAFETY: the calls have no memory effects.
    let set = unsafe {
        libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, size) >= 0
            && libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) == 0
    };
    if !set {
        return Err(io_error("size a pipe for the vm state", std::io::Error::last_os_error()));
    }
    writer.write_all(&bytes).map_err(|e| io_error("fill a pipe with the vm state", e))?;
    Ok(reader.into())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn the_pipe_holds_everything_and_ends() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..161_000_u32).map(|i| i as u8).collect();
        fs::write(file.path(), &bytes).unwrap();
        let pipe = pipe_with(file.path()).await.unwrap();
        let mut read = Vec::new();
        fs::File::from(pipe).read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes);
        fs::write(file.path(), b"").unwrap();
        assert!(matches!(pipe_with(file.path()).await, Err(EngineError::Incompatible(_))));
    }
}
