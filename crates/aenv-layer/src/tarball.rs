//! Layers inside a tar, as OCI registries carry them: one file, whose header (and pax header, for its size) comes first.

use std::sync::Arc;

use aenv_store::{BlockSource, SourceError, WindowSource};

const BLOCK: u64 = 512;
const PAX_MAX: u64 = 64 << 10;

/// The file inside, when `source` begins with a tar header. `None`: it does not.
pub(crate) fn inside(source: &Arc<dyn BlockSource>) -> Result<Option<WindowSource>, SourceError> {
    let Some(first) = Header::read(source, 0)? else { return Ok(None) };
    let (start, size) = if first.is_pax() {
        let records_len =
            first.size.filter(|&len| len <= PAX_MAX).ok_or_else(|| bad("pax header too large"))?;
        SourceError::check_range(BLOCK, records_len, source.size())?;
        let mut records = vec![0; records_len as usize];
        source.read_at(&mut records, BLOCK)?;
        let at = BLOCK + records_len.next_multiple_of(BLOCK);
        let file = Header::read(source, at)?.ok_or_else(|| bad("no file follows the pax header"))?;
        (at + BLOCK, pax_size(&records).or(file.size))
    } else {
        (BLOCK, first.size)
    };
    let size = size.ok_or_else(|| bad("the file's size is not a number"))?;
    WindowSource::new(source.clone(), start, size).map(Some)
}

fn bad(message: &str) -> SourceError {
    SourceError::corrupt("tar around the layer", message)
}

struct Header {
    kind: u8,
    size: Option<u64>,
}

impl Header {
    fn read(source: &Arc<dyn BlockSource>, at: u64) -> Result<Option<Self>, SourceError> {
        let mut bytes = [0; BLOCK as usize];
        if at.checked_add(BLOCK).is_none_or(|end| end > source.size()) {
            return Ok(None);
        }
        source.read_at(&mut bytes, at)?;
        if &bytes[257..262] != b"ustar" || octal(&bytes[148..156]) != Some(checksum(&bytes)) {
            return Ok(None);
        }
        Ok(Some(Self { kind: bytes[156], size: number(&bytes[124..136]) }))
    }

    fn is_pax(&self) -> bool {
        self.kind == b'x'
    }
}

/// The sum of a header's bytes, its own field taken as spaces.
fn checksum(header: &[u8; BLOCK as usize]) -> u64 {
    let byte = |(i, &byte): (usize, &u8)| if (148..156).contains(&i) { 32 } else { u64::from(byte) };
    header.iter().enumerate().map(byte).sum()
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    u64::from_str_radix(text, 8).ok()
}

/// A size field: octal, or base 256 when its first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 == 0 {
        return octal(field);
    }
    let (high, low) = field.split_at(field.len() - 8);
    let empty = high.iter().enumerate().all(|(i, &byte)| byte == if i == 0 { 0x80 } else { 0 });
    empty.then(|| low.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

/// The `size` of a pax header's `LENGTH KEY=VALUE\n` records.
fn pax_size(mut records: &[u8]) -> Option<u64> {
    while !records.is_empty() {
        let space = records.iter().position(|&byte| byte == b' ')?;
        let len: usize = std::str::from_utf8(&records[..space]).ok()?.parse().ok()?;
        if len <= space || len > records.len() {
            return None;
        }
        let (record, rest) = records.split_at(len);
        let text = std::str::from_utf8(&record[space + 1..]).ok()?;
        if let Some(value) = text.strip_prefix("size=") {
            return value.trim_end_matches('\n').parse().ok();
        }
        records = rest;
    }
    None
}

#[cfg(test)]
pub(crate) mod tests {
    use aenv_store::MemorySource;

    use super::*;

    fn header(kind: u8, name: &str, size: &str) -> Vec<u8> {
        let mut bytes = [0; 512];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[124..124 + size.len()].copy_from_slice(size.as_bytes());
        bytes[156] = kind;
        bytes[257..265].copy_from_slice(b"ustar\x0000");
        let sum = format!("{:06o}\0 ", checksum(&bytes));
        bytes[148..156].copy_from_slice(sum.as_bytes());
        bytes.to_vec()
    }

    /// A tar as a registry carries it: one file, its size in the header.
    pub(crate) fn plain(content: &[u8]) -> Vec<u8> {
        let mut tar = header(b'0', "overlaybd.commit", &format!("{:011o}", content.len()));
        tar.extend(content);
        tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
        tar
    }

    /// A tar as overlaybd's own tools write it: the size only in a pax record.
    pub(crate) fn pax(content: &[u8]) -> Vec<u8> {
        let value = content.len().to_string();
        let mut len = value.len() + 8;
        len = value.len() + 7 + len.to_string().len();
        let record = format!("{len} size={value}\n");
        assert_eq!(record.len(), len);
        let mut tar = header(b'x', "overlaybd.pax", &format!("{len:o}"));
        tar.extend(record.as_bytes());
        tar.resize(1024, 0);
        tar.extend(header(b'0', "overlaybd.commit", "00000000000"));
        tar.extend(content);
        tar.resize(tar.len().next_multiple_of(512) + 1024, 0);
        tar
    }

    fn open(bytes: Vec<u8>) -> Result<Option<WindowSource>, SourceError> {
        inside(&(Arc::new(MemorySource::new(bytes)) as Arc<dyn BlockSource>))
    }

    #[test]
    fn finds_the_file_behind_either_header() {
        for tar in [plain(b"hello"), pax(b"hello")] {
            let file = open(tar).unwrap().unwrap();
            let mut buf = [0; 5];
            assert_eq!(file.size(), 5);
            file.read_at(&mut buf, 0).unwrap();
            assert_eq!(&buf, b"hello");
        }
    }

    #[test]
    fn what_is_no_tar_is_left_alone() {
        assert!(open(vec![0; 4096]).unwrap().is_none());
        assert!(open(vec![]).unwrap().is_none());
        let mut wrong_sum = plain(b"x");
        wrong_sum[0] ^= 1;
        assert!(open(wrong_sum).unwrap().is_none());
    }

    #[test]
    fn lies_about_sizes_are_refused() {
        let mut tar = header(b'0', "f", "77777777777");
        tar.extend([0; 512]);
        assert!(open(tar).is_err());
        let mut cut = pax(b"hello");
        cut.truncate(1024);
        assert!(open(cut).is_err());
    }

    #[test]
    fn base_256_sizes() {
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1]), Some((2 << 32) + 1));
        assert_eq!(number(&[0x81, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1]), None);
    }
}
