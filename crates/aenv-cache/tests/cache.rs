//! The cache as its users see it, over sources that go wrong.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use aenv_cache::{BLOCK, BlockCache, CacheConfig, CachedSource, Filled, OpenCacheError, SourceId};
use aenv_store::{BlockSource, Fault, FaultPlan, FaultSource, MemorySource, SourceError};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const ID: SourceId = SourceId([3; 16]);

fn content(len: u64) -> Vec<u8> {
    (0..len).map(|i| ((i / 251) ^ (i * 7)) as u8).collect()
}

fn remote(len: u64) -> Arc<FaultSource> {
    Arc::new(FaultSource::new(Arc::new(MemorySource::new(content(len))), FaultPlan::none()))
}

fn config(folder: &Path, capacity: u64) -> CacheConfig {
    CacheConfig { reserve: 0, one_use: Duration::ZERO, ..CacheConfig::new(folder, capacity) }
}

/// Opens a cache. The one before may still be fetching ahead: then it is in use for a moment.
fn open(folder: &Path, capacity: u64) -> BlockCache {
    let mut opened = None;
    until("the cache can be opened", || match BlockCache::open(&config(folder, capacity)) {
        Err(OpenCacheError::InUse(_)) => false,
        other => {
            opened = Some(other.unwrap());
            true
        }
    });
    opened.unwrap()
}

fn over(cache: &BlockCache, remote: &Arc<FaultSource>) -> CachedSource {
    cache.source(ID, Arc::clone(remote) as Arc<dyn BlockSource>)
}

fn read(source: &dyn BlockSource, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    source.read_at(&mut buf, offset).unwrap();
    buf
}

/// Waits for what happens in another thread.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A slow source that counts the cache's blocks when its read begins, and once more when a fill has had time to go wrong.
struct Watching {
    cache: BlockCache,
    begins: Mutex<mpsc::Receiver<()>>,
    seen: AtomicUsize,
}

impl BlockSource for Watching {
    fn size(&self) -> u64 {
        100
    }

    fn read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<(), SourceError> {
        self.seen.store(self.cache.blocks().0, Ordering::SeqCst);
        self.begins.lock().unwrap().recv().unwrap();
        thread::sleep(Duration::from_millis(100));
        self.seen.store(self.cache.blocks().0, Ordering::SeqCst);
        Ok(())
    }
}

fn disk_usage(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn a_block_is_fetched_once_and_found_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(10 * BLOCK + 100);
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    assert_eq!(read(&source, 5 * BLOCK + 10, 5000), content(10 * BLOCK)[(5 * BLOCK + 10) as usize..][..5000]);
    assert_eq!(read(&source, 10 * BLOCK, 100), content(10 * BLOCK + 100)[(10 * BLOCK) as usize..]);
    assert_eq!(remote.reads(), 2);
    read(&source, 5 * BLOCK + 77_777, 30_000);
    assert_eq!(remote.reads(), 2);
    assert!(matches!(BlockCache::open(&config(dir.path(), 32 * MIB)), Err(OpenCacheError::InUse(_))));
    drop((source, cache));
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    remote.set_plan(FaultPlan::always(Fault::Error));
    assert_eq!(read(&source, 5 * BLOCK, BLOCK as usize), content(6 * BLOCK)[(5 * BLOCK) as usize..]);
    assert_eq!(read(&source, 10 * BLOCK + 99, 1).len(), 1);
    assert_eq!((cache.stats().hits, cache.stats().misses), (2, 0));
}

#[test]
fn adjacent_blocks_are_fetched_with_one_read() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(8 * BLOCK);
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    assert_eq!(read(&source, 100, 4 * BLOCK as usize), content(5 * BLOCK)[100..][..4 * BLOCK as usize]);
    assert_eq!((remote.reads(), cache.stats().misses), (1, 5));
}

#[test]
fn readers_of_one_block_cause_one_fetch() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(BLOCK);
    remote.set_plan(FaultPlan::always(Fault::Latency(Duration::from_millis(200))));
    let source = over(&open(dir.path(), 32 * MIB), &remote);
    let barrier = Barrier::new(8);
    thread::scope(|scope| {
        for reader in 0..8 {
            let (source, barrier) = (&source, &barrier);
            scope.spawn(move || {
                barrier.wait();
                assert_eq!(
                    read(source, reader * 1000, 1000),
                    content(BLOCK)[reader as usize * 1000..][..1000]
                );
            });
        }
    });
    assert_eq!(remote.reads(), 1);
}

