//! Content digests, and the names of layers.

use std::{fmt, io, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use uuid::Uuid;

/// A sha256 digest, written `sha256:<64 hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Why a text is not a digest or a layer name.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not of the form {1}")]
pub struct ParseDigestError(String, &'static str);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of everything that the reader gives, and how many bytes that were.
    pub fn of_reader(mut reader: impl io::Read) -> io::Result<(Self, u64)> {
        let mut hasher = Sha256::new();
        let size = io::copy(&mut reader, &mut hasher)?;
        Ok((Self(hasher.finalize().into()), size))
    }

    /// From a finished hasher.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 64 hex digits, without `sha256:`.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl FromStr for Digest {
    type Err = ParseDigestError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseDigestError(text.chars().take(100).collect(), "sha256:<64 hex digits>");
        let digits = text.strip_prefix("sha256:").ok_or_else(wrong)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| wrong())?;
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseDigestError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of a sealed layer.
///
/// Sealing is O(index), so a layer that was just sealed has no digest yet and goes by a `local:<uuid>` name, which means
/// something on this node only. Publishing computes the digest, and from then on the layer is `sha256:<hex>` everywhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LayerName {
    /// Content-addressed; valid on every node.
    Digest(Digest),
    /// Sealed on this node and not published.
    Local(Uuid),
}

impl LayerName {
    /// A name for a layer that is about to be sealed here.
    pub fn new_local() -> Self {
        Self::Local(Uuid::new_v4())
    }

    /// The file name in a node's `layers` folder: the name with `-` for `:`.
    pub fn file_name(&self) -> String {
        self.to_string().replace(':', "-")
    }
}

impl FromStr for LayerName {
    type Err = ParseDigestError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("local:") {
            Some(uuid) => Uuid::parse_str(uuid).map(Self::Local).map_err(|_| {
                ParseDigestError(text.chars().take(100).collect(), "local:<uuid> or sha256:<64 hex digits>")
            }),
            None => text.parse().map(Self::Digest),
        }
    }
}

impl TryFrom<String> for LayerName {
    type Error = ParseDigestError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<LayerName> for String {
    fn from(name: LayerName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for LayerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Digest(digest) => digest.fmt(f),
            Self::Local(uuid) => write!(f, "local:{uuid}"),
        }
    }
}

impl fmt::Debug for LayerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_nothing() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(Digest::of_reader(&b""[..]).unwrap(), (empty.parse().unwrap(), 0));
    }

    #[test]
    fn names_round_trip_and_are_safe_files() {
        for name in [LayerName::new_local(), LayerName::Digest(Digest::of(b"x"))] {
            assert_eq!(name.to_string().parse::<LayerName>().unwrap(), name);
            assert!(!name.file_name().contains([':', '/']));
        }
        assert!("sha256:../../etc/passwd".parse::<LayerName>().is_err());
        assert!("local:../x".parse::<LayerName>().is_err());
    }
}
