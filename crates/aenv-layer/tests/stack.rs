//! Stacks, uppers and seals against a model: a plain array for the disk, and cut files for crashes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use aenv_layer::{Layer, LayerWriter, SealError, Stack, StackError, Upper, compact};
use aenv_store::{BlockDevice, DeviceError};
use proptest::prelude::*;

const SIZE: usize = 256 << 10;

#[derive(Clone, Debug)]
enum Step {
    Write { offset: usize, len: usize, fill: u8 },
    Discard { offset: usize, len: usize },
    Flush,
    Seal,
    Reopen,
    Compact,
}

fn range() -> impl Strategy<Value = (usize, usize)> {
    (0_usize..SIZE / 512, 1_usize..64).prop_map(|(first, sectors)| {
        let offset = first * 512;
        (offset, (sectors * 512).min(SIZE - offset))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (range(), 1_u8..).prop_map(|((offset, len), fill)| Step::Write { offset, len, fill }),
        3 => range().prop_map(|(offset, len)| Step::Discard { offset, len }),
        2 => Just(Step::Flush),
        2 => Just(Step::Seal),
        1 => Just(Step::Reopen),
        1 => Just(Step::Compact),
    ]
}

/// A disk in a folder, and what it should hold.
struct Disk {
    dir: PathBuf,
    layers: Vec<PathBuf>,
    made: usize,
    stack: Option<Stack>,
}

impl Disk {
    fn new(dir: &Path) -> Self {
        let upper = Upper::create(&dir.join("upper"), SIZE as u64).unwrap();
        let stack = Stack::new(Vec::new(), Some(upper), SIZE as u64).unwrap();
        Self { dir: dir.to_owned(), layers: Vec::new(), made: 0, stack: Some(stack) }
    }

    fn stack(&self) -> &Stack {
        self.stack.as_ref().unwrap()
    }

    fn name(&mut self) -> PathBuf {
        self.made += 1;
        self.dir.join(format!("layer-{}", self.made))
    }

    fn seal(&mut self) -> bool {
        let target = self.name();
        let sealed = self.stack().seal(&target).unwrap();
        if let Some(sealed) = &sealed {
            assert_eq!(sealed.size, fs::metadata(&target).unwrap().len());
            self.layers.push(target);
        }
        sealed.is_some()
    }

    fn reopen(&mut self) {
        self.stack = None;
        self.stack = Some(open(&self.dir, &self.layers).unwrap());
    }

    fn compact(&mut self) {
        if self.layers.len() < 2 {
            return;
        }
        let target = self.name();
        compact(&self.stack().layers(), &target).unwrap();
        self.layers = vec![target];
        self.reopen();
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0xee; SIZE];
        self.stack().read_at(&mut content, 0).unwrap();
        content
    }
}

