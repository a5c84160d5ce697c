//! *Launch*: the second of the two primitives. A checkpoint and an identity become a running generation.
//!
//! Independent steps run side by side: the slot, the memory image and the disks; then the VMM; then envd's answer to `/init`
//! together with the journal's commit. Whatever was made is noted before it is used and taken down again if a later
//! step fails.

mod generation;
mod place;
mod ready;

use std::time::{Duration, Instant};

use aenv_net::NetworkError;
use aenv_types::{Checkpoint, DiskImage};
use aenv_vmm::{BootSpec, EngineError, LaunchSpec, VmSpec};
use tokio_util::sync::CancellationToken;

pub(crate) use generation::{Generation, Parts, remove_folders, remove_uppers};
pub(crate) use place::{drive_export, files, serve_volumes};
pub(crate) use ready::greet;

use crate::{
    SandboxError, Timings,
    admission::Permit,
    deadline,
    identity::init_request,
    journal::{Change, Note, Survives},
    node::Node,
    sandbox::{Launched, Phase, Record},
};

/// Key of the note that tells of a slot.
pub(crate) const SLOT_NOTE: &str = "slot";
/// Key of the note that tells of a VMM.
pub(crate) const VM_NOTE: &str = "vm";

/// How a generation begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// The processes go on where they were.
    Continue,
    /// The kernel boots from the root disk; memory, if the checkpoint has any, is left aside.
    Boot,
}

impl Start {
    /// The natural one.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Self {
        if checkpoint.has_memory() { Self::Continue } else { Self::Boot }
    }
}

/// What is to be launched.
pub(crate) struct Order<'a> {
    /// The sandbox as it was before.
    pub record: &'a Record,
    pub checkpoint: &'a Checkpoint,
    pub start: Start,
    /// From the moment in which it is ready.
    pub timeout: Duration,
    pub permit: Permit,
    /// Ends the launch early.
    pub stop: &'a CancellationToken,
}

/// Launches; returns the record as it is now (journaled, and its guest has answered) and what runs.
pub(crate) async fn launch(node: &Node, order: Order<'_>) -> Result<(Record, Generation), SandboxError> {
    let asked = Instant::now();
    let _turn = tokio::select! {
        turn = node.admission.turn() => turn,
        () = order.stop.cancelled() => return Err(SandboxError::Deleted(order.record.id.clone())),
    };
    let mut timings = Timings { queue_ms: milliseconds(asked), ..Timings::default() };
    let mut parts = Parts::default();
    let outcome = steps(node, &order, &mut parts, &mut timings).await;
    let id = order.record.id.clone();
    match outcome {
        Ok(record) => {
            let generation = parts.into_generation(order.permit).ok_or_else(|| {
                SandboxError::internal("the launch left nothing running", "a part is missing after all steps")
            })?;
            Ok((record, generation))
        }
        Err(error) => {
            parts.take_down(node, &id).await;
            Err(error)
        }
    }
}

