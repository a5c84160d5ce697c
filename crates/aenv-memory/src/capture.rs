//! From changed pages to a layer.
//!
//! ```text
//! vCPUs stopped   scan -> copy into the buffer (what does not fit: straight to the layer's file)
//! vCPUs run       buffer -> layer's file -> index -> fsync -> rename
//! ```
//!
//! The disk is told to begin as soon as a part is in the file, so that `fsync` has little to wait for.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use aenv_layer::{LayerWriter, WriteLayerError};
use thiserror::Error;

use crate::{
    buffer::CaptureBuffer,
    copy::{CopyError, copy},
    pagemap::{Changes, ScanError, Since, mark, scan},
    ram::{PAGE_SIZE, Ram, Range, split, total},
};

/// Bytes that are gathered before they go to the file.
const WRITE: u64 = 4 << 20;

/// Slices that one write takes (`IOV_MAX`).
const SLICES: usize = 1024;

/// Why memory could not be captured. No file is left behind.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// Its changed pages could not be found.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// Its pages could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The layer could not be written.
    #[error("memory layer: {0}")]
    Write(#[from] WriteLayerError),
}

/// What a capture found and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureReport {
    /// What the layer holds: changes since then.
    pub since: Since,
    /// [`Since::Mark`]: the next capture can count from this one, if this layer is kept.
    pub next: Since,
    /// Changed pages.
    pub pages: u64,
    /// Those among them that are all zero: they cost no room in the layer.
    pub zero_pages: u64,
    /// Bytes of the layer's file.
    pub bytes: u64,
    /// Finding the changed pages; the vCPUs are stopped.
    pub scan: Duration,
    /// Copying them out (and writing what fits no buffer); the vCPUs are stopped.
    pub copy: Duration,
    /// Writing the layer and making it durable.
    pub write: Duration,
}

/// The changed pages of a stopped VM, copied out: its vCPUs may go on.
pub struct Snapshot {
    layer: MemoryLayer,
    /// What is in the buffer.
    ranges: Vec<Range>,
    buffer: CaptureBuffer,
    report: CaptureReport,
}

impl Snapshot {
    /// Copies the changed pages of a stopped VM's memory into `buffer`, and marks them. Those that do not fit are written to the
    /// layer's file at once, at the speed of the host's page cache. `path` is where the layer will be. If this or the writing
    /// fails, the next capture has to count from [`Since::Mapping`].
    pub fn take(
        ram: &Ram,
        mut buffer: CaptureBuffer,
        path: &Path,
        since: Since,
    ) -> Result<Self, CaptureError> {
        let began = Instant::now();
        let Changes { ranges, since, next } = mark(ram, since)?;
        let scan = began.elapsed();
        let began = Instant::now();
        let mut layer = MemoryLayer::create(path, ram.len)?;
        let room = buffer.capacity() as u64 / PAGE_SIZE * PAGE_SIZE;
        let (beyond, ranges) = split(&ranges, total(&ranges).saturating_sub(room));
        layer.stream(ram, &beyond, buffer.bytes_mut())?;
        let bytes = total(&ranges) as usize;
        copy(ram, &ranges, &mut buffer.bytes_mut()[..bytes])?;
        let report = CaptureReport { scan, copy: began.elapsed(), ..CaptureReport::new(since, next) };
        Ok(Self { layer, ranges, buffer, report })
    }

    /// What was found so far.
    pub fn report(&self) -> CaptureReport {
        self.report
    }

    /// Bytes of changed pages that are held in the buffer.
    pub fn buffered(&self) -> u64 {
        total(&self.ranges)
    }

    /// Writes the layer at the path that was given before, durable. The buffer goes back to its pool.
    pub fn write(mut self) -> Result<CaptureReport, CaptureError> {
        let began = Instant::now();
        self.layer.append(&self.ranges, self.buffer.bytes())?;
        drop(self.buffer);
        self.layer.finish(CaptureReport { write: began.elapsed(), ..self.report })
    }
}

/// Writes the changed pages of a stopped VM's memory to a layer at `path`, durable. For a VM that will not go on: nothing
/// waits for it, so that it takes little memory. Should it go on after all, the marks are as they were.
pub fn capture_stopped(ram: &Ram, path: &Path, since: Since) -> Result<CaptureReport, CaptureError> {
    let began = Instant::now();
    let Changes { ranges, since, next } = scan(ram, since)?;
    let scan = began.elapsed();
    let mut layer = MemoryLayer::create(path, ram.len)?;
    let mut buffer = vec![0; 2 * WRITE.min(total(&ranges)) as usize];
    let (copy, write) = layer.stream(ram, &ranges, &mut buffer)?;
    layer.finish(CaptureReport { scan, copy, write, ..CaptureReport::new(since, next) })
}

impl CaptureReport {
    fn new(since: Since, next: Since) -> Self {
        let none = Duration::ZERO;
        Self { since, next, pages: 0, zero_pages: 0, bytes: 0, scan: none, copy: none, write: none }
    }
}

/// The layer in the making.
struct MemoryLayer {
    writer: LayerWriter,
    pages: u64,
    zero_pages: u64,
}

impl MemoryLayer {
    fn create(path: &Path, size: u64) -> Result<Self, WriteLayerError> {
        Ok(Self { writer: LayerWriter::create(path, size)?, pages: 0, zero_pages: 0 })
    }

