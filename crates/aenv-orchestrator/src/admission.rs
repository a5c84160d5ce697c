//! Admission: memory and slots are reserved before any work begins, so that a full node says so at once.
//!
//! A [`Permit`] is what a running sandbox holds; it goes back when the VMM is gone. Launches that were admitted take turns in
//! the order in which they came, and what nobody waits for asks first whether there are any. A standby holds memory only, and
//! leaves some of it alone; its permit becomes a sandbox's when it is claimed.
//!
//! Where more memory may be promised than there is (`memory_overcommit`), the host must also have what a sandbox is likely to take: so
//! much of its memory as the ratio says. One that was let in a moment ago has not taken it yet, and counts as if it had.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_types::TeamId;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::{SandboxError, Settings, TeamLimits, TeamResource, sandbox::Record, seams::Host};

/// What a client is told to wait when the node is full.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// The same when a team has all that it may have: somebody of the team has to give something up.
const TEAM_RETRY_AFTER: Duration = Duration::from_secs(5);

/// One part in so many of the node's memory is left free by standbys, so that few creates have to wait for one to end.
const LEFT_BY_STANDBYS: u64 = 8;

/// How long it takes until what was let in shows in the host's memory.
const SETTLE: Duration = Duration::from_secs(10);

/// The node's capacity.
pub(crate) struct Admission {
    limits: Limits,
    host: Arc<dyn Host>,
    used: Mutex<Used>,
    turns: Arc<Semaphore>,
    parallel: usize,
    /// Launches that somebody waits for.
    awaited: watch::Sender<u32>,
    /// When the last of them ended.
    launched: Mutex<Option<Instant>>,
}

struct Limits {
    running: u32,
    /// That may be promised.
    memory_mib: u64,
    overcommit: f64,
    reserve_mib: u64,
}

#[derive(Default)]
struct Used {
    all: Load,
    teams: HashMap<TeamId, Load>,
    /// What was let in lately, by a number of its own, and what it is likely to take.
    fresh: BTreeMap<u64, (Instant, u64)>,
    next: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    running: u32,
    memory_mib: u64,
}

impl Load {
    fn add(&mut self, more: Self) {
        self.running += more.running;
        self.memory_mib += more.memory_mib;
    }

    fn remove(&mut self, less: Self) {
        self.running -= less.running;
        self.memory_mib -= less.memory_mib;
    }
}

/// Who asks for a place, and of what size.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub team: TeamId,
    pub memory_mib: u32,
    /// Counts for the node's memory, and for nothing else.
    pub hidden: bool,
    pub limits: TeamLimits,
}

impl Claim {
    /// Of a sandbox that is known.
    pub(crate) fn of(record: &Record) -> Self {
        Self {
            team: record.team.clone(),
            memory_mib: record.shape.memory_mib,
            hidden: record.hidden,
            limits: record.limits,
        }
    }

    fn load(&self) -> Load {
        Load { running: u32::from(!self.hidden), memory_mib: u64::from(self.memory_mib) }
    }
}

/// Why nothing was reserved.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The node lacks so much memory.
    Memory { missing_mib: u64, error: SandboxError },
    /// Something that giving up standbys does not help.
    Other(SandboxError),
}

impl From<SandboxError> for Refusal {
    fn from(error: SandboxError) -> Self {
        Self::Other(error)
    }
}

impl From<Refusal> for SandboxError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Memory { error, .. } | Refusal::Other(error) => error,
        }
    }
}

/// A turn to launch; the next one's when dropped.
pub(crate) struct Turn {
    _permit: OwnedSemaphorePermit,
    _awaited: Option<Awaited>,
}

/// A launch that somebody waits for, from the request on.
pub(crate) struct Awaited(Arc<Admission>);

/// A reserved place. Given back when dropped.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    /// `None` for a hidden sandbox and for a standby, which count for no team.
    team: Option<TeamId>,
    load: Load,
    /// Its number among what was let in lately.
    number: u64,
}

