//! The manifest: which files, in which version, with which digest, and where they are.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_types::Digest;
use serde::Deserialize;
use thiserror::Error;

/// The manifest of this version of the server.
const OWN: &str = include_str!("../artifacts.toml");

/// What a node gets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The release of Firecracker.
    pub firecracker: Program,
    /// The package of the guest kernel.
    pub kernel: Pinned,
}

/// A file that is known by its digest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pinned {
    /// For people.
    pub version: String,
    /// Its name here and in a folder for nodes without a network.
    pub file: String,
    /// What it is.
    pub sha256: Digest,
    /// Where it is, in the order in which they are tried.
    pub urls: Vec<String>,
}

/// A program in an archive (gzipped tar) that is known by its digest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// For people, and in the program's name here.
    pub version: String,
    /// The archive's name here and in a folder for nodes without a network.
    pub file: String,
    /// What the archive is.
    pub sha256: Digest,
    /// Where it is.
    pub urls: Vec<String>,
    /// Path of the program in it.
    pub member: String,
}

impl Program {
    /// The archive.
    pub fn archive(&self) -> Pinned {
        Pinned {
            version: self.version.clone(),
            file: self.file.clone(),
            sha256: self.sha256,
            urls: self.urls.clone(),
        }
    }
}

/// Why a manifest cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// It cannot be read.
    #[error("the manifest {path} cannot be read: {source}")]
    Read {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no TOML, or not of this form.
    #[error("the manifest cannot be understood: {0}")]
    Form(#[from] toml::de::Error),
    /// A name would lead out of the folder of artifacts.
    #[error("the manifest names the file or version {0:?}, which is no plain file name")]
    Name(String),
    /// A place that is none.
    #[error("the manifest has the URL {0:?}; http:// and https:// can be fetched")]
    Url(String),
}

impl Manifest {
    /// The one that this version of the server was made with.
    pub fn own() -> Result<Self, ManifestError> {
        Self::parse(OWN)
    }

    /// Another one.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let text = fs::read_to_string(path);
        Self::parse(&text.map_err(|source| ManifestError::Read { path: path.to_owned(), source })?)
    }

    fn parse(text: &str) -> Result<Self, ManifestError> {
        let manifest: Self = toml::from_str(text)?;
        for pinned in [&manifest.firecracker.archive(), &manifest.kernel] {
            if let Some(bad) = [&pinned.file, &pinned.version].into_iter().find(|name| !is_plain(name)) {
                return Err(ManifestError::Name(bad.clone()));
            }
            let fits = |url: &&String| url.starts_with("https://") || url.starts_with("http://");
            if let Some(bad) = pinned.urls.iter().find(|url| !fits(url)) {
                return Err(ManifestError::Url(bad.clone()));
            }
        }
        Ok(manifest)
    }
}

fn is_plain(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '~');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_manifest_is_good() {
        let own = Manifest::own().unwrap();
        assert!(own.firecracker.file.contains(&own.firecracker.version));
        assert!(own.firecracker.member.contains(&own.firecracker.version));
        assert!(own.kernel.file.contains(&own.kernel.version));
        for pinned in [own.firecracker.archive(), own.kernel] {
            assert!(pinned.urls.iter().all(|url| url.ends_with(&pinned.file)), "{pinned:?}");
        }
    }

    #[test]
    fn a_manifest_that_cannot_be_is_refused() {
        let fails = |from: &str, to: &str| Manifest::parse(&OWN.replace(from, to)).unwrap_err().to_string();
        assert!(fails("file = \"linux", "file = \"../linux").contains("../linux"));
        assert!(fails("http://deb", "ftp://deb").contains("ftp://deb"));
        assert!(fails("version = \"1.16.1\"", "version = \"a/b\"").contains("a/b"));
        assert!(fails("sha256:4fdd", "sha256:4fd").contains("64 hex digits"));
        assert!(fails("[kernel]", "[kernels]").contains("kernels"));
    }
}
