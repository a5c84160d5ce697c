//! A real blockd with a real mount, driven through its client. Needs root.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    os::unix::{fs::FileExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aenv_blockd::{Client, DiskExport, ExportChoice, ExportError, Exports, MemoryExport, launch};
use aenv_layer::LayerWriter;
use aenv_types::Home;
use nix::{
    fcntl::{FallocateFlags, fallocate},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        mman::{MapFlags, ProtFlags, mmap, munmap},
        signal::{Signal, kill},
    },
    unistd::Pid,
};

const MIB: u64 = 1 << 20;

/// A node's folders and its blockd, both of which go when it is dropped.
struct Node {
    client: Client,
    home: Home,
    folder: tempfile::TempDir,
}

impl Node {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        fs::create_dir_all(home.layers()).unwrap();
        fs::create_dir_all(home.runtime()).unwrap();
        let client =
            launch(&home, Path::new(env!("CARGO_BIN_EXE_aenv-blockd")), ExportChoice::Fuse).await.unwrap();
        Self { client, home, folder }
    }

    fn layer(&self, name: &str) -> PathBuf {
        self.home.layers().join(name)
    }

    fn disk(&self, name: &str, size: u64, layers: Vec<PathBuf>) -> DiskExport {
        DiskExport {
            name: name.into(),
            size,
            layers,
            upper: Some(self.folder.path().join("uppers").join(name)),
        }
    }

    async fn pid(&self) -> Pid {
        Pid::from_raw(self.client.pid().await.unwrap() as i32)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Nobody starts it again once the last client is gone.
        self.client = Client::new(self.home.blockd_socket());
        let pid = fs::read_to_string(self.home.runtime().join("blockd.pid")).unwrap_or_default();
        if let Ok(pid) = pid.trim().parse() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            let lock = File::open(self.home.runtime().join("blockd.pid")).unwrap();
            let _ = eventually(|| lock.try_lock().ok());
        }
        let _ = umount2(&self.home.exports(), MntFlags::MNT_DETACH);
    }
}

fn eventually<T>(mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match check() {
            Some(value) => return Some(value),
            None if Instant::now() > deadline => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Bytes that differ from one block to the next.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).to_le_bytes()).collect()
}

struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_is_sealed_under_load_and_comes_back_from_its_layers() {
    let node = Node::start().await;
    let size = 128 * MIB;
    let path = node.client.open_disk(node.disk("sbx-root", size, vec![])).await.unwrap();
    assert_eq!(path, node.home.exports().join("sbx-root.disk"));
    let device = Loop(run("losetup", &["--find", "--show", path.to_str().unwrap()]));
    run("mkfs.ext4", &["-q", &device.0]);
    let folder = node.folder.path().join("mnt");
    fs::create_dir(&folder).unwrap();
    mount(Some(device.0.as_str()), &folder, Some("ext4"), MsFlags::empty(), None::<&str>).unwrap();
    let mounted = Mounted(folder.clone());

    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (folder, stop, written) = (folder.clone(), Arc::clone(&stop), Arc::clone(&written));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let number = written.load(Ordering::Relaxed);
                let mut file = File::create(folder.join(format!("file-{}", number % 40))).unwrap();
                file.write_all(&pattern(number, 300_000)).unwrap();
                file.sync_all().unwrap();
                written.store(number + 1, Ordering::Relaxed);
            }
        })
    };
    let mut layers = Vec::new();
    for round in 0..5 {
        let target = node.layer(&format!("sealed-{round}"));
        let sealed = node.client.seal("sbx-root", target.clone()).await.unwrap();
        assert_eq!(node.client.seal("sbx-root", target.clone()).await.unwrap(), sealed, "asked again");
        assert_eq!(
            fs::metadata(&target).map(|file| file.len()).ok(),
            sealed.layer.as_ref().map(|_| sealed.size)
        );
        layers.extend(sealed.layer);
        // The load goes on: at least one more file before the next seal.
        let before = written.load(Ordering::Relaxed);
        eventually(|| (written.load(Ordering::Relaxed) > before).then_some(())).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    let files = written.load(Ordering::Relaxed);
    assert!(files > 5, "{files} files");
    drop(mounted);
    drop(device);

    let mut before = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut before).unwrap();
    assert_eq!(before.len() as u64, size);
    layers.extend(node.client.seal("sbx-root", node.layer("sealed-last")).await.unwrap().layer);
    assert!(layers.len() > 2, "{layers:?}");
    let nothing = node.client.seal("sbx-root", node.layer("sealed-nothing")).await.unwrap();
    assert_eq!(nothing.layer, None);
    assert!(!node.layer("sealed-nothing").exists());
    let listed = node.client.list().await.unwrap();
    assert_eq!(listed[0].layers, layers);
    node.client.close_disk("sbx-root").await.unwrap();
    assert!(File::open(&path).is_err());

    let export = DiskExport { upper: None, ..node.disk("again", size, layers) };
    let path = node.client.open_disk(export).await.unwrap();
    let mut after = Vec::new();
    File::open(&path).unwrap().read_to_end(&mut after).unwrap();
    assert!(before == after);
    assert!(OpenOptions::new().write(true).open(&path).is_err());
    let device = Loop(run("losetup", &["--read-only", "--find", "--show", path.to_str().unwrap()]));
    run("e2fsck", &["-n", "-f", &device.0]);
    mount(Some(device.0.as_str()), &folder, Some("ext4"), MsFlags::MS_RDONLY, None::<&str>).unwrap();
    let _mounted = Mounted(folder.clone());
    for file in files.saturating_sub(40)..files {
        assert!(
            fs::read(folder.join(format!("file-{}", file % 40))).unwrap() == pattern(file, 300_000),
            "{file}"
        );
    }
}

