//! Guest memory and layers, as production has them: `aenv-memory` and `aenv-layer`, off the async threads.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_layer::Layer;
use aenv_memory::{
    BufferPool, CaptureReport, DEFAULT_BUFFER, Ram, Since, Snapshot, Upper, capture_stopped, give_back,
};
use aenv_vmm::RamMapping;
use async_trait::async_trait;
use parking_lot::Mutex;

use crate::{
    capture::After,
    seams::{Images, TakenMemory},
};

/// Warm buffers that are kept while nothing is captured, and for how long.
const IDLE_BUFFERS: usize = 1;
const KEPT_FOR: Duration = Duration::from_secs(10);

/// Captures into layers.
pub(crate) struct LayerImages {
    buffers: BufferPool,
    given_back: Mutex<Instant>,
}

impl LayerImages {
    pub(crate) fn new() -> Self {
        Self {
            buffers: BufferPool::new(DEFAULT_BUFFER, IDLE_BUFFERS),
            given_back: Mutex::new(Instant::now()),
        }
    }
}

#[async_trait]
impl Images for LayerImages {
    async fn take(
        &self,
        ram: RamMapping,
        target: PathBuf,
        after: After,
        since: Since,
    ) -> Result<Box<dyn TakenMemory>, String> {
        let pid = u32::try_from(ram.pid).map_err(|_| format!("{} is no process id", ram.pid))?;
        let upper = ram.upper.map(|upper| Upper { offset: upper.offset, start: upper.start });
        let ram = Ram { pid, start: ram.start, len: ram.len, upper };
        if after == After::End {
            let report = blocking(move || capture_stopped(&ram, &target, since)).await?;
            return Ok(Box::new(Written(report)));
        }
        let buffer = self.buffers.get().map_err(|error| format!("no buffer for guest memory: {error}"))?;
        let snapshot = blocking(move || Snapshot::take(&ram, buffer, &target, since)).await?;
        Ok(Box::new(Buffered(snapshot)))
    }

    async fn merge(&self, layers: Vec<PathBuf>, target: PathBuf) -> Result<u64, String> {
        let opened = move || {
            let layers = layers.iter().map(|path| Layer::open_file(path).map(Arc::new));
            layers.collect::<Result<Vec<_>, _>>()
        };
        let layers = blocking(opened).await?;
        let summary = blocking(move || aenv_layer::compact(&layers, &target)).await?;
        Ok(summary.size)
    }

    fn trim(&self) {
        self.buffers.trim(KEPT_FOR);
        let mut last = self.given_back.lock();
        if last.elapsed() > KEPT_FOR {
            *last = Instant::now();
            tokio::task::spawn_blocking(give_back);
        }
    }
}

/// A layer that was written while the vCPUs stood still.
struct Written(CaptureReport);

#[async_trait]
impl TakenMemory for Written {
    fn since(&self) -> Since {
        self.0.since
    }

    fn next(&self) -> Since {
        self.0.next
    }

    async fn write(self: Box<Self>) -> Result<u64, String> {
        Ok(self.0.bytes)
    }
}

/// Pages that wait in a buffer.
struct Buffered(Snapshot);

#[async_trait]
impl TakenMemory for Buffered {
    fn since(&self) -> Since {
        self.0.report().since
    }

    fn next(&self) -> Since {
        self.0.report().next
    }

    async fn write(self: Box<Self>) -> Result<u64, String> {
        let report = blocking(move || self.0.write()).await?;
        Ok(report.bytes)
    }
}

async fn blocking<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, String> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}
