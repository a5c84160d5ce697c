//! What becomes of a row: a pure function of the journal and of what is there.

use aenv_types::CheckpointId;

use super::collect::Traces;
use crate::sandbox::{Phase, Record};

/// What is to be done with a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its VMM may live: take it over; if that fails, it is what `otherwise` says.
    Adopt { otherwise: Otherwise },
    /// It is paused in this checkpoint, and nothing of it runs.
    Paused(CheckpointId),
    /// It ended.
    Failed(String),
    /// It is gone.
    Remove,
}

/// What a sandbox is whose VMM could not be taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Otherwise {
    Failed,
    Paused(CheckpointId),
}

/// Decides. `complete` tells whether a checkpoint's manifest and all of its local blobs are there.
pub(super) fn classify(
    record: &Record,
    traces: &Traces,
    complete: impl Fn(&CheckpointId) -> bool,
) -> Verdict {
    let paused = |id: &CheckpointId| match complete(id) {
        true => Verdict::Paused(id.clone()),
        false => Verdict::Failed(format!("checkpoint {id}, which it was paused in, is lost")),
    };
    let lives = record.launched.is_some()
        && traces.vm.as_ref().is_some_and(|(generation, _)| *generation == record.generation);
    match &record.phase {
        // Whoever used it ended with the server, and begins anew.
        _ if record.hidden => Verdict::Remove,
        Phase::Creating | Phase::Killing | Phase::Failed { .. } => Verdict::Remove,
        Phase::Paused | Phase::Resuming => paused(&record.checkpoint),
        Phase::Pausing { into } if complete(into) => Verdict::Paused(into.clone()),
        Phase::RollingBack { to } if lives => Verdict::Adopt {
            otherwise: if complete(to) { Otherwise::Paused(to.clone()) } else { Otherwise::Failed },
        },
        // It was paused before, or its old generation was ended already.
        Phase::RollingBack { .. } if record.launched.is_none() => paused(&record.checkpoint),
        Phase::RollingBack { to } => paused(to),
        Phase::Running | Phase::Pausing { .. } if lives => Verdict::Adopt { otherwise: Otherwise::Failed },
        Phase::Running | Phase::Pausing { .. } => Verdict::Failed("its VMM was lost".into()),
    }
}