    /// Copies ranges and appends them, through `buffer` of at least two pages: while one part is written, the next one is copied.
    /// Returns the times that both took.
    fn stream(
        &mut self,
        ram: &Ram,
        ranges: &[Range],
        buffer: &mut [u8],
    ) -> Result<(Duration, Duration), CaptureError> {
        let (mut copying, mut writing) = (Duration::ZERO, Duration::ZERO);
        let room = (WRITE as usize).min(buffer.len() / 2) / PAGE_SIZE as usize * PAGE_SIZE as usize;
        assert!(room > 0 || ranges.is_empty(), "a part has a page at least");
        let (mut next, mut ready) = buffer.split_at_mut(room);
        let mut copied = Vec::new();
        let parts = parts(ranges, room as u64);
        for part in parts.map(Some).chain([None]) {
            let part = part.unwrap_or_default();
            let bytes = total(&part) as usize;
            let (copy, write) = thread::scope(|scope| {
                let copy = scope.spawn(|| timed(|| copy(ram, &part, &mut next[..bytes])));
                let write = timed(|| self.append(&copied, ready));
                (copy.join().expect("copying does not panic"), write)
            });
            copying += copy.1;
            writing += write.1;
            copy.0?;
            write.0?;
            (next, ready, copied) = (ready, next, part);
        }
        Ok((copying, writing))
    }

    /// Appends ranges whose bytes lie one after the other in `bytes`. Pages that are all zero become zeros without data.
    fn append(&mut self, ranges: &[Range], bytes: &[u8]) -> Result<(), WriteLayerError> {
        let mut rest = bytes;
        let mut slices: Vec<(u64, &[u8])> = Vec::with_capacity(SLICES);
        for range in ranges {
            let (bytes, others) = rest.split_at(range.len as usize);
            rest = others;
            for run in runs(bytes) {
                let offset = range.offset + run.start as u64;
                let len = run.bytes.len() as u64;
                self.pages += len / PAGE_SIZE;
                if run.zero {
                    self.zero_pages += len / PAGE_SIZE;
                    self.writer.append_zeroes(offset, len)?;
                    continue;
                }
                slices.push((offset, run.bytes));
                if slices.len() == SLICES {
                    self.writer.append_vectored(&slices)?;
                    slices.clear();
                }
            }
        }
        self.writer.append_vectored(&slices)?;
        begin_writing(&self.writer);
        Ok(())
    }

    fn finish(self, report: CaptureReport) -> Result<CaptureReport, CaptureError> {
        let began = Instant::now();
        let summary = self.writer.finish()?;
        let write = report.write + began.elapsed();
        Ok(CaptureReport {
            pages: self.pages,
            zero_pages: self.zero_pages,
            bytes: summary.size,
            write,
            ..report
        })
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let began = Instant::now();
    (work(), began.elapsed())
}

/// Has the disk begin with what was written so far; `fsync` waits for it.
fn begin_writing(file: impl AsFd) {
    // SAFETY: the descriptor is open; the call touches no memory. That it fails, as it may on some filesystems, costs time only.
    unsafe { nix::libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, nix::libc::SYNC_FILE_RANGE_WRITE) };
}

/// Ranges in portions of at most `bytes` bytes.
fn parts(ranges: &[Range], bytes: u64) -> impl Iterator<Item = Vec<Range>> {
    let mut rest = ranges.iter().copied();
    let mut cut: Option<Range> = None;
    std::iter::from_fn(move || {
        let mut part = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let Some(range) = cut.take().or_else(|| rest.next()) else { break };
            let first = range.len.min(left);
            left -= first;
            part.push(Range { offset: range.offset, len: first });
            if first < range.len {
                cut = Some(Range { offset: range.offset + first, len: range.len - first });
            }
        }
        (!part.is_empty()).then_some(part)
    })
}

/// Pages next to each other that are all zero, or all not.
struct Run<'a> {
    start: usize,
    bytes: &'a [u8],
    zero: bool,
}

fn runs(bytes: &[u8]) -> impl Iterator<Item = Run<'_>> {
    const PAGE: usize = PAGE_SIZE as usize;
    let mut start = 0;
    std::iter::from_fn(move || {
        let mut pages = bytes[start..].chunks(PAGE);
        let zero = is_zero(pages.next()?);
        let more = pages.take_while(|page| is_zero(page) == zero).count();
        let end = bytes.len().min(start + (1 + more) * PAGE);
        let run = Run { start, bytes: &bytes[start..end], zero };
        start = end;
        Some(run)
    })
}

fn is_zero(page: &[u8]) -> bool {
    let (blocks, rest) = page.as_chunks::<64>();
    blocks.iter().all(|block| block.iter().fold(0, |any, byte| any | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_hold_all_ranges_in_order() {
        let ranges = [Range { offset: 0, len: 4096 }, Range { offset: 8192, len: 40_960 }];
        let all: Vec<Vec<Range>> = parts(&ranges, 16_384).collect();
        assert_eq!(all.iter().map(|part| total(part)).collect::<Vec<_>>(), [16_384, 16_384, 12_288]);
        assert_eq!(all[0], [ranges[0], Range { offset: 8192, len: 12_288 }]);
        assert_eq!(all[2], [Range { offset: 36_864, len: 12_288 }]);
        assert_eq!(parts(&[], 4096).count(), 0);
    }

    #[test]
    fn zero_pages_are_told_apart() {
        let mut bytes = vec![0u8; 6 * 4096];
        bytes[4096 + 4095] = 1;
        bytes[2 * 4096] = 1;
        bytes[5 * 4096 + 63] = 1;
        let found: Vec<_> =
            runs(&bytes).map(|run| (run.start / 4096, run.bytes.len() / 4096, run.zero)).collect();
        assert_eq!(found, [(0, 1, true), (1, 2, false), (3, 2, true), (5, 1, false)]);
    }
}
