//! Layers inside a tar, as OCI registries carry them: one file, whose header (and pax header, for its size) comes first.

use std::sync::Arc;

use aenv_store::{BlockSource, SourceError, WindowSource};

const BLOCK: u64 = 512;
const PAX_MAX: u64 = 64 << 10;
/// What the file inside is called.
const FILE: &str = "overlaybd.commit";

/// What a tar has around its only file.
#[derive(Clone, Debug)]
pub struct TarFrame {
    /// Before the file.
    pub head: Vec<u8>,
    /// After it.
    pub tail: Vec<u8>,
}

impl TarFrame {
    /// Around a layer of so many bytes, in the form of overlaybd's own tools: the size is in a pax record only, which has room for
    /// any. The same size gives the same bytes.
    pub fn around(size: u64) -> Self {
        let value = size.to_string();
        // The record begins with its own length, which counts its own digits.
        let rest = " size=".len() + value.len() + 1;
        let digits = (1..).find(|digits| (rest + digits).to_string().len() == *digits).unwrap_or(2);
        let record = format!("{} size={value}\n", rest + digits);
        let mut head = Header::write(b'x', "overlaybd.pax", record.len());
        head.extend_from_slice(record.as_bytes());
        head.resize(2 * BLOCK as usize, 0);
        head.extend(Header::write(b'0', FILE, 0));
        let padding = size.next_multiple_of(BLOCK) - size;
        Self { head, tail: vec![0; (padding + 2 * BLOCK) as usize] }
    }

    /// Bytes of the tar around a file of so many bytes.
    pub fn whole(&self, size: u64) -> u64 {
        self.head.len() as u64 + size + self.tail.len() as u64
    }
}

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

    fn write(kind: u8, name: &str, size: usize) -> Vec<u8> {
        let mut bytes = [0; BLOCK as usize];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[100..108].copy_from_slice(b"0000444\0");
        bytes[108..116].copy_from_slice(b"0000000\0");
        bytes[116..124].copy_from_slice(b"0000000\0");
        bytes[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
        bytes[136..148].copy_from_slice(b"00000000000\0");
        bytes[156] = kind;
        bytes[257..265].copy_from_slice(b"ustar\x0000");
        let sum = format!("{:06o}\0 ", checksum(&bytes));
        bytes[148..156].copy_from_slice(sum.as_bytes());
        bytes.to_vec()
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
    fn a_frame_is_read_back() {
        for size in [0, 1, 5, 80, 81, 82, 511, 512, 900, 9_999_999] {
            let content = vec![7; size];
            let frame = TarFrame::around(size as u64);
            let tar = [&frame.head[..], &content, &frame.tail].concat();
            assert_eq!((tar.len() as u64, tar.len() % 512), (frame.whole(size as u64), 0));
            assert_eq!(frame.head.len(), 1536, "overlaybd looks for the layer there");
            let file = open(tar).unwrap().unwrap();
            assert_eq!(file.size(), size as u64);
        }
        let large = TarFrame::around(20 << 30);
        assert!(String::from_utf8_lossy(&large.head[512..1024]).starts_with("20 size=21474836480\n"));
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

    /// Tars around a layer, changed in any way: the file inside is found within them, or nothing is.
    #[test]
    fn changed_tars_are_read_or_refused() {
        let content = [7; 700];
        let frame = TarFrame::around(700);
        let written = [&frame.head[..], &content, &frame.tail].concat();
        aenv_testkit::mutate("tars-around-layers", &[plain(&content), pax(&content), written], |input| {
            let Ok(Some(file)) = open(input.to_vec()) else { return false };
            assert!(file.size() <= input.len() as u64);
            file.read_at(&mut vec![0; file.size() as usize], 0).unwrap();
            true
        });
    }
}
