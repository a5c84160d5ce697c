//! Layers that are elsewhere, through a real mount: read by ranges, kept, read again without their place. Needs root.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aenv_blockd::{Client, DiskExport, ExportChoice, ExportError, Exports, MemoryExport, launch};
use aenv_layer::LayerWriter;
use aenv_remote::{CacheSettings, Location, Place, Remotes, S3Config, StoreConfig};
use aenv_testkit::RangeStore;
use aenv_types::Home;
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const MIB: u64 = 1 << 20;

/// Bytes of the disk, all of which one layer has.
const SIZE: u64 = 24 * MIB;

/// Bytes of a layer's index at most: enough for the layers here.
const TABLE_BYTES: u64 = 4096;

fn start(object: Vec<u8>) -> RangeStore {
    RangeStore::start(object, Duration::ZERO).unwrap()
}

fn config(store: &RangeStore) -> StoreConfig {
    StoreConfig::S3(S3Config {
        endpoint: Some(store.endpoint()),
        bucket: "bucket".to_owned(),
        prefix: "some/prefix".to_owned(),
        region: "us-east-1".to_owned(),
        virtual_hosted: false,
        access_key: Some(("id".to_owned(), "secret".to_owned())),
    })
}

struct Node {
    client: Client,
    home: Home,
    folder: tempfile::TempDir,
}

impl Node {
    async fn start(repository: StoreConfig, read_ms: u64, fill: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        fs::create_dir_all(home.layers()).unwrap();
        fs::create_dir_all(home.runtime()).unwrap();
        let cache = CacheSettings { folder: folder.path().join("cache"), capacity: 64 * MIB, reserve: 0 };
        let remotes = Remotes { repository, cache, read_ms, fill, table_bytes: TABLE_BYTES };
        fs::write(home.blockd_remotes(), serde_json::to_vec(&remotes).unwrap()).unwrap();
        let client =
            launch(&home, Path::new(env!("CARGO_BIN_EXE_aenv-blockd")), ExportChoice::Fuse).await.unwrap();
        Self { client, home, folder }
    }

    /// Notes that a layer is elsewhere.
    fn remote(&self, size: u64, digest: &str) -> PathBuf {
        let place = Place::Repository { key: "blobs/it".to_owned() };
        let location = Location { place, size, digest: format!("sha256:{digest}"), disk: None };
        let layer = self.home.layers().join("layer");
        fs::write(self.home.layers().join("layer.remote"), serde_json::to_vec(&location).unwrap()).unwrap();
        layer
    }

    async fn disk(&self, name: &str, layers: Vec<PathBuf>) -> Result<File, ExportError> {
        let upper = Some(self.folder.path().join(name));
        let path = self.client.open_disk(DiskExport { name: name.into(), size: SIZE, layers, upper }).await?;
        Ok(File::options().read(true).write(true).open(path).unwrap())
    }

    fn kept(&self) -> u64 {
        fs::metadata(self.folder.path().join("cache/blocks")).map_or(0, |file| file.len())
    }

    async fn kill(&self) {
        let pid = self.client.pid().await.unwrap();
        kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap();
        until("blockd is started again", || async { self.client.pid().await.is_ok_and(|now| now != pid) })
            .await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.client = Client::new(self.home.blockd_socket());
        let pid = fs::read_to_string(self.home.runtime().join("blockd.pid")).unwrap_or_default();
        if let Ok(pid) = pid.trim().parse() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = umount2(&self.home.exports(), MntFlags::MNT_DETACH);
    }
}

async fn until<F: Future<Output = bool>>(what: &str, mut happened: impl FnMut() -> F) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happened().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn content() -> Vec<u8> {
    (0..SIZE / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).collect()
}

fn layer(content: &[u8]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, SIZE).unwrap();
    for (number, part) in content.chunks(MIB as usize).enumerate() {
        writer.append(number as u64 * MIB, part).unwrap();
    }
    writer.finish().unwrap();
    fs::read(path).unwrap()
}