/// A private, writable mapping of a whole file, as VMMs make it.
struct Private(std::ptr::NonNull<std::ffi::c_void>, usize);

impl Private {
    fn new(path: &Path) -> Self {
        let file = open(path);
        let len = std::num::NonZeroUsize::new(file.metadata().unwrap().len() as usize).unwrap();
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap(None, len, access, MapFlags::MAP_PRIVATE, &file, 0) }.unwrap();
        Self(start, len.get())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours, readable and writable, until we are dropped.
        unsafe { std::slice::from_raw_parts_mut(self.0.cast().as_ptr(), self.1) }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: nothing borrows the mapping any more.
        let _ = unsafe { munmap(self.0, self.1) };
    }
}

/// Bytes that a process has read so far, by read(2) and the like.
fn bytes_read(pid: Pid) -> u64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

fn memory_layer(path: &Path, size: u64, parts: &[(u64, &[u8])]) {
    let mut writer = LayerWriter::create(path, size).unwrap();
    for (offset, data) in parts {
        writer.append(*offset, data).unwrap();
    }
    writer.finish().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn siblings_share_a_memory_image() {
    let node = Node::start().await;
    let size = 32 * MIB;
    let base = pattern(1, 24 << 20);
    let changed = pattern(2, 1 << 20);
    memory_layer(&node.layer("base"), 24 * MIB, &[(0, &base)]);
    memory_layer(&node.layer("diff"), size, &[(MIB, &changed)]);
    let mut expected = base;
    expected[1 << 20..2 << 20].copy_from_slice(&changed);
    expected.resize(size as usize, 0);
    let image = |holder: &str| MemoryExport {
        holder: holder.into(),
        size,
        layers: vec![node.layer("base"), node.layer("diff")],
        group: None,
    };

    let first = node.client.open_memory(image("one")).await.unwrap();
    let pid = node.pid().await;
    let mut one = Private::new(&first);
    assert!(one.bytes() == expected);
    let after_first = bytes_read(pid);
    assert!(after_first >= 24 * MIB);

    let second = node.client.open_memory(image("two")).await.unwrap();
    assert_eq!(first, second);
    let mut two = Private::new(&second);
    assert!(two.bytes() == expected);
    let for_second = bytes_read(pid) - after_first;
    assert!(for_second < MIB, "the second one read {for_second} bytes");

    // Another group has pages of its own.
    let apart = |holder: &str| MemoryExport { group: Some("other".into()), ..image(holder) };
    let third = node.client.open_memory(apart("apart")).await.unwrap();
    assert_ne!(first, third);
    let mut three = Private::new(&third);
    assert!(three.bytes() == expected);
    assert!(bytes_read(pid) - after_first >= 24 * MIB);
    drop(three);
    assert_eq!(node.client.open_memory(apart("beside")).await.unwrap(), third);
    for holder in ["apart", "beside"] {
        node.client.close_memory(holder).await.unwrap();
    }

    // What one writes is its own, and a hole that its balloon punches takes nothing from the other.
    one.bytes()[5] ^= 0xff;
    assert!(two.bytes() == expected);
    let file = open(&first);
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, hole, 0, 4 << 20).unwrap();
    assert!(two.bytes() == expected);
    assert_eq!(one.bytes()[5], expected[5] ^ 0xff);
    assert!(fallocate(&file, hole, 100, 4096).is_err());
    assert!(fallocate(&file, FallocateFlags::FALLOC_FL_ZERO_RANGE, 0, 4096).is_err());
    assert!(file.set_len(4096).is_err());
    assert!(two.bytes() == expected);
    // A refused write is in the kernel's pages for a moment.
    assert!(file.write_all_at(b"x", 8 << 20).is_err());
    eventually(|| (two.bytes() == expected).then_some(())).unwrap();
    drop(file);

    // The image outlives its holders for those who still map it ...
    node.client.close_memory("one").await.unwrap();
    node.client.close_memory("two").await.unwrap();
    assert!(node.client.list().await.unwrap().is_empty());
    assert!(two.bytes() == expected);
    drop((one, two));
    // ... and one who comes soon after finds its pages.
    let before = bytes_read(pid);
    let third = node.client.open_memory(image("three")).await.unwrap();
    assert_eq!(third, first);
    let mut three = Private::new(&third);
    assert!(three.bytes() == expected);
    let for_third = bytes_read(pid) - before;
    assert!(for_third < MIB, "the third one read {for_third} bytes");

    let zeros = MemoryExport { holder: "cold".into(), size, layers: vec![], group: None };
    let cold = node.client.open_memory(zeros).await.unwrap();
    assert_ne!(cold, third);
    assert!(Private::new(&cold).bytes().iter().all(|byte| *byte == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blockd_that_was_killed_is_started_again_with_its_exports() {
    let node = Node::start().await;
    let size = 8 * MIB;
    memory_layer(&node.layer("ram"), size, &[(0, &pattern(3, 8192))]);
    let image = MemoryExport { holder: "sbx".into(), size, layers: vec![node.layer("ram")], group: None };
    let disk = node.client.open_disk(node.disk("sbx-root", size, vec![])).await.unwrap();
    let memory = node.client.open_memory(image.clone()).await.unwrap();
    let data = pattern(4, 64 << 10);
    let file = open(&disk);
    file.write_all_at(&data, 4096).unwrap();
    file.sync_all().unwrap();
    node.client.seal("sbx-root", node.layer("sealed")).await.unwrap();
    file.write_all_at(&data, MIB).unwrap();
    file.sync_all().unwrap();
    let (before, inode) = (node.client.list().await.unwrap(), {
        use std::os::unix::fs::MetadataExt;
        move |path: &Path| fs::metadata(path).unwrap().ino()
    });
    let inodes = (inode(&disk), inode(&memory));
    let killed = node.pid().await;
    kill(killed, Signal::SIGKILL).unwrap();

    assert_eq!(node.client.list().await.unwrap(), before);
    assert_ne!(node.pid().await, killed);
    assert!(file.sync_all().is_err(), "a file of the dead mount");
    assert_eq!((inode(&disk), inode(&memory)), inodes);
    let mut read = vec![0; data.len()];
    for offset in [4096, MIB] {
        open(&disk).read_exact_at(&mut read, offset).unwrap();
        assert!(read == data, "at {offset}");
    }
    assert!(Private::new(&memory).bytes()[..8192] == pattern(3, 8192));
    assert_eq!(node.client.open_memory(image).await.unwrap(), memory);
    let sealed = node.client.seal("sbx-root", node.layer("sealed-again")).await.unwrap();
    assert!(sealed.layer.is_some());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let place = node.home.exports();
    assert_eq!(mounts.lines().filter(|line| line.split(' ').nth(1) == place.to_str()).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_blockd_for_a_node_however_many_servers_ask() {
    let node = Node::start().await;
    let binary = Path::new(env!("CARGO_BIN_EXE_aenv-blockd"));
    let again = launch(&node.home, binary, ExportChoice::Fuse).await.unwrap();
    assert_eq!(again.pid().await.unwrap(), node.client.pid().await.unwrap());
    let output = Command::new(binary)
        .arg("--socket")
        .arg(node.home.blockd_socket())
        .arg("--mount")
        .arg(node.home.exports())
        .arg("--state")
        .arg(node.home.runtime().join("blockd.state"))
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("another blockd serves this node"));
    let other = Home::new(node.folder.path().join("h2"), node.folder.path().join("r2"));
    let (a, b) =
        tokio::join!(launch(&other, binary, ExportChoice::Fuse), launch(&other, binary, ExportChoice::Fuse));
    let second = Node { client: a.unwrap(), home: other, folder: tempfile::tempdir().unwrap() };
    assert_eq!(second.client.pid().await.unwrap(), b.unwrap().pid().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_typed_errors() {
    let node = Node::start().await;
    let client = &node.client;
    client.open_disk(node.disk("a", MIB, vec![])).await.unwrap();
    client.open_disk(node.disk("a", MIB, vec![])).await.unwrap();
    let exists = client.open_disk(node.disk("a", 2 * MIB, vec![])).await;
    assert_eq!(exists, Err(ExportError::Exists { name: "a".into() }));
    let same_upper = DiskExport { name: "b".into(), ..node.disk("a", MIB, vec![]) };
    assert!(matches!(client.open_disk(same_upper).await, Err(ExportError::Invalid { .. })));
    let bad_name = client.open_disk(node.disk("../a", MIB, vec![])).await;
    assert!(matches!(bad_name, Err(ExportError::Invalid { .. })));
    let missing = client.open_disk(node.disk("c", MIB, vec![node.layer("no")])).await;
    assert!(matches!(missing, Err(ExportError::Layer { path, .. }) if path == node.layer("no")));
    fs::write(node.layer("junk"), vec![7; 100_000]).unwrap();
    let junk = MemoryExport { holder: "h".into(), size: MIB, layers: vec![node.layer("junk")], group: None };
    assert!(matches!(client.open_memory(junk).await, Err(ExportError::Layer { .. })));
    let seal = client.seal("nobody", node.layer("x")).await;
    assert_eq!(seal, Err(ExportError::NotFound { name: "nobody".into() }));
    client.close_disk("nobody").await.unwrap();
    client.close_memory("nobody").await.unwrap();

    // Straight to the socket.
    let mut stream = UnixStream::connect(node.home.blockd_socket()).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
    stream.write_all(b"{\"id\":5,\"call\":\"explode\"}\n{\"id\":6,\"call\":\"list\"}\n").unwrap();
    let both = [answers.next().unwrap().unwrap(), answers.next().unwrap().unwrap()].concat();
    assert!(both.contains("\"id\":5,\"outcome\":{\"error\":{\"code\":\"invalid\""), "{both}");
    assert!(both.contains("\"id\":6,\"outcome\":{\"ok\""), "{both}");
    for junk in [&b"not json\n"[..], b"\xff\xfe\n", b"{\"call\":\"list\"}\n"] {
        let mut stream = UnixStream::connect(node.home.blockd_socket()).unwrap();
        stream.write_all(junk).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("\"code\":\"invalid\""), "{answer}");
    }
    let mut stream = UnixStream::connect(node.home.blockd_socket()).unwrap();
    let long = vec![b'x'; 3 << 20];
    // It may hang up before it has read all of it.
    let _ = stream.write_all(&long);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(client.list().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_offset_can_be_read_and_written_and_holes_read_as_zeros() {
    let node = Node::start().await;
    let path = node.client.open_disk(node.disk("d", MIB, vec![])).await.unwrap();
    let mut file = open(&path);
    let mut expected = vec![0u8; MIB as usize];
    for (offset, len) in [(0usize, 4096usize), (1, 7), (5000, 100_000), (511, 2), (MIB as usize - 3, 3)] {
        let data = pattern(offset as u64, 200_000)[..len].to_vec();
        file.write_all_at(&data, offset as u64).unwrap();
        expected[offset..offset + len].copy_from_slice(&data);
    }
    let zero = FallocateFlags::FALLOC_FL_ZERO_RANGE;
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    for (mode, offset, len) in [(zero, 100, 700), (punch, 8192, 65_536), (punch, 70_001, 10)] {
        fallocate(&file, mode, offset, len).unwrap();
        expected[offset as usize..(offset + len) as usize].fill(0);
    }
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    assert!(all == expected);
    assert!(file.write_all_at(b"beyond", MIB).is_err());
    assert!(fallocate(&file, zero, MIB as i64 - 4096, 8192).is_err());
    assert_eq!(file.read_at(&mut [0; 8], MIB).unwrap(), 0);
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), MIB);

    // A file that is still open when its export is closed writes nothing any more.
    node.client.close_disk("d").await.unwrap();
    assert!(file.write_all_at(b"late", 0).is_err());
    let path = node.client.open_disk(node.disk("d", MIB, vec![])).await.unwrap();
    let mut again = Vec::new();
    open(&path).read_to_end(&mut again).unwrap();
    assert!(again == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gibibyte_passes_through_in_little_memory() {
    let node = Node::start().await;
    let size = 128 * MIB;
    let path = node.client.open_disk(node.disk("d", size, vec![])).await.unwrap();
    let data = pattern(9, 4 << 20);
    let file = open(&path);
    let mut buf = vec![0; data.len()];
    for _ in 0..4 {
        for offset in (0..size).step_by(data.len()) {
            file.write_all_at(&data, offset).unwrap();
        }
        file.sync_all().unwrap();
        for offset in (0..size).step_by(data.len()) {
            file.read_exact_at(&mut buf, offset).unwrap();
            assert!(buf == data);
        }
    }
    let status = fs::read_to_string(format!("/proc/{}/status", node.pid().await)).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!("blockd's memory reached {} MiB", peak / 1024);
    assert!(peak < 100 * 1024, "{peak} kB");
}

/// Whether a process of this uid, which is in no group, can read the first bytes of a file.
fn reads(uid: u32, path: &Path) -> bool {
    use std::os::unix::process::CommandExt;
    let mut head = Command::new("/usr/bin/head");
    head.args(["-c", "16"]).arg(path).uid(uid).gid(uid).stderr(std::process::Stdio::null());
    head.output().unwrap().status.success()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_its_owners_and_its_name_keeps_none() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    const ONE: u32 = 1_900_300_001;
    const OTHER: u32 = 1_900_300_002;
    let node = Node::start().await;
    // Otherwise it is the folders above that refuse.
    fs::set_permissions(node.folder.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let owner = |path: &Path| {
        let meta = fs::metadata(path).unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o777)
    };
    let disk = node.disk("a", MIB, vec![]);
    let path = node.client.open_disk(disk.clone()).await.unwrap();
    assert_eq!(owner(&path), (0, 0, 0o600));
    assert!(!reads(ONE, &path));
    chown(&path, Some(ONE), Some(ONE)).unwrap();
    assert_eq!(owner(&path), (ONE, ONE, 0o600));
    assert!(reads(ONE, &path) && !reads(OTHER, &path));
    chown(&path, Some(OTHER), Some(OTHER)).unwrap();
    assert!(!reads(ONE, &path) && reads(OTHER, &path));

    node.client.close_disk("a").await.unwrap();
    let again = node.client.open_disk(disk).await.unwrap();
    assert_eq!(again, path);
    assert_eq!(owner(&again), (0, 0, 0o600));
    assert!(!reads(ONE, &again) && !reads(OTHER, &again));

    let held = MemoryExport { holder: "a".into(), size: MIB, layers: vec![], group: None };
    let image = node.client.open_memory(held).await.unwrap();
    assert!(reads(ONE, &image) && reads(OTHER, &image), "who knows its name may map it");
    let name = image.file_name().unwrap().to_str().unwrap();
    assert_eq!(name.len(), 36, "a random name: {name}");
    use std::os::unix::process::CommandExt;
    let listed = Command::new("/bin/ls").arg(node.home.exports()).uid(ONE).gid(ONE).output().unwrap();
    assert!(!listed.status.success() && listed.stdout.is_empty(), "{listed:?}");
}
