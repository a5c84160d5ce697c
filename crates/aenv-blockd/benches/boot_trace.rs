//! The first reads of a launch whose layers are in an object store 20 ms away: with an empty cache, and with an empty cache and the trace
//! of an earlier launch. `cargo bench -p aenv-blockd --bench boot_trace`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench")]

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aenv_blockd::{
    DiskExport,
    daemon::{backend::Backend, remotes::Remotes, stacks::Stacks},
};
use aenv_layer::LayerWriter;
use aenv_remote::{CacheSettings, Location, Place, S3Config, StoreConfig};
use aenv_testkit::RangeStore;

const LATENCY: Duration = Duration::from_millis(20);
const RUNS: usize = 20;
const MIB: u64 = 1 << 20;
/// Bytes of the image, all of which one layer has.
const SIZE: u64 = 256 * MIB;
/// Places that a launch goes to, with a few reads of 4 to 64 KiB that follow each other at each.
const PLACES: u64 = 120;

/// How the store is reached.
fn config(store: &RangeStore) -> StoreConfig {
    StoreConfig::S3(S3Config {
        endpoint: Some(store.endpoint()),
        bucket: "bucket".to_owned(),
        prefix: String::new(),
        region: "us-east-1".to_owned(),
        virtual_hosted: false,
        access_key: Some(("id".to_owned(), "secret".to_owned())),
    })
}

fn layer(folder: &Path) -> Vec<u8> {
    let path = folder.join("made");
    let mut writer = LayerWriter::create(&path, SIZE).unwrap();
    let part: Vec<u8> =
        (0..MIB / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).collect();
    for number in 0..SIZE / MIB {
        writer.append(number * MIB, &part).unwrap();
    }
    writer.finish().unwrap();
    fs::read(path).unwrap()
}

/// The reads of a launch, always the same ones.
fn reads() -> Vec<(u64, usize)> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut reads = Vec::new();
    for _ in 0..PLACES {
        // Half of them in an eighth of the image.
        let within = if next(2) == 0 { SIZE / 8 } else { SIZE - MIB };
        let mut at = next(within / 4096) * 4096;
        for _ in 0..=next(8) {
            let len = 4096 << next(5);
            reads.push((at, len as usize));
            at += len + 4096 * next(4);
        }
    }
    reads
}

/// One launch: the time until all was read, one read after the other.
fn launch(runtime: &tokio::runtime::Handle, settings: &Path, layer: PathBuf) -> Duration {
    let stacks = Stacks::with_remotes(Remotes::new(settings.to_owned(), runtime.clone()));
    let began = Instant::now();
    let export = DiskExport { name: "disk".to_owned(), size: SIZE, layers: vec![layer], upper: None };
    let disk = stacks.disk(&export).unwrap();
    let mut buf = vec![0; 64 << 10];
    for (at, len) in reads() {
        disk.read_at(&mut buf[..len], at).unwrap();
    }
    began.elapsed()
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let bytes = layer(folder.path());
    let location = Location {
        place: Place::Repository { key: "it".to_owned() },
        size: bytes.len() as u64,
        digest: format!("sha256:{}", "5".repeat(64)),
        disk: None,
    };
    fs::write(folder.path().join("layer.remote"), serde_json::to_vec(&location).unwrap()).unwrap();
    let layer = || folder.path().join("layer");
    let store = RangeStore::start(bytes, LATENCY).unwrap();
    let node = |name: &str| {
        let cache = folder.path().join(name);
        let settings = aenv_remote::Remotes {
            repository: config(&store),
            cache: CacheSettings { folder: cache.clone(), capacity: 512 * MIB, reserve: 0 },
            read_ms: 30_000,
            fill: false,
            table_bytes: aenv_remote::DEFAULT_TABLE_BYTES,
        };
        let path = folder.path().join(format!("{name}.json"));
        fs::write(&path, serde_json::to_vec(&settings).unwrap()).unwrap();
        (cache, path)
    };
    let all = reads();
    let blocks: HashSet<u64> =
        all.iter().flat_map(|(at, len)| at >> 18..=(at + *len as u64 - 1) >> 18).collect();
    let (reads, blocks, latency) = (all.len(), blocks.len(), LATENCY.as_millis());
    println!("{reads} reads in {blocks} blocks of 256 KiB, {latency} ms to the store");

    let first = node("first");
    launch(runtime.handle(), &first.1, layer());
    let traces = first.0.join("traces");
    let (mut times, mut asked) = ([Vec::new(), Vec::new()], [0, 0]);
    for run in 0..RUNS {
        for (with_trace, times) in times.iter_mut().enumerate() {
            let (cache, settings) = node(&format!("run-{run}-{with_trace}"));
            if with_trace == 1 {
                fs::create_dir_all(cache.join("traces")).unwrap();
                for trace in fs::read_dir(&traces).unwrap().flatten() {
                    fs::copy(trace.path(), cache.join("traces").join(trace.file_name())).unwrap();
                }
            }
            let before = store.requests();
            times.push(launch(runtime.handle(), &settings, layer()));
            asked[with_trace] += store.requests() - before;
            fs::remove_dir_all(&cache).unwrap();
        }
    }
    for ((name, times), asked) in ["without a trace", "with a trace"].iter().zip(&mut times).zip(asked) {
        times.sort();
        let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1000.0;
        println!(
            "{name}: p50 {:.0} ms, p90 {:.0} ms, {:.0} to {:.0} ms; {} requests a launch (n = {RUNS})",
            at(0.5),
            at(0.9),
            at(0.0),
            at(1.0),
            asked / RUNS as u64
        );
    }
}