impl Admission {
    pub(crate) fn new(settings: &Settings, host: Arc<dyn Host>) -> Self {
        let parallel = settings.parallel_launches.max(1);
        Self {
            limits: Limits {
                running: settings.max_running,
                memory_mib: times(settings.memory_mib, settings.memory_overcommit),
                overcommit: settings.memory_overcommit,
                reserve_mib: settings.memory_reserve_mib,
            },
            host,
            used: Mutex::new(Used::default()),
            turns: Arc::new(Semaphore::new(parallel)),
            parallel,
            awaited: watch::Sender::new(0),
            launched: Mutex::default(),
        }
    }

    /// Reserves a place, or says at once what has run out: for the node, or for the team.
    pub(crate) fn reserve(self: &Arc<Self>, claim: &Claim) -> Result<Permit, Refusal> {
        let load = claim.load();
        let mut used = self.used.lock();
        self.place(&used, claim)?;
        if used.all.memory_mib + load.memory_mib > self.limits.memory_mib {
            let left = self.limits.memory_mib.saturating_sub(used.all.memory_mib);
            let error = full(format!(
                "{} MiB of memory are needed and {left} of {} MiB are free",
                load.memory_mib, self.limits.memory_mib
            ));
            let missing_mib = used.all.memory_mib + load.memory_mib - self.limits.memory_mib;
            return Err(Refusal::Memory { missing_mib, error });
        }
        let likely = self.likely_mib(load.memory_mib);
        if let Some(free) = self.free_mib(&mut used)
            && likely > free
        {
            let error = full(format!(
                "{likely} MiB of the host's memory are likely to be needed and {free} are free, {} that are kept aside",
                self.limits.reserve_mib
            ));
            return Err(Refusal::Memory { missing_mib: 0, error });
        }
        Ok(self.take(&mut used, claim))
    }

    /// Guest memory that is promised, in MiB.
    pub(crate) fn promised_mib(&self) -> u64 {
        self.used.lock().all.memory_mib
    }

    /// The most that is promised, in MiB.
    pub(crate) fn limit_mib(&self) -> u64 {
        self.limits.memory_mib
    }

    /// What a sandbox of this size is likely to take, if more is promised than there is.
    fn likely_mib(&self, memory_mib: u64) -> u64 {
        times(memory_mib, self.limits.overcommit.recip())
    }

    /// What the host has for sandboxes that are let in now. `None`: what is promised decides.
    fn free_mib(&self, used: &mut Used) -> Option<u64> {
        if self.limits.overcommit <= 1.0 {
            return None;
        }
        let available = self.host.memory()?.available_mib;
        used.fresh.retain(|_, (since, _)| since.elapsed() < SETTLE);
        let coming: u64 = used.fresh.values().map(|(_, likely)| likely).sum();
        Some(available.saturating_sub(self.limits.reserve_mib + coming))
    }

    /// Reserves memory for a standby, if enough is left then.
    pub(crate) fn reserve_ahead(self: &Arc<Self>, memory_mib: u32) -> Option<Permit> {
        let load = Load { running: 0, memory_mib: u64::from(memory_mib) };
        let mut used = self.used.lock();
        let usable = self.limits.memory_mib - self.limits.memory_mib / LEFT_BY_STANDBYS;
        if used.all.memory_mib + load.memory_mib > usable {
            return None;
        }
        // Beside one that somebody waits for.
        if self.free_mib(&mut used).is_some_and(|free| self.likely_mib(load.memory_mib) * 2 > free) {
            return None;
        }
        used.all.add(load);
        let number = used.note(self.likely_mib(load.memory_mib));
        Some(Permit { admission: Arc::clone(self), team: None, load, number })
    }

