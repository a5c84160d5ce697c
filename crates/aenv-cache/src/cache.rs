//! Which block is in which slot.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher, RandomState},
    io,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use aenv_store::BlockSource;
use parking_lot::{Mutex, RwLock};
use thiserror::Error;

use crate::{
    flights::Flights,
    policy::{Item, S3Fifo, Uses},
    slots::{BLOCK, CHUNK, HEADER, Key, RECORD, Record, Slots, SourceId},
    source::CachedSource,
    stats::{CacheStats, Counters},
    workers::{Gate, Workers},
};

/// The least capacity: enough for what is being read at one moment.
const LEAST_SLOTS: u64 = 64;

const SHARDS: usize = 64;

/// How long no new slot is taken after the disk refused one, or had too little free.
const GROW_AGAIN: Duration = Duration::from_secs(10);

/// New slots between two looks at the free space.
const LOOK_EVERY: u32 = 16;

/// What a cache may take.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Its folder; made when missing. It belongs to one open cache.
    pub folder: PathBuf,
    /// Bytes that its files have at most.
    pub capacity: u64,
    /// Bytes that it leaves free on the folder's filesystem.
    pub reserve: u64,
    /// Reads of a block that follow each other within this time count as one use of it: a guest that reads a block in pieces, once,
    /// does not make it hot.
    pub one_use: Duration,
}

impl CacheConfig {
    /// A cache in `folder` with so many bytes, and usual values for the rest.
    pub fn new(folder: impl Into<PathBuf>, capacity: u64) -> Self {
        Self { folder: folder.into(), capacity, reserve: 1 << 30, one_use: Duration::from_secs(1) }
    }
}

/// Why a cache could not be opened.
#[derive(Debug, Error)]
pub enum OpenCacheError {
    /// Too small to be of use.
    #[error("a cache of {capacity} bytes is too small: give it {least} or more")]
    TooSmall {
        /// Asked for.
        capacity: u64,
        /// The least.
        least: u64,
    },
    /// Another process has it.
    #[error("the cache in {0} is in use by another process")]
    InUse(PathBuf),
    /// The operating system refused.
    #[error("the cache in {folder}: {source}")]
    Io {
        /// Its folder.
        folder: PathBuf,
        /// The refusal.
        #[source]
        source: io::Error,
    },
}

/// Told of every read of a source: which one, and the blocks. Called on the thread that reads; must be quick.
pub type Observer = Box<dyn Fn(SourceId, Range<u64>) + Send + Sync>;

/// The cache. Clones are the same one.
#[derive(Clone)]
pub struct BlockCache(Arc<Shared>);

struct Shared {
    slots: Slots,
    shards: Vec<RwLock<HashMap<Key, Arc<Entry>>>>,
    hasher: RandomState,
    room: Mutex<Room>,
    one_use: Duration,
    reserve: u64,
    opened: Instant,
    flights: Flights,
    counters: Counters,
    gate: Gate,
    workers: Workers,
    observer: OnceLock<Observer>,
    _lock: File,
}

/// A block that is there.
struct Entry {
    slot: u32,
    record: Record,
    uses: Uses,
    /// When it was used last, in milliseconds since the cache was opened.
    used: AtomicU32,
    /// It went; its slot may have other bytes by now.
    gone: AtomicBool,
}

/// Slots that are taken and those that are not.
struct Room {
    queues: S3Fifo<Arc<Entry>>,
    free: Vec<u32>,
    /// The first slot that was never taken.
    fresh: u32,
    no_growth_until: Option<Instant>,
    until_look: u32,
}

impl Item for Arc<Entry> {
    type Key = Key;

    fn key(&self) -> Key {
        self.record.key
    }

    fn uses(&self) -> &Uses {
        &self.uses
    }
}

impl BlockCache {
    /// Opens the cache of a folder, with what an earlier one left there.
    pub fn open(config: &CacheConfig) -> Result<Self, OpenCacheError> {
        let least = LEAST_SLOTS * (BLOCK + RECORD) + HEADER;
        if config.capacity < least {
            return Err(OpenCacheError::TooSmall { capacity: config.capacity, least });
        }
        let failed = |source| OpenCacheError::Io { folder: config.folder.clone(), source };
        fs::create_dir_all(&config.folder).map_err(failed)?;
        let lock = config.folder.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(lock).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenCacheError::InUse(config.folder.clone())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let count = ((config.capacity - HEADER) / (BLOCK + RECORD)).min(u64::from(u32::MAX)) as u32;
        let (slots, found) = Slots::open(&config.folder, count).map_err(failed)?;
        let shared = Shared {
            slots,
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            hasher: RandomState::new(),
            room: Mutex::new(Room {
                queues: S3Fifo::new(count as usize),
                free: Vec::new(),
                fresh: found.len() as u32,
                no_growth_until: None,
                until_look: 0,
            }),
            one_use: config.one_use,
            reserve: config.reserve,
            opened: Instant::now(),
            flights: Flights::default(),
            counters: Counters::default(),
            gate: Gate::default(),
            workers: Workers::start().map_err(failed)?,
            observer: OnceLock::new(),
            _lock: lock,
        };
        let cache = Self(Arc::new(shared));
        cache.restore(&found);
        Ok(cache)
    }

