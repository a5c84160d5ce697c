//! Registries, by the OCI distribution protocol.

use std::{
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use aenv_remote::{
    BlobName, Bounds, Credentials, DockerConfig, Identity, Login, Place, RegistryClient, RegistrySource,
};
use aenv_store::BlockSource;
use aenv_types::Digest;
use async_trait::async_trait;
use bytes::{Buf, Bytes};
use futures::{StreamExt, stream::BoxStream};
use oci_client::{
    Client, Reference,
    client::{BlobResponse, ClientConfig, ClientProtocol},
    errors::{OciDistributionError, OciErrorCode},
    secrets::RegistryAuth as OciAuth,
};
use oci_spec::image::{Descriptor, MediaType};
use tokio::runtime::Handle;

use super::{Blobs, ImageSource, LayerBlob, ResolvedImage, about_image, resolve_document};
use crate::{ImageError, ImageSettings, RegistryAuth, config, error::LayerError};

/// Manifests that we can read.
const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
/// Attempts at one request, or at one position of a blob.
pub(crate) const ATTEMPTS: u32 = 5;
/// How often the connection may break in the middle of one blob.
const MAX_BREAKS: u32 = 50;
/// The longest silence of a registry.
const READ_BOUND: Duration = Duration::from_secs(60);

/// An image in a registry.
pub(crate) struct Registry {
    client: Client,
    image: Reference,
    reference: String,
    /// As whom it is asked.
    credentials: Option<Credentials>,
    /// Whether later reads need to know them.
    noted: Noted,
}

/// Those that were given for this image and last. Docker's are looked up for each read, and so are those that last for hours only.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Noted {
    Yes,
    No,
}

/// Why a registry did not give what it was asked for.
pub(crate) enum Refusal {
    /// It is not there.
    NotFound(String),
    /// It wants (other) credentials.
    Denied(String),
    /// May go better next time.
    Passing(String),
    /// It answers what makes no sense, or finds that what it was told makes none.
    Damaged(String),
}

impl Registry {
    /// The places where an image of this name may be, in the order in which to try them.
    pub(crate) async fn candidates(
        name: &str,
        auth: Option<&RegistryAuth>,
        settings: &ImageSettings,
    ) -> Result<Vec<Self>, ImageError> {
        let names = if is_short(name) {
            settings.search_registries.iter().map(|registry| format!("{registry}/{name}")).collect()
        } else {
            vec![name.to_owned()]
        };
        let docker = DockerConfig::load(settings.docker_config.as_deref());
        let mut found = Vec::new();
        for full_name in names {
            let image: Reference = full_name.parse().map_err(|_| ImageError::Reference(full_name.clone()))?;
            let host = image.registry().to_owned();
            check_allowed(&host, &full_name, settings)?;
            let (credentials, noted) = match auth {
                // Credentials are for one registry; of several search registries only the first gets them.
                Some(auth) if found.is_empty() => {
                    let noted = match auth {
                        RegistryAuth::Password { .. } => Noted::Yes,
                        RegistryAuth::Aws(_) => Noted::No,
                    };
                    (Some(auth.credentials(&full_name).await?), noted)
                }
                _ => (docker.find(&host).await, Noted::No),
            };
            let client = Client::new(config(&host));
            client.store_auth_if_needed(image.resolve_registry(), &login(credentials.as_ref())).await;
            let reference = image.whole();
            found.push(Self { client, image, reference, credentials, noted });
        }
        Ok(found)
    }

    /// Which image this is.
    pub(crate) fn reference(&self) -> &str {
        &self.reference
    }

    fn blob_name(&self, layer: &LayerBlob) -> BlobName {
        BlobName {
            registry: self.image.registry().to_owned(),
            repository: self.image.repository().to_owned(),
            digest: layer.key.clone(),
        }
    }

    async fn manifest(&self, image: &Reference) -> Result<Bytes, Refusal> {
        // The credentials were stored when the client was made.
        let (bytes, _) =
            retry(|| self.client.pull_manifest_raw(image, &OciAuth::Anonymous, ACCEPTED)).await?;
        Ok(bytes)
    }
}

