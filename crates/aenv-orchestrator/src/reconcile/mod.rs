//! The start of a node: collect what is there, classify it, apply.
//!
//! The journal says what was acknowledged; processes, exports, namespaces and folders say what is. Live sandboxes are adopted,
//! paused ones kept, interrupted transitions finished or undone, and whatever belongs to none is removed.
//!
//! | the journal says | and | then it is |
//! |---|---|---|
//! | nothing, but there are notes (a standby) | | removed |
//! | creating, killing, failed | | removed |
//! | anything, of a hidden sandbox (a build's) | | removed |
//! | running | its VMM lives | running, vCPUs let go on, `/init` sent again |
//! | running | its VMM is gone | failed |
//! | pausing into C | C's manifest is there | paused in C, its VMM ended |
//! | pausing into C | C's manifest is not there | running |
//! | paused in C | | paused in C |
//! | resuming from C | | paused in C, whatever runs ended |
//! | rolling back to C | the old generation lives | running, in the old generation |
//! | rolling back to C | the old generation was ended | paused in C |

mod adopt;
mod classify;
mod collect;
mod sweep;

use std::sync::Arc;

use aenv_types::Home;
use tokio::sync::{Notify, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Parts, StartError,
    admission::Admission,
    checkpoints::Checkpoints,
    collector,
    crash::CrashPoints,
    deadline::PARALLEL_EXPIRIES,
    expiries::Expiries,
    files,
    journal::Journal,
    node::{Node, Registry},
    pressure::Pressure,
    seams::Seams,
    shared::Shares,
    standby::Standbys,
};

/// Reads the journal, puts things right.
pub(crate) async fn start(parts: Parts, seams: Seams, crash: CrashPoints) -> Result<Arc<Node>, StartError> {
    let home = parts.home.clone();
    let part = |what: &str, error: &dyn std::fmt::Display| StartError::Part(format!("{what}: {error}"));
    empty_staging(&home).map_err(|error| part("the staging folder cannot be emptied", &error))?;
    let path = home.journal();
    let (journal, contents) =
        Journal::open(&path).map_err(|error| StartError::Journal { path, message: error.to_string() })?;
    let stamp =
        parts.engine.stamp(&parts.kernel).await.map_err(|error| part("the engine cannot be used", &error))?;
    let shares = parts.sharing.map(|sharing| Shares::open(&home, sharing)).transpose();
    let shares = shares.map_err(|error| part("the node's id cannot be read or made", &error))?;
    let node = Arc::new(Node {
        checkpoints: Checkpoints::new(home.clone()),
        admission: Arc::new(Admission::new(&parts.settings, Arc::clone(&seams.host))),
        home,
        exports: parts.exports,
        network: parts.network,
        engine: parts.engine,
        kernel: parts.kernel,
        initramfs: parts.initramfs,
        volumes: parts.volumes,
        standbys: Standbys::new(parts.settings.standby),
        pressure: Pressure::default(),
        settings: parts.settings,
        shares,
        stamp,
        resolvers: aenv_net::default_dns(),
        seams,
        caches: parts.caches,
        journal,
        expiries: Semaphore::new(PARALLEL_EXPIRIES),
        merges: Semaphore::new(1),
        expired: Expiries::new(),
        crash,
        registry: Registry::default(),
        closing: CancellationToken::new(),
        tasks: TaskTracker::new(),
        garbage: Notify::new(),
        _lock: parts.lock,
    });
    let found = collect::collect(&node, contents).await?;
    let adopted = adopt::apply(&node, &found).await?;
    sweep::sweep(&node, &found, adopted).await?;
    collector::collect(&node).await;
    Ok(node)
}

fn empty_staging(home: &Home) -> std::io::Result<()> {
    for entry in std::fs::read_dir(home.staging())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files::remove_folder(&entry.path())?;
        } else {
            files::remove_file(&entry.path())?;
        }
    }
    Ok(())
}
