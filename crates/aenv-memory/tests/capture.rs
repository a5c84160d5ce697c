//! The memory of a real other process, captured and read back through a stack. The process is this test program again,
//! as the test `victim`, told by its environment what to do.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    num::NonZeroUsize,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use aenv_layer::{Layer, LayerWriter, Stack};
use aenv_memory::{BufferPool, CaptureError, CaptureReport, Ram, Range, Snapshot, capture_stopped, scan};
use aenv_store::BlockDevice;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap};

const PAGE: u64 = 4096;
const IMAGE: &str = "AENV_TEST_IMAGE";
const PLAN: &str = "AENV_TEST_PLAN";

/// What the victim does to its pages, in this order: `page count byte`, or `drop page count`.
type Plan = &'static [(&'static str, u64, u64, u8)];

/// A process that maps an image privately and changes pages of it.
struct Victim {
    child: Child,
    ram: Ram,
    /// What its memory should be now.
    expected: Vec<u8>,
}

impl Victim {
    fn start(image: &Path, plan: Plan) -> Self {
        let text: Vec<String> =
            plan.iter().map(|(verb, page, count, byte)| format!("{verb} {page} {count} {byte}")).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["victim", "--exact", "--nocapture", "--ignored"])
            .env(IMAGE, image)
            .env(PLAN, text.join("\n"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let start = lines.map(|line| line.unwrap()).find_map(|line| {
            line.split_once("mapped at ").map(|(_, address)| address.parse::<u64>().unwrap())
        });
        let expected_base = std::fs::read(image).unwrap();
        let ram = Ram { pid: child.id(), start: start.unwrap(), len: expected_base.len() as u64 };
        let mut expected = expected_base.clone();
        for &(verb, page, count, byte) in plan {
            let range = (page * PAGE) as usize..((page + count) * PAGE) as usize;
            match verb {
                "fill" => expected[range].fill(byte),
                "drop" => expected[range.clone()].copy_from_slice(&expected_base[range]),
                _ => {}
            }
        }
        Self { child, ram, expected }
    }

    /// Its memory as the kernel shows it.
    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.ram.len as usize];
        let memory = File::open(format!("/proc/{}/mem", self.ram.pid)).unwrap();
        memory.read_exact_at(&mut bytes, self.ram.start).unwrap();
        bytes
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: the process that [`Victim`] starts.
#[test]
#[ignore = "started by the other tests"]
fn victim() {
    let (Some(image), Ok(plan)) = (std::env::var_os(IMAGE), std::env::var(PLAN)) else { return };
    let file = OpenOptions::new().read(true).write(true).open(image).unwrap();
    let len = NonZeroUsize::new(file.metadata().unwrap().len() as usize).unwrap();
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let start = unsafe { mmap(None, len, access, MapFlags::MAP_PRIVATE, &file, 0) }.unwrap();
    // SAFETY: the mapping lives until the process ends, and nothing else uses it.
    let memory = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>().as_ptr(), len.get()) };
    for line in plan.lines() {
        let mut words = line.split(' ');
        let verb = words.next().unwrap();
        let mut number = || words.next().unwrap().parse::<usize>().unwrap();
        let (page, count, byte) = (number(), number(), number());
        let part = &mut memory[page * 4096..(page + count) * 4096];
        match verb {
            "fill" => part.fill(byte as u8),
            "read" => assert!(part.iter().map(|byte| u64::from(*byte)).sum::<u64>() < u64::MAX),
            "drop" => {
                let at = std::ptr::NonNull::new(part.as_mut_ptr().cast()).unwrap();
                // SAFETY: whole pages of our own mapping; they read as the file's again.
                unsafe { madvise(at, part.len(), MmapAdvise::MADV_DONTNEED) }.unwrap();
            }
            other => panic!("{other}"),
        }
    }
    println!("mapped at {}", start.as_ptr() as u64);
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Fixture {
    folder: tempfile::TempDir,
    image: PathBuf,
    base: Arc<Layer>,
}

/// An image of `pages` pages, as a file to map and as a layer.
fn fixture(pages: u64) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE % 250 + 1) as u8).collect();
    let image = folder.path().join("image");
    std::fs::write(&image, &bytes).unwrap();
    let path = folder.path().join("base");
    let mut writer = LayerWriter::create(&path, pages * PAGE).unwrap();
    writer.append(0, &bytes).unwrap();
    writer.finish().unwrap();
    Fixture { base: Arc::new(Layer::open_file(&path).unwrap()), folder, image }
}

impl Fixture {
    /// What a guest sees that is launched from the base and the captured layer.
    fn launched(&self, layer: &Path, size: u64) -> Vec<u8> {
        let top = Arc::new(Layer::open_file(layer).unwrap());
        assert_eq!(top.virtual_size(), size);
        let stack = Stack::new(vec![self.base.clone(), top], None, size).unwrap();
        let mut bytes = vec![0; size as usize];
        stack.read_at(&mut bytes, 0).unwrap();
        bytes
    }
}

const PLAN_OF_ALL: Plan = &[
    ("read", 0, 2000, 0),
    ("fill", 3, 1, 9),
    ("fill", 5, 300, 200),
    ("fill", 1000, 50, 0),
    ("fill", 1500, 20, 7),
    ("drop", 1505, 5, 0),
    ("fill", 2047, 1, 1),
];

