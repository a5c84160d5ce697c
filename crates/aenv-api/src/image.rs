//! Publishing images in overlaybd format.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// User and password for one registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegistryUser {
    /// User.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl std::fmt::Debug for RegistryUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistryUser").field("username", &self.username).finish_non_exhaustive()
    }
}

/// How the layers of an image are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImageCompression {
    /// Fast to read.
    #[default]
    Lz4,
    /// Smaller.
    Zstd,
}

/// Body of `POST /images/convert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConvertImage {
    /// The image: `registry/name:tag[@digest]`, or a file of the server's (`oci:DIR[:tag]` and others).
    pub image: String,
    /// Where the result goes: `registry/name:tag`, or a folder of the server's (`oci:DIR[:tag]`).
    pub target: String,
    /// How it is compressed.
    #[serde(default)]
    pub compression: ImageCompression,
    /// For the image's registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_login: Option<RegistryUser>,
    /// For the target's registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_login: Option<RegistryUser>,
}

/// Body of `POST /images/push`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PushImage {
    /// The image: `oci:DIR[:tag]` on the server.
    pub image: String,
    /// Where it goes: `registry/name:tag`, or another folder.
    pub target: String,
    /// For the target's registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_login: Option<RegistryUser>,
}

/// An image that was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedImage {
    /// Where it is.
    pub reference: String,
    /// Digest of its manifest.
    pub manifest: String,
    /// Layers.
    pub layers: u64,
    /// Bytes of all layers.
    pub bytes: u64,
    /// Bytes of layers that were sent now; the others were there.
    pub sent_bytes: u64,
}
