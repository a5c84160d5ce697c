//! How paths from outside are read. One rule for files, RPC paths and working folders.

use std::path::{Component, Path, PathBuf};

use thiserror::Error;

use crate::users::User;

/// Why a path is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PathError {
    /// `~bob`.
    #[error("cannot expand '{0}': only '~' and '~/' are expanded, to the home of the user of the request")]
    OtherHome(String),
    /// Not a path of this system.
    #[error("a path cannot contain a NUL byte")]
    Nul,
}

/// The absolute, lexically clean form of `path`: empty is the default workdir (or the home), `~` is the home, relative is
/// below the home.
pub fn resolve(path: &str, user: &User, default_workdir: Option<&str>) -> Result<PathBuf, PathError> {
    if path.contains('\0') {
        return Err(PathError::Nul);
    }
    let path = match path {
        "" => default_workdir.unwrap_or("~"),
        given => given,
    };
    if path == "~" {
        return Ok(clean(&user.home));
    }
    if let Some(below) = path.strip_prefix("~/") {
        return Ok(clean(&user.home.join(below.trim_start_matches('/'))));
    }
    if path.starts_with('~') {
        return Err(PathError::OtherHome(path.to_owned()));
    }
    Ok(clean(&user.home.join(path)))
}

/// Removes `.`, `..` and repeated slashes without looking at the filesystem; `..` above the root is the root.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => {
                cleaned.pop();
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(path: &str, workdir: Option<&str>) -> String {
        let user =
            User { name: "u".to_owned(), uid: 1, gid: 1, groups: vec![1], home: PathBuf::from("/home/u") };
        match resolve(path, &user, workdir) {
            Ok(path) => path.display().to_string(),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn the_rules() {
        assert_eq!(resolved("", None), "/home/u");
        assert_eq!(resolved("", Some("/srv/app")), "/srv/app");
        assert_eq!(resolved("a/b", Some("/srv/app")), "/home/u/a/b");
        assert_eq!(resolved("/a//b/./c/..", None), "/a/b");
        assert_eq!(resolved("/../../etc", None), "/etc");
        assert_eq!(resolved("~", Some("/srv")), "/home/u");
        assert_eq!(resolved("~/x", None), "/home/u/x");
        assert_eq!(resolved("~//etc", None), "/home/u/etc");
        assert!(resolved("~bob", None).starts_with("error: cannot expand '~bob'"));
        assert!(resolved("a\0b", None).starts_with("error: "));
    }
}
