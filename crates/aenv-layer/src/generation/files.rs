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
const RECENT: &str = ".recent";

/// Where a generation's files are: `upper-<number>.data`, `.index` and `.recent` in the upper's folder.
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

    pub fn recent(&self) -> PathBuf {
        self.dir.join(format!("{PREFIX}{:08}{RECENT}", self.number))
    }

    pub fn next(&self) -> Self {
        Self { dir: self.dir.clone(), number: self.number + 1 }
    }

    /// Removes the files, the data first: what is there without it is what a seal leaves, and means nothing.
    pub fn remove(&self) -> io::Result<()> {
        for path in [self.data(), self.index(), self.recent()] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        sync_dir(&self.dir)
    }
}

/// The generations in a folder that have a data file, oldest first, and the other files of those that have none.
pub(crate) fn list(dir: &Path) -> io::Result<(Vec<GenerationName>, Vec<PathBuf>)> {
    let mut numbers = Vec::new();
    let mut others = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (name, entry_path) = (entry.file_name(), entry.path());
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        if let Some(number) = rest.strip_suffix(DATA) {
            numbers.extend(number.parse::<u64>());
        } else if let Some(number) = rest.strip_suffix(INDEX).or_else(|| rest.strip_suffix(RECENT))
            && let Ok(number) = number.parse::<u64>()
        {
            others.push((number, entry_path));
        }
    }
    numbers.sort_unstable();
    let orphans = others.into_iter().filter(|(number, _)| !numbers.contains(number)).map(|(_, path)| path);
    let orphans = orphans.collect();
    let name = |number| GenerationName { dir: dir.to_owned(), number };
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
