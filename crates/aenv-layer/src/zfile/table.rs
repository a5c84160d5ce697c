use aenv_store::BlockSource;

use super::{HEADER_SIZE, Header, MAX_BLOCKS, OpenZFileError, raw_crc32c};

/// Blocks between two offsets that are kept.
const GROUP: u64 = 64;
/// Entries read at once.
const CHUNK: u64 = 1 << 18;
/// What a block may have beyond its size when it does not compress, its checksum included.
const OVERHEAD: u64 = 1024;

/// Where the blocks are: their lengths as the file has them, and the offset of every 64th.
pub(super) struct Table {
    lens: Vec<u32>,
    offsets: Vec<u64>,
}

impl Table {
    /// Reads and checks the jump table, which ends before `limit`.
    pub fn read(source: &dyn BlockSource, header: &Header, limit: u64) -> Result<Self, OpenZFileError> {
        let wrong = |what: String| Err(OpenZFileError::Corrupt(what));
        let blocks = header.blocks;
        if blocks > MAX_BLOCKS || blocks != header.size.div_ceil(u64::from(header.block_size)) {
            return wrong(format!(
                "{blocks} blocks of {} bytes for {} bytes",
                header.block_size, header.size
            ));
        }
        let start = header.table_offset;
        let data_start = HEADER_SIZE + u64::from(header.dictionary_size);
        if start < data_start || start.checked_add(blocks * 4).is_none_or(|end| end > limit) {
            return wrong(format!("a jump table of {blocks} entries at {start} does not fit before {limit}"));
        }
        let shortest = if header.checksums { 5 } else { 1 };
        let longest = u64::from(header.block_size) + u64::from(header.block_size) / 64 + OVERHEAD;
        let mut table = Self { lens: Vec::new(), offsets: Vec::new() };
        let mut at = data_start;
        let mut crc = 0;
        let mut buf = vec![0; blocks.min(CHUNK) as usize * 4];
        for first in (0..blocks).step_by(CHUNK as usize) {
            let part = &mut buf[..(blocks - first).min(CHUNK) as usize * 4];
            source.read_at(part, start + first * 4)?;
            crc = raw_crc32c(crc, part);
            for entry in part.as_chunks().0 {
                let len = u32::from_le_bytes(*entry);
                if u64::from(len) < shortest || u64::from(len) > longest {
                    return wrong(format!("block {} has {len} bytes", table.lens.len()));
                }
                if (table.lens.len() as u64).is_multiple_of(GROUP) {
                    table.offsets.push(at);
                }
                table.lens.push(len);
                at += u64::from(len);
            }
        }
        if header.flags & super::FLAG_DIGEST != 0 && crc != header.table_crc {
            return wrong("the checksum of its jump table does not match".to_owned());
        }
        if at > start {
            return wrong(format!("its blocks end at {at}, behind the jump table at {start}"));
        }
        if blocks.is_multiple_of(GROUP) {
            table.offsets.push(at);
        }
        Ok(table)
    }

    /// Blocks in the file.
    #[cfg(test)]
    pub fn count(&self) -> u64 {
        self.lens.len() as u64
    }

    /// Where a block begins; for the number of blocks, where the last one ends.
    pub fn offset(&self, number: u64) -> u64 {
        let group = number / GROUP;
        let rest = &self.lens[(group * GROUP) as usize..number as usize];
        self.offsets[group as usize] + rest.iter().map(|&len| u64::from(len)).sum::<u64>()
    }

    /// Compressed bytes of a block, its checksum included.
    pub fn len(&self, number: u64) -> usize {
        self.lens[number as usize] as usize
    }
}
