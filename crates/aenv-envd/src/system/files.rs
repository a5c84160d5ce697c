//! Small files that each launch writes.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use super::SystemError;

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Makes `path` contain `contents` unless it already does. A link at `path` is replaced by a file: images link to files of
/// services that do not run here.
pub fn replace(path: &Path, contents: &str) -> Result<(), SystemError> {
    let written = match fs::read(path) {
        Ok(present) if present == contents.as_bytes() => return Ok(()),
        Ok(present) if present.len() == contents.len() && is_file(path) => overwrite(path, contents),
        _ => write_beside(path, contents),
    };
    written.map_err(|source| SystemError::File { path: path.display().to_string(), source })
}

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|entry| entry.is_file())
}

/// A name of the same length is written over the old one: making and renaming a file would be most of a launch's time
/// in a guest whose CPU is emulated (70 of 95 ms), and every launch writes it again.
fn overwrite(path: &Path, contents: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(contents.as_bytes())
}

fn write_beside(path: &Path, contents: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let beside = beside(path);
    let replaced = fs::write(&beside, contents).and_then(|()| fs::rename(&beside, path));
    if replaced.is_err() {
        // The error that matters is the first.
        let _ = fs::remove_file(&beside);
    }
    // A file that something is mounted on (a container's resolv.conf) cannot be renamed over, only written.
    match replaced {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => fs::write(path, contents),
        other => other,
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".aenv-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_the_same_length_keeps_its_file() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hostname");
        replace(&path, "one\n").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        replace(&path, "two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\n");
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        replace(&path, "three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
    }

    #[test]
    fn links_become_files_and_nothing_stays_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("etc/resolv.conf");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("../run/stub", &path).unwrap();
        replace(&path, "nameserver 1.1.1.1\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "nameserver 1.1.1.1\n");
        assert!(!path.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
