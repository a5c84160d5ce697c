use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const RESERVE: u64 = 1000;
const IDLE: Duration = Duration::from_secs(60);
const ROUND: Duration = Duration::from_secs(2);

fn host(available_mib: u64) -> HostMemory {
    HostMemory { available_mib, stalled_pct: 0.0 }
}

/// One of 512 MiB that uses 100 and has 300 of page cache, idle for so many minutes.
fn guest(minutes: u64) -> Guest {
    Guest {
        id: SandboxId::random(),
        memory_mib: 512,
        asked_mib: 0,
        held_mib: 0,
        shrank: false,
        idle: Duration::from_secs(60 * minutes),
        left_mib: Some(412),
        anonymous_mib: Some(450),
    }
}

fn steps(available_mib: u64, standbys: usize, guests: &[Guest], calm_for: Duration) -> Vec<Step> {
    let host = host(available_mib);
    decide(&View { host, reserve_mib: RESERVE, standbys, guests, idle_from: IDLE, calm_for })
}

fn balloon(guest: &Guest, held_mib: u32) -> Step {
    Step::Balloon { id: guest.id.clone(), held_mib }
}

#[test]
fn levels_are_apart() {
    let level = |available_mib, stalled_pct| Level::of(HostMemory { available_mib, stalled_pct }, RESERVE);
    assert_eq!(level(999, 0.0), Level::Tight);
    assert_eq!(level(1000, 0.0), Level::Between);
    assert_eq!(level(1499, 0.0), Level::Between);
    assert_eq!(level(1500, 0.0), Level::Calm);
    // Waiting counts where there is little: a cgroup that is full says nothing of the host.
    assert_eq!(level(1999, 10.0), Level::Tight);
    assert_eq!(level(1999, 5.0), Level::Between);
    assert_eq!(level(2000, 99.0), Level::Calm);
    // Without a reserve nothing is ever done.
    assert_eq!(Level::of(HostMemory { available_mib: 0, stalled_pct: 99.0 }, 0), Level::Calm);
}

#[test]
fn standbys_go_first_and_one_at_a_time() {
    let guests = [guest(9)];
    assert_eq!(steps(10, 3, &guests, Duration::ZERO), [Step::Standby]);
    assert_eq!(steps(1200, 3, &guests, Duration::ZERO), []);
    assert_eq!(steps(10, 0, &guests, Duration::ZERO), [balloon(&guests[0], 128)]);
}

#[test]
fn the_longest_idle_gives_first_and_a_round_is_bounded() {
    let guests = [guest(2), guest(9), guest(5), guest(0)];
    let found = steps(10, 0, &guests, Duration::ZERO);
    assert_eq!(found, [balloon(&guests[1], 128), balloon(&guests[2], 128)]);
    // No more than is needed.
    assert_eq!(steps(990, 0, &guests, Duration::ZERO).len(), 2);
    let stalled = HostMemory { available_mib: 1220, stalled_pct: 50.0 };
    let view = View {
        host: stalled,
        reserve_mib: RESERVE,
        standbys: 0,
        guests: &guests,
        idle_from: IDLE,
        calm_for: Duration::ZERO,
    };
    assert_eq!(decide(&view), [balloon(&guests[1], 30)]);
}

#[test]
fn a_guest_keeps_what_it_uses_and_a_margin() {
    // It says what is left when its balloon was changed: until then nothing is asked of it.
    let unknown = Guest { left_mib: None, ..guest(9) };
    assert_eq!(steps(10, 0, &[unknown], Duration::ZERO), []);
    let nearly = Guest { asked_mib: 340, held_mib: 340, left_mib: Some(72), ..guest(9) };
    assert_eq!(steps(10, 0, &[nearly], Duration::ZERO), []);
    let slow = Guest { asked_mib: 256, held_mib: 156, left_mib: Some(256), ..guest(9) };
    assert_eq!(steps(10, 0, std::slice::from_ref(&slow), Duration::ZERO), [balloon(&slow, 256 + 92)]);
    let small = Guest { memory_mib: 200, left_mib: Some(190), anonymous_mib: Some(190), ..guest(9) };
    assert_eq!(
        steps(10, 0, std::slice::from_ref(&small), Duration::ZERO),
        [balloon(&small, 72)],
        "the floor"
    );
    // What it has free was never touched: there is nothing to be had.
    let fresh = Guest { anonymous_mib: Some(120), ..guest(9) };
    assert_eq!(steps(10, 0, &[fresh], Duration::ZERO), []);
    let refuses = Guest { anonymous_mib: None, ..guest(9) };
    assert_eq!(steps(10, 0, &[refuses], Duration::ZERO), []);
}

