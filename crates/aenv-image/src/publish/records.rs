//! What layers of this node became when they were packed, so that they are not packed again to see that they were sent.
//!
//! Kept in `<home>/cache/converted/<layer>.<compression>.json`. A record may be lost at any time.

use std::{fs, io, path::PathBuf};

use aenv_layer::Compression;
use aenv_types::{Digest, Home, LayerName};
use serde::{Deserialize, Serialize};

/// Version of the record's form, and of how layers are packed.
const FORMAT: u32 = 1;
/// Places of one blob that are remembered.
const PLACES: usize = 16;

/// What a layer became.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// The blob.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Repositories (`host/name`) that have it.
    pub places: Vec<String>,
}

/// The records of a node.
pub(super) struct Records {
    folder: PathBuf,
}

impl Records {
    /// Of this home. Records of layers that are gone are removed.
    pub fn new(home: &Home) -> Self {
        let records = Self { folder: home.cache().join("converted") };
        if let Err(error) = records.sweep(home) {
            tracing::warn!(%error, "records of layers that are gone stay");
        }
        records
    }

    fn sweep(&self, home: &Home) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        for item in fs::read_dir(&self.folder)? {
            let path = item?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let layer = name.split('.').next().unwrap_or_default();
            if !home.layers().join(layer).exists() {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    fn path(&self, layer: &LayerName, compression: Compression) -> PathBuf {
        let kind = match compression {
            Compression::Lz4 => "lz4",
            Compression::Zstd => "zstd",
        };
        self.folder.join(format!("{}.{kind}.json", layer.file_name()))
    }

    /// What a layer became.
    pub fn find(&self, layer: &LayerName, compression: Compression) -> Option<Record> {
        let record: Record = serde_json::from_slice(&fs::read(self.path(layer, compression)).ok()?).ok()?;
        (record.format == FORMAT).then_some(record)
    }

    /// Remembers what a layer became, and where that is.
    pub fn keep(
        &self,
        layer: &LayerName,
        compression: Compression,
        digest: Digest,
        size: u64,
        place: Option<String>,
    ) {
        let before = self.find(layer, compression).filter(|record| record.digest == digest);
        let mut places = before.map(|record| record.places).unwrap_or_default();
        places.retain(|known| Some(known) != place.as_ref());
        places.extend(place);
        let places = places.split_off(places.len().saturating_sub(PLACES));
        let record = Record { format: FORMAT, digest, size, places };
        let written = serde_json::to_vec(&record)
            .map_err(io::Error::other)
            .and_then(|text| aenv_durable::write(&self.path(layer, compression), &text));
        if let Err(error) = written {
            tracing::warn!(%error, "what a layer became is not remembered");
        }
    }
}
