//! Uids of VMM processes: each that lives has one of its own, whichever server started it.

use std::{
    collections::HashSet,
    fs,
    sync::{Arc, Mutex, PoisonError},
};

/// A range of uids.
#[derive(Debug)]
pub(super) struct Uids {
    first: u32,
    count: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Where in the range the search begins: a uid comes again only when all others have had their turn.
    next: u32,
    /// Those of processes that are starting: they do not show them yet.
    starting: HashSet<u32>,
}

/// A uid for a process that starts; kept for it until this goes away.
#[derive(Debug)]
pub(super) struct Claim {
    uid: u32,
    uids: Arc<Uids>,
}

impl Claim {
    pub(super) fn uid(&self) -> u32 {
        self.uid
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.uids.lock().starting.remove(&self.uid);
    }
}

impl Uids {
    pub(super) fn new(first: u32, count: u32) -> Self {
        let count = count.max(1);
        // Anywhere: servers that share a range do not meet, and one that starts again does not begin with what it used last.
        let next = (uuid::Uuid::new_v4().as_u128() % u128::from(count)) as u32;
        Self { first, count, state: Mutex::new(State { next, starting: HashSet::new() }) }
    }

    /// At most `most` uids that no process has; none when all are in use. It looks at every process of the host, which takes a
    /// while, however many are wanted.
    pub(super) fn claim(self: &Arc<Self>, most: usize) -> Vec<Claim> {
        let mut state = self.lock();
        let living = self.living();
        let begin = state.next;
        let places = (0..self.count)
            .map(|step| (u64::from(begin) + u64::from(step)) % u64::from(self.count))
            .map(|place| place as u32);
        let free = places.filter(|place| {
            let uid = self.first + place;
            !living.contains(&uid) && !state.starting.contains(&uid)
        });
        let free: Vec<u32> = free.take(most).collect();
        let claim = |place: &u32| {
            let uid = self.first + place;
            state.next = (place + 1) % self.count;
            state.starting.insert(uid);
            Claim { uid, uids: Arc::clone(self) }
        };
        free.iter().map(claim).collect()
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Uids of the range that processes have.
    fn living(&self) -> HashSet<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let processes = entries.filter(|e| e.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
        let statuses = processes.filter_map(|e| fs::read_to_string(e.path().join("status")).ok());
        statuses.flat_map(|status| uids_of(&status)).filter(|uid| self.contains(*uid)).collect()
    }

    fn contains(&self, uid: u32) -> bool {
        uid.checked_sub(self.first).is_some_and(|place| place < self.count)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Real, effective, saved and filesystem uid in `/proc/<pid>/status`.
fn uids_of(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|uid| uid.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_is_free_again_when_its_process_ended_but_comes_last() {
        let uids = Arc::new(Uids::new(1_900_100_000, 3));
        let mut claims = uids.claim(1);
        claims.extend(uids.claim(9));
        let distinct: HashSet<_> = claims.iter().map(Claim::uid).collect();
        assert_eq!(distinct.len(), 3);
        assert!(uids.claim(1).is_empty());
        let [first, second, third] = <[Claim; 3]>::try_from(claims).unwrap();
        let (oldest, newest) = (first.uid(), third.uid());
        drop((first, third));
        assert_eq!(uids.claim(1)[0].uid(), oldest);
        assert_eq!(uids.claim(1)[0].uid(), newest);
        drop(second);
    }

    #[test]
    fn a_uid_that_a_process_has_is_passed_over() {
        use std::os::unix::process::CommandExt;
        let uids = Arc::new(Uids::new(1_900_200_000, 2));
        let taken = uids.claim(1)[0].uid();
        let mut child =
            std::process::Command::new("/bin/sleep").arg("60").uid(taken).gid(taken).spawn().unwrap();
        let found: HashSet<_> = [(); 4].iter().map(|()| uids.claim(1)[0].uid()).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!found.contains(&taken), "{taken} in {found:?}");
    }
}
