//! Where an image is: parsing and showing references.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::ImageError;

/// Where an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ImageReference {
    /// `registry/name:tag[@digest]`; short names are tried at the search registries.
    Registry(String),
    /// `oci:DIR[:tag]`.
    OciDir {
        /// The folder.
        path: PathBuf,
        /// Which manifest, where there are several.
        tag: Option<String>,
    },
    /// `oci-archive:FILE[:tag]`.
    OciArchive {
        /// The tar file.
        path: PathBuf,
        /// Which manifest, where there are several.
        tag: Option<String>,
    },
    /// `docker-archive:FILE[:tag]`.
    DockerArchive {
        /// The tar file, as `docker save` writes it.
        path: PathBuf,
        /// Which image, where there are several.
        tag: Option<String>,
    },
}

impl ImageReference {
    /// The transport's file or folder, for those that have one.
    pub fn path(&self) -> Option<&std::path::Path> {
        match self {
            Self::Registry(_) => None,
            Self::OciDir { path, .. } | Self::OciArchive { path, .. } | Self::DockerArchive { path, .. } => {
                Some(path)
            }
        }
    }
}

impl FromStr for ImageReference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ImageError::Reference(text.chars().take(200).collect());
        if text.is_empty() || text.len() > 4096 || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(wrong());
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, tag) = path_and_tag(rest).ok_or_else(wrong)?;
            return Ok(Self::OciDir { path, tag });
        }
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            let (path, tag) = path_and_tag(rest).ok_or_else(wrong)?;
            return Ok(Self::OciArchive { path, tag });
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            let (path, tag) = path_and_tag(rest).ok_or_else(wrong)?;
            return Ok(Self::DockerArchive { path, tag });
        }
        let name = text.strip_prefix("docker://").unwrap_or(text);
        name.parse::<oci_client::Reference>().map_err(|_| wrong())?;
        Ok(Self::Registry(name.to_owned()))
    }
}

impl TryFrom<String> for ImageReference {
    type Error = ImageError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ImageReference> for String {
    fn from(reference: ImageReference) -> Self {
        reference.to_string()
    }
}

/// Splits `PATH[:tag]` at the first colon, as containers/image does. A tag may itself hold colons (`alpine:3`).
fn path_and_tag(text: &str) -> Option<(PathBuf, Option<String>)> {
    let (path, tag) = match text.split_once(':') {
        Some((_, "")) => return None,
        Some((path, tag)) => (path, Some(tag.to_owned())),
        None => (text, None),
    };
    (!path.is_empty()).then(|| (PathBuf::from(path), tag))
}

impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, path, tag) = match self {
            Self::Registry(name) => return f.write_str(name),
            Self::OciDir { path, tag } => ("oci", path, tag),
            Self::OciArchive { path, tag } => ("oci-archive", path, tag),
            Self::DockerArchive { path, tag } => ("docker-archive", path, tag),
        };
        write!(f, "{scheme}:{}", path.display())?;
        match tag {
            Some(tag) => write!(f, ":{tag}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_round_trips() {
        for text in [
            "debian",
            "debian:12",
            "ghcr.io/org/app:v1",
            "127.0.0.1:5000/a/b:tag",
            "debian@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "oci:/var/images/base",
            "oci:base:latest",
            "oci-archive:/x/y.tar",
            "docker-archive:y.tar:alpine:3",
        ] {
            assert_eq!(text.parse::<ImageReference>().unwrap().to_string(), text);
        }
        let archive = "docker-archive:y.tar:alpine:3".parse::<ImageReference>().unwrap();
        assert_eq!(
            archive,
            ImageReference::DockerArchive { path: "y.tar".into(), tag: Some("alpine:3".into()) }
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "oci:",
            "oci:dir:",
            "oci-archive::x",
            "UPPER/Case",
            "a b",
            "x\ny",
            "name:tag with space",
            ":x",
        ] {
            assert!(text.parse::<ImageReference>().is_err(), "{text:?} was taken");
        }
    }
}
