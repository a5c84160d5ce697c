//! The build's folder: what a `COPY` names in it, and how that is packed.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use sha2::{Digest as _, Sha256};

use crate::error::CliError;

/// Paths relative to the context, sorted: folders before what is in them.
pub(super) fn collect(context: &Path, source: &str, ignore: &Ignore) -> Result<Vec<PathBuf>, CliError> {
    let source = source.trim_start_matches("./").trim_start_matches('/').trim_end_matches('/');
    let parts: Vec<&str> = source.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err(CliError::Usage(format!("COPY {source}: the source leaves the build's folder")));
    }
    let mut found = Vec::new();
    matching(context, Path::new(""), &parts, &mut found)?;
    let mut all = Vec::new();
    for path in found {
        walk(context, &path, ignore, &mut all)?;
    }
    all.sort();
    all.dedup();
    Ok(all)
}

fn matching(context: &Path, at: &Path, parts: &[&str], found: &mut Vec<PathBuf>) -> Result<(), CliError> {
    let Some((first, rest)) = parts.split_first() else {
        found.push(at.to_owned());
        return Ok(());
    };
    if !first.contains(['*', '?']) {
        let next = at.join(first);
        return if context.join(&next).symlink_metadata().is_ok() {
            matching(context, &next, rest, found)
        } else {
            Ok(())
        };
    }
    for name in names(&context.join(at))? {
        if fits(first.as_bytes(), name.as_bytes()) {
            matching(context, &at.join(&name), rest, found)?;
        }
    }
    Ok(())
}

fn names(folder: &Path) -> Result<Vec<String>, CliError> {
    let entries = std::fs::read_dir(folder).map_err(CliError::io(folder.display().to_string()))?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

fn walk(context: &Path, path: &Path, ignore: &Ignore, all: &mut Vec<PathBuf>) -> Result<(), CliError> {
    if ignore.covers(path) {
        return Ok(());
    }
    let full = context.join(path);
    let meta = full.symlink_metadata().map_err(CliError::io(full.display().to_string()))?;
    if !path.as_os_str().is_empty() {
        all.push(path.to_owned());
    }
    if meta.is_dir() {
        for name in names(&full)? {
            walk(context, &path.join(name), ignore, all)?;
        }
    }
    Ok(())
}

/// A gzip tar of the files, and a hash of their names, modes and contents (not of times, which change without need).
pub(super) fn pack(context: &Path, files: &[PathBuf]) -> Result<(String, tempfile::NamedTempFile), CliError> {
    use std::os::unix::fs::PermissionsExt;
    let archive = tempfile::NamedTempFile::new().map_err(CliError::io("a temporary file"))?;
    let mut tar = tar::Builder::new(GzEncoder::new(archive.as_file(), Compression::fast()));
    tar.follow_symlinks(false);
    let mut hasher = Sha256::new();
    for path in files {
        let full = context.join(path);
        let packed = (|| {
            let meta = full.symlink_metadata()?;
            hasher.update(path.as_os_str().as_encoded_bytes());
            hasher.update([0]);
            hasher.update(meta.permissions().mode().to_le_bytes());
            if meta.is_symlink() {
                hasher.update(full.read_link()?.as_os_str().as_encoded_bytes());
            } else if meta.is_file() {
                let mut file = File::open(&full)?;
                let mut buffer = vec![0; 64 << 10];
                loop {
                    match file.read(&mut buffer)? {
                        0 => break,
                        count => hasher.update(&buffer[..count]),
                    }
                }
                hasher.update(meta.len().to_le_bytes());
            }
            tar.append_path_with_name(&full, path)
        })();
        packed.map_err(CliError::io(full.display().to_string()))?;
    }
    let finished = tar.into_inner().and_then(GzEncoder::finish);
    finished.map_err(CliError::io("the archive"))?;
    let hash = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((hash, archive))
}

/// `.dockerignore`: the last pattern that fits decides.
pub(super) struct Ignore {
    patterns: Vec<(bool, String)>,
}

impl Ignore {
    pub(super) fn load(context: &Path) -> Result<Self, CliError> {
        let path = context.join(".dockerignore");
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self { patterns: Vec::new() }),
            Err(error) => Err(CliError::io(path.display().to_string())(error)),
        }
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let pattern = |line: &str| {
            let (keeps, line) = line.strip_prefix('!').map_or((false, line), |line| (true, line));
            (keeps, line.trim_start_matches("./").trim_matches('/').to_owned())
        };
        Self { patterns: lines.map(pattern).collect() }
    }

    fn covers(&self, path: &Path) -> bool {
        let Some(text) = path.to_str() else { return false };
        let fitting = self.patterns.iter().rev().find(|(_, pattern)| {
            // A pattern covers what lies below a folder that it fits.
            text.match_indices('/')
                .map(|(at, _)| &text[..at])
                .chain([text])
                .any(|head| fits(pattern.as_bytes(), head.as_bytes()))
        });
        fitting.is_some_and(|(keeps, _)| !keeps)
    }
}

/// `?` is one character, `*` any number within a path segment, `**` any number of anything.
fn fits(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([], []) => true,
        ([b'*', b'*', b'/', rest @ ..], _) if fits(rest, text) => true,
        ([b'*', b'*', rest @ ..], _) => (0..=text.len()).any(|skip| fits(rest, &text[skip..])),
        ([b'*', rest @ ..], _) => {
            let segment = text.iter().position(|byte| *byte == b'/').unwrap_or(text.len());
            (0..=segment).any(|skip| fits(rest, &text[skip..]))
        }
        ([b'?', rest @ ..], [byte, more @ ..]) if *byte != b'/' => fits(rest, more),
        ([wanted, rest @ ..], [byte, more @ ..]) if wanted == byte => fits(rest, more),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit() {
        let fit = |pattern: &str, text: &str| fits(pattern.as_bytes(), text.as_bytes());
        assert!(fit("*.txt", "a.txt") && !fit("*.txt", "d/a.txt"));
        assert!(fit("**/a", "x/y/a") && fit("**/a", "a"));
        assert!(fit("d?r", "dir") && !fit("d?r", "d/r"));
    }

    #[test]
    fn ignored_files_are_not_packed_and_the_hash_is_of_the_content() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir_all(root.join("src/target")).unwrap();
        for (name, text) in
            [("src/a.rs", "a"), ("src/target/big", "x"), ("src/b.log", "l"), ("src/keep.log", "k")]
        {
            std::fs::write(root.join(name), text).unwrap();
        }
        std::fs::write(root.join(".dockerignore"), "**/target\n# no\n**/*.log\n!src/keep.log\n").unwrap();
        let ignore = Ignore::load(root).unwrap();
        let files = collect(root, "./src/", &ignore).unwrap();
        let names: Vec<_> = files.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(names, ["src", "src/a.rs", "src/keep.log"]);

        let (first, _) = pack(root, &files).unwrap();
        assert_eq!(pack(root, &files).unwrap().0, first);
        std::fs::write(root.join("src/a.rs"), "b").unwrap();
        assert_ne!(pack(root, &files).unwrap().0, first);
        assert!(collect(root, "../etc", &ignore).is_err());
        assert_eq!(collect(root, "src/*.rs", &ignore).unwrap().len(), 1);
    }
}