/// Refuses registries that the node's settings do not allow.
pub(crate) fn check_allowed(host: &str, image: &str, settings: &ImageSettings) -> Result<(), ImageError> {
    let allowed = &settings.allowed_registries;
    if allowed.is_empty() || allowed.iter().any(|one| one == host) {
        return Ok(());
    }
    let message = format!("this node may not use the registry {host} (image.resolver.allowed_registries)");
    Err(ImageError::Denied { reference: image.to_owned(), message })
}

/// How a registry is spoken to.
pub(crate) fn config(host: &str) -> ClientConfig {
    ClientConfig {
        protocol: if is_loopback(host) { ClientProtocol::Http } else { ClientProtocol::Https },
        platform_resolver: None,
        connect_timeout: Some(Duration::from_secs(10)),
        read_timeout: Some(READ_BOUND),
        user_agent: concat!("aenv/", env!("CARGO_PKG_VERSION")),
        ..ClientConfig::default()
    }
}

/// Credentials in the words of the client.
pub(crate) fn login(credentials: Option<&Credentials>) -> OciAuth {
    match credentials {
        None => OciAuth::Anonymous,
        Some(known) => match known.identity_token() {
            Some(token) => OciAuth::Bearer(token.to_owned()),
            None => OciAuth::Basic(known.user.clone(), known.password.clone()),
        },
    }
}

/// Tries again what may go better next time, after a pause that doubles and varies.
pub(crate) async fn retry<T, F>(mut request: impl FnMut() -> F) -> Result<T, Refusal>
where
    F: Future<Output = Result<T, OciDistributionError>>,
{
    for attempt in 1.. {
        match request().await.map_err(refusal) {
            Err(Refusal::Passing(message)) if attempt < ATTEMPTS => {
                tracing::debug!(attempt, message, "the registry failed, trying again");
                tokio::time::sleep(pause(attempt)).await;
            }
            other => return other,
        }
    }
    unreachable!("the loop returns at its last attempt")
}

/// Before the next attempt.
pub(crate) fn pause(attempt: u32) -> Duration {
    let base = 200 * (1 << attempt.min(6));
    Duration::from_millis(base / 2 + u64::from(uuid::Uuid::new_v4().as_bytes()[0]) * base / 512)
}

/// What an error of the client means.
pub(crate) fn refusal(error: OciDistributionError) -> Refusal {
    use OciErrorCode as Code;
    let message = error.to_string();
    match &error {
        OciDistributionError::UnauthorizedError { .. } | OciDistributionError::AuthenticationFailure(_) => {
            Refusal::Denied(message)
        }
        OciDistributionError::ImageManifestNotFoundError(_) => Refusal::NotFound(message),
        OciDistributionError::ServerError { code: 401 | 403, .. } => Refusal::Denied(message),
        OciDistributionError::ServerError { code: 404, .. } => Refusal::NotFound(message),
        // What was asked cannot be done, and will not be done the next time either.
        OciDistributionError::ServerError { code: 400 | 405..=407 | 409..=428 | 430..=499, .. } => {
            Refusal::Damaged(message)
        }
        OciDistributionError::RequestError(error)
            if error.status().is_some_and(|status| matches!(status.as_u16(), 401 | 403)) =>
        {
            Refusal::Denied(message)
        }
        OciDistributionError::ServerError { .. }
        | OciDistributionError::RequestError(_)
        | OciDistributionError::IoError(_) => Refusal::Passing(message),
        OciDistributionError::RegistryError { envelope, .. } => {
            let has = |codes: &[Code]| envelope.errors.iter().any(|error| codes.contains(&error.code));
            if has(&[
                Code::ManifestUnknown,
                Code::NameUnknown,
                Code::BlobUnknown,
                Code::NotFound,
                Code::NameInvalid,
            ]) {
                Refusal::NotFound(message)
            } else if has(&[Code::Denied, Code::Unauthorized]) {
                Refusal::Denied(message)
            } else {
                Refusal::Passing(message)
            }
        }
        _ => Refusal::Damaged(message),
    }
}

