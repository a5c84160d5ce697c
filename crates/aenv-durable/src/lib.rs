//! Small files that survive a crash, whole or not at all: written beside, synced, renamed, and the folder synced.
//!
//! It knows nothing of what is written. Large or streamed files are written by their owners and made durable with [`publish`].

#![forbid(unsafe_code)]

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Makes `path` contain `bytes`; others may read it. When it returns, the file survives a power loss.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(path, &beside(path), bytes, 0o644)
}

/// The same for a secret: only the owner may read it, from its first byte on.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(path, &beside(path), bytes, 0o600)
}

/// The same through `staging`, a path on the same filesystem that nobody else uses, for owners who clean up after a crash.
pub fn write_through(path: &Path, staging: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with_mode(path, staging, bytes, 0o644)
}

/// Makes a finished file durable under its final name; returns its size in bytes.
pub fn publish(finished: &Path, path: &Path) -> io::Result<u64> {
    let file = File::open(finished)?;
    file.sync_all()?;
    let size = file.metadata()?.len();
    fs::rename(finished, path)?;
    sync_folder_of(path)?;
    Ok(size)
}

fn write_with_mode(path: &Path, beside: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(beside, path)
    })();
    if written.is_err() {
        // The error that matters is the first one.
        let _ = fs::remove_file(beside);
    }
    written?;
    sync_folder_of(path)
}

/// A hidden name in the same folder that no other call uses.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{number}.part", process::id()))
}

fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_are_replaced_whole_and_nothing_stays_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, b"first").unwrap();
        write(&path, b"2").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2");
        let staging = folder.path().join("staging");
        write_through(&path, &staging, b"third").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert!(write(&folder.path().join("no/such"), b"").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn secrets_are_the_owners() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        write_private(&path, b"secret").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_failed_replacement_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("is-a-folder");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, b"text").is_err());
        assert!(path.is_dir());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_published_has_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let (made, path) = (folder.path().join("made"), folder.path().join("kept"));
        fs::write(&made, [7; 1000]).unwrap();
        assert_eq!(publish(&made, &path).unwrap(), 1000);
        assert!(!made.exists() && path.exists());
    }
}