async fn steps(
    node: &Node,
    order: &Order<'_>,
    parts: &mut Parts,
    timings: &mut Timings,
) -> Result<Record, SandboxError> {
    let Order { checkpoint, start, stop, .. } = order;
    let cold = *start == Start::Boot;
    let mut record = next_record(order);
    let go_on = || match stop.is_cancelled() {
        true => Err(SandboxError::Deleted(order.record.id.clone())),
        false => Ok(()),
    };

    let begun = Instant::now();
    let placed = place::place(node, &record, checkpoint, *start, parts).await?;
    timings.place_ms = milliseconds(begun);
    go_on()?;

    let begun = Instant::now();
    let vm = VmSpec {
        sandbox: record.id.clone(),
        shape: record.shape,
        ram: placed.ram,
        drives: placed.drives,
        netns: placed.netns,
        runtime: node.home.sandbox_runtime(&record.id),
        serial_log: node.home.sandbox(&record.id).join("serial.log"),
    };
    let vm = if cold {
        let (kernel, initramfs) = (node.kernel.clone(), node.initramfs.clone());
        node.engine.boot(BootSpec { vm, kernel, initramfs, cmdline: String::new() }).await
    } else {
        let missing = || SandboxError::BadCheckpoint {
            id: checkpoint.id.clone(),
            reason: "its manifest names no vm state".into(),
        };
        let state = checkpoint.vm_state.ok_or_else(missing)?;
        let stamp = checkpoint.engine.clone().ok_or_else(missing)?;
        node.engine.launch(LaunchSpec { vm, state: node.home.layer(&state.name), stamp }).await
    };
    let vm = parts.started(vm.map_err(|error| engine_error(&record, checkpoint, error))?);
    node.crash.pass("launch.vm").await;
    let note = vm_note(&record, &vm.record())?;
    node.journal.commit(vec![Change::Note(note)], Survives::Crash).await?;
    node.crash.pass("launch.noted").await;
    timings.restore_ms = milliseconds(begun);
    go_on()?;

    // The journal's sync takes as long as the guest's answer: they run together. A server that dies in between finds a
    // running sandbox that nobody was told of, sends `/init` again, and lets its deadline take it.
    let begun = Instant::now();
    record.launched = Some(launched(checkpoint, &record, cold));
    record.timings = *timings;
    let request = init_request(node, &record, &checkpoint.guest)?;
    let dial = parts.dial().ok_or_else(|| SandboxError::internal("the sandbox has no network", "no slot"))?;
    let ready = ready::wait(node, &record.id, dial, &*vm, request, *start, stop);
    let (ready, journaled) = tokio::join!(ready, node.journal.put(&record, Survives::PowerLoss));
    ready?;
    journaled?;
    node.crash.pass("launch.ready").await;
    timings.ready_ms = milliseconds(begun);
    record.timings = *timings;
    record.end_at = deadline::after(order.timeout);
    // The deadline counts from now, and needs no sync: after a power failure this sandbox does not run.
    node.journal.put(&record, Survives::Crash).await?;
    Ok(record)
}

/// The record of the generation that is about to begin.
fn next_record(order: &Order<'_>) -> Record {
    Record {
        phase: Phase::Running,
        generation: order.record.generation + 1,
        lifecycle_id: uuid::Uuid::new_v4().to_string(),
        checkpoint: order.checkpoint.id.clone(),
        end_at: deadline::after(order.timeout),
        unresponsive_at_pause: false,
        ..order.record.clone()
    }
}

/// What a capture of this generation builds on.
fn launched(checkpoint: &Checkpoint, record: &Record, cold: bool) -> Launched {
    let memory = match (&checkpoint.memory, cold) {
        (Some(image), false) => image.layers.clone(),
        _ => Vec::new(),
    };
    let disks = checkpoint.disks.iter().enumerate();
    let disks = disks.map(|(index, disk)| DiskImage { size: disk_size(record, index, disk), ..disk.clone() });
    Launched { cold, memory, disks: disks.collect() }
}

/// The root disk may be larger than what it was captured with, when the machine boots.
fn disk_size(record: &Record, index: usize, disk: &DiskImage) -> u64 {
    if index == 0 { disk.size.max(record.shape.disk_bytes()) } else { disk.size }
}

fn vm_note(record: &Record, vm: &aenv_vmm::VmRecord) -> Result<Note, SandboxError> {
    note(record, VM_NOTE, vm)
}

/// Why rules could not be set.
pub(crate) fn policy_error(error: NetworkError) -> SandboxError {
    SandboxError::internal("the sandbox's network rules could not be set", error)
}

/// A note of the record's generation.
pub(crate) fn note(record: &Record, key: &str, value: &impl serde::Serialize) -> Result<Note, SandboxError> {
    let value = serde_json::to_string(value)
        .map_err(|error| SandboxError::internal("the node's journal could not be written", error))?;
    Ok(Note { sandbox: record.id.clone(), key: key.into(), generation: record.generation, value })
}

fn engine_error(record: &Record, checkpoint: &Checkpoint, error: EngineError) -> SandboxError {
    match error {
        EngineError::Incompatible(reason) => {
            SandboxError::BadCheckpoint { id: checkpoint.id.clone(), reason }
        }
        error => {
            SandboxError::internal(format!("the VM of sandbox {} could not be started", record.id), error)
        }
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
