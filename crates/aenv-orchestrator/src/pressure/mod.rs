//! The host's memory under pressure: who gives way, and when memory is given back.
//!
//! Each two seconds the host's memory is looked at ([`host`]); what is to be done is a pure function of that and of what the guests
//! said last ([`decide()`]). Steps are carried out by the sandboxes' actors, so that no balloon moves while its machine is captured.
//!
//! A balloon is part of a vm state: a guest that was captured with one goes on without that memory. So each launch, and each
//! taking over by a new server, begins with giving all of it back ([`give_all`]), and nothing of balloons has to be remembered.

mod decide;
mod host;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use aenv_types::SandboxId;
use aenv_vmm::{EngineError, Vm};
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub(crate) use decide::Level;
use decide::{Guest, Step, View, decide};
pub use host::meminfo;
pub(crate) use host::{HostMemory, ThisHost};

use crate::{
    MetricSample,
    node::Node,
    sandbox::{Cell, Command, Stage},
};

/// How often the host is looked at.
const EVERY: Duration = Duration::from_secs(2);
/// How long a sandbox may take to answer; one that is being captured is left alone.
const BOUND: Duration = Duration::from_secs(1);
/// For giving a launched guest its memory back.
const GIVE_ALL: Duration = Duration::from_secs(5);
/// A guest that works so much, in percent of its vCPUs, is not idle.
const BUSY_PCT: f64 = 10.0;
/// How long a guest may work at what its balloon was asked.
const SETTLED: Duration = Duration::from_secs(15);
/// What a guest said longer ago says nothing of now.
const STALE: Duration = Duration::from_secs(15);

/// How the host is off, as it was seen last.
#[derive(Default)]
pub(crate) struct Pressure {
    level: Mutex<Level>,
    /// Memory that guests have given back.
    held_mib: AtomicU64,
    /// Lets a round begin at once.
    soon: Notify,
}

impl Pressure {
    /// Whether there is memory for what nobody has asked for.
    pub(crate) fn is_calm(&self) -> bool {
        *self.level.lock() == Level::Calm
    }

    /// Memory that guests have given back, in MiB.
    pub(crate) fn held_mib(&self) -> u64 {
        self.held_mib.load(Ordering::Relaxed)
    }

    /// Traffic for a sandbox. If it lacks memory, it has it back at once.
    pub(crate) fn traffic(&self, cell: &Cell) {
        let mut gauge = cell.gauge.lock();
        gauge.busy = Instant::now();
        if gauge.asked_mib > 0 {
            self.soon.notify_one();
        }
    }

    /// Looks now.
    #[cfg(test)]
    pub(crate) fn look(&self) {
        self.soon.notify_one();
    }

    fn set(&self, level: Level, host: HostMemory) {
        let before = std::mem::replace(&mut *self.level.lock(), level);
        if before != level {
            tracing::info!(?before, now = ?level, available_mib = host.available_mib, stalled_pct = host.stalled_pct, "the host's memory");
        }
        metrics::gauge!("aenv_memory_pressure").set(f64::from(level as u8));
        #[allow(clippy::cast_precision_loss, reason = "MiB of a machine's memory fit a float")]
        metrics::gauge!("aenv_available_memory_bytes").set((host.available_mib << 20) as f64);
    }
}

/// What is known of a running guest's memory. Begins anew with each launch.
pub(crate) struct Gauge {
    /// What its balloon was asked to hold.
    asked_mib: u32,
    asked_at: Instant,
    /// What it held when it was looked at last.
    held_mib: u32,
    /// When there was traffic or work.
    busy: Instant,
    reading: Option<Reading>,
}

/// What a guest said.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    /// Free, or page cache.
    left_mib: u32,
}

/// A guest's balloon, as its actor sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Balloon {
    pub held_mib: u32,
    /// Anonymous memory of its VMM, if its balloon may be used at all.
    pub anonymous_mib: Option<u64>,
}

impl Gauge {
    /// Of a guest that has all its memory.
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { asked_mib: 0, asked_at: now, held_mib: 0, busy: now, reading: None }
    }

    /// Its balloon was asked to hold so much.
    pub(crate) fn ask(&mut self, held_mib: u32) {
        self.asked_mib = held_mib;
        self.asked_at = Instant::now();
        if held_mib == 0 {
            // One that has had its memory back is left alone for a while.
            self.busy = self.asked_at;
        }
    }

    /// Takes note of a sample that was asked for at `at`, and takes out of it what the guest has not used but given back.
    pub(crate) fn read(&mut self, sample: &mut MetricSample, at: Instant) {
        let left = sample.mem_total.saturating_sub(sample.mem_used) >> 20;
        self.reading = Some(Reading { at, left_mib: u32::try_from(left).unwrap_or(u32::MAX) });
        // Giving memory back is work for the guest, too, and none that it needs memory for.
        let settled = at.saturating_duration_since(self.asked_at) >= SETTLED;
        if settled && sample.cpu_used_pct >= BUSY_PCT {
            self.busy = at;
        }
        sample.mem_used = sample.mem_used.saturating_sub(u64::from(self.held_mib) << 20);
    }

    /// Long ago was the last time that it was busy.
    #[cfg(test)]
    pub(crate) fn rest(&mut self) {
        self.busy =
            Instant::now().checked_sub(Duration::from_secs(600)).expect("this machine has run so long");
    }

    fn left_mib(&self) -> Option<u32> {
        let reading = self.reading?;
        (reading.at > self.asked_at && reading.at.elapsed() < STALE).then_some(reading.left_mib)
    }
}

