//! A bound on what is kept only to save time: pulled images, cached build steps, uploads, and copies of committed blobs.
//!
//! They give way, the longest unused first, when they take more than `Settings::cache_bytes` together, or when less than twice
//! the disk's reserve is free. What was of use within [`RECENT`] stays whatever happens; a record that was of no use for
//! [`LONGEST`] goes whatever room there is. Forgetting a record removes nothing by itself: its layers go with the next
//! collection, unless something else names them.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use aenv_types::{CacheRecord, LayerName};

use crate::{Blobs, files, node::Node};

/// What was of use so recently may be about to be used again: a pull or a fetch, and the launch that it is for.
const RECENT: Duration = Duration::from_secs(600);
/// A record that was of no use for so long is not worth its room.
const LONGEST: Duration = Duration::from_secs(14 * 24 * 3600);
/// Below this many reserves of free disk, caches give way.
const RESERVES: u64 = 2;

/// A copy of a committed blob that no sandbox and no record needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Copy {
    name: LayerName,
    path: PathBuf,
    last_used: SystemTime,
    /// What its removal gives back: nothing while the file has another name.
    bytes: u64,
    /// The blob that it was a copy of is gone.
    orphaned: bool,
}

/// One thing that may be forgotten.
enum Victim {
    Record(CacheRecord),
    Copy(Copy),
}

impl Victim {
    fn last_used(&self) -> SystemTime {
        match self {
            Self::Record(record) => record.last_used,
            Self::Copy(copy) => copy.last_used,
        }
    }
}

/// The records of all caches; blocking.
pub(super) fn records(node: &Node) -> io::Result<Vec<CacheRecord>> {
    let lists = node.caches.iter().map(|list| list()).collect::<io::Result<Vec<_>>>()?;
    Ok(lists.into_iter().flatten().collect())
}

/// Forgets what there is no room for, once.
pub(super) async fn trim(node: &Arc<Node>) {
    let Some(in_use) = super::shown(node).await else { return };
    let owner = Arc::clone(node);
    let trimmed = files::blocking(move || {
        let records = records(&owner)?;
        let (mut needed, _) = super::survey(&owner)?;
        let copies = copies(&owner, &records, &needed, &in_use)?;
        needed.extend(owner.checkpoints.fresh_layers());
        let free = owner.disk_free()?;
        let low = owner.settings.disk_reserve_bytes.saturating_mul(RESERVES);
        let room = Room { limit: owner.settings.cache_bytes, short_of: low.saturating_sub(free) };
        let victims = choose(records, copies, &needed, &room, SystemTime::now());
        for victim in &victims {
            forget(&owner, victim)?;
        }
        Ok(victims.len())
    });
    match trimmed.await {
        Ok(0) => {}
        Ok(forgotten) => tracing::info!(forgotten, "caches were trimmed"),
        Err(error) => tracing::warn!(%error, "caches are not trimmed"),
    }
}

/// Copies that no sandbox, no record and no export needs.
fn copies(
    node: &Node,
    records: &[CacheRecord],
    needed: &HashSet<LayerName>,
    in_use: &HashSet<PathBuf>,
) -> io::Result<Vec<Copy>> {
    let kept: HashSet<LayerName> =
        records.iter().flat_map(|record| &record.layers).map(|layer| layer.name).collect();
    let mut copies = Vec::new();
    for name in super::all_layers(node) {
        let path = node.home.layer(&name);
        let unneeded = !needed.contains(&name) && !kept.contains(&name) && !in_use.contains(&path);
        if !matches!(name, LayerName::Digest(_)) || !unneeded {
            continue;
        }
        let meta = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            meta => meta?,
        };
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(meta.ctime()).unwrap_or(0));
        let alone = meta.nlink() == 1;
        copies.push(Copy {
            name,
            path,
            last_used: meta.accessed().unwrap_or(changed).max(changed),
            bytes: if alone { meta.len() } else { 0 },
            orphaned: alone && node.settings.blobs == Blobs::Beside,
        });
    }
    Ok(copies)
}

/// How much must go.
struct Room {
    /// Bytes that all of it may take.
    limit: u64,
    /// Bytes that the disk lacks.
    short_of: u64,
}

