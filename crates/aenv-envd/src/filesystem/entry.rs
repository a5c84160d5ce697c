//! Describing one entry of the filesystem.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use aenv_envd_api::proto::filesystem::{EntryInfo, FileType};
use buffa_types::google::protobuf::Timestamp;

use crate::{files, users::Names};

/// Describes what is at `path`. Of a link, `type` and `mode` are its target's.
///
/// `is_symlink` stays unset: the Python client (2.63) turns it into the type `symlink`, while the clients' own tests want the target's
/// type. A link is told by its `symlink_target`.
pub fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let own = fs::symlink_metadata(path)?;
    let (target, symlink_target) = if own.is_symlink() {
        let resolved = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        (fs::metadata(path).ok(), Some(resolved.to_string_lossy().into_owned()))
    } else {
        (Some(own.clone()), None)
    };
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(EntryInfo {
        name: name.to_string_lossy().into_owned(),
        r#type: target.as_ref().map_or(FileType::FILE_TYPE_UNSPECIFIED, type_of).into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode: target.as_ref().map_or(0, |target| target.mode() & 0o777),
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or(0),
            ..Default::default()
        }
        .into(),
        symlink_target,
        // A link to a file that is gone has none; asking for them follows the link.
        metadata: target.map(|_| files::read_metadata(path).into_iter().collect()).unwrap_or_default(),
        ..Default::default()
    })
}

fn type_of(target: &Metadata) -> FileType {
    if target.is_file() {
        FileType::FILE_TYPE_FILE
    } else if target.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// As Go prints a mode: one letter for each special bit, then the permissions.
fn permissions(own: &Metadata) -> String {
    let kind = own.file_type();
    let mode = own.mode();
    let special = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = special.iter().filter(|(is_set, _)| *is_set).map(|(_, letter)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (bit, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode & (1 << bit) != 0 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn files_folders_links() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        fs::write(&file, "four").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        symlink("f", folder.path().join("link")).unwrap();
        symlink("nowhere", folder.path().join("dangling")).unwrap();
        let names = Names::read();

        let entry = describe(&file, &names).unwrap();
        assert_eq!((entry.size, entry.mode, entry.permissions.as_str()), (4, 0o644, "-rw-r--r--"));
        assert_eq!(entry.r#type, FileType::FILE_TYPE_FILE);
        assert!(entry.symlink_target.is_none());

        let link = describe(&folder.path().join("link"), &names).unwrap();
        assert_eq!((link.mode, link.permissions.as_str()), (0o644, "Lrwxrwxrwx"));
        assert_eq!(link.r#type, FileType::FILE_TYPE_FILE);
        let real = fs::canonicalize(&file).unwrap().display().to_string();
        assert_eq!(link.symlink_target, Some(real));

        let dangling = describe(&folder.path().join("dangling"), &names).unwrap();
        assert_eq!(dangling.r#type, FileType::FILE_TYPE_UNSPECIFIED);
        assert_eq!((dangling.mode, dangling.symlink_target), (0, Some(dangling.path)));

        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1755)).unwrap();
        assert_eq!(describe(folder.path(), &names).unwrap().permissions, "dtrwxr-xr-x");
        assert!(describe(&folder.path().join("none"), &names).is_err());
    }
}
