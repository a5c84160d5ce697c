//! Admission: memory and slots are reserved before any work begins, so that a full node says so at once.
//!
//! A [`Permit`] is what a running sandbox holds; it goes back when the VMM is gone. Launches that were admitted take turns in
//! the order in which they came.

use std::{collections::HashMap, sync::Arc, time::Duration};

use aenv_types::TeamId;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{SandboxError, Settings, TeamLimits, TeamResource, sandbox::Record};

/// What a client is told to wait when the node is full.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// The same when a team has all that it may have: somebody of the team has to give something up.
const TEAM_RETRY_AFTER: Duration = Duration::from_secs(5);

/// The node's capacity.
pub(crate) struct Admission {
    limits: Limits,
    used: Mutex<Used>,
    turns: Arc<Semaphore>,
}

struct Limits {
    running: u32,
    memory_mib: u64,
}

#[derive(Default)]
struct Used {
    all: Load,
    teams: HashMap<TeamId, Load>,
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

/// A reserved place. Given back when dropped.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    /// `None` for a hidden sandbox, which counts for no team.
    team: Option<TeamId>,
    load: Load,
}

impl Admission {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            limits: Limits { running: settings.max_running, memory_mib: settings.memory_mib },
            used: Mutex::new(Used::default()),
            turns: Arc::new(Semaphore::new(settings.parallel_launches.max(1))),
        }
    }

    /// Reserves a place, or says at once what has run out: for the node, or for the team.
    pub(crate) fn reserve(self: &Arc<Self>, claim: &Claim) -> Result<Permit, SandboxError> {
        let load = claim.load();
        let mut used = self.used.lock();
        if !claim.hidden {
            let team = used.teams.get(&claim.team).copied().unwrap_or_default();
            within(claim.limits, team, load)?;
        }
        if used.all.running + load.running > self.limits.running {
            return Err(full(format!("all {} places are taken", self.limits.running)));
        }
        if used.all.memory_mib + load.memory_mib > self.limits.memory_mib {
            let left = self.limits.memory_mib.saturating_sub(used.all.memory_mib);
            return Err(full(format!(
                "{} MiB of memory are needed and {left} of {} MiB are free",
                load.memory_mib, self.limits.memory_mib
            )));
        }
        Ok(self.take(&mut used, claim))
    }

    /// Counts a sandbox that runs already, whatever the limits say.
    pub(crate) fn adopt(self: &Arc<Self>, claim: &Claim) -> Permit {
        let mut used = self.used.lock();
        self.take(&mut used, claim)
    }

    /// Waits for a turn to launch, first come, first served.
    pub(crate) async fn turn(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.turns).acquire_owned().await.expect("the semaphore of turns is never closed")
    }

    fn take(self: &Arc<Self>, used: &mut Used, claim: &Claim) -> Permit {
        let load = claim.load();
        used.all.add(load);
        let team = (!claim.hidden).then(|| claim.team.clone());
        if let Some(team) = &team {
            used.teams.entry(team.clone()).or_default().add(load);
        }
        Permit { admission: Arc::clone(self), team, load }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.admission.used.lock();
        used.all.remove(self.load);
        let Some(team) = &self.team else { return };
        if let Some(load) = used.teams.get_mut(team) {
            load.remove(self.load);
            if *load == Load::default() {
                used.teams.remove(team);
            }
        }
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

fn full(reason: String) -> SandboxError {
    SandboxError::Full { reason, retry_after: RETRY_AFTER }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_running: u32, memory_mib: u64) -> Arc<Admission> {
        Arc::new(Admission::new(&Settings {
            max_running,
            memory_mib,
            auto_resume_min_timeout: Duration::from_secs(300),
            disk_reserve_bytes: 0,
            parallel_launches: 1,
            cache_bytes: 0,
            blobs: crate::Blobs::Elsewhere,
        }))
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
        assert!(matches!(reserve(600, false), Err(SandboxError::Full { .. })));
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
            Err(SandboxError::TeamFull { what, .. }) => what,
            Err(other) => panic!("{other}"),
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
