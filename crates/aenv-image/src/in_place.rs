//! Images whose layers are in overlaybd format: their layers stay where they are, and blockd reads what a guest asks for.
//!
//! Of each layer a note is made (`<layer>.remote`), once what can be seen of it without reading its data was found right: its
//! header, jump table and index. Its name is the digest of its *place* and not of its bytes, because those cannot be compared with
//! a digest before all of them are read: so a registry that lies deceives only those who use images of that registry.

use std::{fs, path::Path, sync::Arc, time::SystemTime};

use aenv_layer::{Layer, OpenLayerError, OpenZFileError};
use aenv_remote::{Location, Place};
use aenv_store::{BlockSource, SourceError};
use aenv_types::{Digest, Home, LayerName, LayerRef};
use futures::{StreamExt, TryStreamExt, stream};

use crate::{
    ImageError, PullProgress, PulledImage,
    error::LayerError,
    source::{ImageSource, LayerBlob, ResolvedImage},
};

/// Layers that are looked at at the same time.
const AT_ONCE: usize = 4;
/// Sizes of disks that exports take.
const GRAIN: u64 = 4096;
/// The largest disk that a machine can have.
const LARGEST: u64 = 1 << 40;

/// Notes where the layers of an image are.
pub(crate) async fn refer(
    home: &Home,
    source: &Arc<dyn ImageSource>,
    image: ResolvedImage,
    table_bytes: u64,
    progress: &(dyn Fn(PullProgress) + Send + Sync),
) -> Result<PulledImage, ImageError> {
    let about = |error: LayerError, layer: &LayerBlob| error.of(&image.reference, &layer.key);
    let looks = image.layers.iter().enumerate().map(|(index, layer)| async move {
        let (found, disk) =
            note(home, source, layer, table_bytes).await.map_err(|error| about(error, layer))?;
        progress(PullProgress::InPlace { index });
        Ok::<_, ImageError>((found, disk))
    });
    let found: Vec<(LayerRef, u64)> =
        stream::iter(looks.collect::<Vec<_>>()).buffered(AT_ONCE).try_collect().await?;
    let disk_size = found.iter().map(|(_, disk)| *disk).max().unwrap_or_default().next_multiple_of(GRAIN);
    if disk_size == 0 || disk_size > LARGEST {
        let message = format!("its disk has {disk_size} bytes; {LARGEST} are possible");
        return Err(ImageError::Damaged { reference: image.reference, message });
    }
    Ok(PulledImage {
        reference: image.reference,
        manifest: image.manifest,
        layers: found.into_iter().map(|(layer, _)| layer).collect(),
        disk_size,
        guest: image.config.guest,
    })
}

/// Makes one layer's note, or finds it; returns the size of the disk as well.
async fn note(
    home: &Home,
    source: &Arc<dyn ImageSource>,
    layer: &LayerBlob,
    table_bytes: u64,
) -> Result<(LayerRef, u64), LayerError> {
    let digest =
        layer.expected.digest.ok_or_else(|| LayerError::Damaged("it has no digest".to_owned()))?.to_string();
    let (place, size) = (source.place(layer)?, layer.expected.size);
    let name = LayerName::Digest(Digest::of(place.identity(&digest).as_bytes()));
    let path = home.remote_layer(&name);
    let found = LayerRef { name, size };
    let kept = kept(&path).filter(|kept| kept.size == size && kept.digest == digest);
    if let Some(Location { place: kept_place, disk: Some(disk), .. }) = &kept {
        let unchanged = match &place {
            Place::File { path } => fs::metadata(path).is_ok_and(|file| file.len() == size),
            // Credentials that were given replace those of before; without any, those of before stay.
            Place::Registry { login: Some(_), .. } => *kept_place == place,
            Place::Registry { login: None, .. } | Place::Repository { .. } => true,
        };
        if unchanged {
            return Ok((found, *disk));
        }
    }
    let disk = look(source.bytes(layer)?, table_bytes).await?;
    let location = Location { place, size, digest, disk: Some(disk) };
    let failed = |error: std::io::Error| LayerError::io("noting where a layer is", error);
    let text = serde_json::to_vec(&location).map_err(|error| failed(error.into()))?;
    // It may have a password in it.
    tokio::task::spawn_blocking(move || aenv_durable::write_private(&path, &text))
        .await
        .map_err(|error| failed(std::io::Error::other(error)))?
        .map_err(failed)?;
    Ok((found, disk))
}

/// The note that is there. Noted as its use first, so that the node's collector leaves it for a while.
fn kept(path: &Path) -> Option<Location> {
    let now = fs::FileTimes::new().set_modified(SystemTime::now());
    fs::File::open(path).and_then(|note| note.set_times(now)).ok()?;
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Reads all of a layer but its data, and returns the size of its disk.
async fn look(source: Arc<dyn BlockSource>, table_bytes: u64) -> Result<u64, LayerError> {
    let opened = tokio::task::spawn_blocking(move || {
        Layer::open_within(source, table_bytes).map(|layer| layer.virtual_size())
    });
    let opened = opened.await.map_err(|error| LayerError::Io {
        context: "opening a layer".to_owned(),
        message: error.to_string(),
    })?;
    opened.map_err(|error| match error {
        OpenLayerError::Source(error) | OpenLayerError::ZFile(OpenZFileError::Source(error)) => {
            source_error(error)
        }
        large
        @ (OpenLayerError::TooLarge { .. } | OpenLayerError::ZFile(OpenZFileError::TooLarge { .. })) => {
            LayerError::Hostile(format!("{large} (image.max_layer_table_mib)"))
        }
        other => LayerError::Damaged(other.to_string()),
    })
}

fn source_error(error: SourceError) -> LayerError {
    let message = error.to_string();
    match error {
        SourceError::Denied { .. } => LayerError::Denied(message),
        SourceError::Remote { .. } | SourceError::Away { .. } | SourceError::TimedOut { .. } => {
            LayerError::Unreachable(message)
        }
        SourceError::Corrupt { .. } | SourceError::OutOfRange { .. } => LayerError::Damaged(message),
        SourceError::Io { context, source } => LayerError::io(context, source),
    }
}
