//! Where guest memory lies in a Firecracker. After a load it is the private mapping of the memory image, in which memory that
//! the guest gave back is cut out and replaced by anonymous memory. After a boot it is anonymous.

use std::{fs, path::Path};

use super::root::{MEMORY, inside};
use crate::{
    EngineError, RamMapping,
    maps::{self, FileId, Line},
    process::io_error,
};

/// Finds guest memory of `len` bytes in process `pid`. `image`: what was mapped, if a vm state was loaded.
pub(crate) fn find(pid: i32, image: &Path, len: u64) -> Result<RamMapping, EngineError> {
    let text = maps::read(pid)?;
    let file = FileId::of(image).map_err(|e| io_error(image.display().to_string(), e))?;
    let seen = inside(MEMORY);
    let lines: Vec<Line<'_>> = text.lines().filter_map(Line::parse).collect();
    let of_image = |line: &&Line<'_>| line.private && (line.is_of(&file) || line.name == Some(&seen));
    let loaded: Vec<u64> =
        lines.iter().filter(of_image).map(|line| line.start.wrapping_sub(line.offset)).collect();
    let found = match loaded.split_first() {
        Some((first, others)) if others.iter().all(|other| other == first) => Some(*first),
        Some(_) => None,
        None => anonymous(pid, &lines, len)?,
    };
    let start = found.ok_or_else(|| {
        EngineError::Start(format!("guest memory of {len} bytes is not to be found in process {pid}"))
    })?;
    Ok(RamMapping { pid, start, len })
}

/// The only anonymous mapping of this size that has no swap set aside for it, which is how Firecracker maps guest memory.
fn anonymous(pid: i32, lines: &[Line<'_>], len: u64) -> Result<Option<u64>, EngineError> {
    let fits = |line: &&Line<'_>| {
        line.private
            && line.writable
            && line.inode == 0
            && line.name.is_none()
            && line.end - line.start == len
    };
    let mut fitting = lines.iter().filter(fits).map(|line| line.start);
    match (fitting.next(), fitting.next()) {
        (Some(one), None) => Ok(Some(one)),
        (None, _) => Ok(None),
        (Some(_), Some(_)) => {
            let path = format!("/proc/{pid}/smaps");
            let text = fs::read_to_string(&path).map_err(|e| io_error(format!("read {path}"), e))?;
            Ok(unreserved(&text, len))
        }
    }
}

/// The first mapping in smaps of this size with the flag `nr`.
fn unreserved(smaps: &str, len: u64) -> Option<u64> {
    let mut at = None;
    for line in smaps.lines() {
        match line.strip_prefix("VmFlags:") {
            Some(flags) if flags.split_ascii_whitespace().any(|flag| flag == "nr") && at.is_some() => {
                return at;
            }
            Some(_) => at = None,
            None => {
                if let Some(line) = Line::parse(line) {
                    let fits = line.inode == 0 && line.name.is_none() && line.end - line.start == len;
                    at = fits.then_some(line.start);
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_swap_is_told_from_other_memory() {
        let smaps = "\
7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \nSize: 131072 kB\nVmFlags: rd wr mr mw me ac \n\
7f0010000000-7f0018000000 rw-p 00000000 00:00 0 \nSize: 131072 kB\nVmFlags: rd wr mr mw me nr \n\
7f0020000000-7f0021000000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me nr \n";
        assert_eq!(unreserved(smaps, 0x800_0000), Some(0x7f00_1000_0000));
        assert_eq!(unreserved(smaps, 0x4000), None);
    }
}
