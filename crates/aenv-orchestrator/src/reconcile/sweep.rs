//! Removes what belongs to no sandbox: processes, exports, network slots, folders.

use std::{collections::HashSet, path::Path, sync::Arc};

use aenv_types::SandboxId;

use super::collect::Found;
use crate::{StartError, files, launch::remove_uppers, node::Node};

/// Sweeps. `running` are the sandboxes whose VMM was taken over.
pub(super) async fn sweep(
    node: &Arc<Node>,
    found: &Found,
    running: HashSet<SandboxId>,
) -> Result<(), StartError> {
    end_vmms(node, found, &running).await;
    close_exports(node, found, &running).await;
    match node.network.sweep().await {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "network slots that belonged to no sandbox were removed"),
        Err(error) => tracing::error!(%error, "network slots that belong to no sandbox could not be removed"),
    }
    let known: HashSet<_> = node.registry.all().iter().map(|cell| cell.id.clone()).collect();
    let owner = Arc::clone(node);
    let removal = files::blocking(move || remove_folders(&owner, &known, &running)).await;
    removal
        .map_err(|error| StartError::Part(format!("folders of removed sandboxes cannot be removed: {error}")))
}

/// Every VMM of this node whose sandbox was not taken over.
async fn end_vmms(node: &Node, found: &Found, running: &HashSet<SandboxId>) {
    let noted = found.traces.iter().filter(|(id, _)| running.contains(*id));
    let kept: Vec<_> = noted.filter_map(|(_, traces)| Some(traces.vm.as_ref()?.1.clone())).collect();
    match node.engine.sweep(&kept).await {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "VMMs that belonged to no sandbox were ended"),
        Err(error) => tracing::error!(%error, "VMMs that belong to no sandbox could not be ended"),
    }
}

async fn close_exports(node: &Node, found: &Found, running: &HashSet<SandboxId>) {
    for export in &found.exports {
        let owner = export.name.split('-').next().and_then(|id| id.parse().ok());
        if owner.is_some_and(|id| running.contains(&id)) {
            continue;
        }
        let closed = match export.memory {
            true => node.exports.close_memory(&export.name).await,
            false => node.exports.close_disk(&export.name).await,
        };
        if let Err(error) = closed {
            tracing::error!(export = %export.name, %error, "an export that belongs to no sandbox could not be closed");
        }
    }
}

fn remove_folders(
    node: &Node,
    known: &HashSet<SandboxId>,
    running: &HashSet<SandboxId>,
) -> std::io::Result<()> {
    for id in children(&node.home.sandboxes())? {
        match id {
            (_, Some(id)) if running.contains(&id) => {}
            (_, Some(id)) if known.contains(&id) => remove_uppers(&node.home, &id)?,
            (path, _) => files::remove_folder(&path)?,
        }
    }
    for (path, id) in children(&node.home.runtime().join("sandboxes"))? {
        if id.is_none_or(|id| !running.contains(&id)) {
            files::remove_folder(&path)?;
        }
    }
    Ok(())
}

/// Folders in a folder, and the sandboxes that they are named after.
fn children(folder: &Path) -> std::io::Result<Vec<(std::path::PathBuf, Option<SandboxId>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push((entry.path(), entry.file_name().to_str().and_then(|name| name.parse().ok())));
        }
    }
    Ok(found)
}
