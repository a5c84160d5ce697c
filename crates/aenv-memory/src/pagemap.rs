//! The `PAGEMAP_SCAN` ioctl: which pages of a mapping were changed.
//!
//! Structures and constants are those of `include/uapi/linux/fs.h`.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd},
};

use nix::errno::Errno;
use thiserror::Error;

use crate::ram::{PAGE_SIZE, Ram, Range};

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;

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

/// The ranges of a guest's memory that were changed since it was mapped: its anonymous pages, in memory or swapped out. In
/// order, and not touching each other. The VM should be stopped: what changes during the scan may or may not be found.
pub fn scan(ram: &Ram) -> Result<Vec<Range>, ScanError> {
    let &Ram { pid, start, len } = ram;
    if !start.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) || start.checked_add(len).is_none()
    {
        return Err(ScanError::Unaligned { start, len });
    }
    let pagemap =
        File::open(format!("/proc/{pid}/pagemap")).map_err(|source| ScanError::Open { pid, source })?;
    let mut regions = vec![Region::default(); REGIONS];
    let mut ranges: Vec<Range> = Vec::new();
    let mut at = start;
    while at < start + len {
        let mut arguments = Arguments {
            size: size_of::<Arguments>() as u64,
            flags: 0,
            start: at,
            end: start + len,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
        };
        // SAFETY: `arguments` is the structure that the ioctl takes, with its own size in it; `vec` points to `vec_len`
        // regions that live until the call has returned.
        let found = unsafe { ioctl::pagemap_scan(pagemap.as_fd().as_raw_fd(), &mut arguments) };
        let found = match found {
            Ok(found) => found as usize,
            Err(Errno::EINTR) => continue,
            Err(Errno::ENOTTY) => return Err(ScanError::Unsupported),
            Err(source) => return Err(ScanError::Scan { pid, source }),
        };
        for region in &regions[..found.min(REGIONS)] {
            add(&mut ranges, region.start - start, region.end - start);
        }
        if arguments.walk_end <= at {
            // A walk that does not get on, as of a process without memory left.
            return Err(ScanError::Scan { pid, source: Errno::ESRCH });
        }
        at = arguments.walk_end;
    }
    Ok(ranges)
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
        assert!(matches!(scan(&Ram { pid, start: 1, len: 4096 }), Err(ScanError::Unaligned { .. })));
        assert!(matches!(scan(&Ram { pid, start: 4096, len: 1 }), Err(ScanError::Unaligned { .. })));
        assert!(matches!(scan(&Ram { pid, start: 1 << 63, len: 1 << 63 }), Err(ScanError::Unaligned { .. })));
        // Larger than any process id that Linux gives out.
        let nobody = Ram { pid: 1 << 23, start: 4096, len: 4096 };
        assert!(matches!(scan(&nobody), Err(ScanError::Open { .. })));
    }
}
