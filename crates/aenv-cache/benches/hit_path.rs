//! What a hit costs over `pread` of a plain file: `cargo bench -p aenv-cache --bench hit_path`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{fs, sync::Arc, time::Instant};

use aenv_cache::{BlockCache, CacheConfig, SourceId};
use aenv_store::{BlockSource, FileSource};

const SIZE: u64 = 256 << 20;
const READS: usize = 200_000;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plain");
    fs::write(&path, (0..SIZE as usize / 8).flat_map(|i| (i * i).to_le_bytes()).collect::<Vec<u8>>())
        .unwrap();
    let plain: Arc<dyn BlockSource> = Arc::new(FileSource::open(&path).unwrap());
    let cache = BlockCache::open(&CacheConfig::new(dir.path().join("cache"), 2 * SIZE)).unwrap();
    let cached: Arc<dyn BlockSource> = Arc::new(cache.source(SourceId([1; 16]), Arc::clone(&plain)));
    let mut buf = vec![0; 1 << 20];
    (0..SIZE).step_by(1 << 20).for_each(|at| cached.read_at(&mut buf, at).unwrap());
    for len in [4 << 10, 16 << 10, 128 << 10] {
        for (name, source) in [("pread", &plain), ("cache", &cached)] {
            let mut times: Vec<u64> = random()
                .take(READS * (4 << 10) / len + 1000)
                .map(|random| {
                    let at = (random % (SIZE - len as u64)) & !4095;
                    let started = Instant::now();
                    source.read_at(&mut buf[..len], at).unwrap();
                    started.elapsed().as_nanos() as u64
                })
                .collect();
            times.sort_unstable();
            let part = |part: f64| times[(times.len() as f64 * part) as usize] as f64 / 1000.0;
            println!("{:>3} KiB by {name}: p50 {:.1} us, p99 {:.1} us", len >> 10, part(0.5), part(0.99));
        }
    }
    println!("{:?}", cache.stats());
}

fn random() -> impl Iterator<Item = u64> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    })
}
