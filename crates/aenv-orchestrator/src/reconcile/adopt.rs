//! Carries verdicts out: live sandboxes are taken over, the others become what the journal says.

use std::{collections::HashSet, sync::Arc, time::Duration};

use aenv_types::{CheckpointId, LayerRef, SandboxId};
use futures::{StreamExt, stream};
use tokio_util::sync::CancellationToken;

use super::{
    classify::{Otherwise, Verdict, classify},
    collect::{Found, Traces},
};
use crate::{
    StartError,
    admission::Claim,
    capture::seal_note,
    checkpoints::blobs,
    deadline,
    journal::{Change, Survives},
    launch::{Generation, drive_export, greet, serve_volumes},
    node::Node,
    pressure::give_all,
    sandbox::{Adopted, Phase, Record, Stage, restore},
};

/// Sandboxes that are taken over at once.
const PARALLEL: usize = 16;
/// A deadline that passed while no server was there is put off by this much.
const GRACE: Duration = Duration::from_secs(5);

/// Decides and acts; returns the ids of those that run.
pub(super) async fn apply(node: &Arc<Node>, found: &Found) -> Result<HashSet<SandboxId>, StartError> {
    let outcomes: Vec<_> = stream::iter(&found.records)
        .map(|record| one(node, record, found))
        .buffer_unordered(PARALLEL)
        .collect()
        .await;
    // Notes of standbys: a standby is nobody's, and the sweep removes what they tell of.
    let known: HashSet<_> = found.records.iter().map(|record| &record.id).collect();
    let of_none = found.traces.keys().filter(|id| !known.contains(id)).cloned();
    let mut changes: Vec<_> = of_none.map(Change::Remove).collect();
    let mut running = HashSet::new();
    let mut restored = Vec::new();
    for (id, outcome) in outcomes {
        match outcome {
            None => changes.push(Change::Remove(id)),
            Some(adopted) => {
                changes.push(Change::Put(Box::new(adopted.record.clone())));
                if adopted.generation.is_some() {
                    running.insert(id);
                }
                restored.push(adopted);
            }
        }
    }
    if !changes.is_empty() {
        let committed = node.journal.commit(changes, Survives::PowerLoss).await;
        committed
            .map_err(|error| StartError::Journal { path: node.home.journal(), message: error.to_string() })?;
    }
    tracing::info!(running = running.len(), known = restored.len(), "sandboxes of an earlier server");
    for adopted in restored {
        restore(node, adopted);
    }
    Ok(running)
}

async fn one(node: &Arc<Node>, record: &Record, found: &Found) -> (SandboxId, Option<Adopted>) {
    let id = record.id.clone();
    let none = Traces::default();
    let traces = found.traces.get(&id).unwrap_or(&none);
    let verdict = classify(record, traces, |checkpoint| is_complete(node, checkpoint));
    tracing::debug!(sandbox = %id, phase = record.phase.word(), ?verdict, "found");
    let mut record = record.clone();
    let adopted = match verdict {
        Verdict::Remove => None,
        Verdict::Paused(checkpoint) => Some(paused(node, record, checkpoint)),
        Verdict::Failed(reason) => Some(failed(record, reason)),
        Verdict::Adopt { otherwise } => match take_over(node, &mut record, traces, found).await {
            Ok(generation) => {
                record.phase = Phase::Running;
                record.end_at = record.end_at.max(deadline::after(GRACE));
                Some(Adopted { record, stage: Stage::Running, generation: Some(generation) })
            }
            Err(error) => {
                tracing::warn!(sandbox = %id, %error, "a sandbox could not be taken over");
                Some(match otherwise {
                    Otherwise::Paused(checkpoint) => paused(node, record, checkpoint),
                    Otherwise::Failed => {
                        failed(record, format!("its VMM ended while no server ran: {error}"))
                    }
                })
            }
        },
    };
    (id, adopted)
}

fn paused(node: &Node, record: Record, checkpoint: CheckpointId) -> Adopted {
    let keeps_memory = node.checkpoints.read(&checkpoint).is_ok_and(|checkpoint| checkpoint.has_memory());
    let record = Record { phase: Phase::Paused, checkpoint, keeps_memory, launched: None, ..record };
    Adopted { record, stage: Stage::Paused, generation: None }
}

