//! Layers that stay where they are: those of images in overlaybd format that are used in place. The repository keeps where each of
//! them is, and a node that fetches the checkpoint gets a note with it. Credentials stay on the node that has them.

use aenv_remote::{Location, Place};
use aenv_types::{Digest, Home, LayerName};
use object_store::{ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};

use crate::{
    RepositoryError,
    backend::Opened,
    blobs::{blocking, store_error},
    documents, layout,
};

#[derive(Serialize, Deserialize)]
struct Elsewhere {
    format: u32,
    location: Location,
}

/// What a node's note says about a layer; `None`: there is none.
pub(crate) async fn noted(home: &Home, name: &LayerName) -> Result<Option<Location>, RepositoryError> {
    let path = home.remote_layer(name);
    let context = format!("reading {}", path.display());
    blocking(move || match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(store_error(context)(error)),
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(store_error(context)),
    })
    .await
}

/// Keeps where a layer is.
pub(crate) async fn keep(opened: &Opened, name: &Digest, location: &Location) -> Result<(), RepositoryError> {
    let mut location = location.clone();
    if let Place::Registry { login, .. } = &mut location.place {
        *login = None;
    }
    let document = Elsewhere { format: layout::FORMAT, location };
    let bytes = documents::encode("where a layer is", &document)?;
    // Its name stands for the place: who was faster wrote the same.
    match documents::write(opened, &layout::elsewhere(name), bytes, PutMode::Create).await {
        Ok(_) | Err(RepositoryError::Conflict(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether the repository knows where a layer is.
pub(crate) async fn known(opened: &Opened, name: &Digest) -> Result<bool, RepositoryError> {
    match opened.store.head(&layout::elsewhere(name)).await {
        Ok(_) => Ok(true),
        Err(object_store::Error::NotFound { .. }) => Ok(false),
        Err(error) => Err(store_error(format!("looking for where layer {name} is"))(error)),
    }
}

/// Gives the node a note of a layer that is elsewhere; says whether the repository knows of one.
pub(crate) async fn refer(opened: &Opened, home: &Home, name: &Digest) -> Result<bool, RepositoryError> {
    let Some((bytes, _)) = documents::read(opened, &layout::elsewhere(name)).await? else { return Ok(false) };
    let what = format!("where layer {name} is");
    let document: Elsewhere = documents::parse(&what, &bytes, layout::FORMAT)?;
    let location = document.location;
    // Whoever can write to the repository cannot have nodes read their own files.
    let fits = matches!(location.place, Place::Registry { .. })
        && Digest::of(location.place.identity(&location.digest).as_bytes()) == *name;
    if !fits {
        return Err(RepositoryError::Corrupt {
            what,
            message: "it is the place of another layer".to_owned(),
        });
    }
    let note = home.remote_layer(&LayerName::Digest(*name));
    blocking(move || {
        let text = serde_json::to_vec(&location).map_err(store_error(what.clone()))?;
        aenv_durable::write_private(&note, &text).map_err(store_error(what))
    })
    .await?;
    Ok(true)
}
