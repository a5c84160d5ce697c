use std::sync::atomic::{AtomicU64, Ordering};

/// What a cache has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Reads of (parts of) a block that was there.
    pub hits: u64,
    /// Reads of a block that had to be fetched.
    pub misses: u64,
    /// Reads that waited for a fetch of somebody else.
    pub joined: u64,
    /// Bytes fetched from sources.
    pub fetched_bytes: u64,
    /// Blocks fetched before anybody asked.
    pub ahead: u64,
    /// Blocks that went to make room.
    pub evicted: u64,
    /// Blocks whose bytes did not fit their checksums.
    pub corrupt: u64,
    /// Blocks that could not be kept: the disk refused, or is full.
    pub not_kept: u64,
}

/// The numbers, while they change.
#[derive(Default)]
pub(crate) struct Counters {
    pub hits: Counter,
    pub misses: Counter,
    pub joined: Counter,
    pub fetched_bytes: Counter,
    pub ahead: Counter,
    pub evicted: Counter,
    pub corrupt: Counter,
    pub not_kept: Counter,
}

#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits.get(),
            misses: self.misses.get(),
            joined: self.joined.get(),
            fetched_bytes: self.fetched_bytes.get(),
            ahead: self.ahead.get(),
            evicted: self.evicted.get(),
            corrupt: self.corrupt.get(),
            not_kept: self.not_kept.get(),
        }
    }
}