    /// Makes a standby's permit a sandbox's, or says what has run out, for the node or for the team, and leaves it as it is.
    pub(crate) fn promote(&self, permit: &mut Permit, claim: &Claim) -> Result<(), SandboxError> {
        let mut used = self.used.lock();
        self.place(&used, claim)?;
        used.all.remove(permit.load);
        permit.load = claim.load();
        permit.team = used.add(claim);
        Ok(())
    }

    /// Counts a sandbox that runs already, whatever the limits say.
    pub(crate) fn adopt(self: &Arc<Self>, claim: &Claim) -> Permit {
        let mut used = self.used.lock();
        self.take(&mut used, claim)
    }

    /// Waits for a turn to launch, first come, first served.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn {
        let awaited = self.awaited();
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let permit = turn.expect("the semaphore of turns is never closed");
        Turn { _permit: permit, _awaited: Some(awaited) }
    }

    /// A turn, if one is free.
    pub(crate) fn try_turn(self: &Arc<Self>) -> Option<Turn> {
        let permit = Arc::clone(&self.turns).try_acquire_owned().ok()?;
        Some(Turn { _permit: permit, _awaited: Some(self.awaited()) })
    }

    /// Somebody waits for a launch, until this is dropped.
    pub(crate) fn awaited(self: &Arc<Self>) -> Awaited {
        self.awaited.send_modify(|count| *count += 1);
        Awaited(Arc::clone(self))
    }

    /// A turn for what nobody waits for: only if no launch is under way or waits, and none has ended within `quiet`.
    pub(crate) fn idle_turn(self: &Arc<Self>, quiet: Duration) -> Option<Turn> {
        let busy = self.turns.available_permits() < self.parallel || *self.awaited.borrow() > 0;
        if busy || !self.quiet_in(quiet).is_zero() {
            return None;
        }
        let permit = Arc::clone(&self.turns).try_acquire_owned().ok()?;
        Some(Turn { _permit: permit, _awaited: None })
    }

    /// Returns when somebody waits for a launch.
    pub(crate) async fn busy(&self) {
        // The sender lives as long as `self`.
        let _ = self.awaited.subscribe().wait_for(|count| *count > 0).await;
    }

    /// Returns when nobody has waited for a launch for this long.
    pub(crate) async fn idle(&self, quiet: Duration) {
        let mut awaited = self.awaited.subscribe();
        loop {
            let _ = awaited.wait_for(|count| *count == 0).await;
            let rest = self.quiet_in(quiet);
            if rest.is_zero() {
                return;
            }
            tokio::time::sleep(rest).await;
        }
    }

    /// How long it takes until the last launch was so long ago.
    fn quiet_in(&self, quiet: Duration) -> Duration {
        let launched = *self.launched.lock();
        launched.map_or(Duration::ZERO, |at| quiet.saturating_sub(at.elapsed()))
    }

    /// Refuses what goes beyond the team's limits, or the node's places.
    fn place(&self, used: &Used, claim: &Claim) -> Result<(), SandboxError> {
        let load = claim.load();
        if !claim.hidden {
            let team = used.teams.get(&claim.team).copied().unwrap_or_default();
            within(claim.limits, team, load)?;
        }
        if used.all.running + load.running > self.limits.running {
            return Err(full(format!("all {} places are taken", self.limits.running)));
        }
        Ok(())
    }

    fn take(self: &Arc<Self>, used: &mut Used, claim: &Claim) -> Permit {
        let (team, load) = (used.add(claim), claim.load());
        let number = used.note(self.likely_mib(load.memory_mib));
        Permit { admission: Arc::clone(self), team, load, number }
    }
}

impl Used {
    /// Counts a sandbox; returns the team that it counts for.
    fn add(&mut self, claim: &Claim) -> Option<TeamId> {
        let load = claim.load();
        self.all.add(load);
        let team = (!claim.hidden).then(|| claim.team.clone());
        if let Some(team) = &team {
            self.teams.entry(team.clone()).or_default().add(load);
        }
        team
    }

