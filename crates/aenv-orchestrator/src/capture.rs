//! *Capture*: the first of the two primitives. A running sandbox becomes a checkpoint.
//!
//! The vCPUs stop. Side by side, the disks' uppers are sealed, the VMM writes its state, and the changed pages are copied. If
//! the guest is to go on, its vCPUs do so then; only afterwards are the copied pages written. A checkpoint is returned when all
//! of its layers and its manifest are durable.
//!
//! What changed is counted from the capture before, where that is known ([`memory`]), else from the launch: the new memory stack
//! is that one's and one layer. The disks' stacks grow by the uppers that were sealed.

pub(crate) mod compact;
mod memory;
mod take;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use aenv_types::{
    Checkpoint, CheckpointId, EngineStamp, LayerName, LayerRef, Lineage, Origin, VmState,
    checkpoint::CHECKPOINT_FORMAT,
};

use crate::{
    CaptureMode, SandboxError,
    checkpoints::Fresh,
    files,
    journal::{Change, Survives},
    launch::{Generation, note},
    node::Node,
    sandbox::Record,
    seams::AgentError,
    timeline::Timeline,
};

/// How long a guest may take to write its page cache to its disks.
const SYNC: Duration = Duration::from_secs(60);

/// Key of the note that tells of a layer that a drive's upper is being sealed into.
pub(crate) fn seal_note(drive: &str) -> String {
    format!("seal-{drive}")
}

/// Whether the guest goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    GoOn,
    End,
}

/// What is to be captured.
pub(crate) struct Shot {
    pub id: CheckpointId,
    pub mode: CaptureMode,
    pub after: After,
}

/// Captures. With [`After::End`] the vCPUs stay stopped if it succeeds; in every other case they go on. Layers that were
/// sealed are in the record's disks afterwards, whether it succeeded or not; `held` keeps them from being collected until the
/// caller has shown the record to everybody.
pub(crate) async fn capture(
    node: &Node,
    record: &mut Record,
    generation: &Generation,
    shot: Shot,
    held: &mut Vec<Fresh>,
) -> Result<Checkpoint, SandboxError> {
    let base = node.checkpoints.get(&record.checkpoint).await.map_err(|error| {
        SandboxError::internal("the sandbox cannot be captured: its origin is lost", error)
    })?;
    if shot.mode == CaptureMode::Filesystem {
        sync_guest(node, record, generation).await?;
    }
    let state = NewBlob::new(node, held);
    let beside = node.home.staging().join(state.name.file_name());
    let outcome = steps(node, record, generation, &shot, &base, (state, &beside), held).await;
    if outcome.is_err() {
        generation.go_on(&record.id).await;
        if let Err(error) = files::blocking(move || files::remove_file(&beside)).await {
            tracing::warn!(sandbox = %record.id, %error, "a vm state stays in the staging folder until the next start");
        }
        node.garbage.notify_one();
    }
    outcome
}

async fn sync_guest(node: &Node, record: &Record, generation: &Generation) -> Result<(), SandboxError> {
    let dial = std::sync::Arc::clone(&generation.slot) as _;
    let synced = node.seams.agent.sync(dial, record.envd_token.as_ref(), SYNC).await;
    synced.map_err(|error| {
        let (AgentError::Silent(reason) | AgentError::Refused(reason)) = error;
        SandboxError::GuestUnresponsive { id: record.id.clone(), reason: format!("sync: {reason}") }
    })
}

