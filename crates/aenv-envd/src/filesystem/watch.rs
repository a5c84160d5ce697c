//! Watching a folder for a client: what may be watched, and what its events look like.

use std::{io, path::Path, sync::Arc};

use aenv_envd_api::proto::filesystem::{
    __buffa::oneof::watch_dir_response::Event as Kind,
    EventType, FilesystemEvent, WatchDirResponse,
    watch_dir_response::{KeepAlive, StartEvent},
};
use connectrpc::ConnectError;
use futures::{Stream, StreamExt as _, stream};
use nix::sys::statfs::statfs;

use super::{
    FilesystemError,
    entry::describe,
    inotify::{Change, Depth, Watched},
};
use crate::{
    pace::{Next, Pace},
    users::Names,
};

/// Filesystems whose changes come from elsewhere, by the magic numbers of `<linux/magic.h>` and of the kernel's sources: NFS, SMB
/// (three generations), FUSE, 9p, Ceph, AFS (two), Coda, NCP, OCFS2, GFS2, Lustre, vboxsf.
const NETWORK: [i64; 15] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x6573_5546,
    0x0102_1997,
    0x00c3_6400,
    0x5346_414f,
    0x6b41_4653,
    0x7375_7245,
    0x564c,
    0x7461_636f,
    0x0116_1970,
    0x0bd0_0bd0,
    0x786f_4256,
];

/// Whether changes on network filesystems are asked for, though only those made in this guest can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkMounts {
    /// They are.
    Allowed,
    /// They are not.
    Refused,
}

/// Whether events describe the entry that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// They do.
    Included,
    /// They do not.
    Omitted,
}

/// Arms a watch.
pub fn arm(path: &Path, depth: Depth, network: NetworkMounts) -> Result<Watched, FilesystemError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(FilesystemError::WatchesNoFolder(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(FilesystemError::NothingToWatch(path.to_owned()));
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(FilesystemError::WatchesNoFolder(path.to_owned()));
        }
        Err(source) => return Err(FilesystemError::io("directory", path, source)),
    }
    if network == NetworkMounts::Refused && is_network(path)? {
        return Err(FilesystemError::NetworkMount(path.to_owned()));
    }
    Watched::arm(path, depth).map_err(|error| match error.kind() {
        io::ErrorKind::QuotaExceeded => {
            FilesystemError::Watch { path: path.to_owned(), message: error.to_string() }
        }
        _ => FilesystemError::io("directory", path, error),
    })
}

fn is_network(path: &Path) -> Result<bool, FilesystemError> {
    let found = statfs(path).map_err(|error| FilesystemError::io("directory", path, error.into()))?;
    // The field's type differs between C libraries; the numbers have 32 bits.
    let magic = (found.filesystem_type().0 as i64) & 0xffff_ffff;
    Ok(NETWORK.contains(&magic))
}

/// The events of a batch of changes.
pub fn events(root: &Path, changes: Vec<Change>, entries: Entries) -> Vec<FilesystemEvent> {
    let names = (entries == Entries::Included).then(Names::read);
    let event = |change: Change| {
        let gone = matches!(change.kind, EventType::EVENT_TYPE_REMOVE | EventType::EVENT_TYPE_RENAME);
        let entry =
            names.as_ref().filter(|_| !gone).and_then(|names| describe(&root.join(&change.name), names).ok());
        FilesystemEvent {
            name: change.name.to_string_lossy().into_owned(),
            r#type: change.kind.into(),
            entry: entry.map_or_else(Default::default, Into::into),
            ..Default::default()
        }
    };
    changes.into_iter().map(event).collect()
}

/// The stream of a watch: its start, which says that it is armed, and then its events. A slow client leaves them with the kernel, whose
/// queue is bounded.
pub fn stream_of(
    watched: Watched,
    entries: Entries,
    pace: Pace,
) -> impl Stream<Item = Result<WatchDirResponse, ConnectError>> + Send {
    let start = stream::once(async { Ok(response(StartEvent::default())) });
    let root: Arc<Path> = watched.root().into();
    let following = stream::unfold(Some(watched), move |watched| {
        let root = Arc::clone(&root);
        async move {
            let mut watched = watched?;
            let batch = match pace.next(async { Some(watched.next().await) }).await {
                Next::Item(Ok(changes)) => {
                    events(&root, changes, entries).into_iter().map(|event| Ok(response(event))).collect()
                }
                Next::Item(Err(error)) => {
                    return Some((vec![Err(ConnectError::internal(error.to_string()))], None));
                }
                Next::Silent => vec![Ok(response(KeepAlive::default()))],
                Next::Late | Next::Closed => {
                    let late = ConnectError::deadline_exceeded("the deadline of the call has passed");
                    return Some((vec![Err(late)], None));
                }
            };
            Some((batch, Some(watched)))
        }
    });
    start.chain(following.flat_map(stream::iter))
}

fn response(kind: impl Into<Kind>) -> WatchDirResponse {
    WatchDirResponse { event: Some(kind.into()), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_watched() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "").unwrap();
        let refusal = |path: &Path| match arm(path, Depth::Folder, NetworkMounts::Refused) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{} is watched", path.display()),
        };
        assert!(refusal(&file).ends_with("/f not a directory"));
        assert!(refusal(&folder.path().join("none")).ends_with("/none not found: no such file or directory"));
    }
}
