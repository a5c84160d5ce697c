//! The pool of slots.
//!
//! Making a namespace takes tens of milliseconds, and much more on a busy host, so that some are kept ready. How many follows the demand:
//! `low_watermark` when little happens; each time the pool is found empty the target doubles, up to `high_watermark`, and it falls
//! back after a quiet minute. Requests that find the pool empty are served in order.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use aenv_types::EgressPolicy;
use async_trait::async_trait;
use tokio::sync::{Notify, oneshot};

use crate::{
    Network, NetworkConfig, NetworkError, Slot, SlotRecord, host,
    netns::{self, Netns, in_thread, kernel},
    slot_ns::NamespaceSlot,
    wiring::{self, BuildError},
    workers::Workers,
};

/// Namespaces that are made or removed at the same time: more only wait for each other in the kernel.
const PARALLEL: usize = 4;
/// An acquire that finds the pool empty waits this long at most.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(60);
/// An adoption waits this long at most for a build that tries its number.
const ADOPT_LIMIT: Duration = Duration::from_secs(10);
/// The target falls back when the pool was not found empty for this long.
const QUIET: Duration = Duration::from_secs(60);
/// Pause after a slot could not be made and nobody waited for it.
const RETRY: Duration = Duration::from_secs(2);

/// The node's slots: [`Network`] with real namespaces.
///
/// Dropping it leaves everything in place, as a killed server does: adopt or sweep it with the next one.
pub struct Slots(Arc<Pool>);

struct Pool {
    config: NetworkConfig,
    host: Netns,
    workers: Workers,
    state: Mutex<State>,
    /// Told after each build and removal.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Made and free.
    ready: VecDeque<Arc<NamespaceSlot>>,
    /// Taken or adopted.
    live: BTreeSet<u32>,
    building: BTreeSet<u32>,
    removing: BTreeSet<u32>,
    /// Numbers whose name or addresses somebody else uses.
    taken: BTreeSet<u32>,
    waiting: VecDeque<oneshot::Sender<Loan>>,
    target: u32,
    last_miss: Option<Instant>,
    /// A failed build is repeated after a pause only.
    pausing: bool,
    closed: bool,
}

/// A slot, or why there is none, on its way to who waits for it. If that one has gone meanwhile, the slot goes back.
struct Loan {
    pool: Arc<Pool>,
    slot: Option<Result<Arc<NamespaceSlot>, NetworkError>>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(Ok(slot)) = self.slot.take() {
            let mut state = self.pool.state();
            state.live.remove(&slot.index());
            state.ready.push_front(slot);
        }
    }
}

impl Slots {
    /// Prepares the host and begins to fill the pool. Slots of an earlier run stay until they are adopted or swept.
    pub async fn open(config: NetworkConfig) -> Result<Self, NetworkError> {
        let host = Netns::current().map_err(kernel("opening the host's network namespace"))?;
        let workers = Workers::start(&host).map_err(kernel("starting the network threads"))?;
        let prepared = config.clone();
        let found = in_thread("preparing the host's network", move || {
            host::prepare(&prepared)?;
            existing(&prepared)
        });
        // What an earlier run left may be adopted: the pool must not even try those numbers.
        let taken = found.await?;
        let state = Mutex::new(State { target: config.low_watermark, taken, ..State::default() });
        let pool = Arc::new(Pool { config, host, workers, state, changed: Notify::new() });
        pool.replenish();
        Ok(Self(pool))
    }

    /// Resolvers of guests whose policy names none.
    pub fn resolvers(&self) -> &[std::net::IpAddr] {
        &self.0.config.dns_servers
    }

    /// Slots that are ready now.
    pub fn ready(&self) -> usize {
        self.0.state().ready.len()
    }

    /// Slots that are taken now, and how many can be.
    pub fn usage(&self) -> (usize, u32) {
        (self.0.state().live.len(), self.0.config.capacity())
    }

    /// Every range that no policy opens.
    pub fn denied(&self) -> Vec<crate::Cidr> {
        self.0.config.denied()
    }

    /// As [`Network::acquire`].
    pub async fn take(&self) -> Result<Arc<NamespaceSlot>, NetworkError> {
        let pool = &self.0;
        let waiting = {
            let mut state = pool.state();
            if state.closed {
                return Err(closed());
            }
            if let Some(slot) = state.ready.pop_front() {
                state.live.insert(slot.index());
                drop(state);
                pool.replenish();
                return Ok(slot);
            }
            let limit = pool.config.capacity();
            state.waiting.retain(|waiting| !waiting.is_closed());
            if state.live.len() + state.waiting.len() >= limit as usize {
                return Err(NetworkError::Exhausted { limit });
            }
            state.target = (state.target * 2).clamp(1, pool.config.high_watermark.max(1));
            state.last_miss = Some(Instant::now());
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back(sender);
            receiver
        };
        pool.replenish();
        let step = "waiting for a network slot";
        let late =
            |_| NetworkError::Kernel { step, message: format!("none after {} s", ACQUIRE_LIMIT.as_secs()) };
        let mut loan =
            tokio::time::timeout(ACQUIRE_LIMIT, waiting).await.map_err(late)?.map_err(|_| closed())?;
        match loan.slot.take() {
            Some(result) => result,
            None => Err(closed()),
        }
    }