fn choose(
    records: Vec<CacheRecord>,
    copies: Vec<Copy>,
    needed: &HashSet<LayerName>,
    room: &Room,
    now: SystemTime,
) -> Vec<Victim> {
    let age = |then: SystemTime| now.duration_since(then).unwrap_or_default();
    // A layer's bytes come back with the last record that names it, if no sandbox does.
    let mut names: HashMap<LayerName, (u64, usize)> = HashMap::new();
    for layer in records.iter().flat_map(|record| &record.layers).filter(|l| !needed.contains(&l.name)) {
        names.entry(layer.name).or_insert((layer.size, 0)).1 += 1;
    }
    let layers: u64 = names.values().map(|(size, _)| size).sum();
    let own: u64 = records.iter().map(|record| record.own_bytes).sum();
    let used = layers + own + copies.iter().map(|copy| copy.bytes).sum::<u64>();
    let mut excess = used.saturating_sub(room.limit).max(room.short_of);

    let records = records.into_iter().map(Victim::Record);
    let mut candidates: Vec<Victim> = records.chain(copies.into_iter().map(Victim::Copy)).collect();
    candidates.sort_by_key(Victim::last_used);
    let mut victims = Vec::new();
    for candidate in candidates {
        let age = age(candidate.last_used());
        let (worthless, frees) = match &candidate {
            Victim::Record(CacheRecord { file: None, .. }) => continue,
            Victim::Record(record) => {
                let gone =
                    record.layers.iter().filter(|layer| names.get(&layer.name).is_some_and(|n| n.1 == 1));
                (age > LONGEST, record.own_bytes + gone.map(|layer| layer.size).sum::<u64>())
            }
            Victim::Copy(copy) => (copy.orphaned, copy.bytes),
        };
        if age < RECENT || !(worthless || (excess > 0 && frees > 0)) {
            continue;
        }
        if let Victim::Record(record) = &candidate {
            for layer in &record.layers {
                names.entry(layer.name).and_modify(|n| n.1 = n.1.saturating_sub(1));
            }
        }
        excess = excess.saturating_sub(frees);
        victims.push(candidate);
    }
    victims
}

fn forget(node: &Node, victim: &Victim) -> io::Result<()> {
    match victim {
        Victim::Record(record) => record.file.as_deref().map_or(Ok(()), files::remove_file),
        Victim::Copy(copy) => remove_copy(&copy.path, &node.home.staging()),
    }
}

/// Removes a copy unless somebody fetches it now: whoever does notes the use before looking whether it is there, and here it is
/// taken away before looking whether it was noted.
fn remove_copy(path: &Path, staging: &Path) -> io::Result<()> {
    let before = match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        meta => meta?.accessed()?,
    };
    let aside = staging.join(format!("trimmed-{}", uuid::Uuid::new_v4()));
    std::fs::rename(path, &aside)?;
    if std::fs::metadata(&aside)?.accessed()? != before {
        return std::fs::rename(&aside, path);
    }
    files::remove_file(&aside)
}

#[cfg(test)]
mod tests {
    use aenv_types::{Digest, LayerRef};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn record(file: &str, age: Duration, layers: &[LayerRef]) -> CacheRecord {
        CacheRecord {
            file: Some(file.into()),
            last_used: SystemTime::now() - age,
            own_bytes: 0,
            layers: layers.to_vec(),
        }
    }

    fn copy(age: Duration, bytes: u64) -> Copy {
        Copy {
            name: LayerName::Digest(Digest::of(b"x")),
            path: "copy".into(),
            last_used: SystemTime::now() - age,
            bytes,
            orphaned: false,
        }
    }

    fn names(victims: Vec<Victim>) -> Vec<String> {
        let name = |victim| match victim {
            Victim::Record(record) => record.file.unwrap().display().to_string(),
            Victim::Copy(_) => "copy".to_owned(),
        };
        victims.into_iter().map(name).collect()
    }

    fn layer(size: u64) -> LayerRef {
        LayerRef { name: LayerName::new_local(), size }
    }

    #[test]
    fn the_longest_unused_goes_until_there_is_room() {
        let (shared, a, b, busy) = (layer(100), layer(10), layer(10), layer(1000));
        let records = || {
            vec![
                record("newest", HOUR, &[shared, a]),
                record("oldest", HOUR * 3, &[shared, b]),
                record("in use", HOUR * 4, &[busy]),
                record("just now", Duration::ZERO, &[layer(500)]),
                CacheRecord { file: None, ..record("", HOUR * 9, &[layer(0)]) },
            ]
        };
        let needed = HashSet::from([busy.name]);
        let run = |limit, short_of, copies| {
            names(choose(records(), copies, &needed, &Room { limit, short_of }, SystemTime::now()))
        };
        // 100 + 10 + 10 + 500 bytes; a sandbox needs the 1000.
        assert_eq!(run(620, 0, vec![]), Vec::<String>::new());
        assert_eq!(run(619, 0, vec![]), ["oldest"]);
        // Only both records together give the shared layer back.
        assert_eq!(run(600, 0, vec![]), ["oldest", "newest"]);
        assert_eq!(run(0, 0, vec![]), ["oldest", "newest"], "what was of use just now stays");
        assert_eq!(run(1 << 30, 11, vec![copy(HOUR * 2, 5)]), ["oldest", "copy"], "the disk is short of 11");
        assert_eq!(run(1 << 30, 1, vec![copy(HOUR * 9, 0)]), ["oldest"], "a second name gives nothing back");
        let orphan = Copy { orphaned: true, ..copy(HOUR, 5) };
        assert_eq!(run(1 << 30, 0, vec![orphan]), ["copy"]);
        let ancient = record("ancient", LONGEST + HOUR, &[]);
        let room = Room { limit: 1 << 30, short_of: 0 };
        assert_eq!(names(choose(vec![ancient], vec![], &needed, &room, SystemTime::now())), ["ancient"]);
    }

    #[test]
    fn a_copy_goes_whole_and_one_that_is_gone_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("copy");
        std::fs::write(&path, b"x").unwrap();
        remove_copy(&path, folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        remove_copy(&path, folder.path()).unwrap();
    }
}
