//! The task that makes standbys when nobody launches, and ends those that are of no use.

use std::{sync::Arc, time::Duration};

use aenv_types::{Checkpoint, SandboxId};
use futures::future::{join_all, select_all};
use tokio_util::sync::CancellationToken;

use super::{Order, Standby};
use crate::{
    launch::{self, WarmUpError},
    node::Node,
};

/// A launch that has just ended gets the cores for what its guest does first.
const QUIET: Duration = Duration::from_millis(100);
/// How soon it is looked again whether nobody launches and memory is free.
const LOOK: Duration = Duration::from_millis(200);
/// The same when nothing is to be made.
const REST: Duration = Duration::from_secs(30);

/// Runs until the node closes; then no standby is left.
pub(crate) async fn keep(node: Arc<Node>) {
    let standbys = &node.standbys;
    if standbys.is_off() {
        return;
    }
    loop {
        let pause = match standbys.missing() {
            Some(_) => LOOK,
            None => standbys.next_end().map_or(REST, |end| end.min(REST)),
        };
        tokio::select! {
            () = node.closing.cancelled() => break,
            id = death(&node) => bury(&node, &id).await,
            () = standbys.changed.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
        end(&node, standbys.unwanted()).await;
        while let Some(order) = standbys.missing()
            && !node.closing.is_cancelled()
        {
            if !make(&node, order).await {
                break;
            }
        }
    }
    end(&node, standbys.take_all()).await;
}

async fn end(node: &Node, standbys: Vec<Standby>) {
    join_all(standbys.into_iter().map(|standby| standby.end(node))).await;
}

/// Waits until a standby's VMM ends by itself.
async fn death(node: &Node) -> SandboxId {
    let vms = node.standbys.vms();
    if vms.is_empty() {
        return std::future::pending().await;
    }
    let deaths = vms.into_iter().map(|(id, vm)| {
        Box::pin(async move {
            let reason = vm.exited().await;
            (id, reason)
        })
    });
    let ((id, reason), ..) = select_all(deaths).await;
    tracing::debug!(sandbox = %id, reason, "the VMM of a standby, or of what was one, has ended");
    id
}

/// Removes one that was not claimed meanwhile.
async fn bury(node: &Node, id: &SandboxId) {
    if let Some(standby) = node.standbys.remove(id) {
        tracing::warn!(sandbox = %id, checkpoint = %standby.kind.checkpoint, "the VMM of a standby ended by itself");
        node.standbys.rest(&standby.kind);
        standby.end(node).await;
    }
}

/// Makes one. `false` when it is not the time for it.
async fn make(node: &Arc<Node>, order: Order) -> bool {
    let Order { checkpoint, team, kind } = order;
    let standbys = &node.standbys;
    let _making = standbys.making.lock().await;
    if node.disk_free().is_ok_and(|free| free < node.settings.disk_reserve_bytes) {
        return false;
    }
    if !node.pressure.is_calm() {
        return false;
    }
    let Some(turn) = node.admission.idle_turn(QUIET) else { return false };
    let stop = node.closing.child_token();
    let Some(permit) = standbys.begin(node, &checkpoint, &stop) else { return false };
    let pin = node.checkpoints.pin(&checkpoint.id);
    let made = Box::pin(launch::ahead(node, &team, &checkpoint, &stop)).await;
    // Whoever waits for a launch has it while the guest warms up.
    drop(turn);
    let made = match made {
        Ok(ahead) => {
            let made = Standby { kind, ahead, permit, _pin: pin };
            warm_up(node, &checkpoint, made, &stop).await
        }
        Err(error) => {
            if !stop.is_cancelled() {
                tracing::warn!(checkpoint = %checkpoint.id, ?error, "no standby could be made");
                standbys.rest(&kind);
            }
            drop(permit);
            None
        }
    };
    if let Some(unwanted) = standbys.finish(made) {
        unwanted.end(node).await;
    }
    true
}

/// One that cannot be warmed up is ended.
async fn warm_up(
    node: &Node,
    checkpoint: &Checkpoint,
    made: Standby,
    stop: &CancellationToken,
) -> Option<Standby> {
    match made.ahead.warm_up(node, checkpoint, stop).await {
        Ok(()) => {
            node.crash.pass("standby.made").await;
            return Some(made);
        }
        Err(WarmUpError::Failed(reason)) => {
            tracing::warn!(sandbox = %made.ahead.id(), checkpoint = %checkpoint.id, reason, "a standby could not be warmed up");
            metrics::counter!("aenv_standby_warm_up_failures_total").increment(1);
            node.standbys.rest(&made.kind);
        }
        Err(reason @ (WarmUpError::Stopped | WarmUpError::NoTime)) => {
            tracing::debug!(sandbox = %made.ahead.id(), %reason, "a standby is ended before it was warm");
        }
    }
    made.end(node).await;
    None
}