    fn restore(&self, found: &[Option<Record>]) {
        let mut room = self.0.room.lock();
        for (slot, record) in found.iter().enumerate() {
            let slot = slot as u32;
            let Some(record) = record.filter(|record| !self.contains(record.key)) else {
                room.free.push(slot);
                continue;
            };
            let entry = self.entry(slot, record);
            self.shard(record.key).write().insert(record.key, Arc::clone(&entry));
            room.queues.insert_kept(entry);
        }
    }

    /// A source whose blocks are kept here. `id` stands for the bytes of `inner`, for ever.
    pub fn source(&self, id: SourceId, inner: Arc<dyn BlockSource>) -> CachedSource {
        CachedSource::new(self.clone(), id, inner)
    }

    /// Has all reads from now on observed. The first observer stays.
    pub fn observe(&self, observer: Observer) {
        // A second one would be told what the first one is told.
        let _ = self.0.observer.set(observer);
    }

    pub(crate) fn observer(&self) -> Option<&Observer> {
        self.0.observer.get()
    }

    /// What it has done.
    pub fn stats(&self) -> CacheStats {
        self.0.counters.stats()
    }

    /// Blocks that are there, and for how many there is room.
    pub fn blocks(&self) -> (usize, usize) {
        (self.0.room.lock().queues.len(), self.0.slots.count() as usize)
    }

    /// Lets go of all blocks of a source (whose bytes turned out to be wrong).
    pub fn forget(&self, source: SourceId) {
        for shard in &self.0.shards {
            let found: Vec<Key> = shard.read().keys().filter(|key| key.source == source).copied().collect();
            found.into_iter().for_each(|key| self.drop_entry(key, None));
        }
    }

    pub(crate) fn flights(&self) -> &Flights {
        &self.0.flights
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.0.gate
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.0.workers
    }

    pub(crate) fn contains(&self, key: Key) -> bool {
        self.shard(key).read().contains_key(&key)
    }

    /// Blocks that can be added without another one going.
    pub(crate) fn room(&self) -> usize {
        let room = self.0.room.lock();
        if room.may_grow() { room.free.len() + (self.0.slots.count() - room.fresh) as usize } else { 0 }
    }

    /// Fills `buf` from `offset` of a block, if it is there and right. `expected` is the length that the block must have.
    pub(crate) fn read(&self, key: Key, expected: u64, offset: u64, buf: &mut [u8]) -> bool {
        let Some(entry) = self.shard(key).read().get(&key).cloned() else { return false };
        let read = u64::from(entry.record.len) == expected && self.read_entry(&entry, offset, buf);
        if read {
            self.used(&entry);
            return true;
        }
        // Unless it went while it was read: then nothing is wrong with it.
        if !entry.gone.load(Ordering::Acquire) {
            self.0.counters.corrupt.add(1);
            tracing::warn!(
                block = key.block,
                slot = entry.slot,
                "a block in the cache is damaged; it is fetched again"
            );
            self.drop_entry(key, Some(&entry));
        }
        false
    }

