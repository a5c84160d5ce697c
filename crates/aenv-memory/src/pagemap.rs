//! The `PAGEMAP_SCAN` ioctl: which pages of a mapping were changed, and marks on those that are told of.
//!
//! Structures and constants are those of `include/uapi/linux/fs.h`.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd},
};

use nix::errno::Errno;
use thiserror::Error;

use crate::{
    marks,
    ram::{PAGE_SIZE, Piece, Ram, Range},
};

const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

/// Regions that one call returns at most (96 KiB of output).
const REGIONS: usize = 4096;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
struct Arguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Why a guest's memory could not be scanned.
#[derive(Debug, Error)]
pub enum ScanError {
    /// Address or length is not made of whole pages.
    #[error("{len} bytes at {start:#x} are not whole pages")]
    Unaligned {
        /// Address.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// The process is gone, or it may not be looked into.
    #[error("cannot look into the memory of process {pid}: {source}")]
    Open {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel is too old.
    #[error("this kernel has no PAGEMAP_SCAN; Linux 6.7 or later is needed to capture memory")]
    Unsupported,
    /// The kernel refused.
    #[error("scan of the memory of process {pid}: {source}")]
    Scan {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: Errno,
    },
}

mod ioctl {
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, super::Arguments);
}

/// The moment from which on changes are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// The memory was mapped. Always known.
    Mapping,
    /// Its changed pages were marked last.
    Mark,
}

/// Pages that were changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// In order, and not touching each other but where the memory is in two pieces.
    pub ranges: Vec<Range>,
    /// What was asked for; [`Since::Mapping`] also where there are no marks.
    pub since: Since,
    /// [`Since::Mark`]: these pages are marked now, and the next scan can tell what was written after this one.
    pub next: Since,
}

/// The parts of a guest's memory that were changed: its anonymous pages, in memory or swapped out. The VM should be stopped: what
/// changes during the scan may or may not be found. No mark changes.
///
/// Since the mapping, pages may be told of that the guest gave back: they read as the image does.
pub fn scan(ram: &Ram, since: Since) -> Result<Changes, ScanError> {
    if since == Since::Mark
        && let Some(ranges) = walk(ram, since, PM_SCAN_CHECK_WPASYNC)?
    {
        return Ok(Changes { ranges, since, next: Since::Mapping });
    }
    all(ram)
}

/// The same, and marks what it tells of, if the VMM has opened what that takes: the next scan can tell what was written since
/// then. When this fails, or what it told of is lost, the next one has to tell since the mapping.
///
/// Writes through pages that the kernel had pinned before are not noticed: no I/O into guest memory may be under way.
pub fn mark(ram: &Ram, since: Since) -> Result<Changes, ScanError> {
    let marking = PM_SCAN_CHECK_WPASYNC | PM_SCAN_WP_MATCHING;
    if let Some(ranges) = walk(ram, since, marking)? {
        return Ok(Changes { ranges, since, next: Since::Mark });
    }
    if let Err(error) = marks::register(ram) {
        tracing::debug!(pid = ram.pid, %error, "nothing tells what a guest writes");
        return all(ram);
    }
    let since = Since::Mapping;
    match walk(ram, since, marking)? {
        Some(ranges) => Ok(Changes { ranges, since, next: Since::Mark }),
        None => all(ram),
    }
}

fn all(ram: &Ram) -> Result<Changes, ScanError> {
    let ranges = walk(ram, Since::Mapping, 0)?.unwrap_or_default();
    Ok(Changes { ranges, since: Since::Mapping, next: Since::Mapping })
}