impl Refusal {
    /// What happened.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::NotFound(message)
            | Self::Denied(message)
            | Self::Passing(message)
            | Self::Damaged(message) => message,
        }
    }

    fn of_image(self, reference: &str) -> ImageError {
        let reference = reference.to_owned();
        match self {
            Self::NotFound(message) => ImageError::NotFound { reference, message },
            Self::Denied(message) => ImageError::Denied { reference, message },
            Self::Passing(message) => ImageError::Unreachable { reference, message },
            Self::Damaged(message) => ImageError::Damaged { reference, message },
        }
    }

    fn of_blob(self) -> LayerError {
        match self {
            Self::NotFound(message) => {
                LayerError::Damaged(format!("the registry has no such blob: {message}"))
            }
            Self::Denied(message) => LayerError::Denied(message),
            Self::Passing(message) => LayerError::Unreachable(message),
            Self::Damaged(message) => LayerError::Damaged(message),
        }
    }
}

/// Whether a name has no registry in it: `debian:12`, `library/debian`.
pub(crate) fn is_short(name: &str) -> bool {
    match name.split_once('/') {
        None => true,
        Some((first, _)) => !(first.contains(['.', ':']) || first == "localhost"),
    }
}

/// Registries on this machine are spoken to in plain HTTP.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[async_trait]
impl ImageSource for Registry {
    async fn resolve(&self) -> Result<ResolvedImage, ImageError> {
        let bytes = self.manifest(&self.image).await.map_err(|refusal| refusal.of_image(&self.reference))?;
        let digest = Digest::of(&bytes);
        if let Some(pinned) = self.image.digest()
            && pinned != digest.to_string()
        {
            return Err(ImageError::Damaged {
                reference: self.reference.clone(),
                message: format!("the registry answered with a manifest of the digest {digest}"),
            });
        }
        resolve_document(self, self.reference.clone(), digest, bytes.to_vec())
            .await
            .map_err(|error| about_image(error, &self.reference))
    }

    async fn open(&self, layer: &LayerBlob) -> Result<Box<dyn Read + Send>, LayerError> {
        let mut reader = BlobReader {
            client: self.client.clone(),
            image: self.image.clone(),
            digest: layer.key.clone(),
            size: layer.expected.size,
            runtime: Handle::current(),
            stream: None,
            chunk: Bytes::new(),
            offset: 0,
            skip: 0,
            breaks: 0,
        };
        // A blob that is not there or not allowed is told at once, not in the middle of applying it.
        reader.connect().await?;
        Ok(Box::new(reader))
    }

    fn place(&self, layer: &LayerBlob) -> Result<Place, LayerError> {
        let login = match (self.noted, &self.credentials) {
            (Noted::Yes, Some(known)) => {
                Some(Login { user: known.user.clone(), password: known.password.clone() })
            }
            _ => None,
        };
        Ok(Place::Registry { blob: self.blob_name(layer), login })
    }

    fn bytes(&self, layer: &LayerBlob) -> Result<Arc<dyn BlockSource>, LayerError> {
        let client = RegistryClient::new().map_err(|error| LayerError::Io {
            context: "preparing for the registry".to_owned(),
            message: error.to_string(),
        })?;
        let identity = self.credentials.clone().map_or(Identity::Anonymous, Identity::Known);
        let (name, size) = (self.blob_name(layer), layer.expected.size);
        RegistrySource::new(Handle::current(), client, name, size, identity, Bounds::default())
            .map(|source| Arc::new(source) as Arc<dyn BlockSource>)
            .map_err(|error| LayerError::Damaged(error.to_string()))
    }
}

