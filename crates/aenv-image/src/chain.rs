//! What is done already: sealed layers, by the chain of diff ids that they are the end of.
//!
//! Kept in `<home>/cache/images/<chain id>.json`. A record may be lost at any time: the layer is then made again.

use std::{fs, io, path::PathBuf};

use aenv_types::{CacheRecord, Digest, Home, LayerRef, cache};
use serde::{Deserialize, Serialize};

/// Version of the record's form, and of how layers are applied: a change makes every layer anew.
const FORMAT: u32 = 1;

/// A chain that is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChainRecord {
    format: u32,
    /// The chain.
    chain: Digest,
    /// Size of the filesystem.
    disk_size: u64,
    /// The layers beneath. A layer holds blocks that differ from these, and means nothing on others.
    beneath: Vec<LayerRef>,
    /// What the chain's last layer became; `None` when it changes nothing.
    pub layer: Option<LayerRef>,
}

/// The chain ids of these diff ids: the first is the first diff id, each further one the digest of
/// `<chain id before> <diff id>` (OCI image specification, "Layer ChainID").
pub(crate) fn chain_ids(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chain: Vec<Digest> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let next = match chain.last() {
            None => *diff_id,
            Some(before) => Digest::of(format!("{before} {diff_id}").as_bytes()),
        };
        chain.push(next);
    }
    chain
}

/// The records of a node.
#[derive(Clone, Debug)]
pub(crate) struct Chains {
    folder: PathBuf,
    home: Home,
}

impl Chains {
    /// Of this home.
    pub(crate) fn new(home: &Home) -> Self {
        Self { folder: home.cache().join("images"), home: home.clone() }
    }

    fn path(&self, chain: &Digest) -> PathBuf {
        self.folder.join(format!("{}.json", chain.hex()))
    }

    /// The record of a chain, if it is done on these layers and its layer's file is still there.
    pub(crate) fn find(&self, chain: &Digest, disk_size: u64, beneath: &[LayerRef]) -> Option<ChainRecord> {
        let path = self.path(chain);
        let bytes = fs::read(&path).ok()?;
        let record: ChainRecord = serde_json::from_slice(&bytes).ok()?;
        let current = record.format == FORMAT
            && record.chain == *chain
            && record.disk_size == disk_size
            && record.beneath == beneath;
        let there = record.layer.is_none_or(|layer| {
            fs::metadata(self.home.layer(&layer.name)).is_ok_and(|file| file.len() == layer.size)
        });
        let found = (current && there).then_some(record)?;
        // Without the note it only seems older than it is.
        cache::touch(&path).ok();
        Some(found)
    }

    /// Every record, with the layer that it keeps.
    pub(crate) fn list(&self) -> io::Result<Vec<CacheRecord>> {
        let mut records = Vec::new();
        let listing = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
            listing => listing?,
        };
        for item in listing {
            let path = item?.path();
            // Forgotten meanwhile, or half-written: it keeps nothing.
            let (Ok(bytes), Ok(meta)) = (fs::read(&path), fs::metadata(&path)) else { continue };
            let Ok(record) = serde_json::from_slice::<ChainRecord>(&bytes) else { continue };
            records.push(CacheRecord {
                file: Some(path),
                last_used: meta.modified()?,
                own_bytes: 0,
                layers: record.layer.into_iter().collect(),
            });
        }
        Ok(records)
    }

    /// Records that a chain is done, durably.
    pub(crate) fn record(
        &self,
        chain: Digest,
        disk_size: u64,
        beneath: &[LayerRef],
        layer: Option<LayerRef>,
    ) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let record = ChainRecord { format: FORMAT, chain, disk_size, beneath: beneath.to_vec(), layer };
        let bytes = serde_json::to_vec_pretty(&record).map_err(io::Error::other)?;
        aenv_durable::write(&self.path(&chain), &bytes)
    }

    /// Whether some record names this file of the `layers` folder.
    pub(crate) fn names(&self, file_name: &str) -> bool {
        let Ok(listing) = fs::read_dir(&self.folder) else { return false };
        listing.filter_map(|item| fs::read(item.ok()?.path()).ok()).any(|bytes| {
            serde_json::from_slice::<ChainRecord>(&bytes)
                .ok()
                .and_then(|record| record.layer)
                .is_some_and(|layer| layer.name.file_name() == file_name)
        })
    }
}

#[cfg(test)]
mod tests {
    use aenv_types::LayerName;

    use super::*;

    #[test]
    fn chain_ids_are_those_of_the_specification() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let chain = chain_ids(&[a, b]);
        assert_eq!(chain, [a, Digest::of(format!("{a} {b}").as_bytes())]);
        assert_ne!(chain_ids(&[b, a])[1], chain[1]);
    }

    #[test]
    fn a_record_counts_only_while_its_layer_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path().join("home"), dir.path().join("run"));
        home.create().unwrap();
        let chains = Chains::new(&home);
        let chain = Digest::of(b"chain");
        assert_eq!(chains.find(&chain, 4096, &[]), None);

        let layer = LayerRef { name: LayerName::new_local(), size: 3 };
        fs::write(home.layer(&layer.name), b"abc").unwrap();
        chains.record(chain, 4096, &[], Some(layer)).unwrap();
        assert_eq!(chains.find(&chain, 4096, &[]).unwrap().layer, Some(layer));
        assert_eq!(chains.find(&chain, 4096, &[layer]), None, "on other layers it means nothing");
        assert_eq!(chains.find(&chain, 8192, &[]), None, "a disk of another size is another layer");
        assert!(chains.names(&layer.name.file_name()));
        assert_eq!(chains.list().unwrap()[0].layers, [layer]);

        fs::write(home.layer(&layer.name), b"ab").unwrap();
        assert_eq!(chains.find(&chain, 4096, &[]), None, "a layer of another size is not the one");
        fs::write(home.cache().join("images").join(format!("{}.json", chain.hex())), b"{").unwrap();
        assert_eq!(chains.find(&chain, 4096, &[]), None);
    }
}
