//! Fetching the distribution's kernel package with the distribution's own tool.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use thiserror::Error;

/// Why the kernel package could not be fetched.
#[derive(Debug, Error)]
pub enum PackageError {
    /// The tool is missing or cannot be run.
    #[error(
        "{tool} cannot be run ({source}): on a system without apt, unpack a kernel package by hand and set kernel.image_path"
    )]
    Tool {
        /// The tool.
        tool: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// No such package in the configured archives.
    #[error("no kernel package for {0} is known to apt: name another package")]
    Unknown(String),
    /// No such package in the lists, and the lists could not be fetched.
    #[error("no kernel package for {package} is known, and `apt-get update` failed: {message}")]
    Lists {
        /// The package.
        package: String,
        /// What apt said last.
        message: String,
    },
    /// The name is not a Debian package name.
    #[error("{0:?} is not the name of a Debian package")]
    Name(String),
    /// The download failed.
    #[error("downloading {package} failed: {message}")]
    Download {
        /// The package.
        package: String,
        /// What apt said last.
        message: String,
    },
}

/// Downloads the package that the meta package `meta` (`linux-image-cloud-amd64`) stands for into `folder`, and returns its
/// path. Nothing is installed. A file that is there already is not fetched again; where the archives know the package no more, or
/// not yet, their lists are fetched once (`apt-get update`), and after that an older file of the same kind will do.
pub fn download_kernel_package(meta: &str, folder: &Path) -> Result<PathBuf, PackageError> {
    let resolved = match resolve(meta) {
        Err(PackageError::Unknown(package)) => {
            let updated = apt_get(&["update", "-q"], folder)?;
            match resolve(meta) {
                Err(PackageError::Unknown(_)) if !updated.status.success() => {
                    Err(PackageError::Lists { package, message: last_error(&updated) })
                }
                other => other,
            }
        }
        other => other,
    };
    let package = match resolved {
        Ok(package) => package,
        Err(error) => return cached_kernel_package(meta, folder).ok_or(error),
    };
    if let Some(found) = find(folder, &package) {
        return Ok(found);
    }
    let output = apt_get(&["download", "-q", &package], folder)?;
    match find(folder, &package) {
        Some(found) if output.status.success() => Ok(found),
        _ => Err(PackageError::Download { package, message: last_error(&output) }),
    }
}

/// The newest file in `folder` of the kind that the meta package stands for: `linux-image-cloud-amd64` is
/// `linux-image-<version>-cloud-amd64`.
pub fn cached_kernel_package(meta: &str, folder: &Path) -> Option<PathBuf> {
    let flavour = meta.strip_prefix("linux-image-")?;
    newest(folder, |name| {
        let package = name.split('_').next().unwrap_or_default();
        package == meta || package.starts_with("linux-image-") && package.ends_with(&format!("-{flavour}"))
    })
}

fn apt_get(arguments: &[&str], folder: &Path) -> Result<Output, PackageError> {
    let mut command = Command::new("apt-get");
    command.args(arguments).current_dir(folder);
    command.output().map_err(|source| PackageError::Tool { tool: "apt-get", source })
}

fn last_error(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().rfind(|line| line.starts_with("E:")).unwrap_or("apt-get failed").to_owned()
}

fn resolve(meta: &str) -> Result<String, PackageError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '+');
    if !meta.starts_with(|c: char| c.is_ascii_alphanumeric()) || !meta.chars().all(fits) {
        return Err(PackageError::Name(meta.to_owned()));
    }
    let output = Command::new("apt-cache")
        .args(["depends", "--no-recommends", "--no-suggests", meta])
        .output()
        .map_err(|source| PackageError::Tool { tool: "apt-cache", source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || text.trim().is_empty() {
        return Err(PackageError::Unknown(meta.to_owned()));
    }
    Ok(dependency(&text).unwrap_or(meta).to_owned())
}

/// The `linux-image-<version>` that a meta package depends on; `None` for a package that is no meta package.
fn dependency(text: &str) -> Option<&str> {
    let depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    depends.map(str::trim).find(|name| {
        name.strip_prefix("linux-image-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// apt names a downloaded file `<package>_<version>_<arch>.deb`.
fn find(folder: &Path, package: &str) -> Option<PathBuf> {
    newest(folder, |name| name.split('_').next() == Some(package))
}

fn newest(folder: &Path, fits: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let found = entries.map(|entry| entry.path()).filter(|path| {
        path.extension().is_some_and(|ext| ext == "deb")
            && path.file_name().is_some_and(|name| fits(&name.to_string_lossy()))
    });
    found.max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_packages_resolve() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-57-cloud-amd64\n";
        assert_eq!(dependency(text), Some("linux-image-6.1.0-57-cloud-amd64"));
        assert_eq!(dependency("linux-image-6.1.0-57-cloud-amd64\n  Depends: kmod\n"), None);
    }

    #[test]
    fn an_older_package_of_the_same_kind_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["linux-image-6.1.0-57-amd64_1_amd64.deb", "linux-image-6.1.0-57-cloud-amd64_1_amd64.deb"]
        {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let found = cached_kernel_package("linux-image-cloud-amd64", folder.path()).unwrap();
        assert!(found.ends_with("linux-image-6.1.0-57-cloud-amd64_1_amd64.deb"));
        assert_eq!(cached_kernel_package("linux-image-rt-amd64", folder.path()), None);
    }

    #[test]
    fn options_are_no_package_names() {
        for bad in ["-o=APT::x=y", "", "a b", "a;b", "../x"] {
            assert!(matches!(resolve(bad), Err(PackageError::Name(_))), "{bad:?} was taken");
        }
    }
}