#[async_trait]
impl Blobs for Registry {
    async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, LayerError> {
        let digest = config::digest_of(descriptor)?;
        let is_manifest = match descriptor.media_type() {
            MediaType::ImageManifest | MediaType::ImageIndex => true,
            other => ACCEPTED.contains(&other.to_string().as_str()),
        };
        if is_manifest {
            let image = self.image.clone_with_digest(digest.to_string());
            return self.manifest(&image).await.map(|bytes| bytes.to_vec()).map_err(Refusal::of_blob);
        }
        let expected = crate::blob::Expected { digest: Some(digest), size: descriptor.size() };
        let blob = self.open(&LayerBlob { expected, key: digest.to_string() }).await?;
        let limit = descriptor.size() + 1;
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = Vec::new();
            blob.take(limit).read_to_end(&mut bytes).map(|_| bytes)
        });
        read.await
            .map_err(|error| LayerError::Io {
                context: "reading the config".to_owned(),
                message: error.to_string(),
            })?
            .map_err(|error| LayerError::io("reading the config", error))
    }
}

/// The bytes of a blob; goes on where it was when the connection breaks.
struct BlobReader {
    client: Client,
    image: Reference,
    digest: String,
    size: u64,
    runtime: Handle,
    stream: Option<BoxStream<'static, Result<Bytes, io::Error>>>,
    chunk: Bytes,
    /// Bytes that were given out or are in `chunk`.
    offset: u64,
    /// Bytes to leave out, where a registry knows no ranges.
    skip: u64,
    /// How often the connection broke.
    breaks: u32,
}

impl BlobReader {
    /// Asks for the blob from `offset` on.
    async fn connect(&mut self) -> Result<(), LayerError> {
        let (client, image, digest, offset) = (&self.client, &self.image, self.digest.as_str(), self.offset);
        let (stream, skip) = if offset == 0 {
            (retry(|| client.pull_blob_stream(image, digest)).await.map_err(Refusal::of_blob)?.stream, 0)
        } else {
            match retry(|| client.pull_blob_stream_partial(image, digest, offset, None))
                .await
                .map_err(Refusal::of_blob)?
            {
                BlobResponse::Full(stream) => (stream.stream, offset),
                BlobResponse::Partial(stream) => (stream.stream, 0),
            }
        };
        (self.stream, self.skip) = (Some(stream), skip);
        Ok(())
    }

    /// The next bytes; empty at the end.
    async fn next_chunk(&mut self) -> Result<Bytes, LayerError> {
        let mut failures = 0;
        loop {
            let failure = match &mut self.stream {
                None => "not connected".to_owned(),
                Some(stream) => match tokio::time::timeout(READ_BOUND, stream.next()).await {
                    Ok(Some(Ok(mut chunk))) => {
                        let skipped = self.skip.min(chunk.len() as u64);
                        self.skip -= skipped;
                        chunk.advance(usize::try_from(skipped).expect("not more than the chunk's length"));
                        if chunk.is_empty() {
                            continue;
                        }
                        self.offset += chunk.len() as u64;
                        return Ok(chunk);
                    }
                    Ok(_) if self.offset >= self.size => return Ok(Bytes::new()),
                    Ok(None) => "the connection ended early".to_owned(),
                    Ok(Some(Err(error))) => error.to_string(),
                    Err(_) => format!("nothing came for {} s", READ_BOUND.as_secs()),
                },
            };
            self.stream = None;
            failures += 1;
            self.breaks += 1;
            if failures >= ATTEMPTS || self.breaks >= MAX_BREAKS {
                let offset = self.offset;
                return Err(LayerError::Unreachable(format!(
                    "{failure}, at byte {offset} of {}",
                    self.digest
                )));
            }
            tokio::time::sleep(pause(failures)).await;
            self.connect().await?;
        }
    }
}

impl Read for BlobReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.chunk.is_empty() {
            let runtime = self.runtime.clone();
            self.chunk = runtime.block_on(self.next_chunk())?;
        }
        let len = buf.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buf[..len]);
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_a_registry_are_short() {
        for name in ["debian", "debian:12", "library/debian", "org/app@sha256:00"] {
            assert!(is_short(name), "{name}");
        }
        for name in ["ghcr.io/a/b", "localhost/a", "127.0.0.1:5000/a", "registry:5000/a"] {
            assert!(!is_short(name), "{name}");
        }
    }

    #[test]
    fn only_this_machine_is_spoken_to_in_plain_http() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:5000", "127.3.2.1", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["example.com", "10.0.0.1:5000", "localhost.example.com", "127.0.0.1.example.com"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
