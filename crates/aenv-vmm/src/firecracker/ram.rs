//! Where guest memory lies in a Firecracker. After a load it is the private mapping of the memory image, in which memory that
//! the guest gave back is cut out and replaced by anonymous memory. After a boot it is anonymous. What is above 3 GiB lies in a
//! mapping of its own, wherever there was room.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use super::root::{MEMORY, inside};
use crate::{
    EngineError, RamMapping, UpperRam,
    maps::{self, FileId, Line},
    process::io_error,
};

/// Where guest memory is cut: devices are at the guest's addresses from here to 4 GiB.
const CUT: u64 = 3 << 30;

/// Finds guest memory of `len` bytes in process `pid`. `image`: what was mapped, if a vm state was loaded.
pub(crate) fn find(pid: i32, image: &Path, len: u64) -> Result<RamMapping, EngineError> {
    let text = maps::read(pid)?;
    let file = FileId::of(image).map_err(|e| io_error(image.display().to_string(), e))?;
    let lines: Vec<Line<'_>> = text.lines().filter_map(Line::parse).collect();
    let seen = inside(MEMORY);
    let of_image = |line: &&Line<'_>| line.private && (line.is_of(&file) || line.name == Some(&seen));
    let loaded: Vec<Line<'_>> = lines.iter().filter(of_image).copied().collect();
    let found = match loaded.is_empty() {
        true => anonymous(&lines, len, |start| holds_tables(pid, start)),
        false => of_file(&loaded, len),
    };
    let (start, upper) = found.ok_or_else(|| {
        EngineError::Start(format!("guest memory of {len} bytes is not to be found in process {pid}"))
    })?;
    Ok(RamMapping { pid, start, len, upper })
}

type Found = Option<(u64, Option<UpperRam>)>;

/// By what is left of the mappings of the image: each line tells where its piece begins.
fn of_file(lines: &[Line<'_>], len: u64) -> Found {
    let begin = |upper: bool| {
        let own = lines.iter().filter(|line| (line.offset >= CUT) == upper);
        let mut begins = own.map(|line| line.start.wrapping_sub(line.offset - if upper { CUT } else { 0 }));
        let first = begins.next()?;
        begins.all(|other| other == first).then_some(first)
    };
    let start = begin(false)?;
    if len <= CUT {
        return Some((start, None));
    }
    // A mapping that happens to follow the first one is told of as one with it.
    let upper = if lines.iter().any(|line| line.offset >= CUT) { begin(true)? } else { start + CUT };
    Some((start, Some(UpperRam { offset: CUT, start: upper })))
}

/// By its size. `is_lower` tells whether the beginning of guest memory lies at an address.
fn anonymous(lines: &[Line<'_>], len: u64, is_lower: impl Fn(u64) -> bool) -> Found {
    let blank = |line: &&Line<'_>| line.private && line.writable && line.inode == 0 && line.name.is_none();
    let of_size = |size: u64| {
        lines.iter().filter(blank).filter(move |line| line.end - line.start == size).map(|line| line.start)
    };
    if len <= CUT {
        let mut fitting = of_size(len);
        let one = fitting.next()?;
        return match fitting.next() {
            None => Some((one, None)),
            Some(_) => of_size(len).find(|start| is_lower(*start)).map(|start| (start, None)),
        };
    }
    let rest = len - CUT;
    let upper = |start: u64| Some(UpperRam { offset: CUT, start });
    // Pieces next to each other are one line, in either order.
    if let Some(both) = of_size(len).next() {
        return match is_lower(both + rest) {
            true => Some((both + rest, upper(both))),
            false => Some((both, upper(both + CUT))),
        };
    }
    let lower = of_size(CUT).find(|start| is_lower(*start))?;
    Some((lower, upper(of_size(rest).find(|start| *start != lower)?)))
}

/// Whether guest memory begins there: Firecracker puts its ACPI tables at this address of the guest.
fn holds_tables(pid: i32, start: u64) -> bool {
    const TABLES: u64 = 0xe_0000;
    let mut word = [0; 8];
    let read =
        File::open(format!("/proc/{pid}/mem")).and_then(|mem| mem.read_exact_at(&mut word, start + TABLES));
    read.is_ok() && word == *b"RSD PTR "
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn line(start: u64, len: u64, offset: Option<u64>) -> String {
        match offset {
            None => format!("{start:x}-{:x} rw-p 00000000 00:00 0 ", start + len),
            Some(offset) => format!("{start:x}-{:x} rw-p {offset:08x} 00:2f 42 /memory", start + len),
        }
    }

    fn parse(lines: &[String]) -> Vec<Line<'_>> {
        lines.iter().map(|line| Line::parse(line).unwrap()).collect()
    }

    #[test]
    fn an_image_with_holes_is_found_by_what_is_left() {
        let at = 0x7f00_0000_0000;
        let lines = [line(at + 0x2000, 0x1000, Some(0x2000)), line(at + 0x8000, 0x8000, Some(0x8000))];
        assert_eq!(of_file(&parse(&lines), 0x10000), Some((at, None)));
        let other = [line(at, 0x1000, Some(0)), line(at + 0x8000, 0x8000, Some(0x9000))];
        assert_eq!(of_file(&parse(&other), 0x10000), None);

        let low = 0x7e00_0000_0000;
        let two = [line(low + 0x1000, GIB, Some(CUT + 0x1000)), line(at, CUT, Some(0))];
        let upper = Some(UpperRam { offset: CUT, start: low });
        assert_eq!(of_file(&parse(&two), 4 * GIB), Some((at, upper)));
        let joined = [line(at, 4 * GIB, Some(0))];
        assert_eq!(of_file(&parse(&joined), 4 * GIB).unwrap().1.unwrap().start, at + CUT);
    }

    #[test]
    fn memory_without_a_file_is_found_by_its_size_and_what_lies_in_it() {
        let (one, other) = (0x7f00_0000_0000, 0x7f10_0000_0000);
        let lines = [line(one, 1 << 27, None), line(other, 1 << 20, None)];
        assert_eq!(anonymous(&parse(&lines), 1 << 27, |_| false), Some((one, None)));
        assert_eq!(anonymous(&parse(&lines), 1 << 28, |_| true), None);
        let twins = [line(one, 1 << 27, None), line(other, 1 << 27, None)];
        assert_eq!(anonymous(&parse(&twins), 1 << 27, |start| start == other), Some((other, None)));

        let apart = [line(one, GIB, None), line(other, CUT, None)];
        let found = anonymous(&parse(&apart), 4 * GIB, |start| start == other);
        assert_eq!(found, Some((other, Some(UpperRam { offset: CUT, start: one }))));
        let joined = [line(one, 4 * GIB, None)];
        let below = anonymous(&parse(&joined), 4 * GIB, |start| start == one + GIB);
        assert_eq!(below, Some((one + GIB, Some(UpperRam { offset: CUT, start: one }))));
        let above = anonymous(&parse(&joined), 4 * GIB, |start| start == one);
        assert_eq!(above, Some((one, Some(UpperRam { offset: CUT, start: one + CUT }))));
    }
}
