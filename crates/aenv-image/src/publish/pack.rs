//! A layer of a disk becomes the blob that a registry carries: without what is dead in it, compressed in blocks, in a tar.

use std::{fs, path::Path, sync::Arc};

use aenv_layer::{CompressOptions, Compression, Layer, TarFrame, compact, compress_zfile};
use aenv_store::FileSource;

use super::blob::Blob;
use crate::error::LayerError;

/// Segments of a layer that other implementations read.
const MOST_SEGMENTS: usize = 1_000_000;

/// Packs the layer in `file` into a file at `packed`. Blocks, and leaves nothing but that file. The same layer gives the same bytes.
pub(super) fn pack(file: &Path, packed: &Path, compression: Compression) -> Result<Blob, LayerError> {
    let failed = |what: &str, error: &dyn std::fmt::Display| LayerError::Io {
        context: format!("packing {} ({what})", file.display()),
        message: error.to_string(),
    };
    let layer = Layer::open_file(file).map_err(|error| failed("opening it", &error))?;
    let plain = packed.with_extension("plain");
    let written = compact(&[Arc::new(layer)], &plain).map_err(|error| failed("writing it", &error))?;
    let compressed = (|| {
        if written.segments > MOST_SEGMENTS {
            return Err(LayerError::Damaged(format!(
                "it has {} segments on its disk, and other readers of the format take {MOST_SEGMENTS}",
                written.segments
            )));
        }
        let source = FileSource::open(&plain).map_err(|error| failed("reading it", &error))?;
        compress_zfile(&source, packed, CompressOptions::new(compression))
            .map_err(|error| failed("compressing it", &error))
    })();
    fs::remove_file(&plain).map_err(|error| failed("removing what was in between", &error))?;
    let frame = TarFrame::around(compressed?);
    Blob::framed(frame.head, packed.to_owned(), frame.tail).map_err(|error| failed("hashing it", &error))
}
