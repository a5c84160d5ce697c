use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use crate::{BlockSource, SourceError};

/// Bytes of a local file, read with `pread`. The size is taken when it is opened.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    size: u64,
    label: String,
}

impl FileSource {
    /// Opens a file for reading.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let label = path.display().to_string();
        let file = File::open(path).map_err(|source| SourceError::io(&label, source))?;
        Self::from_file(file, label)
    }

    /// Takes a file that is open; `label` names it in errors.
    pub fn from_file(file: File, label: impl Into<String>) -> Result<Self, SourceError> {
        let label = label.into();
        let meta = file.metadata().map_err(|source| SourceError::io(&label, source))?;
        if !meta.is_file() {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(SourceError::io(label, source));
        }
        Ok(Self { file, size: meta.len(), label })
    }

    /// The open file, for callers that can pass a descriptor on.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl BlockSource for FileSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size)?;
        self.file.read_exact_at(buf, offset).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                SourceError::corrupt(&self.label, "the file became shorter while it was in use")
            }
            _ => SourceError::io(&self.label, source),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn reads_a_range_and_refuses_what_lies_beyond() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, b"0123456789").unwrap();
        let source = FileSource::open(&path).unwrap();
        let mut buf = [0; 4];
        source.read_at(&mut buf, 6).unwrap();
        assert_eq!(&buf, b"6789");
        assert!(matches!(source.read_at(&mut buf, 7), Err(SourceError::OutOfRange { size: 10, .. })));
        assert!(matches!(source.read_at(&mut buf, u64::MAX), Err(SourceError::OutOfRange { .. })));
    }

    #[test]
    fn a_file_that_shrinks_is_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, b"0123456789").unwrap();
        let source = FileSource::open(&path).unwrap();
        fs::write(&path, b"01").unwrap();
        assert!(matches!(source.read_at(&mut [0; 4], 6), Err(SourceError::Corrupt { .. })));
    }

    #[test]
    fn a_folder_is_not_a_source() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(FileSource::open(dir.path()), Err(SourceError::Io { .. })));
    }
}
