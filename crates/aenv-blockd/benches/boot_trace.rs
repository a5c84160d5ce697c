//! The first reads of a launch whose layers are in an object store 20 ms away: with an empty cache, and with an empty cache and the trace
//! of an earlier launch. `cargo bench -p aenv-blockd --bench boot_trace`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench")]

use std::{
    collections::HashSet,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aenv_blockd::{
    DiskExport,
    daemon::{backend::Backend, remotes::Remotes, stacks::Stacks},
};
use aenv_layer::LayerWriter;
use aenv_remote::{CacheSettings, Location, Place, S3Config, StoreConfig};

const LATENCY: Duration = Duration::from_millis(20);
const RUNS: usize = 20;
const MIB: u64 = 1 << 20;
/// Bytes of the image, all of which one layer has.
const SIZE: u64 = 256 * MIB;
/// Places that a launch goes to, with a few reads of 4 to 64 KiB that follow each other at each.
const PLACES: u64 = 120;

/// An object store that begins each answer after [`LATENCY`], and how often it was asked.
fn store(object: Vec<u8>) -> (StoreConfig, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (object, requests) = (Arc::new(object), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (object, requests) = (Arc::clone(&object), Arc::clone(&counted));
            thread::spawn(move || serve(stream.unwrap(), &object, &requests));
        }
    });
    let config = StoreConfig::S3(S3Config {
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        bucket: "bucket".to_owned(),
        prefix: String::new(),
        region: "us-east-1".to_owned(),
        virtual_hosted: false,
        access_key: Some(("id".to_owned(), "secret".to_owned())),
    });
    (config, requests)
}

fn serve(mut stream: TcpStream, object: &[u8], requests: &AtomicU64) {
    stream.set_nodelay(true).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    while lines.next().is_some() {
        let headers: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
        let range = headers
            .iter()
            .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let range = range.unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
        requests.fetch_add(1, Ordering::Relaxed);
        thread::sleep(LATENCY);
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{to}/{}\r\n\
             ETag: \"x\"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n",
            to - from + 1,
            object.len()
        );
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&object[from..=to])).is_err() {
            return;
        }
    }
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
    let (repository, requests) = store(bytes);
    let node = |name: &str| {
        let cache = folder.path().join(name);
        let settings = aenv_remote::Remotes {
            repository: repository.clone(),
            cache: CacheSettings { folder: cache.clone(), capacity: 512 * MIB, reserve: 0 },
            read_ms: 30_000,
            fill: false,
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
            let before = requests.load(Ordering::Relaxed);
            times.push(launch(runtime.handle(), &settings, layer()));
            asked[with_trace] += requests.load(Ordering::Relaxed) - before;
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
