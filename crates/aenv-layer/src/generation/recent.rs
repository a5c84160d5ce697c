//! What was written since the last flush, for a process that dies while the machine goes on.
//!
//! The log has mappings of durable data only, and so it has them late. But a guest whose block device outlives the process that
//! served it has seen no power loss, and must find all that it wrote. So each mapping is noted here before its write is
//! acknowledged. No sync is waited for: the notes are in the host's page cache, as their data is, and hold as long as the host
//! is not started anew. Whether it was, they tell themselves: the kernel's id of the boot stands at their beginning.
//!
//! Notes of what a flush made durable may stay for a while. Replayed in their order over the log they change nothing.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use uuid::Uuid;

use crate::mapping::Mapping;

/// The id of the boot, then that of the generation.
const HEADER: u64 = 32;

/// Above this, notes that are not needed any more are left out.
const LARGE: u64 = 4 << 20;

/// The file.
pub(super) struct Recent {
    path: PathBuf,
    file: File,
    header: [u8; HEADER as usize],
    /// Where the next note goes.
    end: u64,
}

impl Recent {
    /// None yet, for the generation of this id.
    pub fn create(path: PathBuf, generation: Uuid) -> io::Result<Self> {
        let header = header(generation);
        let file = create(&path, &header)?;
        Ok(Self { path, file, header, end: HEADER })
    }

    /// Takes up what a process before noted, if the machine has been running since, and what it noted, in order. What is not
    /// `valid` is left out for good: data written later would make it look right.
    pub fn open(
        path: PathBuf,
        generation: Uuid,
        valid: impl Fn(&Mapping) -> bool,
    ) -> io::Result<(Self, Vec<Mapping>)> {
        let header = header(generation);
        let bytes = match fs::read(&path) {
            Ok(bytes) if bytes.starts_with(&header) => bytes,
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => return Ok((Self::create(path, generation)?, Vec::new())),
        };
        let (notes, _torn) = bytes[HEADER as usize..].as_chunks();
        let mut mappings: Vec<Mapping> = notes.iter().map(|note| Mapping::from_bytes(*note)).collect();
        mappings.retain(valid);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let mut recent = Self { path, file, header, end: HEADER };
        recent.replace(&to_bytes(&mappings))?;
        Ok((recent, mappings))
    }

    /// Where the notes end so far.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Notes mappings.
    pub fn note(&mut self, mappings: &[Mapping]) -> io::Result<()> {
        let notes = to_bytes(mappings);
        self.file.write_all_at(&notes, self.end)?;
        self.end += notes.len() as u64;
        Ok(())
    }

    /// The notes before `end` are in the log, durable.
    pub fn forget(&mut self, end: u64) -> io::Result<()> {
        if self.end == end {
            self.file.set_len(HEADER)?;
            self.end = HEADER;
        } else if self.end > LARGE {
            let mut rest = vec![0; (self.end - end) as usize];
            self.file.read_exact_at(&mut rest, end)?;
            self.replace(&rest)?;
        }
        Ok(())
    }

    /// Whole, or not at all: the process may die here.
    fn replace(&mut self, notes: &[u8]) -> io::Result<()> {
        let beside = self.path.with_extension("recent.tmp");
        let file = create(&beside, &self.header)?;
        file.write_all_at(notes, HEADER)?;
        fs::rename(&beside, &self.path)?;
        self.file = file;
        self.end = HEADER + notes.len() as u64;
        Ok(())
    }
}

fn to_bytes(mappings: &[Mapping]) -> Vec<u8> {
    mappings.iter().flat_map(|mapping| mapping.to_bytes()).collect()
}

fn create(path: &Path, header: &[u8]) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.write_all_at(header, 0)?;
    Ok(file)
}

fn header(generation: Uuid) -> [u8; HEADER as usize] {
    // One that nobody else has where the kernel tells none: what is noted is not believed then.
    static BOOT: OnceLock<Uuid> = OnceLock::new();
    let boot = BOOT.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.trim().parse().unwrap_or_else(|_| Uuid::new_v4())
    });
    let mut header = [0; HEADER as usize];
    header[..16].copy_from_slice(boot.as_bytes());
    header[16..].copy_from_slice(generation.as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(number: u64) -> Mapping {
        Mapping::data(number, 1, 100 + number)
    }

    fn open(path: &Path, generation: Uuid) -> io::Result<(Recent, Vec<Mapping>)> {
        Recent::open(path.to_owned(), generation, |_| true)
    }

    #[test]
    fn notes_are_there_until_they_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let (path, id) = (folder.path().join("notes"), Uuid::new_v4());
        let mut recent = Recent::create(path.clone(), id).unwrap();
        recent.note(&[mapping(1), mapping(2)]).unwrap();
        let flushed = recent.end();
        recent.note(&[mapping(3)]).unwrap();
        recent.forget(flushed).unwrap();
        let (mut recent, found) = open(&path, id).unwrap();
        assert_eq!(found.last(), Some(&mapping(3)));
        recent.forget(recent.end()).unwrap();
        assert_eq!(open(&path, id).unwrap().1, []);
        assert_eq!(open(&path, Uuid::new_v4()).unwrap().1, [], "those of another generation");
    }

    #[test]
    fn notes_of_another_boot_mean_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (path, id) = (folder.path().join("notes"), Uuid::new_v4());
        Recent::create(path.clone(), id).unwrap().note(&[mapping(1)]).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[0] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(open(&path, id).unwrap().1, []);
    }

    #[test]
    fn what_is_not_valid_does_not_come_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, id) = (folder.path().join("notes"), Uuid::new_v4());
        Recent::create(path.clone(), id).unwrap().note(&[mapping(1), mapping(2), mapping(3)]).unwrap();
        let found = Recent::open(path.clone(), id, |note| note.offset() != 2).unwrap().1;
        assert_eq!(found, [mapping(1), mapping(3)]);
        assert_eq!(open(&path, id).unwrap().1, found);
    }

    #[test]
    fn many_notes_that_are_not_needed_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let (path, id) = (folder.path().join("notes"), Uuid::new_v4());
        let mut recent = Recent::create(path.clone(), id).unwrap();
        for number in 0..LARGE / 1024 {
            recent.note(&[mapping(number); 64]).unwrap();
        }
        let flushed = recent.end();
        recent.note(&[mapping(7)]).unwrap();
        recent.forget(flushed).unwrap();
        recent.note(&[mapping(8)]).unwrap();
        assert_eq!(open(&path, id).unwrap().1, [mapping(7), mapping(8)]);
    }
}