    /// Reads whole chunks, compares their checksums, and copies what was asked for.
    fn read_entry(&self, entry: &Entry, offset: u64, buf: &mut [u8]) -> bool {
        thread_local! {
            static CHUNKS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let end = offset as usize + buf.len();
        let first = offset as usize / CHUNK;
        let (from, to) = (first * CHUNK, end.next_multiple_of(CHUNK).min(entry.record.len as usize));
        if (from, to) == (offset as usize, end) {
            return self.0.slots.read(entry.slot, offset, buf).is_ok() && entry.record.fits(first, buf);
        }
        CHUNKS.with_borrow_mut(|chunks| {
            chunks.resize(BLOCK as usize, 0);
            let chunks = &mut chunks[..to - from];
            if self.0.slots.read(entry.slot, from as u64, chunks).is_err()
                || !entry.record.fits(first, chunks)
            {
                return false;
            }
            buf.copy_from_slice(&chunks[offset as usize - from..end - from]);
            true
        })
    }

    /// Keeps a block, if there is room or another one can go.
    pub(crate) fn insert(&self, key: Key, bytes: &[u8]) {
        if self.contains(key) {
            return;
        }
        let Some(slot) = self.take_slot() else {
            self.0.counters.not_kept.add(1);
            return;
        };
        let record = Record::of(key, bytes);
        if let Err(error) = self.0.slots.write(slot, &record, bytes) {
            tracing::warn!(%error, "a block could not be kept in the cache");
            self.0.counters.not_kept.add(1);
            let mut room = self.0.room.lock();
            room.no_growth_until = Some(Instant::now() + GROW_AGAIN);
            room.free.push(slot);
            return;
        }
        let entry = self.entry(slot, record);
        let before = self.shard(key).write().insert(key, Arc::clone(&entry));
        let mut room = self.0.room.lock();
        if let Some(before) = before
            && !before.gone.swap(true, Ordering::AcqRel)
        {
            room.queues.remove(|other| Arc::ptr_eq(other, &before));
            room.free.push(before.slot);
        }
        // It may have been dropped again already; its slot is free then.
        if !entry.gone.load(Ordering::Acquire) {
            room.queues.insert(entry);
        }
    }

    /// A slot that nobody has: a free one, a new one, or that of the block that is needed least.
    fn take_slot(&self) -> Option<u32> {
        let mut room = self.0.room.lock();
        // Room that was given back on a full disk has bytes no longer; a slot that is overwritten needs no new ones.
        if room.may_grow() {
            if let Some(slot) = room.free.pop() {
                return Some(slot);
            }
            if room.fresh < self.0.slots.count() && self.disk_has_room(&mut room) {
                room.fresh += 1;
                return Some(room.fresh - 1);
            }
        }
        let entry = room.queues.evict()?;
        // Before its slot is overwritten: a read that is under way then knows why its bytes do not fit.
        entry.gone.store(true, Ordering::Release);
        drop(room);
        let mut shard = self.shard(entry.record.key).write();
        if shard.get(&entry.record.key).is_some_and(|found| Arc::ptr_eq(found, &entry)) {
            shard.remove(&entry.record.key);
        }
        self.0.counters.evicted.add(1);
        Some(entry.slot)
    }

    fn disk_has_room(&self, room: &mut Room) -> bool {
        if room.until_look > 0 {
            room.until_look -= 1;
            return true;
        }
        let needed = self.0.reserve + u64::from(LOOK_EVERY) * BLOCK;
        let enough = self.0.slots.free_space().is_ok_and(|free| free >= needed);
        if enough {
            room.until_look = LOOK_EVERY - 1;
        } else {
            room.no_growth_until = Some(Instant::now() + GROW_AGAIN);
        }
        enough
    }

    /// Takes a block out: any of that name, or only this one.
    fn drop_entry(&self, key: Key, only: Option<&Arc<Entry>>) {
        let entry = {
            let mut shard = self.shard(key).write();
            match shard.get(&key) {
                Some(found) if only.is_none_or(|only| Arc::ptr_eq(found, only)) => shard.remove(&key),
                _ => None,
            }
        };
        let Some(entry) = entry else { return };
        let mut room = self.0.room.lock();
        if entry.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        room.queues.remove(|other| Arc::ptr_eq(other, &entry));
        if let Err(error) = self.0.slots.clear(entry.slot) {
            tracing::warn!(%error, "a damaged block stays in the cache's files");
        }
        room.free.push(entry.slot);
    }

    fn entry(&self, slot: u32, record: Record) -> Arc<Entry> {
        let used = AtomicU32::new(self.now());
        Arc::new(Entry { slot, record, uses: Uses::default(), used, gone: AtomicBool::new(false) })
    }

    fn used(&self, entry: &Entry) {
        let now = self.now();
        let before = entry.used.swap(now, Ordering::Relaxed);
        if u128::from(now.wrapping_sub(before)) >= self.0.one_use.as_millis() {
            entry.uses.add();
        }
    }

    fn now(&self) -> u32 {
        self.0.opened.elapsed().as_millis() as u32
    }

    fn shard(&self, key: Key) -> &RwLock<HashMap<Key, Arc<Entry>>> {
        &self.0.shards[self.0.hasher.hash_one(key) as usize % SHARDS]
    }
}

impl Room {
    fn may_grow(&self) -> bool {
        self.no_growth_until.is_none_or(|until| Instant::now() >= until)
    }
}