#[test]
fn who_needs_memory_has_it_at_once() {
    let held = Guest { asked_mib: 256, held_mib: 256, left_mib: Some(156), ..guest(9) };
    let busy = Guest { idle: Duration::ZERO, ..held.clone() };
    let short = Guest { left_mib: Some(SHORT_MIB - 1), ..held.clone() };
    let shrank = Guest { shrank: true, ..held.clone() };
    for wanting in [busy, short, shrank] {
        for available in [10, 1200, 9000] {
            assert_eq!(steps(available, 0, std::slice::from_ref(&wanting), CALM * 9), [balloon(&wanting, 0)]);
        }
    }
    assert_eq!(steps(1200, 0, std::slice::from_ref(&held), CALM * 9), []);
}

#[test]
fn the_rest_is_given_back_when_the_host_has_been_calm_and_stays_so() {
    let guests: Vec<_> =
        [5, 9, 7].map(|minutes| Guest { asked_mib: 200, held_mib: 200, ..guest(minutes) }).into();
    assert_eq!(steps(9000, 0, &guests, CALM - Duration::from_secs(1)), []);
    let found = steps(9000, 0, &guests, CALM);
    assert_eq!(found, [balloon(&guests[0], 0), balloon(&guests[2], 144)]);
    assert_eq!(steps(1600, 0, &guests, CALM), [balloon(&guests[0], 100)]);
    assert_eq!(steps(1510, 0, &guests, CALM), []);
}

/// A host that has what its guests do not hold, and guests that do at once what they are asked.
struct World {
    total: u64,
    guests: Vec<Guest>,
    used: Vec<u32>,
    calm: Duration,
}

impl World {
    fn available(&self) -> u64 {
        let taken = self.guests.iter().filter_map(|guest| guest.anonymous_mib).sum::<u64>();
        self.total.saturating_sub(taken)
    }

    /// All of a guest's free memory is page cache, and so the host has it not.
    fn settle(&mut self) {
        for (guest, used) in self.guests.iter_mut().zip(&self.used) {
            guest.left_mib = Some(guest.memory_mib.saturating_sub(used + guest.held_mib));
            guest.anonymous_mib = Some(u64::from(guest.memory_mib - guest.held_mib + 20));
        }
    }

    fn round(&mut self) -> Vec<Step> {
        self.settle();
        let host = host(self.available());
        let view = View {
            host,
            reserve_mib: RESERVE,
            standbys: 0,
            guests: &self.guests,
            idle_from: IDLE,
            calm_for: self.calm,
        };
        let steps = decide(&view);
        self.calm = match Level::of(host, RESERVE) {
            Level::Calm => self.calm + ROUND,
            _ => Duration::ZERO,
        };
        for step in &steps {
            let Step::Balloon { id, held_mib } = step else { panic!("there are no standbys") };
            let guest = self.guests.iter_mut().find(|guest| guest.id == *id).unwrap();
            (guest.asked_mib, guest.held_mib) = (*held_mib, *held_mib);
        }
        steps
    }
}

proptest! {
    #[test]
    fn it_comes_to_rest_and_takes_from_no_guest_what_it_uses(
        guests in prop::collection::vec((64_u32..1024, 0_u32..100, 0_u64..30), 1..12),
        total in 500_u64..16_000,
    ) {
        let used: Vec<_> = guests.iter().map(|(memory, part, _)| memory * 2 * part / 100).collect();
        let guests: Vec<_> = guests
            .iter()
            .map(|(memory, _, minutes)| Guest { memory_mib: memory * 2, ..guest(*minutes) })
            .collect();
        let mut world = World { total, guests, used, calm: Duration::ZERO };
        let mut asked: HashMap<SandboxId, u32> = HashMap::new();
        let mut quiet = 0;
        for _ in 0..1000 {
            let before = world.available();
            let steps = world.round();
            let (mut taken, mut back) = (0, 0);
            for step in &steps {
                let Step::Balloon { id, held_mib } = step else { unreachable!() };
                let was = asked.insert(id.clone(), *held_mib).unwrap_or(0);
                taken += held_mib.saturating_sub(was);
                back += was.saturating_sub(*held_mib);
            }
            prop_assert!(taken <= ROUND_MIB && (taken == 0 || back == 0));
            world.settle();
            for (guest, used) in world.guests.iter().zip(&world.used) {
                prop_assert!(guest.asked_mib == 0 || guest.left_mib.unwrap() >= MARGIN_MIB);
                prop_assert!(guest.asked_mib == 0 || guest.memory_mib - guest.asked_mib >= FLOOR_MIB.max(*used));
                prop_assert!(guest.idle >= IDLE || guest.asked_mib == 0);
            }
            if back > 0 {
                prop_assert!(world.available() >= calm_from(RESERVE) && before >= calm_from(RESERVE));
            }
            quiet = if steps.is_empty() { quiet + 1 } else { 0 };
            if ROUND * quiet > CALM {
                return Ok(());
            }
        }
        prop_assert!(false, "it did not come to rest");
    }
}