fn read(file: &File, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut buf = vec![0; len];
    file.read_exact_at(&mut buf, offset).map(|()| buf)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_elsewhere_is_read_by_ranges_and_kept() {
    let content = content();
    let bytes = layer(&content);
    let store = start(bytes.clone());
    let node = Node::start(config(&store), 20_000, false).await;
    let layer = node.remote(bytes.len() as u64, &"0".repeat(64));
    let disk = node.disk("one", vec![layer.clone()]).await.unwrap();
    let at = 10 * MIB;
    assert!(read(&disk, at, 5000).unwrap() == content[at as usize..][..5000]);
    disk.write_all_at(&[7; 4096], at).unwrap();
    disk.sync_data().unwrap();
    assert!(read(&disk, at, 4096).unwrap() == [7; 4096]);
    let sent = store.sent();
    assert!(sent < SIZE / 2, "{sent} of {SIZE} bytes were fetched for a few");
    assert!(node.kept() > 0);
    // A memory image of the same layer needs nothing new.
    let memory = MemoryExport { holder: "m".into(), size: SIZE, layers: vec![layer], group: None };
    let memory = File::open(node.client.open_memory(memory).await.unwrap()).unwrap();
    assert!(read(&memory, at, 4096).unwrap() == content[at as usize..][..4096]);
    drop((disk, memory));

    // Without its place: what was read is still there, also after blockd was started again.
    store.fall_silent();
    node.kill().await;
    let path = node.home.exports().join("one.disk");
    until("the disk is shown again", || async { path.exists() }).await;
    let disk = File::open(&path).unwrap();
    assert!(read(&disk, at, 4096).unwrap() == [7; 4096]);
    assert!(read(&disk, at + 4096, 900).unwrap() == content[at as usize + 4096..][..900]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_stays_away_fails_reads_in_time_and_holds_up_no_others() {
    let content = content();
    let bytes = layer(&content);
    let store = start(bytes.clone());
    let node = Node::start(config(&store), 8000, false).await;
    let layer = node.remote(bytes.len() as u64, &"1".repeat(64));
    let remote = Arc::new(node.disk("remote", vec![layer]).await.unwrap());
    let local = node.disk("local", vec![]).await.unwrap();
    local.write_all_at(&[5; 8192], 0).unwrap();
    store.fall_silent();
    // More than blockd has workers.
    let reads: Vec<_> = (0..40)
        .map(|number| {
            let remote = Arc::clone(&remote);
            thread::spawn(move || read(&remote, number * MIB / 2, 4096))
        })
        .collect();
    // Few, so that a slow disk does not need as long for them as the reads have.
    for number in 0..20 {
        local.write_all_at(&[6; 4096], 4096 * number).unwrap();
        local.sync_data().unwrap();
    }
    assert!(reads.iter().any(|read| !read.is_finished()), "others had to wait for reads that wait");
    let outcomes: Vec<_> = reads.into_iter().map(|read| read.join().unwrap()).collect();
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    assert!(failed > 30, "{failed} of {} reads failed", outcomes.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_is_fetched_in_the_background_and_wrong_bytes_are_not_kept() {
    use sha2::Digest;
    let content = content();
    let bytes = layer(&content);
    let right = hex::encode(sha2::Sha256::digest(&bytes));
    for (digest, whole) in [(right, true), ("2".repeat(64), false)] {
        let store = start(bytes.clone());
        let node = Node::start(config(&store), 20_000, true).await;
        let layer = node.remote(bytes.len() as u64, &digest);
        let _disk = node.disk("one", vec![layer]).await.unwrap();
        let log = node.home.path().join("logs/blockd.log");
        let said = if whole { "a layer is here whole" } else { "they are forgotten" };
        until(said, || async { fs::read_to_string(&log).is_ok_and(|log| log.contains(said)) }).await;
        assert!(store.sent() >= bytes.len() as u64);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_launch_needed_is_there_before_the_next_one_asks() {
    let content = content();
    let bytes = layer(&content);
    let store = start(bytes.clone());
    let places = [20 * MIB, 3 * MIB, 3 * MIB + 300_000, 11 * MIB];
    let node = Node::start(config(&store), 20_000, false).await;
    let layer = node.remote(bytes.len() as u64, &"4".repeat(64));
    let disk = node.disk("one", vec![layer]).await.unwrap();
    for at in places {
        assert!(read(&disk, at, 4096).unwrap() == content[at as usize..][..4096]);
    }
    drop(disk);
    node.client.close_disk("one").await.unwrap();
    let traces = node.folder.path().join("cache/traces");
    let kept = || {
        fs::read_dir(&traces).is_ok_and(|traces| traces.flatten().any(|one| one.path().extension().is_some()))
    };
    until("the trace is kept", || async { kept() }).await;

    // Another node, which has nothing but the trace.
    let next = Node::start(config(&store), 20_000, false).await;
    let folder = next.folder.path().join("cache/traces");
    fs::create_dir_all(&folder).unwrap();
    for trace in fs::read_dir(&traces).unwrap() {
        let trace = trace.unwrap();
        fs::copy(trace.path(), folder.join(trace.file_name())).unwrap();
    }
    let layer = next.remote(bytes.len() as u64, &"4".repeat(64));
    let before = store.sent();
    let disk = next.disk("one", vec![layer]).await.unwrap();
    // 5 blocks at least: the ends of the layer, and those of the places.
    let sent = || store.sent() - before;
    until("what was needed is fetched", || async { sent() >= 5 * 256 * 1024 }).await;
    until("and kept", || async { next.kept() >= 5 * 256 * 1024 }).await;
    store.fall_silent();
    for at in places {
        assert!(read(&disk, at, 4096).unwrap() == content[at as usize..][..4096]);
    }
    assert!(sent() < 16 * 256 * 1024, "{} bytes were fetched", sent());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_nowhere_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(StoreConfig::Folder(folder.path().to_owned()), 5000, false).await;
    let layer = node.home.layers().join("layer");
    assert!(matches!(node.disk("one", vec![layer]).await, Err(ExportError::Layer { .. })));
    let layer = node.remote(100_000, &"3".repeat(64));
    assert!(matches!(node.disk("one", vec![layer.clone()]).await, Err(ExportError::Layer { .. })));
    fs::write(node.home.layers().join("layer.remote"), "{}").unwrap();
    assert!(matches!(node.disk("one", vec![layer]).await, Err(ExportError::Layer { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_does_not_arrive_in_time_is_away_and_a_large_index_is_refused() {
    let bytes = layer(&content());
    let store = start(bytes.clone());
    let node = Node::start(config(&store), 1500, false).await;
    let layer = node.remote(bytes.len() as u64, &"6".repeat(64));
    store.fall_silent();
    let away = node.disk("one", vec![layer.clone()]).await.unwrap_err();
    assert!(matches!(away, ExportError::Away { .. }), "{away}");
    // Later it is there, under the same name.
    store.speak_again();
    node.disk("one", vec![layer]).await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    let mut writer = LayerWriter::create(&path, SIZE).unwrap();
    for number in 0..=TABLE_BYTES / 16 {
        writer.append(number * 8192, &[1; 4096]).unwrap();
    }
    writer.finish().unwrap();
    let store = start(fs::read(&path).unwrap());
    let node = Node::start(config(&store), 20_000, false).await;
    let layer = node.remote(fs::metadata(&path).unwrap().len(), &"7".repeat(64));
    let refused = node.disk("two", vec![layer]).await.unwrap_err();
    assert!(refused.to_string().contains("larger than the limit of 4096"), "{refused}");
    assert!(matches!(refused, ExportError::Layer { .. }));
}
