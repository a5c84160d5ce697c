//! Where layers are, and how those places are reached: two small documents that the server writes and blockd reads.

use std::{path::PathBuf, sync::Arc, time::Duration};

use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, RetryConfig, aws::AmazonS3Builder, local::LocalFileSystem,
    prefix::PrefixStore,
};
use serde::{Deserialize, Serialize};

use crate::{Bounds, registry::BlobName};

/// The content of a file `<layer>.remote`: where the layer's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Location {
    /// The place.
    pub place: Place,
    /// Bytes.
    pub size: u64,
    /// Digest of all of them, `sha256:` and 64 hex digits.
    pub digest: String,
    /// Bytes of the disk that it is a layer of, where whoever noted it looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
}

/// A place that bytes are read from by ranges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "in", rename_all = "snake_case")]
pub enum Place {
    /// The node's repository.
    Repository {
        /// The object.
        key: String,
    },
    /// An OCI registry.
    Registry {
        /// The blob.
        #[serde(flatten)]
        blob: BlobName,
        /// As whom it is read; as docker's `config.json` says when `None`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        login: Option<Login>,
    },
    /// A file of this machine, such as a blob of an OCI layout.
    File {
        /// The file.
        path: PathBuf,
    },
}

impl Place {
    /// The place in words that stand for it and for nothing else: those of two blobs are equal only if both are one blob.
    pub fn identity(&self, digest: &str) -> String {
        match self {
            Self::Repository { key } => format!("repository {key} {digest}"),
            Self::Registry { blob, .. } => {
                format!("registry {}/{} {} {digest}", blob.registry, blob.repository, blob.digest)
            }
            Self::File { path } => format!("file {} {digest}", path.display()),
        }
    }
}

/// How places are reached, and the cache for what was read from them.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remotes {
    /// The node's repository.
    pub repository: StoreConfig,
    /// The cache.
    pub cache: CacheSettings,
    /// Bound of a read in milliseconds, attempts and pauses included.
    pub read_ms: u64,
    /// Whether layers that are in use are fetched whole in the background.
    pub fill: bool,
    /// Bytes of the index and of the jump table of a layer at most. Left out where it is the usual one, so that a blockd of an earlier
    /// version, which does not know it, reads the document all the same.
    #[serde(default = "usual_table_bytes", skip_serializing_if = "is_usual_table_bytes")]
    pub table_bytes: u64,
}

/// Bytes of the index and of the jump table of a layer at most, where nothing else is configured: enough for 64 GiB in blocks of
/// 4 KiB, and four times the segments that overlaybd's own programs take.
pub const DEFAULT_TABLE_BYTES: u64 = 64 << 20;

fn usual_table_bytes() -> u64 {
    DEFAULT_TABLE_BYTES
}

fn is_usual_table_bytes(bytes: &u64) -> bool {
    *bytes == DEFAULT_TABLE_BYTES
}

/// The cache's folder and bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSettings {
    /// Folder.
    pub folder: PathBuf,
    /// Bytes of its files at most.
    pub capacity: u64,
    /// Bytes that stay free on its filesystem.
    pub reserve: u64,
}

/// User and password.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Login {
    /// User.
    pub user: String,
    /// Password.
    pub password: String,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// An object store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StoreConfig {
    /// A folder.
    Folder(PathBuf),
    /// An S3-compatible store.
    S3(S3Config),
}

/// How to reach an S3-compatible store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct S3Config {
    /// URL; the provider's own when `None`.
    pub endpoint: Option<String>,
    /// Bucket.
    pub bucket: String,
    /// Prefix of every key.
    pub prefix: String,
    /// Region.
    pub region: String,
    /// `true`: `bucket.host`, `false`: `host/bucket`.
    pub virtual_hosted: bool,
    /// Id and secret; environment and instance roles when `None`.
    pub access_key: Option<(String, String)>,
}

impl S3Config {
    /// The store. Nothing is asked of it yet.
    pub fn open(
        &self,
        retry: RetryConfig,
        options: ClientOptions,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        let mut builder = AmazonS3Builder::from_env()
            .with_region(&self.region)
            .with_bucket_name(&self.bucket)
            .with_virtual_hosted_style_request(self.virtual_hosted)
            .with_retry(retry);
        let plain = self.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
        builder = builder.with_client_options(options.with_allow_http(plain));
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some((id, secret)) = &self.access_key {
            builder = builder.with_access_key_id(id).with_secret_access_key(secret);
        }
        let store = builder.build()?;
        let prefix = self.prefix.trim_matches('/');
        Ok(if prefix.is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) })
    }
}

impl StoreConfig {
    /// The store, for reads whose attempts are counted by their caller.
    pub fn open_for_reads(&self, bounds: &Bounds) -> object_store::Result<Arc<dyn ObjectStore>> {
        match self {
            Self::Folder(root) => Ok(Arc::new(LocalFileSystem::new_with_prefix(root)?)),
            Self::S3(config) => {
                let retry = RetryConfig {
                    backoff: BackoffConfig::default(),
                    max_retries: 0,
                    retry_timeout: bounds.attempt,
                };
                let options = ClientOptions::new()
                    .with_connect_timeout(Duration::from_secs(5))
                    .with_timeout(bounds.attempt);
                config.open(retry, options)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_what_they_were() {
        let location = Location {
            place: Place::Registry {
                blob: BlobName { registry: "r".into(), repository: "a/b".into(), digest: "sha256:00".into() },
                login: None,
            },
            size: 7,
            digest: "sha256:00".into(),
            disk: None,
        };
        let text = serde_json::to_string(&location).unwrap();
        assert_eq!(
            text,
            r#"{"place":{"in":"registry","registry":"r","repository":"a/b","digest":"sha256:00"},"size":7,"digest":"sha256:00"}"#
        );
        assert_eq!(serde_json::from_str::<Location>(&text).unwrap(), location);
        let text = r#"{"place":{"in":"repository","key":"blobs/x"},"size":7,"digest":"sha256:00"}"#;
        let place = Place::Repository { key: "blobs/x".into() };
        assert_eq!(serde_json::from_str::<Location>(text).unwrap().place, place);
    }
}
