//! The cache's files: `blocks` has a slot of 256 KiB for each block, `records` says what is in each slot.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
};

/// Bytes of a block, and of a slot.
pub const BLOCK: u64 = 256 << 10;

/// Bytes that share a checksum.
pub(crate) const CHUNK: usize = 16 << 10;

/// Chunks of a block.
pub(crate) const CHUNKS: usize = BLOCK as usize / CHUNK;

/// Bytes of a record: it never crosses a sector, so that it is written whole or not at all.
pub(crate) const RECORD: u64 = 128;

/// Bytes before the first record.
pub(crate) const HEADER: u64 = 4096;

const MAGIC: &[u8; 16] = b"aenv-cache v1\0\0\0";
const CHECKED: usize = 96;

/// Stands for the bytes of a source, in this cache and the next one that opens its files. Two sources of one id have the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SourceId(pub [u8; 16]);

/// Names a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub source: SourceId,
    /// Its number in the source.
    pub block: u64,
}

/// What is in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    pub key: Key,
    /// Bytes; less than [`BLOCK`] at a source's end.
    pub len: u32,
    /// Of each chunk.
    pub checksums: [u32; CHUNKS],
}

impl Record {
    pub fn of(key: Key, bytes: &[u8]) -> Self {
        let mut checksums = [0; CHUNKS];
        for (checksum, chunk) in checksums.iter_mut().zip(bytes.chunks(CHUNK)) {
            *checksum = crc32c::crc32c(chunk);
        }
        Self { key, len: bytes.len() as u32, checksums }
    }

    /// Whether bytes are those of the chunks from `first` on.
    pub fn fits(&self, first: usize, bytes: &[u8]) -> bool {
        let expected = &self.checksums[first..];
        bytes.chunks(CHUNK).zip(expected).all(|(chunk, expected)| crc32c::crc32c(chunk) == *expected)
    }

    fn encode(&self) -> [u8; RECORD as usize] {
        let mut out = [0; RECORD as usize];
        out[..16].copy_from_slice(&self.key.source.0);
        out[16..24].copy_from_slice(&self.key.block.to_le_bytes());
        out[24..28].copy_from_slice(&self.len.to_le_bytes());
        for (at, checksum) in out[32..CHECKED].chunks_exact_mut(4).zip(self.checksums) {
            at.copy_from_slice(&checksum.to_le_bytes());
        }
        let sum = crc32c::crc32c(&out[..CHECKED]);
        out[CHECKED..CHECKED + 4].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; RECORD as usize]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let len = u32_at(24);
        if crc32c::crc32c(&bytes[..CHECKED]) != u32_at(CHECKED) || len == 0 || u64::from(len) > BLOCK {
            return None;
        }
        let source = SourceId(std::array::from_fn(|i| bytes[i]));
        let block = u64::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]));
        Some(Self { key: Key { source, block }, len, checksums: std::array::from_fn(|i| u32_at(32 + 4 * i)) })
    }
}

/// The two files, open.
pub(crate) struct Slots {
    blocks: File,
    records: File,
    count: u32,
}

impl Slots {
    /// Opens the files in a folder, or makes them, and returns what is in each slot. Slots beyond `count` are given back.
    pub fn open(folder: &Path, count: u32) -> io::Result<(Self, Vec<Option<Record>>)> {
        let open = |name: &str| {
            let path = folder.join(name);
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
        };
        let (blocks, records) = (open("blocks")?, open("records")?);
        let mut magic = [0; MAGIC.len()];
        let known = records.read_exact_at(&mut magic, 0).is_ok() && magic == *MAGIC;
        if !known {
            blocks.set_len(0)?;
            records.set_len(0)?;
            records.set_len(HEADER)?;
            records.write_all_at(MAGIC, 0)?;
        }
        let bound = |file: &File, most: u64| match file.metadata()?.len() {
            len if len > most => file.set_len(most),
            _ => Ok(()),
        };
        bound(&blocks, u64::from(count) * BLOCK)?;
        bound(&records, HEADER + u64::from(count) * RECORD)?;
        let slots = Self { blocks, records, count };
        let found = slots.load()?;
        Ok((slots, found))
    }