fn open(dir: &Path, layers: &[PathBuf]) -> Result<Stack, StackError> {
    let lower = layers.iter().map(|path| Arc::new(Layer::open_file(path).unwrap())).collect();
    let upper = Upper::open(&dir.join("upper")).unwrap();
    Stack::new(lower, Some(upper), SIZE as u64)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The only file in the upper's folder with this ending, and its length.
fn upper_file(dir: &Path, ending: &str) -> (PathBuf, u64) {
    let path = fs::read_dir(dir.join("upper")).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = path.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    let path = found.pop().unwrap();
    let len = fs::metadata(&path).unwrap().len();
    (path, len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn behaves_like_an_array(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut disk = Disk::new(dir.path());
        let mut model = vec![0; SIZE];
        for step in steps {
            match step {
                Step::Write { offset, len, fill } => {
                    let data: Vec<u8> = (0..len).map(|i| fill ^ (i / 512) as u8).collect();
                    disk.stack().write_at(&data, offset as u64).unwrap();
                    model[offset..offset + len].copy_from_slice(&data);
                }
                Step::Discard { offset, len } => {
                    disk.stack().discard(offset as u64, len as u64).unwrap();
                    model[offset..offset + len].fill(0);
                }
                Step::Flush => disk.stack().flush().unwrap(),
                Step::Seal => {
                    disk.seal();
                    prop_assert!(!disk.seal(), "nothing was written since");
                }
                // As when the process dies, and the machine does not.
                Step::Reopen => disk.reopen(),
                Step::Compact => {
                    disk.seal();
                    disk.compact();
                }
            }
            prop_assert!(disk.content() == model);
        }
        let mut part = vec![0; 512];
        for offset in (0..SIZE).step_by(512 * 7) {
            disk.stack().read_at(&mut part, offset as u64).unwrap();
            prop_assert_eq!(&part[..], &model[offset..offset + 512]);
        }
    }

    /// After a crash, each sector has what the last flush left there, or something that was written to it later.
    #[test]
    fn a_crash_at_any_byte_keeps_what_was_flushed(
        before in prop::collection::vec(step(), 0..25),
        after in prop::collection::vec(step(), 0..12),
        cut_data in 0.0..1.0_f64,
        cut_index in 0.0..1.0_f64,
        blank in any::<bool>(),
        rebooted in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut disk = Disk::new(&dir.path().join("a"));
        let mut stamp = 0_u32;
        let mut write = |disk: &mut Disk, step: &Step, history: &mut Vec<Vec<u32>>| match *step {
            Step::Write { offset, len, .. } => {
                stamp += 1;
                let data: Vec<u8> = (0..len / 4).flat_map(|_| stamp.to_le_bytes()).collect();
                disk.stack().write_at(&data, offset as u64).unwrap();
                history[offset / 512..(offset + len) / 512].iter_mut().for_each(|sector| sector.push(stamp));
                false
            }
            Step::Discard { offset, len } => {
                disk.stack().discard(offset as u64, len as u64).unwrap();
                history[offset / 512..(offset + len) / 512].iter_mut().for_each(|sector| sector.push(0));
                false
            }
            Step::Seal => disk.seal(),
            _ => { disk.stack().flush().unwrap(); true }
        };
        let mut history = vec![vec![0]; SIZE / 512];
        for step in &before {
            write(&mut disk, step, &mut history);
        }
        disk.stack().flush().unwrap();
        let mut durable = [upper_file(&disk.dir, ".data").1, upper_file(&disk.dir, ".index").1];
        history.iter_mut().for_each(|sector| { sector.drain(..sector.len() - 1); });
        for step in &after {
            if matches!(step, Step::Seal | Step::Reopen | Step::Compact) {
                continue;
            }
            if write(&mut disk, step, &mut history) {
                durable = [upper_file(&disk.dir, ".data").1, upper_file(&disk.dir, ".index").1];
                history.iter_mut().for_each(|sector| { sector.drain(..sector.len() - 1); });
            }
        }
        // What was not flushed is in the page cache; a copy with cut files is what a crash may leave of it. Records that
        // another flush had begun to log are made up: whole ones of data that may be missing, torn ones, and blank ones.
        let crashed = dir.path().join("b");
        copy_dir(&disk.dir.join("upper"), &crashed.join("upper"));
        if rebooted {
            let (recent, _) = upper_file(&crashed, ".recent");
            let mut notes = fs::read(&recent).unwrap();
            notes[0] ^= 1;
            fs::write(&recent, notes).unwrap();
        }
        let layers = disk.layers.clone();
        let (data, len) = upper_file(&crashed, ".data");
        let keep = durable[0] + ((len - durable[0]) as f64 * cut_data) as u64;
        fs::OpenOptions::new().write(true).open(&data).unwrap().set_len(keep).unwrap();
        disk.stack().flush().unwrap();
        let full_index = fs::read(upper_file(&disk.dir, ".index").0).unwrap();
        let (index, _) = upper_file(&crashed, ".index");
        let keep = durable[1] as usize + ((full_index.len() as u64 - durable[1]) as f64 * cut_index) as usize;
        let mut torn = full_index[..keep].to_vec();
        if blank {
            torn[durable[1] as usize..].iter_mut().take(16).for_each(|byte| *byte = 0);
        }
        fs::write(&index, torn).unwrap();

        for attempt in 0..2 {
            let stack = open(&crashed, &layers).unwrap();
            let mut content = vec![0; SIZE];
            stack.read_at(&mut content, 0).unwrap();
            for (sector, allowed) in content.chunks(512).zip(&history) {
                let found = u32::from_le_bytes(sector[..4].try_into().unwrap());
                prop_assert!(sector.chunks(4).all(|word| word == found.to_le_bytes()), "a torn sector");
                prop_assert!(allowed.contains(&found), "{found} is not one of {allowed:?}");
            }
            // What was recovered must take writes, and be the same when it is opened once more.
            let stamp = 1_000_000 + attempt;
            let data: Vec<u8> = (0..1024).flat_map(|_| u32::to_le_bytes(stamp)).collect();
            stack.write_at(&data, 8192).unwrap();
            stack.flush().unwrap();
            history[16..24].iter_mut().for_each(|sector| *sector = vec![stamp]);
        }
    }
}

/// Stops a seal at each of its steps, by putting the files where that step has them.
#[test]
fn a_seal_that_a_crash_interrupted_is_done_or_undone() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::new(&dir.path().join("a"));
    let old = [1; 8192];
    disk.stack().write_at(&old, 0).unwrap();
    disk.stack().flush().unwrap();
    let before = dir.path().join("before");
    copy_dir(&disk.dir.join("upper"), &before);
    let target = disk.dir.join("sealed");
    disk.stack().seal(&target).unwrap().unwrap();
    let new = [2; 4096];
    disk.stack().write_at(&new, 4096).unwrap();
    disk.stack().discard(16384, 4096).unwrap();
    disk.stack().flush().unwrap();
    let after = dir.path().join("after");
    copy_dir(&disk.dir.join("upper"), &after);
    let expected = disk.content();
    drop(disk);

    // Before the rename: both generations are there, the older with or without (part of) its index and trailer.
    let sealed = fs::read(&target).unwrap();
    let (data, data_len) = upper_file(dir.path().join("a").as_path(), ".data");
    assert!(data_len > 0, "{data:?}");
    for (case, len) in [12_288, 12_290, 16_384, sealed.len()].into_iter().enumerate() {
        let crashed = dir.path().join(format!("crashed-{case}"));
        copy_dir(&before, &crashed.join("upper"));
        let (data, _) = upper_file(&crashed, ".data");
        fs::write(data, &sealed[..len]).unwrap();
        copy_dir(&after, &crashed.join("upper"));
        for _ in 0..2 {
            let stack = open(&crashed, &[]).unwrap();
            let mut content = vec![0; SIZE];
            stack.read_at(&mut content, 0).unwrap();
            assert!(content == expected, "{case}");
        }
        upper_file(&crashed, ".data");
    }

    // Before the fresh generation was whole: it goes.
    let crashed = dir.path().join("crashed-unborn");
    copy_dir(&before, &crashed.join("upper"));
    fs::write(crashed.join("upper/upper-00000002.index"), [0; 100]).unwrap();
    fs::write(crashed.join("upper/upper-00000002.data"), []).unwrap();
    let stack = open(&crashed, &[]).unwrap();
    let mut content = vec![0; 8192];
    stack.read_at(&mut content, 0).unwrap();
    assert_eq!(content, old);

    // After the rename: the layer is complete, and the upper is not taken without it.
    let crashed = dir.path().join("crashed-after");
    copy_dir(&after, &crashed.join("upper"));
    fs::write(crashed.join("upper/upper-00000001.index"), [0; 4096]).unwrap();
    assert!(matches!(open(&crashed, &[]), Err(StackError::UpperOfOther { found: None, .. })));
    let stack = open(&crashed, &[target]).unwrap();
    let mut content = vec![0; SIZE];
    stack.read_at(&mut content, 0).unwrap();
    assert!(content == expected);
    assert!(!crashed.join("upper/upper-00000001.index").exists());
}

#[test]
fn seals_under_load_lose_nothing() {
    const WRITERS: u64 = 4;
    let dir = tempfile::tempdir().unwrap();
    let mut disk = Disk::new(dir.path());
    let stop = AtomicBool::new(false);
    let rounds: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    let stack = disk.stack.take().unwrap();
    let mut layers = Vec::new();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stack, stop, rounds) = (&stack, &stop, &rounds);
            scope.spawn(move || {
                // Each owns every fourth block, writes its round into all of them, and must always read it back.
                let mut round = 0_u64;
                while !stop.load(Ordering::Relaxed) || round < 20 {
                    round += 1;
                    for block in (writer..SIZE as u64 / 4096).step_by(WRITERS as usize) {
                        let data: Vec<u8> = (0..512).flat_map(|_| round.to_le_bytes()).collect();
                        if (round + block).is_multiple_of(7) {
                            stack.discard(block * 4096, 4096).unwrap();
                        }
                        stack.write_at(&data, block * 4096).unwrap();
                        let mut back = vec![0; 4096];
                        stack.read_at(&mut back, block * 4096).unwrap();
                        assert!(back == data, "writer {writer}, block {block}, round {round}");
                    }
                    if round.is_multiple_of(5) {
                        stack.flush().unwrap();
                    }
                    rounds[writer as usize].store(round, Ordering::Relaxed);
                }
            });
        }
        for seal in 0..12 {
            let target = dir.path().join(format!("under-load-{seal}"));
            while stack.seal(&target).unwrap().is_none() {
                thread::yield_now();
            }
            layers.push(target);
        }
        stop.store(true, Ordering::Relaxed);
    });
    stack.flush().unwrap();
    drop(stack);
    let stack = open(dir.path(), &layers).unwrap();
    let mut content = vec![0; SIZE];
    stack.read_at(&mut content, 0).unwrap();
    for (block, bytes) in content.chunks(4096).enumerate() {
        let round = rounds[block % WRITERS as usize].load(Ordering::Relaxed);
        assert!(bytes.chunks(8).all(|word| word == round.to_le_bytes()), "block {block}");
    }
}

