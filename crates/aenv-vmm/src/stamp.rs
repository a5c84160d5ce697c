//! What both engines ask of a checkpoint's stamp before they start anything.

use aenv_types::{EngineKind, EngineStamp, Virtualization};

use crate::EngineError;

/// What an engine is on this host. What version it may load each engine knows by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here<'a> {
    pub(crate) kind: EngineKind,
    pub(crate) virtualization: Virtualization,
    /// The CPU that guests are shown.
    pub(crate) cpu: &'a str,
    /// What is to be done about another CPU; empty when nothing can be.
    pub(crate) cpu_mend: &'a str,
}

/// Whether a vm state of this stamp was made by such an engine, in the same mode, for the same CPU.
pub(crate) fn check(stamp: &EngineStamp, here: Here<'_>) -> Result<(), EngineError> {
    if stamp.kind != here.kind {
        return Err(refusal(format!("it was made by engine {:?}, this is {:?}", stamp.kind, here.kind)));
    }
    if stamp.virtualization != here.virtualization {
        let (theirs, ours) = (stamp.virtualization, here.virtualization);
        return Err(refusal(format!("it was made with {theirs:?}, this host uses {ours:?}")));
    }
    if stamp.cpu_baseline != here.cpu {
        let (theirs, ours, mend) = (&stamp.cpu_baseline, here.cpu, here.cpu_mend);
        return Err(refusal(format!("its guest was shown the CPU {theirs}, here it is {ours}{mend}")));
    }
    Ok(())
}

pub(crate) fn refusal(why: String) -> EngineError {
    EngineError::Incompatible(why)
}
