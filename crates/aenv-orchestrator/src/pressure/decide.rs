//! What is to be done about the host's memory: a pure function of what was seen.
//!
//! ```text
//!   available    0 ........ reserve ........ 1.5 x reserve ........ all
//!                  tight        |    between       |      calm
//! ```
//!
//! *Tight*: standbys go, one in a round; when there are none, balloons of idle guests grow, the longest idle first. *Between*: nothing
//! changes. *Calm* for a while: balloons shrink, the shortest idle first, by no more than leaves the host calm should the guests use
//! all of it. In whatever state the host is, a guest that is busy or short has its memory back at once.

use std::time::Duration;

use aenv_types::SandboxId;

use super::HostMemory;

/// What a guest is left beyond what it uses.
const MARGIN_MIB: u32 = 64;
/// A guest that has less than this is short.
const SHORT_MIB: u32 = 32;
/// No guest is left with less, nor with less than a quarter of its memory.
const FLOOR_MIB: u32 = 128;
/// Smaller changes are not worth a guest's work.
const LEAST_MIB: u32 = 16;
/// The most that one guest gives back in a round.
const GUEST_MIB: u32 = 128;
/// The most that is taken, and that is given back, in a round.
const ROUND_MIB: u32 = 256;
/// What a VMM has of anonymous memory beside its guest's, translated code included.
const VMM_MIB: u32 = 32;
/// How long the host is calm before guests have memory back that they did not miss.
const CALM: Duration = Duration::from_secs(30);
/// Percent of time in which something waited for memory: from here on the host is short, if it has little.
const STALLED_PCT: f64 = 10.0;
/// And below this it may be calm.
const SMOOTH_PCT: f64 = 1.0;

/// How the host is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// It has more than enough.
    #[default]
    Calm,
    /// Enough, and not more.
    Between,
    /// Too little.
    Tight,
}

impl Level {
    /// With a reserve that is to stay available.
    pub(crate) fn of(host: HostMemory, reserve_mib: u64) -> Self {
        let HostMemory { available_mib, stalled_pct } = host;
        if available_mib < reserve_mib || (stalled_pct >= STALLED_PCT && available_mib < reserve_mib * 2) {
            return Self::Tight;
        }
        if available_mib >= calm_from(reserve_mib)
            && (stalled_pct < SMOOTH_PCT || available_mib >= reserve_mib * 2)
        {
            return Self::Calm;
        }
        Self::Between
    }
}

fn calm_from(reserve_mib: u64) -> u64 {
    reserve_mib + reserve_mib / 2
}

/// A running guest.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub id: SandboxId,
    pub memory_mib: u32,
    /// What its balloon was asked to hold.
    pub asked_mib: u32,
    /// What it holds.
    pub held_mib: u32,
    /// It took some of that back by itself.
    pub shrank: bool,
    /// Since when there was no traffic, and little work.
    pub idle: Duration,
    /// What is free in it or page cache, if it said so after its balloon was changed the last time.
    pub left_mib: Option<u32>,
    /// Anonymous memory of its VMM, if its balloon may be used at all.
    pub anonymous_mib: Option<u64>,
}

impl Guest {
    fn is_wanting(&self, idle_from: Duration) -> bool {
        self.idle < idle_from || self.shrank || self.left_mib.is_some_and(|left| left < SHORT_MIB)
    }

    /// What it can give back now.
    fn gives(&self, idle_from: Duration) -> u32 {
        let (Some(left), Some(anonymous)) = (self.left_mib, self.anonymous_mib) else { return 0 };
        if self.is_wanting(idle_from) {
            return 0;
        }
        let used = self.memory_mib.saturating_sub(self.held_mib + left);
        // What was never touched, or was reported free, has gone back already.
        if anonymous < u64::from(used + VMM_MIB) {
            return 0;
        }
        let floor = FLOOR_MIB.max(self.memory_mib / 4);
        let room = self.memory_mib.saturating_sub(self.asked_mib + floor);
        // It may not have done yet what it was asked.
        let pending = self.asked_mib.saturating_sub(self.held_mib);
        let spare = left.saturating_sub(MARGIN_MIB + pending);
        let gives = spare.min(room).min(GUEST_MIB);
        if gives < LEAST_MIB { 0 } else { gives }
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// One standby goes, or the VMM of a paused sandbox that stands.
    Standby,
    /// A guest's balloon is to hold so much.
    Balloon { id: SandboxId, held_mib: u32 },
}

/// What is seen in a round.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub host: HostMemory,
    pub reserve_mib: u64,
    pub standbys: usize,
    pub guests: &'a [Guest],
    /// A guest without traffic for so long is idle.
    pub idle_from: Duration,
    /// How long the host has been calm.
    pub calm_for: Duration,
}

/// Decides.
pub(crate) fn decide(view: &View<'_>) -> Vec<Step> {
    let wanting = view.guests.iter().filter(|guest| guest.asked_mib > 0 && guest.is_wanting(view.idle_from));
    let mut steps: Vec<_> =
        wanting.map(|guest| Step::Balloon { id: guest.id.clone(), held_mib: 0 }).collect();
    match Level::of(view.host, view.reserve_mib) {
        Level::Tight if view.standbys > 0 => steps.push(Step::Standby),
        Level::Tight => steps.extend(take(view)),
        Level::Calm if view.calm_for >= CALM => steps.extend(give_back(view)),
        Level::Calm | Level::Between => {}
    }
    steps
}

/// As much as brings the host out of need.
fn take(view: &View<'_>) -> Vec<Step> {
    let need = (view.reserve_mib + view.reserve_mib / 4).saturating_sub(view.host.available_mib);
    let need = u32::try_from(need).unwrap_or(u32::MAX);
    let mut left = need.clamp(LEAST_MIB, ROUND_MIB);
    let mut steps = Vec::new();
    for guest in by_idleness(view.guests).into_iter().rev() {
        let gives = guest.gives(view.idle_from).min(left);
        if gives >= LEAST_MIB {
            steps.push(Step::Balloon { id: guest.id.clone(), held_mib: guest.asked_mib + gives });
            left -= gives;
        }
    }
    steps
}

/// As much as leaves the host calm.
fn give_back(view: &View<'_>) -> Vec<Step> {
    let spare = view.host.available_mib.saturating_sub(calm_from(view.reserve_mib));
    let mut left = u32::try_from(spare).unwrap_or(u32::MAX).min(ROUND_MIB);
    let mut steps = Vec::new();
    for guest in by_idleness(view.guests) {
        let back = guest.asked_mib.min(left);
        // The last bit of a balloon goes, however small.
        if guest.is_wanting(view.idle_from) || back == 0 || (back < LEAST_MIB && back < guest.asked_mib) {
            continue;
        }
        steps.push(Step::Balloon { id: guest.id.clone(), held_mib: guest.asked_mib - back });
        left -= back;
    }
    steps
}

/// The shortest idle first.
fn by_idleness(guests: &[Guest]) -> Vec<&Guest> {
    let mut sorted: Vec<_> = guests.iter().collect();
    sorted.sort_by_key(|guest| guest.idle);
    sorted
}

#[cfg(test)]
mod tests;
