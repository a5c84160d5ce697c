use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use nix::fcntl::{FallocateFlags, fallocate};

use crate::durable::sync_dir;

const PREFIX: &str = "upper-";
const DATA: &str = ".data";
const INDEX: &str = ".index";

/// Where a generation's two files are: `upper-<number>.data` and `upper-<number>.index` in the upper's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GenerationName {
    pub dir: PathBuf,
    pub number: u64,
}

impl GenerationName {
    pub fn data(&self) -> PathBuf {
        self.dir.join(format!("{PREFIX}{:08}{DATA}", self.number))
    }

    pub fn index(&self) -> PathBuf {
        self.dir.join(format!("{PREFIX}{:08}{INDEX}", self.number))
    }

    pub fn next(&self) -> Self {
        Self { dir: self.dir.clone(), number: self.number + 1 }
    }

    /// Removes both files, the data first: an index alone is what a seal leaves, and means nothing.
    pub fn remove(&self) -> io::Result<()> {
        for path in [self.data(), self.index()] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        sync_dir(&self.dir)
    }
}

/// The generations in a folder that have a data file, oldest first, and the index files that have none.
pub(crate) fn list(dir: &Path) -> io::Result<(Vec<GenerationName>, Vec<PathBuf>)> {
    let mut numbers = Vec::new();
    let mut indexes = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        if let Some(number) = rest.strip_suffix(DATA) {
            numbers.extend(number.parse::<u64>());
        } else if let Some(number) = rest.strip_suffix(INDEX) {
            indexes.extend(number.parse::<u64>());
        }
    }
    numbers.sort_unstable();
    let name = |number| GenerationName { dir: dir.to_owned(), number };
    let orphans =
        indexes.iter().filter(|number| !numbers.contains(number)).map(|&number| name(number).index());
    let orphans = orphans.collect();
    Ok((numbers.into_iter().map(name).collect(), orphans))
}

/// Opens a file for reading and writing.
pub(crate) fn open_rw(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Makes a file for reading and writing, which must not exist.
pub(crate) fn create_rw(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).open(path)
}

/// Gives a range of a file back to the filesystem; it reads as zeros then.
pub(crate) fn punch(file: &File, start: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let (start, len) = (start.cast_signed(), len.cast_signed());
    fallocate(file, flags, start, len).map_err(io::Error::from)
}
