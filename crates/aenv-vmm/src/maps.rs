//! Where guest memory lies in a VMM: the private mapping of its memory file, found in `/proc/<pid>/maps`.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use crate::{EngineError, RamMapping, process::io_error};

/// Finds the mapping of `file`, `len` bytes long, in process `pid`.
pub(crate) fn find(pid: i32, file: &Path, len: u64) -> Result<RamMapping, EngineError> {
    let path = format!("/proc/{pid}/maps");
    let text = fs::read_to_string(&path).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => EngineError::Gone,
        _ => io_error(format!("read {path}"), source),
    })?;
    let meta = fs::metadata(file).map_err(|e| io_error(file.display().to_string(), e))?;
    let name = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let wanted = Wanted { device: meta.dev(), inode: meta.ino(), name: &name };
    match span(&text, &wanted) {
        Some((start, end)) if end - start == len => Ok(RamMapping { pid, start, len }),
        Some((start, end)) => Err(EngineError::Start(format!(
            "{} is mapped with {} bytes, guest memory has {len}",
            file.display(),
            end - start
        ))),
        None => Err(EngineError::Start(format!("{} is not mapped by process {pid}", file.display()))),
    }
}

struct Wanted<'a> {
    device: u64,
    inode: u64,
    name: &'a Path,
}

/// First and last address of the adjoining lines that map the file from its start.
fn span(maps: &str, wanted: &Wanted<'_>) -> Option<(u64, u64)> {
    let mut found: Option<(u64, u64)> = None;
    for line in maps.lines() {
        let Some((start, end)) = parse(line, wanted) else { continue };
        found = match found {
            Some((first, last)) if last == start => Some((first, end)),
            None => Some((start, end)),
            // A second mapping of the same file elsewhere: the first one is the guest's.
            other => other,
        };
    }
    found
}

/// `start-end perms offset major:minor inode path`, if the line maps the file privately.
fn parse(line: &str, wanted: &Wanted<'_>) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let private = fields.next()?.ends_with('p');
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let device = libc::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode: u64 = fields.next()?.parse().ok()?;
    let named = line.find('/').is_some_and(|at| Path::new(&line[at..]) == wanted.name);
    let same = named || (inode == wanted.inode && device == wanted.device);
    (private && same && inode != 0).then_some((number(start)?, number(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_mappings_are_joined_and_others_passed_over() {
        let maps = "\
55d0c0000000-55d0c0001000 r-xp 00000000 fe:00 11 /usr/bin/qemu\n\
7f0000000000-7f0000200000 rw-p 00000000 00:2f 42 /x/base mem\n\
7f0000200000-7f0000400000 rw-p 00200000 00:2f 42 /x/base mem\n\
7f0000400000-7f0000500000 rw-s 00400000 00:2f 42 /x/base mem\n\
7f0000600000-7f0000700000 rw-p 00000000 00:00 0 \n";
        let wanted = Wanted { device: libc::makedev(0, 0x2f), inode: 42, name: Path::new("/other") };
        assert_eq!(span(maps, &wanted), Some((0x7f00_0000_0000, 0x7f00_0040_0000)));
        let by_name = Wanted { device: 1, inode: 1, name: Path::new("/x/base mem") };
        assert_eq!(span(maps, &by_name), span(maps, &wanted));
        let nothing = Wanted { device: 0, inode: 0, name: Path::new("/y") };
        assert_eq!(span(maps, &nothing), None);
    }
}
