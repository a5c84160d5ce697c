//! OCI images to stacks of layers: resolve a reference, read its layers, apply each to an ext4 on the stack beneath it, seal.
//!
//! The result is keyed by the chain of diff ids, so that images that share layers share them here too.
//!
//! An image whose layers are in overlaybd format already is not pulled: `in_place` notes where its layers are. `publish`
//! makes such images and sends them to registries.
//!
//! The rooms: `source` finds an image and hands out its blobs, `blob` checks them as they stream by, `tarball` reads tar,
//! `apply` puts entries into a filesystem without ever leaving it, `disk` makes and mounts that filesystem, `chain`
//! remembers what is done, and `pull` does one thing after the other.
//!
//! Everything that comes out of an image is hostile until checked: a layer can name what it likes, it only ever touches
//! the filesystem that is made for it.

mod apply;
mod blob;
mod chain;
mod config;
mod disk;
mod error;
mod image;
mod in_place;
mod overlaybd;
mod publish;
mod pull;
mod reference;
mod source;
mod tarball;

pub use aenv_layer::Compression;
pub use aenv_remote::{AwsKey, InvalidAwsKey};
pub use error::ImageError;
pub use image::{ImageLimits, ImageSettings, PullProgress, PulledImage, RegistryAuth};
pub use publish::{Destination, PublishAs, PublishProgress, Published};
pub use pull::Images;
pub use reference::ImageReference;
