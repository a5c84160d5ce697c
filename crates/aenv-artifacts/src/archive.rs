//! A program out of a gzipped tar.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use aenv_types::Digest;
use thiserror::Error;

/// No program is larger; bounds what a damaged archive can fill a disk with.
const LARGEST: u64 = 256 << 20;

/// Why there is no program.
#[derive(Debug, Error)]
pub enum ArchiveError {
    /// It is not in the archive.
    #[error("{archive} does not have the file {member}: the manifest names another release")]
    NoMember {
        /// The archive.
        archive: PathBuf,
        /// What was looked for.
        member: String,
    },
    /// It is larger than any program.
    #[error("{member} in {archive} is larger than any program")]
    TooLarge {
        /// The archive.
        archive: PathBuf,
        /// The member.
        member: String,
    },
    /// The archive is damaged, or a file cannot be written.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Puts the file `member` of `archive` at `target`, executable; tells whether it was there already, byte by byte the same.
/// Processes that run an older one keep it.
pub fn unpack_program(archive: &Path, member: &str, target: &Path) -> Result<bool, ArchiveError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| ArchiveError::Io { path, source }
    };
    let bytes = read_member(archive, member)?;
    let there = File::open(target).and_then(Digest::of_reader).ok();
    if there.is_some_and(|(digest, _)| digest == Digest::of(&bytes)) && is_executable(target) {
        return Ok(true);
    }
    let mut half = target.as_os_str().to_owned();
    half.push(format!(".{}.part", std::process::id()));
    let half = PathBuf::from(half);
    let written = (|| {
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o755).open(&half)?;
        file.write_all(&bytes)?;
        file.set_permissions(fs::Permissions::from_mode(0o755))?;
        aenv_durable::publish(&half, target)
    })();
    if written.is_err() {
        // The error that matters is the first one.
        let _ = fs::remove_file(&half);
    }
    written.map_err(io(target))?;
    Ok(false)
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o555 == 0o555)
}

fn read_member(archive: &Path, member: &str) -> Result<Vec<u8>, ArchiveError> {
    let io = |source| ArchiveError::Io { path: archive.to_owned(), source };
    let file = File::open(archive).map_err(io)?;
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(file));
    for entry in tar.entries().map_err(io)? {
        let entry = entry.map_err(io)?;
        let named =
            entry.path().is_ok_and(|path| path.strip_prefix(".").unwrap_or(&path) == Path::new(member));
        if !named || !entry.header().entry_type().is_file() {
            continue;
        }
        let mut bytes = Vec::new();
        entry.take(LARGEST + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > LARGEST {
            return Err(ArchiveError::TooLarge { archive: archive.to_owned(), member: member.to_owned() });
        }
        return Ok(bytes);
    }
    Err(ArchiveError::NoMember { archive: archive.to_owned(), member: member.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(folder: &Path, entries: &[(&str, &str)]) -> PathBuf {
        let path = folder.join("a.tgz");
        let gzip = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gzip);
        for (name, text) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            tar.append_data(&mut header, name, text.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap();
        path
    }

    #[test]
    fn a_program_is_taken_out_once() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("program");
        let path = archive(folder.path(), &[("r/other", "no"), ("r/program", "yes")]);
        assert!(!unpack_program(&path, "r/program", &target).unwrap());
        assert_eq!(fs::read_to_string(&target).unwrap(), "yes");
        assert!(is_executable(&target));
        assert!(unpack_program(&path, "r/program", &target).unwrap());
        fs::write(&target, "changed").unwrap();
        assert!(!unpack_program(&path, "r/program", &target).unwrap());
        assert_eq!(fs::read_to_string(&target).unwrap(), "yes");
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "a half-made file is left");
    }

    #[test]
    fn what_is_not_in_it_or_damaged_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("program");
        let path = archive(folder.path(), &[("r/other", "no")]);
        let error = unpack_program(&path, "r/program", &target).unwrap_err();
        assert!(matches!(error, ArchiveError::NoMember { .. }), "{error}");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        let error = unpack_program(&path, "r/other", &target).unwrap_err();
        assert!(matches!(error, ArchiveError::Io { .. }), "{error}");
        assert!(!target.exists());
    }
}
