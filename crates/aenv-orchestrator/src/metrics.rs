//! Samples of what guests use: every 5 s, of the last two hours, a few guests at a time.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};

use crate::{
    Publication, SandboxState,
    node::Node,
    sandbox::{Cell, Stage},
};

/// How often each guest is asked.
const EVERY: Duration = Duration::from_secs(5);
/// How long a guest may take to answer.
const BOUND: Duration = Duration::from_secs(3);
/// Guests that are asked at once.
const PARALLEL: usize = 8;
/// Samples that are kept: two hours.
const KEPT: usize = 1440;

/// Runs until the node closes.
pub(crate) async fn run(node: Arc<Node>) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = node.closing.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let cells = node.registry.all();
        metrics::gauge!("aenv_sandboxes_running")
            .set(cells.iter().filter(|cell| cell.now().stage == Stage::Running).count() as f64);
        let pending = cells.iter().filter(|cell| {
            let now = cell.now();
            now.stage == Stage::Paused
                && node.view(&now.record, SandboxState::Paused).publication == Some(Publication::Pending)
        });
        metrics::gauge!("aenv_paused_unpublished").set(pending.count() as f64);
        metrics::gauge!("aenv_sandboxes_standing").set(node.standing().len() as f64);
        let round = stream::iter(cells).for_each_concurrent(PARALLEL, |cell| sample(&node, cell));
        tokio::select! {
            () = node.closing.cancelled() => return,
            () = round => {}
        }
    }
}

async fn sample(node: &Node, cell: Arc<Cell>) {
    let now = cell.now();
    let (Stage::Running, Some(route)) = (now.stage, now.route) else { return };
    let asked_at = Instant::now();
    let asked = node.seams.agent.metrics(Arc::clone(&route.dial), route.envd_token.as_ref(), BOUND);
    let answer = tokio::select! {
        answer = asked => answer,
        () = route.ended.cancelled() => return,
    };
    match answer {
        Ok(mut found) => {
            cell.gauge.lock().read(&mut found, asked_at);
            cell.misses.store(0, Ordering::Relaxed);
            let mut samples = cell.samples.lock();
            if samples.len() == KEPT {
                samples.pop_front();
            }
            samples.push_back(found);
        }
        Err(error) => {
            cell.misses.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(sandbox = %cell.id, ?error, "a guest was not sampled");
        }
    }
}
