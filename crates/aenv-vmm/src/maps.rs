//! Where guest memory lies in a VMM: the private mapping of its memory file, found in `/proc/<pid>/maps`.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, sync::OnceLock};

use crate::{EngineError, RamMapping, process::io_error};

/// Finds the mapping of `file`, `len` bytes long, in process `pid`.
pub(crate) fn find(pid: i32, file: &Path, len: u64) -> Result<RamMapping, EngineError> {
    let text = read(pid)?;
    let id = FileId::of(file).map_err(|e| io_error(file.display().to_string(), e))?;
    let name = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    match span(&text, &id, &name) {
        Some((start, end)) if end - start == len => Ok(RamMapping { pid, start, len, upper: None }),
        Some((start, end)) => Err(EngineError::Start(format!(
            "{} is mapped with {} bytes, guest memory has {len}",
            file.display(),
            end - start
        ))),
        None => Err(EngineError::Start(format!("{} is not mapped by process {pid}", file.display()))),
    }
}

/// Where a VM's memory lies, which is looked for once: it stays there.
#[derive(Debug, Default)]
pub(crate) struct FoundRam(OnceLock<RamMapping>);

impl FoundRam {
    pub(crate) fn or_find(
        &self,
        find: impl FnOnce() -> Result<RamMapping, EngineError>,
    ) -> Result<RamMapping, EngineError> {
        if let Some(found) = self.0.get() {
            return Ok(*found);
        }
        let found = find()?;
        Ok(*self.0.get_or_init(|| found))
    }
}

/// The mappings of a process.
pub(crate) fn read(pid: i32) -> Result<String, EngineError> {
    let path = format!("/proc/{pid}/maps");
    fs::read_to_string(&path).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => EngineError::Gone,
        _ => io_error(format!("read {path}"), source),
    })
}

/// What a file is, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(file: &Path) -> io::Result<Self> {
        let meta = fs::metadata(file)?;
        Ok(Self { device: meta.dev(), inode: meta.ino() })
    }
}

/// One mapping: `start-end perms offset major:minor inode name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) writable: bool,
    pub(crate) private: bool,
    pub(crate) offset: u64,
    device: u64,
    pub(crate) inode: u64,
    /// A path, or what the kernel calls it.
    pub(crate) name: Option<&'a str>,
}

impl<'a> Line<'a> {
    pub(crate) fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?;
        let offset = number(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device =
            libc::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = fields.next()?.parse().ok()?;
        Some(Self {
            start: number(start)?,
            end: number(end)?,
            writable: permissions.as_bytes().get(1) == Some(&b'w'),
            private: permissions.ends_with('p'),
            offset,
            device,
            inode,
            // The fields before it hold neither a slash nor a bracket.
            name: line.find(['/', '[']).map(|at| &line[at..]),
        })
    }

    pub(crate) fn is_of(&self, file: &FileId) -> bool {
        self.inode != 0 && self.inode == file.inode && self.device == file.device
    }
}

/// First and last address of the adjoining lines that map the file from its start.
fn span(maps: &str, file: &FileId, name: &Path) -> Option<(u64, u64)> {
    let mut found: Option<(u64, u64)> = None;
    for line in maps.lines().filter_map(Line::parse) {
        let named = line.inode != 0 && line.name.is_some_and(|own| Path::new(own) == name);
        if !line.private || !(named || line.is_of(file)) {
            continue;
        }
        found = match found {
            Some((first, last)) if last == line.start => Some((first, line.end)),
            None => Some((line.start, line.end)),
            // A second mapping of the same file elsewhere: the first one is the guest's.
            other => other,
        };
    }
    found
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
        let span = |device, inode, name: &str| span(maps, &FileId { device, inode }, Path::new(name));
        assert_eq!(span(libc::makedev(0, 0x2f), 42, "/other"), Some((0x7f00_0000_0000, 0x7f00_0040_0000)));
        assert_eq!(span(1, 1, "/x/base mem"), span(libc::makedev(0, 0x2f), 42, "/other"));
        assert_eq!(span(0, 0, "/y"), None);
    }
}