/// Gives a guest that begins to run all memory that it had given back.
pub(crate) async fn give_all(vm: &dyn Vm, id: &SandboxId, memory_mib: u32) {
    let given = async {
        let held_mib = vm.balloon().await?;
        if held_mib > 0 {
            tracing::debug!(sandbox = %id, held_mib, "a guest has memory back that it had given");
            vm.set_balloon(memory_mib).await?;
        }
        Ok::<_, EngineError>(())
    };
    match tokio::time::timeout(GIVE_ALL, given).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(sandbox = %id, %error, "a guest may lack memory"),
        Err(_) => tracing::warn!(sandbox = %id, "a guest may lack memory: its VMM does not answer"),
    }
}

/// Runs until the node closes.
pub(crate) async fn run(node: Arc<Node>) {
    if node.settings.memory_reserve_mib == 0 {
        return;
    }
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut calm_since = None;
    loop {
        tokio::select! {
            () = node.closing.cancelled() => return,
            _ = ticks.tick() => {}
            () = node.pressure.soon.notified() => {}
        }
        tokio::select! {
            () = node.closing.cancelled() => return,
            () = round(&node, &mut calm_since) => {}
        }
    }
}

async fn round(node: &Arc<Node>, calm_since: &mut Option<Instant>) {
    let Some(host) = node.seams.host.memory() else { return };
    let reserve_mib = node.settings.memory_reserve_mib;
    let level = Level::of(host, reserve_mib);
    node.pressure.set(level, host);
    let since = (level == Level::Calm).then(|| calm_since.unwrap_or_else(Instant::now));
    *calm_since = since;

    let cells = node.registry.all();
    let looks = cells.iter().filter(|cell| concerns(cell, level)).map(|cell| look(cell));
    let guests: Vec<_> = join_all(looks).await.into_iter().flatten().collect();
    let view = View {
        host,
        reserve_mib,
        standbys: node.standbys.held() + node.standing().len(),
        guests: &guests,
        idle_from: node.settings.memory_idle,
        calm_for: since.map_or(Duration::ZERO, |since| since.elapsed()),
    };
    let steps = decide(&view).into_iter().map(|step| carry_out(node, step));
    join_all(steps).await;

    let held: u64 = cells.iter().map(|cell| u64::from(cell.gauge.lock().held_mib)).sum();
    node.pressure.held_mib.store(held, Ordering::Relaxed);
    #[allow(clippy::cast_precision_loss, reason = "MiB of a machine's memory fit a float")]
    metrics::gauge!("aenv_ballooned_memory_bytes").set((held << 20) as f64);
}

/// Builds are left alone: they are at work, though nobody sees traffic.
fn concerns(cell: &Cell, level: Level) -> bool {
    let now = cell.now();
    if now.stage != Stage::Running || now.record.hidden {
        return false;
    }
    let gauge = cell.gauge.lock();
    gauge.asked_mib > 0 || gauge.held_mib > 0 || (level == Level::Tight && gauge.left_mib().is_some())
}

/// `None` when it is about to do something else.
async fn look(cell: &Cell) -> Option<Guest> {
    let balloon = ask(cell, None).await?;
    let memory_mib = cell.now().record.shape.memory_mib;
    let mut gauge = cell.gauge.lock();
    let before = std::mem::replace(&mut gauge.held_mib, balloon.held_mib);
    Some(Guest {
        id: cell.id.clone(),
        memory_mib,
        asked_mib: gauge.asked_mib,
        held_mib: balloon.held_mib,
        shrank: balloon.held_mib < before && balloon.held_mib < gauge.asked_mib,
        idle: gauge.busy.elapsed(),
        left_mib: gauge.left_mib(),
        anonymous_mib: balloon.anonymous_mib,
    })
}

async fn ask(cell: &Cell, held_mib: Option<u32>) -> Option<Balloon> {
    let asked = cell.ask(|reply| Command::Balloon { held_mib, reply });
    match tokio::time::timeout(BOUND, asked).await {
        Ok(Ok(balloon)) => Some(balloon),
        Ok(Err(error)) => {
            tracing::debug!(sandbox = %cell.id, ?error, "a balloon was not reached");
            None
        }
        Err(_) => None,
    }
}

async fn carry_out(node: &Arc<Node>, step: Step) {
    match step {
        Step::Standby => {
            count("standby");
            if !node.standbys.give_up_memory(node, 0).await {
                node.give_up_standing().await;
            }
        }
        Step::Balloon { id, held_mib } => {
            let Ok(cell) = node.registry.any(&id) else { return };
            let before = cell.gauge.lock().asked_mib;
            if ask(&cell, Some(held_mib)).await.is_some() {
                count(if held_mib > before { "inflate" } else { "deflate" });
                tracing::debug!(sandbox = %id, before, held_mib, "a balloon is asked to hold");
            }
        }
    }
}

fn count(step: &'static str) {
    metrics::counter!("aenv_memory_steps_total", "step" => step).increment(1);
}