#[test]
fn overwritten_data_is_given_back() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let size = 64 << 20;
    let upper = Upper::create(&dir.path().join("upper"), size).unwrap();
    let stack = Stack::new(Vec::new(), Some(upper), size).unwrap();
    let data = vec![7; 8 << 20];
    for _ in 0..40 {
        stack.write_at(&data, 0).unwrap();
        stack.flush().unwrap();
    }
    let (path, len) = upper_file(dir.path(), ".data");
    assert!(len >= 40 * (8 << 20));
    let used = fs::metadata(path).unwrap().blocks() * 512;
    assert!(used <= 100 << 20, "{used} bytes for 8 MiB that are alive");
    let mut back = vec![0; 8 << 20];
    stack.read_at(&mut back, 0).unwrap();
    assert!(back == data);
}

#[test]
fn nobody_has_to_flush_for_overwritten_data_to_be_given_back() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let size = 64 << 20;
    let upper = Upper::create(&dir.path().join("upper"), size).unwrap();
    let stack = Stack::new(Vec::new(), Some(upper), size).unwrap();
    for round in 0..60_u8 {
        stack.write_at(&vec![round; 8 << 20], 0).unwrap();
    }
    let (path, len) = upper_file(dir.path(), ".data");
    assert!(len >= 60 * (8 << 20));
    let used = fs::metadata(path).unwrap().blocks() * 512;
    assert!(used <= 150 << 20, "{used} bytes for 8 MiB that are alive");
    let mut back = vec![0; 8 << 20];
    stack.read_at(&mut back, 0).unwrap();
    assert!(back == vec![59; 8 << 20]);
}

