//! Steps that make names durable.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    path::Path,
};

/// Makes the names in a folder durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The folder that holds a path.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Fails when a path names something that a rename must not replace: a device, a pipe, a link or a folder.
pub(crate) fn check_replaceable(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(meta) if meta.is_file() => Ok(()),
        Ok(_) => Err(io::Error::new(ErrorKind::InvalidInput, "something other than a regular file is there")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    #[test]
    fn only_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name| dir.path().join(name);
        fs::write(path("file"), b"x").unwrap();
        symlink(path("file"), path("link")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        check_replaceable(&path("missing")).unwrap();
        check_replaceable(&path("file")).unwrap();
        for name in ["link", "socket", "."] {
            assert_eq!(check_replaceable(&path(name)).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
        }
    }
}
