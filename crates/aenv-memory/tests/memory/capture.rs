//! Captures that count from the mapping.

use std::{fs::OpenOptions, os::unix::fs::FileExt, path::Path};

use crate::victim::{Act, Fixture, PAGE, Victim, fixture};
use aenv_memory::{
    BufferPool, CaptureError, CaptureReport, Ram, Range, Since, Snapshot, capture_stopped, scan,
};

const FIRST: Since = Since::Mapping;

const ACTS: &[Act] = &[
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
    let victim = Victim::start(&fixture.image, ACTS);
    let pages: Vec<_> = scan(&victim.ram, FIRST)
        .unwrap()
        .ranges
        .iter()
        .map(|range| (range.offset / PAGE, range.len / PAGE))
        .collect();
    assert_eq!(pages, [(3, 1), (5, 300), (1000, 50), (1500, 5), (1510, 10), (2047, 1)]);
}

#[test]
fn more_regions_than_one_call_returns_are_all_found() {
    let fixture = fixture(10_000);
    // Every second page: 5000 regions.
    let acts: Vec<Act> = (0..5000).map(|i| ("fill", i * 2, 1, (i % 255) as u8)).collect();
    let victim = Victim::start(&fixture.image, &acts);
    let ranges = scan(&victim.ram, FIRST).unwrap().ranges;
    assert_eq!(ranges.len(), 5000);
    assert!(
        ranges
            .iter()
            .enumerate()
            .all(|(i, range)| *range == Range { offset: i as u64 * 2 * PAGE, len: PAGE })
    );
    let layer = fixture.folder.path().join("layer");
    let pool = BufferPool::new(64 << 20, 1);
    let snapshot = Snapshot::take(&victim.ram, pool.get().unwrap(), &layer, FIRST).unwrap();
    let report = snapshot.write().unwrap();
    assert_eq!((report.pages, report.zero_pages), (5000, 20));
    assert!(fixture.launched(&[layer], victim.ram.len) == victim.expected);
}

fn check(fixture: &Fixture, victim: &Victim, layer: &Path, report: &CaptureReport) {
    assert_eq!((report.pages, report.zero_pages), (367, 50));
    let data = 317 * PAGE;
    assert!((data..data + 5 * PAGE).contains(&report.bytes), "{report:?}");
    assert_eq!(report.bytes, std::fs::metadata(layer).unwrap().len());
    assert!(victim.memory() == victim.expected);
    assert!(fixture.launched(&[layer.to_owned()], victim.ram.len) == victim.expected);
}

#[test]
fn a_snapshot_is_the_memory_at_the_moment_it_was_taken() {
    let fixture = fixture(2048);
    let victim = Victim::start(&fixture.image, ACTS);
    // All fits; some fits; nothing but two pages fits.
    for capacity in [64 << 20, 100 * PAGE as usize, 1] {
        let pool = BufferPool::new(capacity, 1);
        let layer = fixture.folder.path().join(format!("layer-{capacity}"));
        let snapshot = Snapshot::take(&victim.ram, pool.get().unwrap(), &layer, FIRST).unwrap();
        assert_eq!(snapshot.buffered(), (capacity as u64).next_multiple_of(PAGE).clamp(2 * PAGE, 367 * PAGE));
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
    let victim = Victim::start(&fixture.image, ACTS);
    let layer = fixture.folder.path().join("layer");
    let report = capture_stopped(&victim.ram, &layer, FIRST).unwrap();
    check(&fixture, &victim, &layer, &report);
}

#[test]
fn an_unchanged_memory_is_an_empty_layer() {
    let fixture = fixture(64);
    let victim = Victim::start(&fixture.image, &[("read", 0, 64, 0)]);
    let layer = fixture.folder.path().join("layer");
    let report = capture_stopped(&victim.ram, &layer, FIRST).unwrap();
    assert_eq!((report.pages, report.zero_pages), (0, 0));
    assert!(fixture.launched(&[layer], victim.ram.len) == victim.expected);
}

#[test]
fn a_dead_vmm_and_a_missing_folder_are_errors_that_leave_nothing() {
    let fixture = fixture(64);
    let victim = Victim::start(&fixture.image, &[("fill", 0, 64, 1)]);
    let nowhere = fixture.folder.path().join("no/layer");
    assert!(matches!(capture_stopped(&victim.ram, &nowhere, FIRST), Err(CaptureError::Write(_))));
    let layer = fixture.folder.path().join("layer");
    let ram = victim.ram;
    drop(victim);
    assert!(matches!(capture_stopped(&ram, &layer, FIRST), Err(CaptureError::Scan(_))));
    // A range that is not mapped in a living process has nothing in it.
    let unmapped = Ram::whole(std::process::id(), 1 << 46, 1 << 20);
    assert_eq!(scan(&unmapped, FIRST).unwrap().ranges, []);
    let mut left: Vec<_> = std::fs::read_dir(fixture.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["base", "image"]);
}