#[test]
fn refusals_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let size = SIZE as u64;
    let upper = Upper::create(&dir.path().join("upper"), size).unwrap();
    assert!(matches!(Upper::open(&dir.path().join("upper")), Err(aenv_layer::OpenUpperError::Busy(_))));
    let stack = Stack::new(Vec::new(), Some(upper), size).unwrap();
    for (offset, len) in [(1, 512), (0, 100), (size, 512), (size - 512, 1024), (u64::MAX - 511, 512)] {
        let found = stack.write_at(&vec![0; len], offset);
        assert!(matches!(found, Err(DeviceError::OutOfRange { .. })), "{offset} {len}");
        assert!(matches!(stack.discard(offset, len as u64), Err(DeviceError::OutOfRange { .. })));
    }
    stack.write_at(&[1; 512], 0).unwrap();
    let taken = dir.path().join("taken");
    fs::write(&taken, b"x").unwrap();
    assert!(matches!(stack.seal(&taken), Err(SealError::TargetExists(_))));
    assert!(matches!(stack.seal(&dir.path().join("no/such")), Err(SealError::Io { .. })));
    assert!(stack.seal(&dir.path().join("fine")).unwrap().is_some());
    assert_eq!(fs::read(&taken).unwrap(), b"x");

    let layer = Arc::new(Layer::open_file(&dir.path().join("fine")).unwrap());
    let read_only = Stack::new(vec![layer.clone()], None, size).unwrap();
    assert!(matches!(read_only.write_at(&[0; 512], 0), Err(DeviceError::ReadOnly)));
    assert!(matches!(read_only.seal(&dir.path().join("x")), Err(SealError::ReadOnly)));
    read_only.flush().unwrap();
    assert!(matches!(Stack::new(vec![layer; 256], None, size), Err(StackError::TooDeep(256))));
    assert!(matches!(Stack::new(Vec::new(), None, 1000), Err(StackError::Size(1000))));
}

