//! An object of an object store.

use std::sync::Arc;

use aenv_store::{BlockSource, SourceError};
use object_store::{ObjectStore, ObjectStoreExt, path::Path};
use tokio::runtime::Handle;

use crate::bounds::{Bounds, Failure};

/// An object, read by ranges.
pub struct ObjectSource {
    runtime: Handle,
    store: Arc<dyn ObjectStore>,
    path: Path,
    size: u64,
    bounds: Bounds,
}

impl ObjectSource {
    /// The object at `path`, which has `size` bytes. Nothing is asked of the store yet. `store` should not try again by itself for
    /// long: its attempts count as one here.
    pub fn new(runtime: Handle, store: Arc<dyn ObjectStore>, path: Path, size: u64, bounds: Bounds) -> Self {
        Self { runtime, store, path, size, bounds }
    }
}

impl BlockSource for ObjectSource {
    fn may_wait(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.size)?;
        if buf.is_empty() {
            return Ok(());
        }
        let context = format!("object {}", self.path);
        let (store, path, bounds) = (Arc::clone(&self.store), self.path.clone(), self.bounds);
        let (range, len) = (offset..offset + buf.len() as u64, buf.len());
        let named = context.clone();
        let read = async move {
            bounds
                .attempts(&named, || async {
                    let bytes = store.get_range(&path, range.clone()).await.map_err(failure)?;
                    match bytes.len() {
                        got if got == len => Ok(bytes),
                        got => {
                            Err(Failure::Wrong(format!("{got} bytes came, not the {len} at {}", range.start)))
                        }
                    }
                })
                .await
        };
        let bytes = self.bounds.wait(&self.runtime, &context, read)?;
        buf.copy_from_slice(&bytes);
        Ok(())
    }
}

fn failure(error: object_store::Error) -> Failure {
    use object_store::Error;
    match error {
        Error::NotFound { .. } => Failure::Final("it is not there".to_owned()),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Failure::Final(error.to_string()),
        Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::InvalidPath { .. } => {
            Failure::Final(error.to_string())
        }
        other => Failure::Passing(other.to_string(), None),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use object_store::{
        PutPayload,
        memory::InMemory,
        throttle::{ThrottleConfig, ThrottledStore},
    };
    use tokio::runtime::Runtime;

    use super::*;

    fn bounds() -> Bounds {
        Bounds {
            read: Duration::from_millis(500),
            attempt: Duration::from_millis(200),
            attempts: 2,
            pause: Duration::from_millis(1),
        }
    }

    fn store(runtime: &Runtime) -> InMemory {
        let store = InMemory::new();
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        runtime.block_on(store.put(&Path::from("a/b"), PutPayload::from(bytes))).unwrap();
        store
    }

    fn open(runtime: &Runtime, store: impl ObjectStore, path: &str, size: u64) -> ObjectSource {
        ObjectSource::new(runtime.handle().clone(), Arc::new(store), Path::from(path), size, bounds())
    }

    #[test]
    fn ranges_are_read() {
        let runtime = Runtime::new().unwrap();
        let source = open(&runtime, store(&runtime), "a/b", 100_000);
        let mut buf = [0; 600];
        source.read_at(&mut buf, 99_400).unwrap();
        assert!(buf.iter().zip(99_400_u32..).all(|(byte, i)| *byte == (i % 251) as u8));
        assert!(matches!(source.read_at(&mut buf, 99_401), Err(SourceError::OutOfRange { .. })));
        // Also from a thread of the runtime, as blockd's calls are.
        let read = runtime.spawn_blocking(move || source.read_at(&mut [0; 10], 5));
        runtime.block_on(read).unwrap().unwrap();
    }

    #[test]
    fn what_is_missing_or_shorter_is_an_error_at_once() {
        let runtime = Runtime::new().unwrap();
        let missing = open(&runtime, store(&runtime), "a/c", 100);
        assert!(matches!(missing.read_at(&mut [0; 10], 0), Err(SourceError::Remote { .. })));
        let shorter = open(&runtime, store(&runtime), "a/b", 200_000);
        assert!(matches!(shorter.read_at(&mut [0; 10], 99_995), Err(SourceError::Corrupt { .. })));
    }

    #[test]
    fn a_store_that_does_not_answer_is_an_error_in_time() {
        let runtime = Runtime::new().unwrap();
        let config =
            ThrottleConfig { wait_get_per_call: Duration::from_secs(3600), ..ThrottleConfig::default() };
        let source = open(&runtime, ThrottledStore::new(store(&runtime), config), "a/b", 100_000);
        let started = Instant::now();
        let error = source.read_at(&mut [0; 10], 0).unwrap_err();
        assert!(matches!(error, SourceError::Away { .. } | SourceError::TimedOut { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}
