//! *Launch*: the second of the two primitives. A checkpoint and an identity become a running generation.
//!
//! Independent steps run side by side: the slot, the memory image and the disks; then the VMM; then envd's answer to `/init`
//! together with the journal's commit. Whatever was made is noted before it is used and taken down again if a later
//! step fails.
//!
//! Up to the point where the vCPUs run, nothing depends on whose sandbox it will be: a standby is launched so far
//! [`ahead()`], its guest is [warmed up](Ahead::warm_up) where it reaches nobody, and it goes on from there when it is claimed.

mod ahead;
mod generation;
mod place;
mod ready;
mod warm_up;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_net::NetworkError;
use aenv_types::{Checkpoint, DiskImage, EgressPolicy, MachineShape, SandboxId, TeamId};
use aenv_vmm::{BootSpec, EngineError, LaunchSpec, Vm, VmSpec};
use aenv_volume::VolumeMount;
use tokio_util::sync::CancellationToken;

pub(crate) use ahead::{Ahead, Awake, ahead};
pub(crate) use generation::{Generation, Parts, remove_folders, remove_uppers};
pub(crate) use place::{drive_export, files, serve_volumes};
use ready::Up;
pub(crate) use ready::greet;
pub(crate) use warm_up::WarmUpError;

use crate::{
    SandboxError, Timings,
    admission::Permit,
    deadline,
    identity::init_request,
    journal::{Change, Note, Survives},
    node::Node,
    pressure::give_all,
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
    /// A standby that has the record's id, and whose vCPUs run already.
    pub awake: Option<Awake>,
}

/// What is to be made before vCPUs can run.
struct Machine<'a> {
    id: &'a SandboxId,
    team: &'a TeamId,
    generation: u64,
    shape: MachineShape,
    checkpoint: &'a Checkpoint,
    start: Start,
    /// `None`: it is nobody's yet, and reaches nobody.
    egress: Option<&'a EgressPolicy>,
    volumes: &'a [VolumeMount],
}

/// Launches; returns the record as it is now (journaled, and its guest has answered) and what runs.
pub(crate) async fn launch(node: &Node, mut order: Order<'_>) -> Result<(Record, Generation), SandboxError> {
    let mut up = Up::of(order.start);
    let (_turn, mut parts, mut timings) = match order.awake.take() {
        // The work was done in an earlier turn; this one only tells that a guest is coming up.
        Some(Awake { parts, timings, .. }) => {
            up = Up::Claimed;
            (node.admission.try_turn(), parts, timings)
        }
        None => {
            let asked = Instant::now();
            let turn = tokio::select! {
                turn = node.admission.turn() => turn,
                () = order.stop.cancelled() => return Err(SandboxError::Deleted(order.record.id.clone())),
            };
            let timings = Timings { queue_ms: milliseconds(asked), ..Timings::default() };
            (Some(turn), Parts::default(), timings)
        }
    };
    let outcome = steps(node, &order, up, &mut parts, &mut timings).await;
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
    up: Up,
    parts: &mut Parts,
    timings: &mut Timings,
) -> Result<Record, SandboxError> {
    let Order { checkpoint, start, stop, .. } = order;
    let cold = *start == Start::Boot;
    let mut record = next_record(order);
    let vm = match parts.vm() {
        Some(vm) => vm,
        None => {
            let machine = Machine {
                id: &record.id,
                team: &record.team,
                generation: record.generation,
                shape: record.shape,
                checkpoint,
                start: *start,
                egress: Some(&record.egress),
                volumes: &record.volumes,
            };
            let vm = assemble(node, &machine, parts, timings, stop).await?;
            if !cold {
                let begun = Instant::now();
                vm.resume().await.map_err(|error| engine_error(&record.id, checkpoint, error))?;
                timings.restore_ms += milliseconds(begun);
            }
            vm
        }
    };

    record.launched = Some(launched(checkpoint, &record, cold));
    record.timings = *timings;
    let dial = parts.dial().ok_or_else(|| SandboxError::internal("the sandbox has no network", "no slot"))?;
    come_up(node, record, checkpoint, (&*vm, dial), up, order.timeout, stop).await
}

/// A sandbox that was paused, and whose VMM stands.
pub(crate) struct InPlace<'a> {
    pub record: &'a Record,
    pub checkpoint: &'a Checkpoint,
    pub launched: &'a Launched,
    pub timeout: Duration,
}

/// Lets it go on; returns the record as it is now.
pub(crate) async fn in_place(
    node: &Node,
    order: InPlace<'_>,
    generation: &Generation,
    stop: &CancellationToken,
) -> Result<Record, SandboxError> {
    let InPlace { record, checkpoint, launched, timeout } = order;
    let _turn = node.admission.try_turn();
    let begun = Instant::now();
    let vm = &*generation.vm;
    vm.resume().await.map_err(|error| engine_error(&record.id, checkpoint, error))?;
    let timings = Timings { restore_ms: milliseconds(begun), ..Timings::default() };
    let record = Record {
        phase: Phase::Running,
        lifecycle_id: uuid::Uuid::new_v4().to_string(),
        end_at: deadline::after(timeout),
        unresponsive_at_pause: false,
        launched: Some(launched.clone()),
        timings,
        ..record.clone()
    };
    let dial = Arc::clone(&generation.slot) as _;
    come_up(node, record, checkpoint, (vm, dial), Up::Claimed, timeout, stop).await
}

