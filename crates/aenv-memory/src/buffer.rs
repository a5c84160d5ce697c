//! Warm memory to copy into. A page that the kernel must first find and clear costs more than copying into it.

use std::{
    ffi::c_void,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap},
};
use parking_lot::Mutex;

/// Bytes that a capture copies while the vCPUs are stopped, before it has to wait for the disk.
pub const DEFAULT_BUFFER: usize = 64 << 20;

/// A few buffers that are used again and again.
pub struct BufferPool {
    shelf: Arc<Shelf>,
}

struct Shelf {
    capacity: NonZeroUsize,
    most_idle: usize,
    idle: Mutex<Vec<(Mapping, Instant)>>,
}

/// Memory of a fixed size; goes back to its pool when dropped.
pub struct CaptureBuffer {
    mapping: Option<Mapping>,
    shelf: Weak<Shelf>,
}

/// Anonymous memory, all of it present.
struct Mapping {
    start: NonNull<c_void>,
    len: NonZeroUsize,
}

// SAFETY: the mapping belongs to this value alone, and is only reached through it.
unsafe impl Send for Mapping {}

impl BufferPool {
    /// A pool of buffers of `capacity` bytes (rounded up to whole pages, at least two), which keeps `most_idle` of them while
    /// nobody needs them. None is made before the first one is asked for.
    pub fn new(capacity: usize, most_idle: usize) -> Self {
        let capacity = NonZeroUsize::MIN.saturating_add(capacity.next_multiple_of(4096).max(8192) - 1);
        Self { shelf: Arc::new(Shelf { capacity, most_idle, idle: Mutex::new(Vec::new()) }) }
    }

    /// A buffer: a warm one where there is one, else a new one (warming takes about 25 ms for 64 MiB).
    pub fn get(&self) -> Result<CaptureBuffer, Errno> {
        let idle = self.shelf.idle.lock().pop();
        let mapping = match idle {
            Some((mapping, _)) => mapping,
            None => Mapping::new(self.shelf.capacity)?,
        };
        Ok(CaptureBuffer { mapping: Some(mapping), shelf: Arc::downgrade(&self.shelf) })
    }

    /// Gives the memory of buffers that nobody needed for this long back to the host.
    pub fn trim(&self, unused_for: Duration) {
        self.shelf.idle.lock().retain(|(_, since)| since.elapsed() < unused_for);
    }
}

impl CaptureBuffer {
    pub(crate) fn capacity(&self) -> usize {
        self.mapping.as_ref().map_or(0, |mapping| mapping.len.get())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.mapping.as_ref().map_or(&[], Mapping::bytes)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.mapping.as_mut().map_or(&mut [], Mapping::bytes_mut)
    }
}

impl Drop for CaptureBuffer {
    fn drop(&mut self) {
        let (Some(mapping), Some(shelf)) = (self.mapping.take(), self.shelf.upgrade()) else { return };
        let mut idle = shelf.idle.lock();
        if idle.len() < shelf.most_idle {
            idle.push((mapping, Instant::now()));
        }
    }
}

impl Mapping {
    fn new(len: NonZeroUsize) -> Result<Self, Errno> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(None, len, access, MapFlags::MAP_PRIVATE) }?;
        let mapping = Self { start, len };
        // SAFETY: the range is the mapping that was just made; populating does not change what it contains.
        unsafe { madvise(start, len.get(), MmapAdvise::MADV_POPULATE_WRITE) }?;
        Ok(mapping)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` readable bytes are mapped at `start` for as long as `self` lives; any byte is a valid u8.
        unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.len.get()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, writable, and `&mut self` is the only way to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), self.len.get()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing points into the mapping any more: its slices borrow `self`.
        if let Err(error) = unsafe { munmap(self.start, self.len.get()) } {
            tracing::error!(%error, "a capture buffer could not be unmapped");
        }
    }
}

/// Gives memory that was freed, and that the allocator keeps for the next time, back to the host.
pub fn give_back() {
    // SAFETY: the allocator takes its own locks, and touches nothing that is in use.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again() {
        let pool = BufferPool::new(10_000, 1);
        let mut first = pool.get().unwrap();
        assert_eq!(first.capacity(), 12_288);
        first.bytes_mut()[12_287] = 7;
        let (address, second) = (first.bytes().as_ptr(), pool.get().unwrap());
        assert_ne!(second.bytes().as_ptr(), address);
        drop(first);
        drop(second);
        let again = pool.get().unwrap();
        assert_eq!(again.bytes().as_ptr(), address);
        assert_eq!(again.bytes()[12_287], 7);
        drop(again);
        pool.trim(Duration::from_secs(60));
        assert_eq!(pool.shelf.idle.lock().len(), 1);
        pool.trim(Duration::ZERO);
        assert!(pool.shelf.idle.lock().is_empty());
    }
}
