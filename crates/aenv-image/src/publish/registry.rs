//! Publishing to a registry, by the OCI distribution protocol.

use std::{sync::atomic::Ordering, time::Duration};

use aenv_remote::DockerConfig;
use aenv_types::Digest;
use futures::TryStreamExt;
use oci_client::{Client, Reference, client::ClientConfig, errors::OciDistributionError};

use super::{PublishAs, blob::Blob};
use crate::{
    ImageError, ImageSettings,
    blob::Meter,
    source::registry::{self, ATTEMPTS, Refusal},
};

/// The longest that nothing goes out. At the end of a large blob a registry may have a while to do.
const STALLED: Duration = Duration::from_secs(180);
/// The registry takes no request of that size.
const TOO_LARGE: u16 = 413;

/// A name and tag in a registry.
pub(super) struct RegistryTarget {
    /// Sends a blob in one request.
    client: Client,
    /// Sends it in several, for registries behind something that bounds requests.
    in_chunks: Client,
    image: Reference,
    shown: String,
}

impl RegistryTarget {
    /// Nothing is asked of the registry yet.
    pub async fn open(
        name: &str,
        identity: &PublishAs,
        settings: &ImageSettings,
    ) -> Result<Self, ImageError> {
        let refused =
            |message: &str| ImageError::NotPublished { target: name.to_owned(), message: message.to_owned() };
        if registry::is_short(name) {
            return Err(refused("the name has no registry in it: write host/name:tag"));
        }
        let image: Reference = name.parse().map_err(|_| ImageError::Reference(name.to_owned()))?;
        if image.digest().is_some() {
            return Err(refused("what is published gets a tag, and its digest by itself"));
        }
        let host = image.registry().to_owned();
        registry::check_allowed(&host, name, settings)?;
        let credentials = match identity {
            PublishAs::Nobody => None,
            PublishAs::Known(auth) => Some(auth.credentials(name).await?),
            PublishAs::Docker => DockerConfig::load(settings.docker_config.as_deref()).find(&host).await,
        };
        // What bounds a transfer here is that it goes on.
        let config =
            ClientConfig { read_timeout: None, use_monolithic_push: true, ..registry::config(&host) };
        let chunks = ClientConfig { use_monolithic_push: false, ..registry::config(&host) };
        let (client, in_chunks) = (Client::new(config), Client::new(chunks));
        let login = registry::login(credentials.as_ref());
        client.store_auth_if_needed(image.resolve_registry(), &login).await;
        in_chunks.store_auth_if_needed(image.resolve_registry(), &login).await;
        Ok(Self { client, in_chunks, image, shown: name.to_owned() })
    }

    /// `host/name`.
    pub fn place(&self) -> String {
        format!("{}/{}", self.image.registry(), self.image.repository())
    }

    fn failed(&self, refusal: Refusal) -> ImageError {
        match refusal {
            Refusal::Denied(message) => ImageError::Denied { reference: self.shown.clone(), message },
            Refusal::NotFound(message) | Refusal::Passing(message) | Refusal::Damaged(message) => {
                ImageError::NotPublished { target: self.shown.clone(), message }
            }
        }
    }

    pub async fn has(&self, digest: &Digest) -> Result<bool, ImageError> {
        let digest = digest.to_string();
        let asked = bounded(registry::retry(|| self.client.blob_exists(&self.image, &digest))).await;
        asked.map_err(|refusal| self.failed(refusal))
    }

    /// Has the registry take a blob over from another name of its own. `false`: it did not.
    pub async fn mount(&self, digest: &Digest, places: &[String]) -> bool {
        let (host, own) = (self.image.registry(), self.image.repository());
        for place in places.iter().rev() {
            let Some(name) = place.strip_prefix(host).and_then(|rest| rest.strip_prefix('/')) else {
                continue;
            };
            let Ok(source) = place.parse::<Reference>() else { continue };
            if name == own {
                continue;
            }
            let mounted = bounded(async {
                self.client
                    .mount_blob(&self.image, &source, &digest.to_string())
                    .await
                    .map_err(registry::refusal)
            });
            match mounted.await {
                Ok(()) => return true,
                Err(refusal) => tracing::debug!(place, message = refusal.message(), "not mounted"),
            }
        }
        false
    }

    pub async fn put(&self, blob: &Blob, meter: &Meter) -> Result<(), ImageError> {
        let mut client = &self.client;
        for attempt in 1.. {
            let refusal = match self.try_put(client, blob, meter).await {
                Ok(()) => return Ok(()),
                Err(OciDistributionError::ServerError { code: TOO_LARGE, .. })
                    if std::ptr::eq(client, &self.client) =>
                {
                    client = &self.in_chunks;
                    continue;
                }
                Err(error) => registry::refusal(error),
            };
            match refusal {
                Refusal::Passing(message) if attempt < ATTEMPTS => {
                    tracing::debug!(attempt, message, "a blob was not taken, trying again");
                    tokio::time::sleep(registry::pause(attempt)).await;
                }
                other => return Err(self.failed(other)),
            }
        }
        unreachable!("the loop returns at its last attempt")
    }

    async fn try_put(&self, client: &Client, blob: &Blob, meter: &Meter) -> Result<(), OciDistributionError> {
        meter.store(0, Ordering::Relaxed);
        let pieces = blob.stream(meter).await?.map_err(OciDistributionError::from);
        let digest = blob.digest.to_string();
        tokio::select! {
            sent = client.push_blob_stream(&self.image, pieces, &digest, Some(blob.size)) => sent.map(drop),
            () = stalled(meter) => Err(std::io::Error::other(format!("nothing went out for {} s", STALLED.as_secs())).into()),
        }
    }

    /// Gives the manifest its tag.
    pub async fn finish(&self, manifest: &[u8], media_type: &str) -> Result<(), ImageError> {
        let kind = http::HeaderValue::from_str(media_type).map_err(|_| ImageError::NotPublished {
            target: self.shown.clone(),
            message: format!("{media_type:?} is no media type"),
        })?;
        let pushed = bounded(registry::retry(|| {
            self.client.push_manifest_raw(&self.image, manifest.to_vec(), kind.clone())
        }));
        pushed.await.map(drop).map_err(|refusal| self.failed(refusal))
    }
}

/// Returns when a meter has stood still for too long.
async fn stalled(meter: &Meter) {
    let mut before = None;
    loop {
        let now = meter.load(Ordering::Relaxed);
        if before.replace(now) == Some(now) {
            return;
        }
        tokio::time::sleep(STALLED).await;
    }
}

/// Bounds small requests.
async fn bounded<T>(request: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
    let late = || Refusal::Passing(format!("no answer within {} s", STALLED.as_secs()));
    tokio::time::timeout(STALLED, request).await.unwrap_or_else(|_| Err(late()))
}