#[test]
fn a_scan_finds_what_was_changed_and_nothing_else() {
    let fixture = fixture(2048);
    let victim = Victim::start(&fixture.image, PLAN_OF_ALL);
    let pages: Vec<_> =
        scan(&victim.ram).unwrap().iter().map(|range| (range.offset / PAGE, range.len / PAGE)).collect();
    assert_eq!(pages, [(3, 1), (5, 300), (1000, 50), (1500, 5), (1510, 10), (2047, 1)]);
}

#[test]
fn more_regions_than_one_call_returns_are_all_found() {
    let fixture = fixture(10_000);
    // Every second page: 5000 regions.
    let plan: Vec<_> = (0..5000).map(|i| ("fill", i * 2, 1, (i % 255) as u8)).collect();
    let victim = Victim::start(&fixture.image, plan.leak());
    let ranges = scan(&victim.ram).unwrap();
    assert_eq!(ranges.len(), 5000);
    assert!(
        ranges
            .iter()
            .enumerate()
            .all(|(i, range)| *range == Range { offset: i as u64 * 2 * PAGE, len: PAGE })
    );
    let layer = fixture.folder.path().join("layer");
    let pool = BufferPool::new(64 << 20, 1);
    let snapshot = Snapshot::take(&victim.ram, pool.get().unwrap(), &layer).unwrap();
    let report = snapshot.write().unwrap();
    assert_eq!((report.pages, report.zero_pages), (5000, 20));
    assert!(fixture.launched(&layer, victim.ram.len) == victim.expected);
}

fn check(fixture: &Fixture, victim: &Victim, layer: &Path, report: &CaptureReport) {
    assert_eq!((report.pages, report.zero_pages), (367, 50));
    let data = 317 * PAGE;
    assert!((data..data + 5 * PAGE).contains(&report.bytes), "{report:?}");
    assert_eq!(report.bytes, std::fs::metadata(layer).unwrap().len());
    assert!(victim.memory() == victim.expected);
    assert!(fixture.launched(layer, victim.ram.len) == victim.expected);
}

#[test]
fn a_snapshot_is_the_memory_at_the_moment_it_was_taken() {
    let fixture = fixture(2048);
    let victim = Victim::start(&fixture.image, PLAN_OF_ALL);
    // All fits; some fits; nothing but one page fits.
    for capacity in [64 << 20, 100 * PAGE as usize, 1] {
        let pool = BufferPool::new(capacity, 1);
        let layer = fixture.folder.path().join(format!("layer-{capacity}"));
        let snapshot = Snapshot::take(&victim.ram, pool.get().unwrap(), &layer).unwrap();
        assert_eq!(snapshot.buffered(), (capacity as u64).next_multiple_of(PAGE).min(367 * PAGE));
        assert!(!layer.exists());
        // The guest goes on and changes its memory: the snapshot does not.
        let memory = OpenOptions::new().write(true).open(format!("/proc/{}/mem", victim.ram.pid)).unwrap();
        memory.write_all_at(&[77; 4096], victim.ram.start + 5 * PAGE).unwrap();
        let report = snapshot.write().unwrap();
        memory.write_all_at(&[200; 4096], victim.ram.start + 5 * PAGE).unwrap();
        check(&fixture, &victim, &layer, &report);
    }
}

#[test]
fn a_stopped_vm_is_captured_straight_to_the_file() {
    let fixture = fixture(2048);
    let victim = Victim::start(&fixture.image, PLAN_OF_ALL);
    let layer = fixture.folder.path().join("layer");
    let report = capture_stopped(&victim.ram, &layer).unwrap();
    check(&fixture, &victim, &layer, &report);
}

#[test]
fn an_unchanged_memory_is_an_empty_layer() {
    let fixture = fixture(64);
    let victim = Victim::start(&fixture.image, &[("read", 0, 64, 0)]);
    let layer = fixture.folder.path().join("layer");
    let report = capture_stopped(&victim.ram, &layer).unwrap();
    assert_eq!((report.pages, report.zero_pages), (0, 0));
    assert!(fixture.launched(&layer, victim.ram.len) == victim.expected);
}

#[test]
fn a_dead_vmm_and_a_missing_folder_are_errors_that_leave_nothing() {
    let fixture = fixture(64);
    let victim = Victim::start(&fixture.image, &[("fill", 0, 64, 1)]);
    let nowhere = fixture.folder.path().join("no/layer");
    assert!(matches!(capture_stopped(&victim.ram, &nowhere), Err(CaptureError::Write(_))));
    let layer = fixture.folder.path().join("layer");
    let ram = victim.ram;
    drop(victim);
    assert!(matches!(capture_stopped(&ram, &layer), Err(CaptureError::Scan(_))));
    // A range that is not mapped in a living process has nothing in it.
    let unmapped = Ram { pid: std::process::id(), start: 1 << 46, len: 1 << 20 };
    assert_eq!(scan(&unmapped).unwrap(), []);
    let mut left: Vec<_> = std::fs::read_dir(fixture.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["base", "image"]);
}