#[test]
fn an_error_reaches_all_who_wait_and_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(BLOCK);
    let failing = FaultPlan::none().and(Fault::Latency(Duration::from_millis(100)), 0, 1, 100).and(
        Fault::ShortRead,
        0,
        1,
        100,
    );
    remote.set_plan(failing);
    let source = over(&open(dir.path(), 32 * MIB), &remote);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let error = source.read_at(&mut [0; 10], 0).unwrap_err();
                assert!(matches!(error, SourceError::Remote { .. }), "{error}");
            });
        }
    });
    remote.set_plan(FaultPlan::none());
    assert_eq!(read(&source, 0, 100), content(100));
}

#[test]
fn what_changed_on_the_disk_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(2 * BLOCK);
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    read(&source, 0, 2 * BLOCK as usize);
    let file = OpenOptions::new().write(true).open(dir.path().join("blocks")).unwrap();
    file.write_all_at(&[0xaa; 3], 40_000).unwrap();
    assert_eq!(read(&source, 0, 4096), content(4096), "another part of the block is still right");
    assert_eq!(cache.stats().corrupt, 0);
    assert_eq!(read(&source, 39_990, 100), content(BLOCK)[39_990..][..100]);
    assert_eq!(cache.stats().corrupt, 1);
    assert_eq!(remote.reads(), 2);
    assert_eq!(read(&source, 39_990, 100), content(BLOCK)[39_990..][..100]);
    assert_eq!(remote.reads(), 2);
    // Nor does a file that was cut off, or is gone, harm a read.
    file.set_len(0).unwrap();
    assert_eq!(read(&source, 10, 2000), content(3000)[10..2010]);
}

#[test]
fn it_stays_within_its_bytes_and_keeps_what_is_hot() {
    let dir = tempfile::tempdir().unwrap();
    let capacity = 17 * MIB;
    let remote = remote(200 * BLOCK);
    let cache = open(dir.path(), capacity);
    let source = over(&cache, &remote);
    let hot = [3, 50, 121, 180];
    for _ in 0..3 {
        hot.iter().for_each(|block| drop(read(&source, block * BLOCK, 100)));
    }
    for block in (0..200).rev() {
        read(&source, block * BLOCK, 4096);
        assert!(disk_usage(dir.path()) <= capacity);
    }
    let before = remote.reads();
    hot.iter().for_each(|block| drop(read(&source, block * BLOCK + 100, 100)));
    assert_eq!(remote.reads(), before, "what was asked for again and again went");
    let (there, room) = cache.blocks();
    assert_eq!((there, room), (67, 67));
    drop((source, cache));
    // A smaller cache gives the rest back.
    let cache = open(dir.path(), 17 * MIB - 2 * BLOCK);
    assert_eq!(cache.blocks(), (65, 65));
    assert!(disk_usage(dir.path()) <= 17 * MIB - 2 * BLOCK);
    assert!(matches!(
        BlockCache::open(&config(&dir.path().join("x"), MIB)),
        Err(OpenCacheError::TooSmall { .. })
    ));
}

#[test]
fn a_disk_without_room_costs_no_read() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(20 * BLOCK);
    let cache =
        BlockCache::open(&CacheConfig { reserve: u64::MAX / 2, ..config(dir.path(), 32 * MIB) }).unwrap();
    let source = over(&cache, &remote);
    for block in 0..20 {
        assert_eq!(
            read(&source, block * BLOCK, 4096),
            content(20 * BLOCK)[(block * BLOCK) as usize..][..4096]
        );
    }
    assert_eq!(cache.blocks().0, 0);
    assert!(cache.stats().not_kept >= 20);
    assert_eq!(source.fill(|| false).unwrap(), Filled::NoRoom);
}

#[test]
fn a_sequence_is_fetched_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(40 * BLOCK);
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    for at in (0..4 * BLOCK).step_by(64 << 10) {
        read(&source, at, 64 << 10);
    }
    until("what comes next is fetched", || cache.stats().ahead > 0 && cache.blocks().0 > 4);
    let random = tempfile::tempdir().unwrap();
    let cache = open(random.path(), 32 * MIB);
    let source = over(&cache, &remote);
    for block in [30, 4, 17, 9, 38, 22] {
        read(&source, block * BLOCK, 64 << 10);
    }
    assert_eq!(cache.stats().ahead, 0);
}

