//! What is there: the journal's rows and notes, and what is shown. (Processes and namespaces are their own rooms' to find.)

use std::{collections::HashMap, sync::Arc};

use aenv_blockd::ExportInfo;
use aenv_net::SlotRecord;
use aenv_types::{LayerName, SandboxId};
use aenv_vmm::VmRecord;
use serde::de::DeserializeOwned;

use crate::{
    StartError,
    journal::{Contents, Note},
    launch::{SLOT_NOTE, VM_NOTE},
    node::Node,
    sandbox::Record,
};

/// Everything that was found.
pub(super) struct Found {
    pub records: Vec<Record>,
    pub traces: HashMap<SandboxId, Traces>,
    pub exports: Vec<ExportInfo>,
}

/// What was noted of a sandbox.
#[derive(Clone, Debug, Default)]
pub(super) struct Traces {
    /// With the generation that it belongs to.
    pub vm: Option<(u64, VmRecord)>,
    pub slot: Option<SlotRecord>,
    /// Drives whose upper was being sealed, and the layer that it became if that was done.
    pub seals: Vec<(String, LayerName)>,
}

/// Looks at everything.
pub(super) async fn collect(node: &Arc<Node>, contents: Contents) -> Result<Found, StartError> {
    let exports = node.exports.list().await;
    let exports =
        exports.map_err(|error| StartError::Part(format!("the data plane cannot be used: {error}")))?;
    Ok(Found { records: contents.records, traces: traces(contents.notes), exports })
}

fn traces(notes: Vec<Note>) -> HashMap<SandboxId, Traces> {
    let mut traces: HashMap<SandboxId, Traces> = HashMap::new();
    for note in notes {
        let of = traces.entry(note.sandbox.clone()).or_default();
        match note.key.as_str() {
            VM_NOTE => of.vm = parse(&note).map(|vm| (note.generation, vm)),
            SLOT_NOTE => of.slot = parse(&note),
            key => {
                if let (Some(drive), Some(layer)) = (key.strip_prefix("seal-"), parse(&note)) {
                    of.seals.push((drive.to_owned(), layer));
                }
            }
        }
    }
    traces
}

fn parse<T: DeserializeOwned>(note: &Note) -> Option<T> {
    let parsed = serde_json::from_str(&note.value);
    parsed
        .inspect_err(
            |error| tracing::error!(sandbox = %note.sandbox, key = note.key, %error, "a note is damaged"),
        )
        .ok()
}