    /// Counts it no more.
    fn remove(&mut self, team: Option<TeamId>, less: Load) {
        self.all.remove(less);
        let Some(team) = team else { return };
        if let Some(load) = self.teams.get_mut(&team) {
            load.remove(less);
            if *load == Load::default() {
                self.teams.remove(&team);
            }
        }
    }

    /// Something is let in.
    fn note(&mut self, likely_mib: u64) -> u64 {
        self.next += 1;
        self.fresh.insert(self.next, (Instant::now(), likely_mib));
        self.next
    }
}

impl Permit {
    /// What it was for stands, and is a sandbox's no more until it is promoted. It holds memory only, as a standby's does.
    pub(crate) fn demote(&mut self) {
        let mut used = self.admission.used.lock();
        used.remove(self.team.take(), self.load);
        self.load.running = 0;
        used.all.add(self.load);
    }

    /// Memory that it stands for.
    pub(crate) fn memory_mib(&self) -> u64 {
        self.load.memory_mib
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // Before the count: whoever sees that nobody waits must see since when.
        *self.0.launched.lock() = Some(Instant::now());
        self.0.awaited.send_modify(|count| *count -= 1);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.admission.used.lock();
        used.remove(self.team.take(), self.load);
        used.fresh.remove(&self.number);
    }
}

/// Refuses what goes beyond a team's limits.
fn within(limits: TeamLimits, team: Load, more: Load) -> Result<(), SandboxError> {
    let beyond = |what, limit: u64, used: u64| SandboxError::TeamFull {
        what,
        limit,
        used,
        retry_after: TEAM_RETRY_AFTER,
    };
    match (limits.running, limits.memory_mib) {
        (Some(limit), _) if team.running + more.running > limit => {
            Err(beyond(TeamResource::Running, u64::from(limit), u64::from(team.running)))
        }
        (_, Some(limit)) if team.memory_mib + more.memory_mib > limit => {
            Err(beyond(TeamResource::Memory, limit, team.memory_mib))
        }
        _ => Ok(()),
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "MiB of a machine's memory fit a float, and none is negative"
)]
fn times(memory_mib: u64, ratio: f64) -> u64 {
    (memory_mib as f64 * ratio).ceil() as u64
}