fn failed(record: Record, reason: String) -> Adopted {
    let record = Record { phase: Phase::Failed { reason: reason.clone() }, launched: None, ..record };
    Adopted { record, stage: Stage::Failed(reason), generation: None }
}

/// Whether a manifest and its local blobs are there.
fn is_complete(node: &Node, id: &CheckpointId) -> bool {
    let Ok(checkpoint) = node.checkpoints.read(id) else { return false };
    blobs(&checkpoint).all(|name| node.home.has_layer(&name))
}

/// Takes a live sandbox over: its VMM, its slot, and the layers that blockd sealed last.
async fn take_over(
    node: &Arc<Node>,
    record: &mut Record,
    traces: &Traces,
    found: &Found,
) -> Result<Generation, String> {
    let (Some((_, vm)), Some(slot)) = (&traces.vm, &traces.slot) else {
        return Err("its VMM or its network was not noted".into());
    };
    let mut disks = Vec::new();
    let sealed_now = sealed(node, record, traces, found);
    for disk in record.launched.iter_mut().flat_map(|launched| &mut launched.disks) {
        let export = drive_export(&record.id, &disk.drive);
        if !found.exports.iter().any(|shown| !shown.memory && shown.name == export) {
            return Err(format!("disk {export} is not shown any more"));
        }
        disk.layers
            .extend(sealed_now.iter().filter(|(drive, _)| *drive == disk.drive).map(|(_, layer)| *layer));
        disks.push(export);
    }
    let vm = node.engine.adopt(vm).await.map_err(|error| error.to_string())?;
    let slot = match node.network.adopt(slot).await {
        Ok(slot) => slot,
        Err(error) => {
            if let Err(error) = vm.end().await {
                tracing::error!(sandbox = %record.id, %error, "a VMM without a network could not be ended");
            }
            return Err(error.to_string());
        }
    };
    let volumes = serve_volumes(node, &record.volumes, &*slot).await.unwrap_or_else(|error| {
        // The guest waits for them; the rest of it works.
        tracing::error!(sandbox = %record.id, %error, "an adopted sandbox has lost its volumes");
        None
    });
    let generation = Generation {
        vm: Arc::from(vm),
        slot,
        volumes,
        disks,
        ended: CancellationToken::new(),
        permit: node.admission.adopt(&Claim::of(record)),
    };
    // What the rules hand to the gate goes nowhere until it is open again; and the server may have died while it changed them.
    if let Err(error) = generation.slot.set_policy(&record.egress).await {
        generation.end(node, &record.id).await;
        return Err(error.to_string());
    }
    // The server may have died between stopping the vCPUs and letting them go on.
    if let Err(error) = generation.vm.resume().await {
        generation.end(node, &record.id).await;
        return Err(error.to_string());
    }
    give_all(&*generation.vm, &record.id, record.shape.memory_mib).await;
    let forget: Vec<_> = traces
        .seals
        .iter()
        .map(|(drive, _)| Change::Forget { sandbox: record.id.clone(), key: seal_note(drive) })
        .chain([Change::Put(Box::new(record.clone()))])
        .collect();
    if let Err(error) = node.journal.commit(forget, Survives::Crash).await {
        tracing::warn!(sandbox = %record.id, %error, "notes of seals stay in the journal");
    }
    // A server that died before the answer to `/init` came has left a guest without its token.
    let dial = Arc::clone(&generation.slot) as _;
    if let Err(error) = greet(node, record, dial, std::convert::identity).await {
        tracing::warn!(sandbox = %record.id, ?error, "the guest of an adopted sandbox does not answer");
    }
    Ok(generation)
}

/// Layers that blockd sealed and the journal does not know of yet.
fn sealed(node: &Node, record: &Record, traces: &Traces, found: &Found) -> Vec<(String, LayerRef)> {
    let known: HashSet<_> = record.launched_layers().collect();
    let candidates = traces.seals.iter().filter(|(_, name)| !known.contains(name));
    let sealed = candidates.filter_map(|(drive, name)| {
        let (export, file) = (drive_export(&record.id, drive), node.home.layer(name));
        let shown = found.exports.iter().find(|shown| !shown.memory && shown.name == export)?;
        let size = std::fs::metadata(&file).ok()?.len();
        shown.layers.contains(&file).then_some((drive.clone(), LayerRef { name: *name, size }))
    });
    sealed.collect()
}
