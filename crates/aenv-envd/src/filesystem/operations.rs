//! What the filesystem calls do, on a thread that may block.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_envd_api::proto::filesystem::EntryInfo;

use super::{FilesystemError, entry::describe};
use crate::{
    files::make_folders,
    users::{Names, User},
};

/// Describes an entry.
pub fn stat(path: &Path) -> Result<EntryInfo, FilesystemError> {
    describe(path, &Names::read()).map_err(|source| FilesystemError::io("file", path, source))
}

/// Makes a folder and its missing parents.
pub fn make_dir(path: &Path, user: &User) -> Result<EntryInfo, FilesystemError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => return Err(FilesystemError::FolderExists(path.to_owned())),
        Ok(_) => return Err(FilesystemError::NotAFolder(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(FilesystemError::io("file", path, source)),
    }
    make_folders(path, user).map_err(|source| FilesystemError::io("file", path, source))?;
    stat(path)
}

/// Renames an entry; its extended attributes travel with it.
pub fn rename(source: &Path, destination: &Path, user: &User) -> Result<EntryInfo, FilesystemError> {
    fs::symlink_metadata(source).map_err(|error| FilesystemError::io("source file", source, error))?;
    if let Some(parent) = destination.parent() {
        make_folders(parent, user).map_err(|error| FilesystemError::io("directory", parent, error))?;
    }
    fs::rename(source, destination).map_err(|error| FilesystemError::io("source file", source, error))?;
    stat(destination)
}

/// Removes an entry and everything below it. What is not there is removed already.
pub fn remove(path: &Path) -> Result<(), FilesystemError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(()),
        removed => removed.map_err(|source| FilesystemError::io("file", path, source)),
    }
}

/// Lists a folder: itself before what it contains, names in the order of their bytes.
pub fn list_dir(path: &Path, depth: u32) -> Result<Vec<EntryInfo>, FilesystemError> {
    let found = fs::metadata(path).map_err(|source| FilesystemError::io("directory", path, source))?;
    if !found.is_dir() {
        return Err(FilesystemError::NoFolder(path.to_owned()));
    }
    let names = Names::read();
    let mut entries = Vec::new();
    walk(path, depth.max(1), &names, &mut entries)
        .map_err(|source| FilesystemError::io("directory", path, source))?;
    Ok(entries)
}

fn walk(folder: &Path, depth: u32, names: &Names, entries: &mut Vec<EntryInfo>) -> io::Result<()> {
    for path in sorted(folder)? {
        match describe(&path, names) {
            Ok(entry) => entries.push(entry),
            // It went away in between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        }
        // Links to folders are listed, not entered: they could lead back here.
        if depth > 1 && path.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            match walk(&path, depth - 1, names, entries) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                walked => walked?,
            }
        }
    }
    Ok(())
}

fn sorted(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        paths.push(entry?.path());
    }
    paths.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn me() -> User {
        let uid = nix::unistd::getuid().as_raw();
        let gid = nix::unistd::getgid().as_raw();
        User { name: "me".to_owned(), uid, gid, groups: vec![gid], home: PathBuf::from("/") }
    }

    fn paths(root: &Path, depth: u32) -> Vec<String> {
        let relative = |entry: EntryInfo| entry.path[root.to_str().unwrap().len() + 1..].to_owned();
        list_dir(root, depth).unwrap().into_iter().map(relative).collect()
    }

    #[test]
    fn listings_are_in_order_and_do_not_follow_links() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        make_dir(&root.join("subdir1/subdir1_1"), &me()).unwrap();
        make_dir(&root.join("subdir2"), &me()).unwrap();
        fs::write(root.join("file1.txt"), "").unwrap();
        fs::write(root.join("subdir1/x"), "").unwrap();
        symlink(&root, root.join("subdir2/loop")).unwrap();
        assert_eq!(paths(&root, 0), ["file1.txt", "subdir1", "subdir2"]);
        assert_eq!(paths(&root, 1), paths(&root, 0));
        let all = ["file1.txt", "subdir1", "subdir1/subdir1_1", "subdir1/x", "subdir2", "subdir2/loop"];
        assert_eq!(paths(&root, 2), all);
        assert_eq!(paths(&root, 9), all);
    }

    #[test]
    fn errors_have_their_words() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let file = root.join("file");
        fs::write(&file, "").unwrap();
        let none = root.join("none");
        let words = |error: FilesystemError| error.to_string().replace(root.to_str().unwrap(), "");
        assert_eq!(words(stat(&none).unwrap_err()), "file not found: /none");
        assert_eq!(words(list_dir(&none, 1).unwrap_err()), "directory not found: /none");
        assert_eq!(words(list_dir(&file, 1).unwrap_err()), "path is not a directory: /file");
        assert_eq!(words(make_dir(root, &me()).unwrap_err()), "directory already exists: ");
        assert_eq!(
            words(make_dir(&file, &me()).unwrap_err()),
            "path already exists but it is not a directory: /file"
        );
        assert_eq!(words(rename(&none, &file, &me()).unwrap_err()), "source file not found: /none");
        remove(&none).unwrap();
        rename(&file, &root.join("a/b/c"), &me()).unwrap();
        remove(&root.join("a")).unwrap();
        assert!(paths(root, 1).is_empty());
    }
}