fn full(reason: String) -> SandboxError {
    SandboxError::Full { reason, retry_after: RETRY_AFTER }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::pressure::HostMemory;

    /// A host that has so many MiB available.
    struct Has(AtomicU64);

    impl Host for Has {
        fn memory(&self) -> Option<HostMemory> {
            Some(HostMemory { available_mib: self.0.load(Ordering::Relaxed), stalled_pct: 0.0 })
        }
        fn anonymous_mib(&self, _: i32) -> Option<u64> {
            None
        }
    }

    fn limited(max_running: u32, memory_mib: u64) -> Admission {
        Admission::new(&settings(max_running, memory_mib, 1.0), Arc::new(Has(AtomicU64::new(0))))
    }

    fn settings(max_running: u32, memory_mib: u64, memory_overcommit: f64) -> Settings {
        Settings {
            max_running,
            memory_mib,
            memory_overcommit,
            memory_reserve_mib: 100,
            memory_idle: Duration::from_secs(60),
            stand_after_deadline: Duration::ZERO,
            share_memory_across_teams: true,
            auto_resume_min_timeout: Duration::from_secs(300),
            disk_reserve_bytes: 0,
            parallel_launches: 1,
            cache_bytes: 0,
            blobs: crate::Blobs::Elsewhere,
            standby: crate::StandbySettings::OFF,
        }
    }

    fn admission(max_running: u32, memory_mib: u64) -> Arc<Admission> {
        Arc::new(limited(max_running, memory_mib))
    }

    fn claim(team: &str, memory_mib: u32, limits: TeamLimits) -> Claim {
        Claim { team: team.parse().unwrap(), memory_mib, hidden: false, limits }
    }

    #[test]
    fn what_is_reserved_comes_back() {
        let node = admission(2, 1000);
        let reserve = |memory_mib, hidden| {
            node.reserve(&Claim { hidden, ..claim("red", memory_mib, TeamLimits::default()) })
        };
        let first = reserve(600, false).unwrap();
        let full = reserve(600, false).map(drop).unwrap_err();
        assert!(matches!(full, Refusal::Memory { missing_mib: 200, error: SandboxError::Full { .. } }));
        let second = reserve(400, false).unwrap();
        assert!(reserve(0, false).is_err(), "a third place was given");
        assert!(reserve(0, true).is_ok(), "hidden sandboxes take no place");
        drop(first);
        assert!(reserve(600, false).is_ok());
        drop(second);
        assert_eq!(node.used.lock().all, Load::default());
        assert!(node.used.lock().teams.is_empty());
    }

    #[test]
    fn adopted_sandboxes_count_beyond_the_limit() {
        let node = admission(1, 100);
        let large = claim("red", 100, TeamLimits::default());
        let held = [node.adopt(&large), node.adopt(&large)];
        assert!(node.reserve(&claim("red", 1, TeamLimits::default())).is_err());
        drop(held);
        assert!(node.reserve(&large).is_ok());
    }

    #[test]
    fn a_teams_limits_are_its_own() {
        let node = admission(100, 2000);
        let limits = TeamLimits { running: Some(3), memory_mib: Some(500) };
        let refused = |claim: &Claim| match node.reserve(claim) {
            Err(Refusal::Other(SandboxError::TeamFull { what, .. })) => what,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("a place was given"),
        };
        let large = node.reserve(&claim("red", 400, limits)).unwrap();
        assert_eq!(refused(&claim("red", 200, limits)), TeamResource::Memory);
        let small: Vec<_> = (0..2).map(|_| node.reserve(&claim("red", 50, limits)).unwrap()).collect();
        assert_eq!(refused(&claim("red", 0, limits)), TeamResource::Running);
        let hidden = Claim { hidden: true, ..claim("red", 100, limits) };
        let build = node.reserve(&hidden).unwrap();
        let other = node.reserve(&claim("blue", 400, limits)).unwrap();
        // Which key asks decides: one without limits sees only the node's.
        assert!(node.reserve(&claim("red", 10, TeamLimits::default())).is_ok());
        drop((large, small, build, other));
        assert!(node.used.lock().teams.is_empty());
    }

    #[test]
    fn a_standby_holds_memory_until_it_is_claimed() {
        let node = admission(2, 800);
        let limits = TeamLimits { running: Some(1), memory_mib: None };
        let mut standbys = [node.reserve_ahead(300).unwrap(), node.reserve_ahead(300).unwrap()];
        assert!(node.reserve_ahead(101).is_none(), "an eighth stays free");
        let missing = node.reserve(&claim("red", 400, limits)).map(drop).unwrap_err();
        assert!(matches!(missing, Refusal::Memory { missing_mib: 200, .. }));
        let [first, second] = &mut standbys;
        node.promote(first, &claim("red", 300, limits)).unwrap();
        let refused = node.promote(second, &claim("red", 300, limits)).unwrap_err();
        assert!(matches!(refused, SandboxError::TeamFull { what: TeamResource::Running, .. }));
        let third = node.reserve(&claim("blue", 200, limits)).map_err(SandboxError::from).unwrap();
        let refused = node.promote(second, &claim("green", 300, limits)).unwrap_err();
        assert!(matches!(refused, SandboxError::Full { .. }), "a place was given beyond the limit");
        assert_eq!(node.used.lock().all, Load { running: 2, memory_mib: 800 });
        // And again when its sandbox is paused.
        first.demote();
        assert_eq!(node.used.lock().all, Load { running: 1, memory_mib: 800 });
        node.promote(first, &claim("red", 300, limits)).unwrap();
        assert_eq!(node.used.lock().all, Load { running: 2, memory_mib: 800 });
        first.demote();
        drop((standbys, third));
        assert_eq!(node.used.lock().all, Load::default());
        assert!(node.used.lock().teams.is_empty());
    }

    #[test]
    fn more_is_promised_than_there_is_as_long_as_the_host_has_what_is_likely() {
        let host = Arc::new(Has(AtomicU64::new(700)));
        let node = Arc::new(Admission::new(&settings(99, 1000, 2.0), Arc::clone(&host) as _));
        let reserve = |memory_mib| node.reserve(&claim("red", memory_mib, TeamLimits::default()));
        assert_eq!(node.limit_mib(), 2000);
        // 600 are free beside the reserve. Each of these is likely to take 200, and has not taken it yet.
        let mut held: Vec<_> = (0..3).map(|_| reserve(400).unwrap()).collect();
        let refused = reserve(400).map(drop).unwrap_err();
        let Refusal::Memory { missing_mib: 0, error: SandboxError::Full { reason, .. } } = refused else {
            panic!("{refused:?}");
        };
        assert!(reason.contains("200 MiB of the host's memory") && reason.contains("0 are free"), "{reason}");
        assert!(node.reserve_ahead(2).is_none(), "a standby goes after sandboxes");
        // They settle, and have taken less.
        node.used.lock().fresh.clear();
        host.0.store(700 - 3 * 50, Ordering::Relaxed);
        held.push(reserve(400).unwrap());
        assert_eq!(node.promised_mib(), 1600);
        drop(held.pop());
        held.push(reserve(400).unwrap());
        // What goes at once does not count as coming, and what is promised has its limit.
        host.0.store(99_999, Ordering::Relaxed);
        assert!(reserve(402).is_err() && reserve(400).is_ok());
        drop(held);
        let used = node.used.lock();
        assert!(used.all == Load::default() && used.fresh.is_empty());
    }

    #[tokio::test]
    async fn an_idle_turn_is_given_only_when_nobody_launches() {
        let node =
            Arc::new(Admission { parallel: 2, turns: Arc::new(Semaphore::new(2)), ..limited(9, 1000) });
        let turn = node.turn().await;
        assert!(node.idle_turn(Duration::ZERO).is_none());
        drop(turn);
        assert!(node.idle_turn(Duration::from_secs(60)).is_none());
        let awaited = node.awaited();
        assert!(node.idle_turn(Duration::ZERO).is_none(), "one that needs no turn");
        drop(awaited);
        let idle = node.idle_turn(Duration::ZERO).unwrap();
        assert!(node.idle_turn(Duration::ZERO).is_none());
        assert!(node.try_turn().is_some());
        drop(idle);
    }

    #[tokio::test]
    async fn what_nobody_waits_for_knows_when_somebody_does() {
        let node = admission(9, 1000);
        let soon = Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, node.busy()).await.is_err());
        node.idle(Duration::from_secs(60)).await;
        let awaited = [node.awaited(), node.awaited()];
        node.busy().await;
        assert!(tokio::time::timeout(soon, node.idle(Duration::ZERO)).await.is_err());
        let [first, second] = awaited;
        drop(first);
        assert!(tokio::time::timeout(soon, node.idle(Duration::ZERO)).await.is_err());
        let ended = Instant::now();
        drop(second);
        node.idle(soon).await;
        assert!(ended.elapsed() >= soon);
    }

    #[tokio::test]
    async fn turns_are_fair() {
        let node = admission(9, 1000);
        let held = node.turn().await;
        let (order, mut came) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..5 {
            let (node, order) = (Arc::clone(&node), order.clone());
            tokio::spawn(async move {
                let _turn = node.turn().await;
                order.send(number).unwrap();
            });
            tokio::task::yield_now().await;
        }
        drop(held);
        for number in 0..5 {
            assert_eq!(came.recv().await, Some(number));
        }
    }
}
