//! Removal of manifests that nobody needs, and of local layers that no manifest and no cache names.
//!
//! Layers named by digest are copies of committed blobs, and stay until [`trim`] finds that there is no room for them.
//! The order of the look-ups matters: files first, then what is fresh or pinned, then manifests and records. A layer is in a
//! manifest or a record *before* it stops being fresh, and a manifest is in a record before its pin goes, so that neither
//! can slip through.

use std::{collections::HashSet, io, path::PathBuf, sync::Arc, time::Duration};

use aenv_types::{CheckpointId, LayerName};

use crate::{checkpoints::blobs, files, node::Node};

pub(crate) mod notes;
mod trim;

/// How often the collector looks.
const EVERY: Duration = Duration::from_secs(30);

/// Runs until the node closes: at once when a sandbox went, and twice a minute.
pub(crate) async fn run(node: Arc<Node>) {
    loop {
        tokio::select! {
            () = node.closing.cancelled() => return,
            () = node.garbage.notified() => {}
            () = tokio::time::sleep(EVERY) => {}
        }
        node.seams.images.trim();
        trim::trim(&node).await;
        collect(&node).await;
    }
}

/// Removes what nobody needs, once.
pub(crate) async fn collect(node: &Arc<Node>) {
    let Some(in_use) = shown(node).await else { return };
    let (found, removed) = {
        let node = Arc::clone(node);
        let plan = files::blocking(move || plan(&node)).await;
        match plan {
            Ok(plan) => plan,
            Err(error) => {
                tracing::warn!(%error, "nothing is collected: the folders cannot be read");
                return;
            }
        }
    };
    for id in removed {
        node.crash.pass("collect.manifest").await;
        let (owner, removed) = (Arc::clone(node), id.clone());
        let removal =
            files::blocking(move || owner.checkpoints.remove_unless(&removed, |id| is_named(&owner, id)));
        if let Err(error) = removal.await {
            tracing::warn!(checkpoint = %id, %error, "a manifest could not be removed");
        }
    }
    for name in found {
        let path = node.home.layer(&name);
        if in_use.contains(&path) {
            continue;
        }
        node.crash.pass("collect.layer").await;
        if let Err(error) = files::blocking(move || files::remove_file(&path)).await {
            tracing::warn!(layer = %name, %error, "a layer could not be removed");
        }
    }
}

/// Files of layers that blockd shows; `None`, and a line in the log, when it does not say.
async fn shown(node: &Arc<Node>) -> Option<HashSet<PathBuf>> {
    match node.exports.list().await {
        Ok(shown) => Some(shown.into_iter().flat_map(|export| export.layers).collect()),
        Err(error) => {
            tracing::warn!(%error, "nothing is collected: it is not known what is in use");
            None
        }
    }
}

/// Local layers and manifests that may go; blocking.
fn plan(node: &Node) -> io::Result<(Vec<LayerName>, Vec<CheckpointId>)> {
    let mut files = local_layers(node)?;
    // After the files: what is about to be recorded was noted before its file appeared.
    let cached = trim::records(node)?;
    let (mut needed, unneeded) = survey(node)?;
    needed.extend(cached.iter().flat_map(|record| &record.layers).map(|layer| layer.name));
    files.retain(|name| !needed.contains(name));
    Ok((files, unneeded))
}

/// Every layer and vm state that a sandbox or a checkpoint of this node needs; blocking.
pub(crate) fn needed(node: &Node) -> io::Result<HashSet<LayerName>> {
    survey(node).map(|(needed, _)| needed)
}

/// Every layer that is there, whether or not it is needed.
pub(crate) fn all_layers(node: &Node) -> Vec<LayerName> {
    let entries = std::fs::read_dir(node.home.layers()).into_iter().flatten().flatten();
    entries.filter_map(|entry| layer_name(entry.file_name().to_str()?)).collect()
}

/// What is needed, and the manifests that are not.
fn survey(node: &Node) -> io::Result<(HashSet<LayerName>, Vec<CheckpointId>)> {
    let mut needed: HashSet<LayerName> = node.checkpoints.fresh_layers().into_iter().collect();
    let manifests = node.checkpoints.list()?;
    let pinned = node.checkpoints.pinned();
    let records = node.registry.records();
    let named: HashSet<_> = records.iter().flat_map(|record| record.checkpoints()).cloned().collect();
    let mut unneeded = Vec::new();
    for id in manifests {
        if !named.contains(&id) && !pinned.contains(&id) {
            unneeded.push(id);
            continue;
        }
        match node.checkpoints.read(&id) {
            Ok(checkpoint) => needed.extend(blobs(&checkpoint)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io::Error::other(format!("manifest {id}: {error}"))),
        }
    }
    needed.extend(records.iter().flat_map(|record| record.launched_layers()));
    Ok((needed, unneeded))
}

fn local_layers(node: &Node) -> io::Result<Vec<LayerName>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(node.home.layers())? {
        if let Some(name @ LayerName::Local(_)) = entry?.file_name().to_str().and_then(layer_name) {
            files.push(name);
        }
    }
    Ok(files)
}

fn is_named(node: &Node, id: &CheckpointId) -> bool {
    node.registry.records().iter().any(|record| record.checkpoints().any(|named| named == id))
}

/// The layer that a file of the `layers` folder holds.
fn layer_name(file: &str) -> Option<LayerName> {
    let name: LayerName = file.replacen('-', ":", 1).parse().ok()?;
    (name.file_name() == file).then_some(name)
}