    /// As [`Network::adopt`].
    pub async fn take_over(&self, record: &SlotRecord) -> Result<Arc<NamespaceSlot>, NetworkError> {
        let pool = &self.0;
        let index = record.index;
        let gone = |message: String| NetworkError::Gone { index, message };
        let name = pool.config.tag.slot_name(index);
        let path = netns::path(&name);
        if record.netns != path || index >= pool.config.capacity() {
            return Err(gone(format!(
                "{} belongs to another instance or configuration",
                record.netns.display()
            )));
        }
        // A build that tries this number ends soon, because the number is taken.
        let deadline = tokio::time::Instant::now() + ADOPT_LIMIT;
        loop {
            let changed = pool.changed.notified();
            if !pool.state().building.contains(&index)
                || tokio::time::timeout_at(deadline, changed).await.is_err()
            {
                break;
            }
        }
        {
            let mut state = pool.state();
            let busy = state.building.contains(&index) || state.removing.contains(&index);
            if busy || state.ready.iter().any(|slot| slot.index() == index) || !state.live.insert(index) {
                return Err(gone("it is in use already".to_owned()));
            }
        }
        let checked = async {
            let netns = Netns::open(&path).map_err(|error| gone(format!("{}: {error}", path.display())))?;
            let check = netns.run("checking a slot", wiring::check_inside).await;
            check.map_err(|error| gone(error.to_string()))?;
            Ok(netns)
        };
        match checked.await {
            Ok(netns) => Ok(Arc::new(NamespaceSlot::new(index, path, netns, pool.workers.clone(), None))),
            Err(error) => {
                pool.state().live.remove(&index);
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Network for Slots {
    async fn acquire(&self) -> Result<Arc<dyn Slot>, NetworkError> {
        Ok(self.take().await?)
    }

    async fn adopt(&self, record: &SlotRecord) -> Result<Arc<dyn Slot>, NetworkError> {
        Ok(self.take_over(record).await?)
    }

    async fn release(&self, slot: Arc<dyn Slot>) {
        let index = slot.record().index;
        {
            let mut state = self.0.state();
            if !state.live.remove(&index) {
                tracing::warn!(index, "a network slot was given back that was not taken");
                return;
            }
            state.removing.insert(index);
        }
        let pool = Arc::clone(&self.0);
        tokio::spawn(async move {
            drop(slot);
            pool.remove(index).await;
        });
    }

    async fn sweep(&self) -> Result<u32, NetworkError> {
        let pool = &self.0;
        let config = pool.config.clone();
        let found = in_thread("listing network slots", move || existing(&config)).await?;
        let leftovers: Vec<u32> = {
            let mut state = pool.state();
            let known = |index: &u32| {
                state.live.contains(index)
                    || state.building.contains(index)
                    || state.removing.contains(index)
                    || state.ready.iter().any(|slot| slot.index() == *index)
            };
            let leftovers: Vec<u32> = found.into_iter().filter(|index| !known(index)).collect();
            state.removing.extend(&leftovers);
            leftovers
        };
        let mut removed = 0;
        for index in leftovers {
            removed += u32::from(pool.remove(index).await);
        }
        pool.state().taken.clear();
        pool.replenish();
        Ok(removed)
    }

    async fn close(&self) {
        let pool = &self.0;
        {
            let mut state = pool.state();
            state.closed = true;
            state.waiting.clear();
        }
        // Builds and removals under way end by themselves, each within its own limit.
        loop {
            let changed = pool.changed.notified();
            {
                let mut state = pool.state();
                if state.building.is_empty() && state.removing.is_empty() {
                    state.ready.clear();
                    state.live.clear();
                    break;
                }
            }
            changed.await;
        }
        let swept = self.sweep().await;
        let config = pool.config.clone();
        let cleared = in_thread("removing the host's rules", move || host::clear(&config)).await;
        if let Err(error) = swept.and(cleared) {
            tracing::warn!(%error, "the network could not be removed entirely");
        }
    }
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Starts as many builds as are wanted and allowed now.
    fn replenish(self: &Arc<Self>) {
        let mut state = self.state();
        let capacity = self.config.capacity() as usize;
        if state.last_miss.is_some_and(|miss| miss.elapsed() > QUIET) {
            state.target = self.config.low_watermark;
            state.last_miss = None;
        }
        loop {
            let made = state.ready.len() + state.building.len();
            let wanted = state.waiting.len() + state.target as usize;
            let paused = state.pausing && state.waiting.is_empty();
            let full = made + state.live.len() >= capacity || state.building.len() >= PARALLEL;
            if state.closed || paused || full || made >= wanted {
                return;
            }
            let Some(index) = state.free_index(self.config.capacity()) else { return };
            state.building.insert(index);
            let pool = Arc::clone(self);
            tokio::spawn(async move { pool.build(index).await });
        }
    }

    async fn build(self: Arc<Self>, index: u32) {
        let (config, host) = (self.config.clone(), self.host.clone());
        let built = in_thread("making a network slot", move || match wiring::build(&config, index, &host) {
            Ok(netns) => Ok(Some(netns)),
            Err(BuildError::Taken) => Ok(None),
            Err(BuildError::Failed(error)) => Err(error),
        });
        let built = built.await;
        let mut state = self.state();
        state.building.remove(&index);
        match built {
            Ok(Some(netns)) => {
                let path = netns::path(&self.config.tag.slot_name(index));
                let policy = Some(EgressPolicy::default());
                let slot = Arc::new(NamespaceSlot::new(index, path, netns, self.workers.clone(), policy));
                self.hand_over(&mut state, slot);
            }
            Ok(None) => {
                state.taken.insert(index);
            }
            Err(error) => {
                if let Some(waiting) = state.waiting.pop_front() {
                    // Whoever waited may have gone: nothing is lost with an error.
                    drop(waiting.send(Loan { pool: Arc::clone(&self), slot: Some(Err(error)) }));
                } else if !state.pausing {
                    tracing::warn!(%error, "no network slot could be made ahead");
                    state.pausing = true;
                    let pool = Arc::clone(&self);
                    tokio::spawn(async move {
                        tokio::time::sleep(RETRY).await;
                        pool.state().pausing = false;
                        pool.replenish();
                    });
                }
            }
        }
        drop(state);
        self.changed.notify_waiters();
        self.replenish();
    }

    /// Gives a fresh slot to the first who still waits, or keeps it ready.
    fn hand_over(self: &Arc<Self>, state: &mut State, slot: Arc<NamespaceSlot>) {
        while let Some(waiting) = state.waiting.pop_front() {
            if waiting.is_closed() {
                continue;
            }
            state.live.insert(slot.index());
            let loan = Loan { pool: Arc::clone(self), slot: Some(Ok(Arc::clone(&slot))) };
            match waiting.send(loan) {
                Ok(()) => return,
                // It left just now. The loan must not put the slot back by itself while the state is locked.
                Err(mut loan) => {
                    loan.slot = None;
                    state.live.remove(&slot.index());
                }
            }
        }
        state.ready.push_back(slot);
    }

    /// Removes the namespace of a number that is in `removing`. Whether that was done.
    async fn remove(self: &Arc<Self>, index: u32) -> bool {
        let (name, host) = (self.config.tag.slot_name(index), self.host.clone());
        let removed = in_thread("removing a network slot", move || wiring::remove(&name, &host)).await;
        if let Err(error) = &removed {
            tracing::warn!(index, %error, "a network slot stays for the next sweep");
        }
        {
            let mut state = self.state();
            state.removing.remove(&index);
            if removed.is_err() {
                state.taken.insert(index);
            }
        }
        self.changed.notify_waiters();
        self.replenish();
        removed.is_ok()
    }
}

impl State {
    /// The lowest number that nothing uses. When only numbers that others had are left, those are tried again.
    fn free_index(&mut self, capacity: u32) -> Option<u32> {
        let own = |state: &Self, index: &u32| {
            state.live.contains(index)
                || state.building.contains(index)
                || state.removing.contains(index)
                || state.ready.iter().any(|slot| slot.index() == *index)
        };
        let free = (0..capacity).find(|index| !own(self, index) && !self.taken.contains(index));
        if free.is_none() && self.building.is_empty() {
            self.taken.clear();
        }
        free
    }
}

/// Numbers of which this instance has a namespace or an interface. Blocks.
fn existing(config: &NetworkConfig) -> Result<BTreeSet<u32>, NetworkError> {
    let prefix = config.tag.prefix();
    let mut names = netns::list(&prefix).map_err(kernel("listing network namespaces"))?;
    names.extend(wiring::links(&prefix)?);
    Ok(names.iter().filter_map(|name| name.strip_prefix(&prefix)?.parse().ok()).collect())
}

fn closed() -> NetworkError {
    NetworkError::Kernel { step: "taking a network slot", message: "the network is closed".to_owned() }
}