async fn steps(
    node: &Node,
    record: &mut Record,
    generation: &Generation,
    shot: &Shot,
    base: &Checkpoint,
    (state, beside): (NewBlob, &Path),
    held: &mut Vec<Fresh>,
) -> Result<Checkpoint, SandboxError> {
    let mut timeline = Timeline::new();
    let seals = take::plan_seals(node, record, held)?;
    let notes =
        seals.iter().map(|seal| note(&record.id, record.generation, &seal_note(&seal.drive), &seal.layer));
    let notes: Result<Vec<_>, _> = notes.map(|note| note.map(Change::Note)).collect();
    let mut changes = notes?;
    let launched = record.launched.as_mut().ok_or_else(|| not_running(&record.id))?;
    let known = memory::Known::take(launched, shot);
    changes.push(Change::Put(Box::new(record.clone())));
    node.journal.commit(changes, Survives::Crash).await?;
    timeline.step("noted");
    let blob = NewBlob::new(node, held);
    let plan = take::Plan { seals: &seals, state: beside, memory: &blob.path, since: known.since() };

    let stopped = std::time::Instant::now();
    generation.vm.pause().await.map_err(engine_error)?;
    let created_at = chrono::Utc::now();
    timeline.step("stopped");
    node.crash.pass("capture.stopped").await;
    let taken = take::take(node, record, generation, shot, plan).await;
    node.crash.pass("capture.sealed").await;
    timeline.step("taken");
    if shot.after == After::GoOn {
        generation.vm.resume().await.map_err(engine_error)?;
        tracing::debug!(sandbox = %record.id, stopped = ?stopped.elapsed(), "captured; the guest goes on");
        timeline.step("resumed");
    }
    node.crash.pass("capture.resumed").await;
    let forget =
        |seal: &take::Seal| Change::Forget { sandbox: record.id.clone(), key: seal_note(&seal.drive) };
    let mut changes: Vec<_> = seals.iter().map(forget).collect();
    changes.push(Change::Put(Box::new(record.clone())));
    node.journal.commit(changes, Survives::Crash).await?;
    timeline.step("journaled");

    let (vm_state, diff) = match taken? {
        None => (None, None),
        Some(taken) => {
            let (since, next) = (taken.since(), taken.next());
            let (written, kept) = tokio::join!(taken.write(), state.keep(beside.to_owned()));
            let size = written
                .map_err(|error| SandboxError::internal("guest memory could not be written", error))?;
            let layer = LayerRef { name: blob.name, size };
            (Some(kept?), Some(memory::Diff { layer, since, next }))
        }
    };
    node.crash.pass("capture.written").await;
    timeline.step("written");

    let launched = record.launched.as_mut().ok_or_else(|| not_running(&record.id))?;
    let disks = compact::disks(node, launched, held).await?;
    let cold = launched.cold;
    let memory = match diff {
        None => None,
        Some(diff) => Some(memory::stack(node, record, known, diff, held).await?),
    };
    node.crash.pass("capture.recorded").await;
    timeline.step("recorded");
    let mut guest = base.guest.clone();
    guest.env.extend(record.env.clone());
    let checkpoint = Checkpoint {
        format: CHECKPOINT_FORMAT,
        id: shot.id.clone(),
        created_at,
        shape: record.shape,
        engine: memory.is_some().then(|| stamp(node, base, cold)),
        vm_state,
        memory,
        disks,
        guest,
        lineage: Lineage {
            parent: Some(record.checkpoint.clone()),
            origin: Origin::Sandbox { sandbox: record.id.clone(), template: record.template.clone() },
        },
    };
    let put = node.checkpoints.put(&checkpoint).await;
    put.map_err(|error| SandboxError::internal("the checkpoint's manifest could not be written", error))?;
    node.crash.pass("capture.manifest").await;
    timeline.step("manifest");
    tracing::debug!(sandbox = %record.id, timeline = timeline.told(), "a checkpoint was made");
    Ok(checkpoint)
}

/// A VM that was continued keeps what its guest was booted with; only the engine that wrote the state is today's.
fn stamp(node: &Node, base: &Checkpoint, cold: bool) -> EngineStamp {
    match &base.engine {
        Some(booted) if !cold => EngineStamp { version: node.stamp.version.clone(), ..booted.clone() },
        _ => node.stamp.clone(),
    }
}

/// A blob that is being made in the `layers` folder.
pub(super) struct NewBlob {
    pub name: LayerName,
    pub path: PathBuf,
}

impl NewBlob {
    pub(super) fn new(node: &Node, held: &mut Vec<Fresh>) -> Self {
        let name = LayerName::new_local();
        held.push(node.checkpoints.fresh(name));
        Self { name, path: node.home.layer(&name) }
    }

    /// Makes a vm state that was written beside durable under its name.
    async fn keep(&self, beside: PathBuf) -> Result<VmState, SandboxError> {
        let (name, target) = (self.name, self.path.clone());
        let size = files::blocking(move || aenv_durable::publish(&beside, &target)).await;
        let size =
            size.map_err(|error| SandboxError::internal("the vm state could not be written", error))?;
        Ok(VmState { name, size })
    }
}

fn engine_error(error: aenv_vmm::EngineError) -> SandboxError {
    SandboxError::internal("the VM did not do what it was told", error)
}

fn not_running(id: &aenv_types::SandboxId) -> SandboxError {
    SandboxError::internal(format!("sandbox {id} does not run"), "its record has nothing launched")
}
