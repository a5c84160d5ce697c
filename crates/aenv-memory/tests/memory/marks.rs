//! Captures that count from the one before, of a process that has `libaenv_track.so` loaded.

use std::path::{Path, PathBuf};

use aenv_memory::{BufferPool, Since, Snapshot, capture_stopped, mark, scan};
use proptest::prelude::*;

use crate::victim::{Act, Fixture, PAGE, Victim, fixture};

/// A sandbox's captures, each upon the one before where that can be.
struct Captures {
    fixture: Fixture,
    victim: Victim,
    layers: Vec<PathBuf>,
    since: Since,
    taken: usize,
}

impl Captures {
    fn of(pages: u64, start: impl Fn(&Path, &[Act]) -> Victim, acts: &[Act]) -> Self {
        let fixture = fixture(pages);
        let victim = start(&fixture.image, acts);
        Self { fixture, victim, layers: Vec::new(), since: Since::Mapping, taken: 0 }
    }

    fn path(&mut self) -> PathBuf {
        self.taken += 1;
        self.fixture.folder.path().join(format!("layer-{}", self.taken))
    }

    /// Captures, lets it go on, and returns the number of pages.
    fn take(&mut self) -> u64 {
        let path = self.path();
        let pool = BufferPool::new(16 * PAGE as usize, 1);
        let snapshot = Snapshot::take(&self.victim.ram, pool.get().unwrap(), &path, self.since).unwrap();
        let report = snapshot.write().unwrap();
        if report.since == Since::Mapping {
            self.layers.clear();
        }
        self.layers.push(path);
        self.since = report.next;
        report.pages
    }

    /// What is launched from the last capture.
    fn launched(&self) -> Vec<u8> {
        self.fixture.launched(&self.layers, self.victim.ram.len)
    }

    fn check(&self) {
        assert!(self.victim.memory() == self.victim.expected, "the victim's memory");
        assert!(self.launched() == self.victim.expected, "what is launched from the capture");
    }
}

#[test]
fn a_capture_holds_what_was_written_since_the_one_before() {
    let mut captures = Captures::of(2048, Victim::tracked, &[("read", 0, 2000, 0), ("fill", 3, 500, 7)]);
    assert_eq!((captures.take(), captures.since), (500, Since::Mark));
    captures.check();
    assert_eq!(captures.take(), 0, "nothing was written");
    // Changed before, changed to zeros, changed for the first time, only read, and given back.
    captures.victim.act(&[
        ("fill", 10, 2, 9),
        ("fill", 40, 1, 0),
        ("fill", 1000, 5, 1),
        ("read", 0, 2048, 0),
    ]);
    assert_eq!(captures.take(), 8);
    captures.check();
    assert_eq!(captures.layers.len(), 3);
    captures.victim.act(&[("drop", 100, 50, 0), ("read", 100, 50, 0), ("fill", 120, 3, 77)]);
    assert_eq!(captures.take(), 3);
    let (launched, expected) = (captures.launched(), &captures.victim.expected);
    // Of a page that was given back, nobody expects anything until it is written to.
    let kept = |page: u64| !(100..150).contains(&page) || (120..123).contains(&page);
    for page in (0..2048).filter(|page| kept(*page)) {
        let range = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        assert!(launched[range.clone()] == expected[range], "page {page}");
    }
}

#[test]
fn pages_that_the_kernel_puts_elsewhere_keep_their_marks() {
    let mut captures = Captures::of(256, Victim::tracked, &[("fill", 0, 200, 3)]);
    captures.take();
    captures.victim.act(&[("fill", 10, 4, 5), ("swap", 0, 256, 0)]);
    assert_eq!(captures.take(), 4);
    captures.victim.act(&[("swap", 0, 256, 0), ("fill", 12, 1, 6), ("read", 0, 256, 0)]);
    assert_eq!(captures.take(), 1);
    captures.check();
}

#[test]
fn a_capture_before_an_end_leaves_the_marks() {
    let mut captures = Captures::of(256, Victim::tracked, &[("fill", 0, 200, 3)]);
    captures.take();
    captures.victim.act(&[("fill", 7, 2, 4)]);
    for _ in 0..2 {
        let path = captures.path();
        let report = capture_stopped(&captures.victim.ram, &path, Since::Mark).unwrap();
        assert_eq!((report.pages, report.since, report.next), (2, Since::Mark, Since::Mapping));
    }
    assert_eq!(captures.take(), 2);
    captures.check();
}

#[test]
fn marks_that_were_set_for_a_lost_capture_hide_nothing() {
    let mut captures = Captures::of(256, Victim::tracked, &[("fill", 0, 200, 3)]);
    captures.take();
    captures.victim.act(&[("fill", 7, 2, 4)]);
    assert_eq!(mark(&captures.victim.ram, Since::Mark).unwrap().ranges.len(), 1);
    captures.since = Since::Mapping;
    assert_eq!(captures.take(), 200);
    captures.check();
    assert_eq!(captures.layers.len(), 1);
    captures.victim.act(&[("fill", 8, 1, 5)]);
    assert_eq!(captures.take(), 1);
    captures.check();
}

#[test]
fn without_the_library_each_capture_counts_from_the_mapping() {
    let mut captures = Captures::of(256, Victim::start, &[("fill", 0, 200, 3)]);
    for round in 1..3 {
        captures.victim.act(&[("fill", 7, 1, round)]);
        captures.since = Since::Mark;
        assert_eq!((captures.take(), captures.since), (200, Since::Mapping));
        captures.check();
    }
    assert_eq!(scan(&captures.victim.ram, Since::Mark).unwrap().since, Since::Mapping);
}

#[test]
fn more_regions_than_one_call_tells_of_are_all_marked() {
    let every_second: Vec<Act> = (0..5000).map(|i| ("fill", i * 2, 1, (i % 255) as u8)).collect();
    let mut captures = Captures::of(10_000, Victim::tracked, &every_second);
    assert_eq!(captures.take(), 5000);
    assert_eq!(captures.take(), 0);
    let every_fourth: Vec<Act> = (0..2500).map(|i| ("fill", i * 4, 1, (i % 253) as u8 + 1)).collect();
    captures.victim.act(&every_second);
    captures.victim.act(&every_fourth);
    assert_eq!(captures.take(), 5000);
    captures.check();
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let verb = prop_oneof![4 => Just("fill"), 1 => Just("read"), 1 => Just("swap")];
    let act = (verb, 0u64..500, 1u64..12, any::<u8>());
    proptest::collection::vec(act, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// Any writes between any number of captures, some of which are lost or come before an end that does not happen.
    #[test]
    fn what_is_launched_from_a_capture_is_the_memory_of_that_moment(
        rounds in proptest::collection::vec((acts(), 0..5), 1..8)
    ) {
        let mut captures = Captures::of(512, Victim::tracked, &[]);
        for (acts, fate) in rounds {
            captures.victim.act(&acts);
            match fate {
                0 => {
                    mark(&captures.victim.ram, captures.since).unwrap();
                    captures.since = Since::Mapping;
                }
                1 => {
                    let path = captures.path();
                    capture_stopped(&captures.victim.ram, &path, captures.since).unwrap();
                }
                _ => {
                    captures.take();
                    prop_assert_eq!(captures.since, Since::Mark);
                    prop_assert!(captures.launched() == captures.victim.expected);
                }
            }
        }
    }
}
