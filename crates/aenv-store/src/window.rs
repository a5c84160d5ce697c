use std::sync::Arc;

use crate::{BlockSource, SourceError};

/// A range of another source, shown as a source of its own (a blob inside an archive, for one).
pub struct WindowSource {
    inner: Arc<dyn BlockSource>,
    start: u64,
    size: u64,
}

impl WindowSource {
    /// Shows `size` bytes of `inner` from `start`. Fails when they reach beyond its end.
    pub fn new(inner: Arc<dyn BlockSource>, start: u64, size: u64) -> Result<Self, SourceError> {
        SourceError::check_range(start, size, inner.size())?;
        Ok(Self { inner, start, size })
    }
}

impl BlockSource for WindowSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size)?;
        self.inner.read_at(buf, self.start + offset)
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemorySource;

    #[test]
    fn shifts_and_bounds() {
        let inner: Arc<dyn BlockSource> = Arc::new(MemorySource::new(&b"0123456789"[..]));
        let window = WindowSource::new(inner.clone(), 2, 5).unwrap();
        let mut buf = [0; 3];
        window.read_at(&mut buf, 2).unwrap();
        assert_eq!(&buf, b"456");
        assert!(window.read_at(&mut buf, 3).is_err());
        assert!(WindowSource::new(inner, 8, 3).is_err());
    }
}