#[test]
fn a_writer_takes_any_order_and_leaves_nothing_when_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layer");
    let big: Vec<u8> = (0..20 << 20).map(|i: u32| (i / 4096) as u8 | 1).collect();
    let mut writer = LayerWriter::create(&path, 64 << 20).unwrap();
    writer.append(32 << 20, &big).unwrap();
    writer.append(0, &[5; 512]).unwrap();
    writer.append_vectored(&[(4096, &[6; 4096]), (8192, &[]), (12_288, &[7; 8192])]).unwrap();
    writer.append(4608, &[8; 512]).unwrap();
    writer.append_zeroes(33 << 20, 1 << 20).unwrap();
    let mut half = vec![0; 64 << 10];
    half[..4096].fill(9);
    writer.append_sparse(1 << 20, &half).unwrap();
    assert!(writer.append(64 << 20, &[0; 512]).is_err());
    assert!(writer.append(100, &[0; 512]).is_err());
    let summary = writer.finish().unwrap();
    assert_eq!(summary.size, fs::metadata(&path).unwrap().len());
    assert_eq!(summary.data_bytes, (19 << 20) + 512 + 4096 + 8192 + 4096);

    let mut expected = vec![0; 64 << 20];
    expected[32 << 20..52 << 20].copy_from_slice(&big);
    expected[..512].fill(5);
    expected[4096..8192].fill(6);
    expected[12_288..20_480].fill(7);
    expected[4608..5120].fill(8);
    expected[33 << 20..34 << 20].fill(0);
    expected[1 << 20..(1 << 20) + 4096].fill(9);
    let layer = Arc::new(Layer::open_file(&path).unwrap());
    assert_eq!((layer.uuid(), layer.segments()), (summary.uuid, summary.segments));
    let stack = Stack::new(vec![layer], None, 80 << 20).unwrap();
    let mut content = vec![1; 80 << 20];
    stack.read_at(&mut content, 0).unwrap();
    assert!(content[..64 << 20] == expected && content[64 << 20..].iter().all(|&byte| byte == 0));

    drop(LayerWriter::create(&dir.path().join("dropped"), 4096).unwrap());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
