//! A vm state on its way into QEMU and out of it. In: a pipe that already holds all of it, so that loading waits for nobody. Out:
//! a file in memory, of which the server keeps a copy. QEMU never has a file of the server's open.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    sync::{Mutex, PoisonError},
};

use serde_json::{Value, json};

use super::{prepared::COMMAND_WAIT, qmp::Qmp};
use crate::{
    EngineError,
    process::{io_error, write_private},
};

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

/// What a VM was given to save its state in, and still holds.
#[derive(Debug, Default)]
pub(crate) struct SavedStates {
    /// Sets of descriptors. QEMU keeps them open for as long as its vCPUs stand, whatever it is told.
    sets: Mutex<Vec<Value>>,
}

impl SavedStates {
    /// Writes the state of a VM whose vCPUs stand to a file, in place of what is there.
    pub(crate) async fn save(&self, qmp: &Qmp, path: &Path) -> Result<(), EngineError> {
        let (memory, writer) = memory_file().map_err(|e| io_error("make a memory file", e))?;
        let added = qmp.execute("add-fd", json!({}), &[writer.as_fd()], COMMAND_WAIT).await?;
        drop(writer);
        let set = added["fdset-id"].clone();
        let name = format!("/dev/fdset/{set}");
        self.sets.lock().unwrap_or_else(PoisonError::into_inner).push(set);
        // `live: false` would let another process have the disks in a Xen migration; here it keeps them active, so that the
        // vCPUs may go on.
        let arguments = json!({ "filename": name, "live": false });
        qmp.execute("xen-save-devices-state", arguments, &[], COMMAND_WAIT).await?;
        let path = path.to_owned();
        let copied = tokio::task::spawn_blocking(move || copy(memory, &path)).await;
        copied.map_err(|e| EngineError::Start(e.to_string()))?
    }

    /// Lets the VM close what it does not need any more. Its vCPUs run.
    pub(crate) async fn forget(&self, qmp: &Qmp) {
        let sets = std::mem::take(&mut *self.sets.lock().unwrap_or_else(PoisonError::into_inner));
        for set in sets {
            let removed = qmp.execute("remove-fd", json!({ "fdset-id": set }), &[], COMMAND_WAIT).await;
            if let Err(error) = removed {
                tracing::debug!(%error, "a VMM keeps a file");
            }
        }
    }
}

/// A file that has no name, and another description of it for writing only, which is what QEMU looks for.
fn memory_file() -> io::Result<(File, File)> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"vm state".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    let writer = File::options().write(true).open(format!("/proc/self/fd/{fd}"))?;
    Ok((file, writer))
}

/// The VM may still write to `memory`, whatever it was told: what was read counts.
fn copy(memory: File, path: &Path) -> Result<(), EngineError> {
    let mut bytes = Vec::new();
    memory.take(LIMIT + 1).read_to_end(&mut bytes).map_err(|e| io_error("read a vm state", e))?;
    if bytes.is_empty() || bytes.len() as u64 > LIMIT {
        return Err(EngineError::Start(format!("the VMM saved a state of {} bytes", bytes.len())));
    }
    let written = write_private(path, &bytes);
    written.map_err(|e| io_error(format!("write the vm state {}", path.display()), e))
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_state_comes_out_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (memory, _) = memory_file().unwrap();
        assert!(copy(memory, &path).is_err(), "nothing was saved");
        let (memory, mut endless) = memory_file().unwrap();
        endless.write_all(&vec![7; LIMIT as usize + 1]).unwrap();
        assert!(copy(memory, &path).is_err() && !path.exists());
        let (memory, mut writer) = memory_file().unwrap();
        writer.write_all(&[7; 5000]).unwrap();
        copy(memory, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
        assert!(writer.read(&mut [0]).is_err(), "it is for writing only");
    }
}
