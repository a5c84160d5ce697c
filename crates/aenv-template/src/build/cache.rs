//! The step cache: what the disk was after a step, keyed by everything that led to it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_types::{CacheRecord, CheckpointId, DiskImage, Home, cache};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::steps::Context;

/// A key: the digest of the one before it and of what comes on top.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn root(what: &str) -> Self {
        Self(hex::encode(Sha256::digest(what.as_bytes())))
    }

    pub(crate) fn then(&self, what: &str) -> Self {
        Self(hex::encode(
            Sha256::new().chain_update(&self.0).chain_update("\n").chain_update(what).finalize(),
        ))
    }
}

/// What a step left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cached {
    /// The disks after it.
    pub(crate) disks: Vec<DiskImage>,
    /// Env, user and workdir after it.
    pub(crate) context: Context,
}

/// `<home>/cache/{steps,builds}`. May be emptied at any time.
pub(crate) struct StepCache {
    steps: PathBuf,
    results: PathBuf,
    home: Home,
}

impl StepCache {
    pub(crate) fn new(home: &Home) -> Self {
        Self { steps: home.cache().join("steps"), results: home.cache().join("builds"), home: home.clone() }
    }

    /// What is cached, if all of its layers are still on this node.
    pub(crate) fn find(&self, key: &Key) -> Option<Cached> {
        let path = self.steps.join(format!("{}.json", key.0));
        let text = fs::read(&path).ok()?;
        let cached: Cached = serde_json::from_slice(&text).ok()?;
        let whole = cached.disks.iter().flat_map(|disk| &disk.layers).all(|layer| {
            let here = fs::metadata(self.home.layer(&layer.name));
            here.map_or_else(|_| self.home.has_layer(&layer.name), |found| found.len() == layer.size)
        });
        let found = whole.then_some(cached)?;
        // Without the note it only seems older than it is.
        cache::touch(&path).ok();
        Some(found)
    }

    /// Keeps a step's result. A cache that cannot be written costs time later, and fails nothing.
    pub(crate) fn keep(&self, key: &Key, cached: &Cached) {
        self.write(&self.steps, key, &serde_json::to_vec(cached).expect("a cached step has only text"));
    }

    /// The checkpoint of a whole build with this key.
    pub(crate) fn find_result(&self, key: &Key) -> Option<CheckpointId> {
        let text = fs::read_to_string(self.results.join(format!("{}.json", key.0))).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Keeps the checkpoint of a whole build.
    pub(crate) fn keep_result(&self, key: &Key, checkpoint: &CheckpointId) {
        self.write(&self.results, key, &serde_json::to_vec(checkpoint).expect("an id is text"));
    }

    fn write(&self, folder: &Path, key: &Key, text: &[u8]) {
        let path = folder.join(format!("{}.json", key.0));
        let written = fs::create_dir_all(folder).and_then(|()| aenv_durable::write(&path, text));
        if let Err(error) = written {
            tracing::warn!(folder = %folder.display(), %error, "a step's result is not cached");
        }
    }
}

/// Every cached step of a node, with the layers that it keeps; and the uploads that wait for a `COPY`. Blocks.
pub fn cached(home: &Home) -> io::Result<Vec<CacheRecord>> {
    let mut records = Vec::new();
    let steps = files(&home.cache().join("steps"))?;
    let uploads = files(&home.cache().join("uploads"))?;
    for path in steps {
        // Forgotten meanwhile, or half-written: it keeps nothing.
        let (Ok(text), Ok(meta)) = (fs::read(&path), fs::metadata(&path)) else { continue };
        let Ok(step) = serde_json::from_slice::<Cached>(&text) else { continue };
        let layers = step.disks.into_iter().flat_map(|disk| disk.layers).collect();
        records.push(CacheRecord { file: Some(path), last_used: meta.modified()?, own_bytes: 0, layers });
    }
    for path in uploads {
        let Ok(meta) = fs::metadata(&path) else { continue };
        records.push(CacheRecord {
            file: Some(path),
            last_used: meta.modified()?,
            own_bytes: meta.len(),
            layers: Vec::new(),
        });
    }
    Ok(records)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listing => listing?.map(|entry| Ok(entry?.path())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use aenv_types::{LayerName, LayerRef};

    use super::*;

    #[test]
    fn what_is_cached_is_listed_with_what_it_keeps() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path().join("home"), dir.path().join("run"));
        home.create().unwrap();
        assert_eq!(cached(&home).unwrap(), []);
        let layer = LayerRef { name: LayerName::new_local(), size: 3 };
        fs::write(home.layer(&layer.name), b"abc").unwrap();
        let disks = vec![DiskImage { drive: "root".into(), size: 4096, layers: vec![layer] }];
        let (cache, key) = (StepCache::new(&home), Key::root("x"));
        cache.keep(
            &key,
            &Cached {
                disks,
                context: Context {
                    env: Default::default(),
                    user: "user".into(),
                    workdir: String::new(),
                    exposed: Default::default(),
                },
            },
        );
        fs::create_dir_all(home.cache().join("uploads")).unwrap();
        fs::write(home.cache().join("uploads/some.tar.gz"), b"12345").unwrap();
        let listed = cached(&home).unwrap();
        assert_eq!(listed.iter().map(|record| record.layers.len()).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(listed[1].own_bytes, 5);
        // Whoever forgets a record removes its file; then the step is made again.
        fs::remove_file(listed[0].file.as_ref().unwrap()).unwrap();
        assert!(cache.find(&key).is_none());
    }

    #[test]
    fn keys_depend_on_order_and_content() {
        let root = Key::root("image");
        assert_ne!(root.then("a").then("b"), root.then("b").then("a"));
        assert_ne!(root.then("ab"), root.then("a").then("b"));
        assert_eq!(root.then("a"), Key::root("image").then("a"));
    }
}
