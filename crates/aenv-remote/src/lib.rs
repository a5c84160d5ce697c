//! Sources whose bytes are on other machines: [`ObjectSource`] (an object of an object store) and [`RegistrySource`] (a blob of an
//! OCI registry), both read by ranges.
//!
//! Every read ends: with the bytes that were asked for, or with an error after [`Bounds::read`] at the latest. What may go better
//! is tried again, a few times, after pauses that double and vary. What will not (refused, missing, not the bytes that were asked
//! for) is an error at once.
//!
//! Also the credentials that registries are read with: docker's, and those that Amazon gives out for a key ([`AwsKey`]).
//!
//! This room keeps nothing (the cache is a stage of its own) and knows no layers.

#![forbid(unsafe_code)]

mod bounds;
mod challenge;
mod credentials;
mod ecr;
mod location;
mod object;
mod registry;

pub use bounds::Bounds;
pub use credentials::DockerConfig;
pub use ecr::{AwsKey, InvalidAwsKey};
pub use location::{
    CacheSettings, DEFAULT_TABLE_BYTES, Location, Login, Place, Remotes, S3Config, StoreConfig,
};
pub use object::ObjectSource;
pub use registry::{BlobName, Credentials, Identity, InvalidBlobName, RegistryClient, RegistrySource};
