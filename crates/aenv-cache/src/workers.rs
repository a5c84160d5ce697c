//! Threads that fetch ahead, and the gate that keeps the last in line behind everybody else.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

const THREADS: usize = 4;

/// Fetches that may wait for a thread. More are not made: by the time they would be, a guest has asked itself.
const QUEUE: usize = 32;

type Work = Box<dyn FnOnce() + Send>;

/// The threads. They end when this is dropped.
pub(crate) struct Workers(SyncSender<Work>);

impl Workers {
    pub fn start() -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Work>(QUEUE);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..THREADS {
            let receiver = Arc::clone(&receiver);
            thread::Builder::new().name("cache-ahead".to_owned()).spawn(move || {
                loop {
                    let Ok(work) = receiver.lock().recv() else { return };
                    work();
                }
            })?;
        }
        Ok(Self(sender))
    }

    /// Has work done soon, or not at all when there is much to do.
    pub fn submit(&self, work: impl FnOnce() + Send + 'static) {
        // A queue that is full: see above.
        let _ = self.0.try_send(Box::new(work));
    }
}

/// Reads that wait for a source.
#[derive(Default)]
pub(crate) struct Gate {
    waiting: Mutex<usize>,
    none: Condvar,
}

/// A read that waits for a source; it no longer does when this is dropped.
pub(crate) struct Waiting<'a>(&'a Gate);

impl Gate {
    pub fn enter(&self) -> Waiting<'_> {
        *self.waiting.lock() += 1;
        Waiting(self)
    }

    /// Waits until no read waits for a source, or for `bound`: what comes last must come some time.
    pub fn wait_for_none(&self, bound: Duration) {
        let deadline = Instant::now() + bound;
        let mut waiting = self.waiting.lock();
        while *waiting > 0 && !self.none.wait_until(&mut waiting, deadline).timed_out() {}
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock();
        *waiting -= 1;
        if *waiting == 0 {
            self.0.none.notify_all();
        }
    }
}
