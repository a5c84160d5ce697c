//! Threads for work that must not hold up whoever takes requests: reads that may wait for another machine, I/O on the host's disk.

use std::{collections::VecDeque, sync::Arc, thread};

use parking_lot::{Condvar, Mutex};

type Work = Box<dyn FnOnce() + Send>;

/// The threads; made when they are needed, and kept.
#[derive(Clone)]
pub(crate) struct Pool {
    most: usize,
    prepare: fn(),
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    threads: usize,
    idle: usize,
}

impl Pool {
    /// `most` threads at most, each of which calls `prepare` first. Work beyond waits in a queue, whose length the kernel bounds: it has
    /// so many requests in flight.
    pub(crate) fn new(most: usize, prepare: fn()) -> Self {
        Self { most, prepare, shared: Arc::default() }
    }

    /// Has work done in another thread.
    pub(crate) fn run(&self, work: impl FnOnce() + Send + 'static) {
        let (state, came) = &*self.shared;
        let mut state = state.lock();
        state.queue.push_back(Box::new(work));
        if state.idle < state.queue.len() && state.threads < self.most {
            let (shared, prepare) = (Arc::clone(&self.shared), self.prepare);
            let begin = move || {
                prepare();
                serve(&shared);
            };
            match thread::Builder::new().name("waiting".to_owned()).spawn(begin) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    tracing::error!(%error, "no thread for I/O that waits");
                    let work = state.queue.pop_back();
                    drop(state);
                    return work.into_iter().for_each(|work| work());
                }
                Err(error) => tracing::warn!(%error, "I/O that waits has few threads"),
            }
        }
        came.notify_one();
    }
}

fn serve((state, came): &(Mutex<State>, Condvar)) {
    let mut state = state.lock();
    loop {
        while let Some(work) = state.queue.pop_front() {
            parking_lot::MutexGuard::unlocked(&mut state, work);
        }
        state.idle += 1;
        came.wait(&mut state);
        state.idle -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[test]
    fn work_that_waits_holds_up_no_other() {
        let most = 16;
        let waiting = Pool::new(most, || ());
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (done, results) = mpsc::channel();
        for _ in 0..most - 1 {
            let held = Arc::clone(&held);
            waiting.run(move || {
                let _ = held.lock().recv();
            });
        }
        for number in 0..10 {
            let done = done.clone();
            waiting.run(move || done.send(number).unwrap());
        }
        let mut numbers: Vec<i32> =
            (0..10).map(|_| results.recv_timeout(Duration::from_secs(60)).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
        drop(release);
    }
}