/// Waits for a guest whose vCPUs run, and writes down that it does.
async fn come_up(
    node: &Node,
    mut record: Record,
    checkpoint: &Checkpoint,
    (vm, dial): (&dyn Vm, Arc<dyn aenv_types::Dial>),
    up: Up,
    timeout: Duration,
    stop: &CancellationToken,
) -> Result<Record, SandboxError> {
    // The journal's sync takes as long as the guest's answer: they run together. A server that dies in between finds a
    // running sandbox that nobody was told of, sends `/init` again, and lets its deadline take it.
    let begun = Instant::now();
    let request = init_request(node, &record, &checkpoint.guest)?;
    let ready = ready::wait(node, &record.id, dial, vm, request, up, stop);
    // Also where it was booted: then there is nothing to give.
    let whole = give_all(vm, &record.id, record.shape.memory_mib);
    let (ready, journaled, ()) = tokio::join!(ready, node.journal.put(&record, Survives::PowerLoss), whole);
    ready?;
    journaled?;
    node.crash.pass("launch.ready").await;
    record.timings.ready_ms = milliseconds(begun);
    record.end_at = deadline::after(timeout);
    // The deadline counts from now, and needs no sync: after a power failure this sandbox does not run.
    node.journal.put(&record, Survives::Crash).await?;
    Ok(record)
}

/// Places a machine and starts its VMM. Its vCPUs stand, unless it boots.
async fn assemble(
    node: &Node,
    machine: &Machine<'_>,
    parts: &mut Parts,
    timings: &mut Timings,
    stop: &CancellationToken,
) -> Result<Arc<dyn Vm>, SandboxError> {
    let Machine { id, checkpoint, .. } = *machine;
    let go_on = || match stop.is_cancelled() {
        true => Err(SandboxError::Deleted(id.clone())),
        false => Ok(()),
    };
    let begun = Instant::now();
    let placed = place::place(node, machine, parts).await?;
    timings.place_ms = milliseconds(begun);
    go_on()?;

    let begun = Instant::now();
    let vm = VmSpec {
        sandbox: id.clone(),
        shape: machine.shape,
        ram: placed.ram,
        drives: placed.drives,
        netns: placed.netns,
        runtime: node.home.sandbox_runtime(id),
        serial_log: node.home.sandbox(id).join("serial.log"),
    };
    let vm = match machine.start {
        Start::Boot => {
            let (kernel, initramfs) = (node.kernel.clone(), node.initramfs.clone());
            node.engine.boot(BootSpec { vm, kernel, initramfs, cmdline: String::new() }).await
        }
        Start::Continue => {
            let missing = || SandboxError::BadCheckpoint {
                id: checkpoint.id.clone(),
                reason: "its manifest names no vm state".into(),
            };
            let state = checkpoint.vm_state.ok_or_else(missing)?;
            let stamp = checkpoint.engine.clone().ok_or_else(missing)?;
            node.engine.launch(LaunchSpec { vm, state: node.home.layer(&state.name), stamp }).await
        }
    };
    let vm = parts.started(vm.map_err(|error| engine_error(id, checkpoint, error))?);
    node.crash.pass("launch.vm").await;
    let note = note(id, machine.generation, VM_NOTE, &vm.record())?;
    node.journal.commit(vec![Change::Note(note)], Survives::Crash).await?;
    node.crash.pass("launch.noted").await;
    timings.restore_ms = milliseconds(begun);
    go_on()?;
    Ok(vm)
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
    let disks =
        disks.map(|(index, disk)| DiskImage { size: disk_size(record.shape, index, disk), ..disk.clone() });
    Launched { cold, memory, captured: None, disks: disks.collect() }
}

/// The root disk may be larger than what it was captured with, when the machine boots.
fn disk_size(shape: MachineShape, index: usize, disk: &DiskImage) -> u64 {
    if index == 0 { disk.size.max(shape.disk_bytes()) } else { disk.size }
}

/// Why rules could not be set.
pub(crate) fn policy_error(error: NetworkError) -> SandboxError {
    SandboxError::internal("the sandbox's network rules could not be set", error)
}

/// A note of a generation.
pub(crate) fn note(
    id: &SandboxId,
    generation: u64,
    key: &str,
    value: &impl serde::Serialize,
) -> Result<Note, SandboxError> {
    let value = serde_json::to_string(value)
        .map_err(|error| SandboxError::internal("the node's journal could not be written", error))?;
    Ok(Note { sandbox: id.clone(), key: key.into(), generation, value })
}

fn engine_error(id: &SandboxId, checkpoint: &Checkpoint, error: EngineError) -> SandboxError {
    match error {
        EngineError::Incompatible(reason) => {
            SandboxError::BadCheckpoint { id: checkpoint.id.clone(), reason }
        }
        error => SandboxError::internal(format!("the VM of sandbox {id} could not be started"), error),
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