#[test]
fn a_fill_gets_the_rest_and_yields() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(30 * BLOCK);
    let cache = open(dir.path(), 32 * MIB);
    let source = over(&cache, &remote);
    read(&source, 9 * BLOCK, 10);
    assert_eq!(source.fill(|| true).unwrap(), Filled::Stopped);
    assert_eq!(cache.blocks().0, 1);
    // A read of another source waits: the fill does not begin before it is over.
    let (begun, begins) = mpsc::channel();
    let watching =
        Arc::new(Watching { cache: cache.clone(), begins: begins.into(), seen: AtomicUsize::new(0) });
    let other = cache.source(SourceId([9; 16]), Arc::clone(&watching) as Arc<dyn BlockSource>);
    thread::scope(|scope| {
        let foreground = scope.spawn(|| read(&other, 0, 10));
        until("the other read is under way", || watching.seen.load(Ordering::SeqCst) > 0);
        begun.send(()).unwrap();
        assert_eq!(source.fill(|| false).unwrap(), Filled::Whole);
        foreground.join().unwrap();
    });
    assert_eq!(watching.seen.load(Ordering::SeqCst), 1, "the fill did not wait");
    remote.set_plan(FaultPlan::always(Fault::Error));
    assert_eq!(read(&source, 0, 30 * BLOCK as usize), content(30 * BLOCK));
}

#[test]
fn a_fill_does_not_drive_out_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let remote = remote(100 * BLOCK);
    let cache = open(dir.path(), 17 * MIB);
    let source = over(&cache, &remote);
    read(&source, 99 * BLOCK, 10);
    assert_eq!(source.fill(|| false).unwrap(), Filled::NoRoom);
    assert_eq!(cache.stats().evicted, 0);
    let before = remote.reads();
    read(&source, 99 * BLOCK, 10);
    assert_eq!(remote.reads(), before);
}

#[test]
fn a_source_that_was_wrong_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (remote(4 * BLOCK), remote(4 * BLOCK));
    let cache = open(dir.path(), 32 * MIB);
    let first = over(&cache, &one);
    let second = cache.source(SourceId([4; 16]), Arc::clone(&two) as Arc<dyn BlockSource>);
    read(&first, 0, 4 * BLOCK as usize);
    read(&second, 0, 4 * BLOCK as usize);
    cache.forget(ID);
    assert_eq!(cache.blocks().0, 4);
    read(&second, 0, 4 * BLOCK as usize);
    assert_eq!(two.reads(), 1);
    read(&first, 0, 4 * BLOCK as usize);
    assert_eq!(one.reads(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever is read, in several threads, with a source that fails now and then, a cache that is too small, and files that are
    /// damaged meanwhile: what a read returns is right.
    #[test]
    fn every_read_is_right_or_fails(
        reads in prop::collection::vec((0_u64..120 * BLOCK, 1_u64..2 * BLOCK), 30..120),
        damage in prop::collection::vec(0_u64..64 * BLOCK, 0..8),
        failing in 3_u64..9,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let remote = remote(122 * BLOCK);
        let bytes = content(122 * BLOCK);
        remote.set_plan(FaultPlan::none().and(Fault::ShortRead, 2, failing, u64::MAX));
        for part in reads.chunks(reads.len().div_ceil(2)) {
            if let Ok(file) = OpenOptions::new().write(true).open(dir.path().join("records")) {
                damage.iter().for_each(|&at| file.write_all_at(&[0x5a; 9], at % 12_000).unwrap());
            }
            let cache = open(dir.path(), 17 * MIB);
            let source = over(&cache, &remote);
            thread::scope(|scope| {
                let (source, bytes, damage) = (&source, &bytes, &damage);
                for reads in part.chunks(part.len().div_ceil(3)) {
                    scope.spawn(move || for &(offset, len) in reads {
                        let mut buf = vec![0; len as usize];
                        if source.read_at(&mut buf, offset).is_ok() {
                            assert!(buf == bytes[offset as usize..][..len as usize], "{len} at {offset}");
                        }
                    });
                }
                scope.spawn(|| {
                    let file = OpenOptions::new().write(true).open(dir.path().join("blocks")).unwrap();
                    damage.iter().for_each(|&at| file.write_all_at(&[0x5a; 9], at).unwrap());
                });
            });
            prop_assert!(cache.blocks().0 <= 67);
        }
    }
}
