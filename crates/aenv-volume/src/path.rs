//! Names and paths from outside, parsed once.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest path in bytes.
const MAX_PATH: usize = 4095;
/// Longest component in bytes.
const MAX_COMPONENT: usize = 255;
/// Longest name of a volume.
const MAX_NAME: usize = 128;

/// Why a text is no path in a volume.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PathError {
    /// `..` is not needed to name anything in a volume.
    #[error("path has a component \"..\"; name the file from the volume's root")]
    Parent,
    /// A NUL byte.
    #[error("path has a NUL character")]
    Nul,
    /// Too long for a filesystem.
    #[error("path is too long: it has at most {MAX_PATH} bytes, and each component at most {MAX_COMPONENT}")]
    Long,
    /// A place where a volume cannot be mounted.
    #[error("path must be absolute, name a folder below /, and lie outside of /proc, /sys and /dev")]
    MountPoint,
}

/// A path below a volume's root: components without `.`, `..`, NUL and `/`. It cannot name anything outside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VolumePath(Vec<String>);

impl VolumePath {
    /// Its components; none is the root.
    pub fn components(&self) -> &[String] {
        &self.0
    }

    /// The folder that it is in, and its name there; `None` for the root.
    pub fn split(&self) -> Option<(VolumePath, &str)> {
        let (name, folder) = self.0.split_last()?;
        Some((Self(folder.to_vec()), name))
    }

    /// One component further.
    pub(crate) fn join(&self, name: &str) -> Self {
        Self(self.0.iter().cloned().chain([name.to_owned()]).collect())
    }

    /// As the kernel takes it, from the root's descriptor.
    pub(crate) fn relative(&self) -> String {
        self.0.join("/")
    }
}

impl FromStr for VolumePath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        if text.len() > MAX_PATH {
            return Err(PathError::Long);
        }
        if text.contains('\0') {
            return Err(PathError::Nul);
        }
        let components = text.split('/').filter(|part| !part.is_empty() && *part != ".");
        let mut path = Vec::new();
        for component in components {
            if component == ".." {
                return Err(PathError::Parent);
            }
            if component.len() > MAX_COMPONENT {
                return Err(PathError::Long);
            }
            path.push(component.to_owned());
        }
        Ok(Self(path))
    }
}

impl fmt::Display for VolumePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

/// Where a volume is mounted in a guest: absolute, normal, not the root and not in the kernel's own filesystems.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MountPoint(String);

impl MountPoint {
    /// The path.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for MountPoint {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        let path: VolumePath = text.parse()?;
        let forbidden = path.0.first().is_none_or(|first| matches!(first.as_str(), "proc" | "sys" | "dev"));
        // Control characters would have to be escaped in the guest's table of mounts.
        if !text.starts_with('/') || forbidden || text.len() > 1024 || text.chars().any(char::is_control) {
            return Err(PathError::MountPoint);
        }
        Ok(Self(path.to_string()))
    }
}

impl TryFrom<String> for MountPoint {
    type Error = PathError;
    fn try_from(text: String) -> Result<Self, PathError> {
        text.parse()
    }
}

impl From<MountPoint> for String {
    fn from(point: MountPoint) -> Self {
        point.0
    }
}

impl fmt::Display for MountPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a text is no name of a volume.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a volume's name has 1 to {MAX_NAME} letters, digits, - and _")]
pub struct NameError;

/// A volume's name, unique in its team.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(String);

impl VolumeName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VolumeName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let valid = (1..=MAX_NAME).contains(&text.len()) && text.chars().all(fits);
        valid.then(|| Self(text.to_owned())).ok_or(NameError)
    }
}

impl TryFrom<String> for VolumeName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> Self {
        name.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(text: &str) -> Result<String, PathError> {
        text.parse::<VolumePath>().map(|path| path.to_string())
    }

    #[test]
    fn paths_are_normal() {
        assert_eq!(path("/a//b/./c/").unwrap(), "/a/b/c");
        assert_eq!(path("a").unwrap(), "/a");
        assert_eq!(path("").unwrap(), "/");
        assert_eq!(path("...").unwrap(), "/...");
        assert_eq!(path("a/../b"), Err(PathError::Parent));
        assert_eq!(path("a\0b"), Err(PathError::Nul));
        assert_eq!(path(&"a".repeat(256)), Err(PathError::Long));
        assert_eq!(path(&"a/".repeat(3000)), Err(PathError::Long));
        let (folder, name) = "/x/y"
            .parse::<VolumePath>()
            .map(|p| p.split().map(|(f, n)| (f.to_string(), n.to_owned())))
            .unwrap()
            .unwrap();
        assert_eq!((folder.as_str(), name.as_str()), ("/x", "y"));
    }

    #[test]
    fn mount_points_are_absolute_and_elsewhere_than_the_kernels() {
        let point = |text: &str| text.parse::<MountPoint>().map(|point| point.to_string());
        assert_eq!(point("/mnt/data/").unwrap(), "/mnt/data");
        for bad in ["", "/", "mnt", "/proc/x", "/dev", "//sys/fs", "/./", "/a/../b", "/a\nb"] {
            assert!(point(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn names() {
        assert!("My-volume_1".parse::<VolumeName>().is_ok());
        for bad in ["", "a b", "a/b", "..", "é", &"a".repeat(129)] {
            assert!(bad.parse::<VolumeName>().is_err(), "{bad:?} was taken");
        }
    }

    proptest! {
        #[test]
        fn no_text_leads_out(text in "[a./\\x00]{0,40}") {
            if let Ok(path) = text.parse::<VolumePath>() {
                prop_assert!(path.components().iter().all(|c| !c.is_empty() && c != "." && c != ".." && !c.contains(['/', '\0'])));
                prop_assert_eq!(path.to_string().parse::<VolumePath>().unwrap(), path);
            }
        }
    }
}