/// One pass over the memory; `None` when it asks for marks and the memory is not registered for them.
fn walk(ram: &Ram, since: Since, flags: u64) -> Result<Option<Vec<Range>>, ScanError> {
    let pid = ram.pid;
    for Piece { start, len, .. } in ram.pieces() {
        let whole = start.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE);
        if !whole || start.checked_add(len).is_none() {
            return Err(ScanError::Unaligned { start, len });
        }
    }
    let pagemap =
        File::open(format!("/proc/{pid}/pagemap")).map_err(|source| ScanError::Open { pid, source })?;
    let mut ranges = Vec::new();
    for piece in ram.pieces() {
        match walk_piece(&pagemap, pid, piece, since, flags)? {
            Some(found) => ranges.extend(found),
            None => return Ok(None),
        }
    }
    Ok(Some(ranges))
}

fn walk_piece(
    pagemap: &File,
    pid: u32,
    Piece { offset, start, len }: Piece,
    since: Since,
    flags: u64,
) -> Result<Option<Vec<Range>>, ScanError> {
    let unwanted = PAGE_IS_FILE | PAGE_IS_PFNZERO;
    let wanted = match since {
        Since::Mapping => 0,
        Since::Mark => PAGE_IS_WRITTEN,
    };
    let mut regions = vec![Region::default(); REGIONS];
    let mut ranges: Vec<Range> = Vec::new();
    let mut at = start;
    while at < start + len {
        let mut arguments = Arguments {
            size: size_of::<Arguments>() as u64,
            flags,
            start: at,
            end: start + len,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: unwanted,
            category_mask: unwanted | wanted,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
        };
        // SAFETY: `arguments` is the structure that the ioctl takes, with its own size in it; `vec` points to `vec_len`
        // regions that live until the call has returned.
        let found = unsafe { ioctl::pagemap_scan(pagemap.as_fd().as_raw_fd(), &mut arguments) };
        let found = match found {
            Ok(found) => found as usize,
            Err(Errno::EPERM) if flags & PM_SCAN_CHECK_WPASYNC != 0 => return Ok(None),
            Err(Errno::ENOTTY) => return Err(ScanError::Unsupported),
            // Never tried again: pages may have been marked without being told of.
            Err(source) => return Err(ScanError::Scan { pid, source }),
        };
        for region in &regions[..found.min(REGIONS)] {
            add(&mut ranges, offset + (region.start - start), offset + (region.end - start));
        }
        if arguments.walk_end <= at {
            // A walk that does not get on, as of a process without memory left.
            return Err(ScanError::Scan { pid, source: Errno::ESRCH });
        }
        at = arguments.walk_end;
    }
    Ok(Some(ranges))
}

/// Adds a region. One that a call ended in may be told again by the next call, for `walk_end` can lie before it.
fn add(ranges: &mut Vec<Range>, offset: u64, end: u64) {
    let Some(last) = ranges.last_mut() else {
        return ranges.push(Range { offset, len: end - offset });
    };
    let told = last.end();
    if offset <= told {
        last.len += end.saturating_sub(told);
    } else {
        ranges.push(Range { offset, len: end - offset });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_twice_counts_once() {
        let mut ranges = Vec::new();
        for (offset, end) in [(0, 2), (2, 3), (8, 10), (8, 10), (9, 12), (20, 21)] {
            add(&mut ranges, offset * PAGE_SIZE, end * PAGE_SIZE);
        }
        let pages: Vec<_> =
            ranges.iter().map(|range| (range.offset / PAGE_SIZE, range.len / PAGE_SIZE)).collect();
        assert_eq!(pages, [(0, 3), (8, 4), (20, 1)]);
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let pid = std::process::id();
        let scan_all = |ram: Ram| scan(&ram, Since::Mapping);
        assert!(matches!(scan_all(Ram::whole(pid, 1, 4096)), Err(ScanError::Unaligned { .. })));
        assert!(matches!(scan_all(Ram::whole(pid, 4096, 1)), Err(ScanError::Unaligned { .. })));
        assert!(matches!(scan_all(Ram::whole(pid, 1 << 63, 1 << 63)), Err(ScanError::Unaligned { .. })));
        // Larger than any process id that Linux gives out.
        let nobody = Ram::whole(1 << 23, 4096, 4096);
        assert!(matches!(scan_all(nobody), Err(ScanError::Open { .. })));
    }
}
