//! Reading ZFiles, against what the decompressor does alone: `cargo bench -p aenv-layer --bench zfile`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for the terminal")]

use std::{sync::Arc, time::Duration};

use aenv_layer::{CompressOptions, Compression, ZFileSource, compress_zfile};
use aenv_store::{BlockSource, FileSource, MemorySource};

const SIZE: usize = 256 << 20;

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let content = content();
    let source = MemorySource::new(content.clone());
    for (name, compression) in [("lz4", Compression::Lz4), ("zstd", Compression::Zstd)] {
        for block in [4096, 16_384] {
            let path = dir.path().join("z");
            let started = cpu_time();
            let size =
                compress_zfile(&source, &path, CompressOptions::new(compression).block_size(block)).unwrap();
            let write = rate(started);
            let file: Arc<dyn BlockSource> = Arc::new(FileSource::open(&path).unwrap());
            let zfile = ZFileSource::open(&file).unwrap().unwrap();
            let mut buf = vec![0; 1 << 20];
            for round in 0..2 {
                let started = cpu_time();
                for at in (0..SIZE).step_by(buf.len()) {
                    zfile.read_at(&mut buf, at as u64).unwrap();
                }
                if round == 1 {
                    let percent = size * 100 / SIZE as u64;
                    println!(
                        "{name}, blocks of {block}: {percent}% size, write {write:.2} GB/s, read {:.2} GB/s",
                        rate(started)
                    );
                }
            }
        }
    }
    let blocks: Vec<Vec<u8>> = content.chunks(4096).map(lz4_flex::block::compress).collect();
    let mut out = [0; 4096];
    let started = cpu_time();
    for block in &blocks {
        lz4_flex::block::decompress_into(block, &mut out).unwrap();
    }
    println!("(GB per second of CPU)");
    println!("lz4 alone, blocks of 4096: {:.2} GB/s", rate(started));
}

fn rate(started: Duration) -> f64 {
    SIZE as f64 / (cpu_time() - started).as_secs_f64() / 1e9
}

/// Text-like bytes that compress to about half.
fn content() -> Vec<u8> {
    let mut random = 1_u64;
    let mut out = Vec::with_capacity(SIZE);
    while out.len() < SIZE {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let word = (random >> 40) as u32 % 5000;
        out.extend_from_slice(format!("{word:x}-{} ", word * 7).as_bytes());
    }
    out.truncate(SIZE);
    out
}

/// CPU time that this thread has had: on a busy machine the clock on the wall says little.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}