    fn load(&self) -> io::Result<Vec<Option<Record>>> {
        const AT_ONCE: u64 = 8192;
        let recorded =
            (self.records.metadata()?.len().saturating_sub(HEADER) / RECORD).min(u64::from(self.count));
        let present = self.blocks.metadata()?.len();
        let mut found = Vec::with_capacity(recorded as usize);
        let mut buffer = vec![0; (AT_ONCE * RECORD) as usize];
        for first in (0..recorded).step_by(AT_ONCE as usize) {
            let part = &mut buffer[..((recorded - first).min(AT_ONCE) * RECORD) as usize];
            self.records.read_exact_at(part, HEADER + first * RECORD)?;
            found.extend(part.as_chunks().0.iter().map(Record::decode));
        }
        for (slot, record) in found.iter_mut().enumerate() {
            if record.is_some_and(|record| slot as u64 * BLOCK + u64::from(record.len) > present) {
                *record = None;
            }
        }
        Ok(found)
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// Fills a slot: its bytes, then its record.
    pub fn write(&self, slot: u32, record: &Record, bytes: &[u8]) -> io::Result<()> {
        debug_assert!(slot < self.count && bytes.len() == record.len as usize);
        self.blocks.write_all_at(bytes, u64::from(slot) * BLOCK)?;
        self.records.write_all_at(&record.encode(), HEADER + u64::from(slot) * RECORD)
    }

    /// Empties a slot.
    pub fn clear(&self, slot: u32) -> io::Result<()> {
        self.records.write_all_at(&[0; RECORD as usize], HEADER + u64::from(slot) * RECORD)
    }

    /// Bytes of a slot.
    pub fn read(&self, slot: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.blocks.read_exact_at(buf, u64::from(slot) * BLOCK + offset)
    }

    /// Bytes that are free for us on the files' filesystem.
    pub fn free_space(&self) -> io::Result<u64> {
        let found = nix::sys::statvfs::fstatvfs(&self.blocks)?;
        Ok(found.blocks_available() * found.fragment_size())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn key(block: u64) -> Key {
        Key { source: SourceId([7; 16]), block }
    }

    #[test]
    fn what_was_written_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let (slots, found) = Slots::open(dir.path(), 4).unwrap();
        assert!(found.is_empty());
        let record = Record::of(key(9), &[3; 50_000]);
        slots.write(2, &record, &[3; 50_000]).unwrap();
        drop(slots);
        let (slots, found) = Slots::open(dir.path(), 4).unwrap();
        assert_eq!(found, [None, None, Some(record)]);
        let mut bytes = [0; 100];
        slots.read(2, 49_900, &mut bytes).unwrap();
        assert_eq!(bytes, [3; 100]);
        slots.clear(2).unwrap();
        drop(slots);
        assert!(Slots::open(dir.path(), 4).unwrap().1.iter().all(Option::is_none));
    }

    #[test]
    fn a_smaller_cache_gives_slots_back() {
        let dir = tempfile::tempdir().unwrap();
        let (slots, _) = Slots::open(dir.path(), 8).unwrap();
        for slot in 0..8 {
            slots.write(slot, &Record::of(key(slot.into()), &[1; 10]), &[1; 10]).unwrap();
        }
        drop(slots);
        let (_, found) = Slots::open(dir.path(), 3).unwrap();
        assert_eq!(found.len(), 3);
        assert!(fs::metadata(dir.path().join("blocks")).unwrap().len() <= 3 * BLOCK);
    }

    #[test]
    fn files_of_another_kind_are_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("records"), [9; 10_000]).unwrap();
        fs::write(dir.path().join("blocks"), [9; 10_000]).unwrap();
        assert!(Slots::open(dir.path(), 4).unwrap().1.is_empty());
        assert_eq!(fs::metadata(dir.path().join("blocks")).unwrap().len(), 0);
    }

    #[test]
    fn a_record_without_its_bytes_or_with_a_wrong_bit_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (slots, _) = Slots::open(dir.path(), 4).unwrap();
        slots.write(0, &Record::of(key(0), &[1; 10]), &[1; 10]).unwrap();
        slots.write(1, &Record::of(key(1), &[1; 10]), &[1; 10]).unwrap();
        slots.blocks.set_len(BLOCK).unwrap();
        let byte = HEADER + 20;
        slots.records.write_all_at(&[1], byte).unwrap();
        assert_eq!(slots.load().unwrap(), [None, None]);
    }

    /// Files of records, changed in any way: what they say is in the slots is there, or nothing is.
    #[test]
    fn changed_records_are_kept_or_dropped() {
        const SLOTS: u32 = 8;
        let dir = tempfile::tempdir().unwrap();
        let (slots, _) = Slots::open(dir.path(), SLOTS).unwrap();
        for slot in 0..SLOTS {
            slots.write(slot, &Record::of(key(slot.into()), &[1; 10]), &[1; 10]).unwrap();
        }
        let path = dir.path().join("records");
        let valid = fs::read(&path).unwrap();
        // The space between the magic and the first record means nothing: changes go to the rest.
        let (head, records) = valid.split_at(HEADER as usize);
        aenv_testkit::mutate("cache-records", &[records.to_vec()], |input| {
            fs::write(&path, [head, input].concat()).unwrap();
            let (slots, found) = Slots::open(dir.path(), SLOTS).unwrap();
            assert!(found.len() <= SLOTS as usize);
            for (slot, record) in (0..).zip(&found) {
                let Some(record) = record else { continue };
                let mut bytes = vec![0; record.len as usize];
                slots.read(slot, 0, &mut bytes).unwrap();
            }
            found.iter().flatten().count() == SLOTS as usize
        });
    }
}
