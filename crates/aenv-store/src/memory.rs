use bytes::Bytes;

use crate::{BlockSource, SourceError};

/// Bytes that are in memory, such as a small blob that was fetched whole.
#[derive(Clone, Debug)]
pub struct MemorySource(Bytes);

impl MemorySource {
    /// A source of these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }
}

impl BlockSource for MemorySource {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size())?;
        let start = offset as usize;
        buf.copy_from_slice(&self.0[start..start + buf.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_within_and_refuses_beyond() {
        let source = MemorySource::new(&b"abcdef"[..]);
        let mut buf = [0; 3];
        source.read_at(&mut buf, 3).unwrap();
        assert_eq!(&buf, b"def");
        assert!(source.read_at(&mut buf, 4).is_err());
        assert!(source.read_at(&mut [], 6).is_ok());
    }
}
