//! The processes that were started through the API, and who listens to them.

use std::{
    collections::HashMap,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aenv_envd_api::proto::process::ProcessConfig;
use futures::future::join_all;
use nix::{errno::Errno, libc, sys::signal::Signal};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::{ProcessError, input::Input, output::Chunk};

/// Pieces of output that wait for a slow subscriber before the process is slowed down.
const QUEUE: usize = 4;

/// Every process that runs, and those that ended a moment ago.
#[derive(Default)]
pub struct Processes(Mutex<HashMap<u32, Arc<Process>>>);

/// One process.
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// The name that its starter gave it.
    pub tag: Option<String>,
    /// What was asked for.
    pub config: ProcessConfig,
    /// The way in.
    pub input: Input,
    /// Told when waiting for the rest of the output has become pointless.
    pub cut: Notify,
    was_cut: AtomicBool,
    /// Told when the subscribers were dropped, so that nobody waits for one of them.
    dropped: Notify,
    /// `None` once it has ended: what is remembered of it holds no descriptor.
    pidfd: Mutex<Option<Arc<OwnedFd>>>,
    subscribers: Mutex<Subscribers>,
}

#[derive(Default)]
struct Subscribers {
    queues: Vec<mpsc::Sender<Event>>,
    ended: Option<End>,
}

/// What subscribers hear.
#[derive(Clone, Debug)]
pub enum Event {
    /// Output.
    Data(Chunk),
    /// The end; nothing comes after it.
    End(End),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited with a code.
    Exited(i32),
    /// A signal ended it; whether it left a core.
    Signalled(i32, Core),
}

/// Whether a core was dumped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    /// It was.
    Dumped,
    /// It was not.
    Not,
}

/// How a request names a process.
#[derive(Clone, Debug)]
pub enum Selector {
    /// By its id.
    Pid(u32),
    /// By the name that its starter gave it.
    Tag(String),
}

impl Processes {
    /// Adds a process that has just been started.
    pub fn insert(&self, process: Arc<Process>) {
        self.0.lock().insert(process.pid, process);
    }

    /// Forgets a process, unless its pid has been given to another since.
    pub fn remove(&self, process: &Arc<Process>) {
        let mut map = self.0.lock();
        if map.get(&process.pid).is_some_and(|present| Arc::ptr_eq(present, process)) {
            map.remove(&process.pid);
        }
    }

    /// Every process that has not ended, by pid.
    pub fn live(&self) -> Vec<Arc<Process>> {
        let mut live: Vec<_> = self.0.lock().values().filter(|process| process.is_live()).cloned().collect();
        live.sort_by_key(|process| process.pid);
        live
    }

    /// A process that runs.
    pub fn find_live(&self, selector: &Selector) -> Result<Arc<Process>, ProcessError> {
        self.find(selector, Process::is_live)
    }

    /// A process that runs or has just ended.
    pub fn find_known(&self, selector: &Selector) -> Result<Arc<Process>, ProcessError> {
        self.find(selector, Process::is_live).or_else(|_| self.find(selector, |_| true))
    }

    fn find(
        &self,
        selector: &Selector,
        fits: impl Fn(&Process) -> bool,
    ) -> Result<Arc<Process>, ProcessError> {
        let map = self.0.lock();
        match selector {
            Selector::Pid(pid) => {
                map.get(pid).filter(|process| fits(process)).cloned().ok_or(ProcessError::NoPid(*pid))
            }
            Selector::Tag(tag) => {
                let tagged = |process: &&Arc<Process>| process.tag.as_ref() == Some(tag) && fits(process);
                map.values().find(tagged).cloned().ok_or_else(|| ProcessError::NoTag(tag.clone()))
            }
        }
    }

    /// Ends every stream; the processes go on.
    pub fn drop_subscribers(&self) {
        for process in self.0.lock().values() {
            process.subscribers.lock().queues.clear();
            process.dropped.notify_waiters();
        }
    }
}

impl Process {
    /// A process that has just been started.
    pub fn new(
        pid: u32,
        tag: Option<String>,
        config: ProcessConfig,
        input: Input,
        pidfd: Arc<OwnedFd>,
    ) -> Self {
        Self {
            pid,
            tag,
            config,
            input,
            cut: Notify::new(),
            was_cut: AtomicBool::new(false),
            dropped: Notify::new(),
            pidfd: Mutex::new(Some(pidfd)),
            subscribers: Mutex::default(),
        }
    }

    fn is_live(&self) -> bool {
        self.subscribers.lock().ended.is_none()
    }

    /// Everything from now on. Of a process that has ended: its end.
    pub fn subscribe(&self) -> mpsc::Receiver<Event> {
        let (queue, events) = mpsc::channel(QUEUE);
        let mut subscribers = self.subscribers.lock();
        match subscribers.ended {
            // There is room: the queue is new.
            Some(end) => drop(queue.try_send(Event::End(end))),
            None => subscribers.queues.push(queue),
        }
        events
    }

    /// Hands output to every subscriber; waits for the slowest. Without subscribers it is dropped.
    pub async fn publish(&self, chunk: Chunk) {
        let queues = {
            let mut subscribers = self.subscribers.lock();
            subscribers.queues.retain(|queue| !queue.is_closed());
            subscribers.queues.clone()
        };
        self.send_all(&queues, Event::Data(chunk)).await;
    }

    /// A subscriber that has gone misses nothing.
    async fn send_all(&self, queues: &[mpsc::Sender<Event>], event: Event) {
        let dropped = self.dropped.notified();
        match queues {
            [] => {}
            [one] => {
                tokio::select! {
                    _ = one.send(event) => {}
                    () = dropped => {}
                }
            }
            many => {
                tokio::select! {
                    _ = join_all(many.iter().map(|queue| queue.send(event.clone()))) => {}
                    () = dropped => {}
                }
            }
        }
    }

    /// Tells every subscriber, now and later, that it ended.
    pub async fn finish(&self, end: End) {
        let queues = {
            let mut subscribers = self.subscribers.lock();
            subscribers.ended = Some(end);
            std::mem::take(&mut subscribers.queues)
        };
        self.input.release();
        self.pidfd.lock().take();
        self.send_all(&queues, Event::End(end)).await;
    }

    /// Sends a signal to this very process, never to one that has been given its pid.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        let Some(pidfd) = self.pidfd.lock().clone() else {
            return Err(ProcessError::NoPid(self.pid));
        };
        // SAFETY: pidfd_send_signal takes a descriptor that lives as long as `pidfd`, plain numbers, and a null siginfo.
        let sent = unsafe {
            let nothing = std::ptr::null::<libc::siginfo_t>();
            libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal as libc::c_int, nothing, 0)
        };
        match Errno::result(sent) {
            Ok(_) => Ok(()),
            // It is gone, only its output is still held open by a child of its own.
            Err(Errno::ESRCH) => Ok(()),
            Err(error) => Err(ProcessError::Kill(error)),
        }
    }

    /// Lets the end out as soon as the process is gone, even while a child of its holds its output open.
    pub fn cut_output(&self) {
        self.was_cut.store(true, Ordering::Release);
        self.cut.notify_one();
    }

    /// Whether [`cut_output`](Self::cut_output) was called.
    pub fn is_cut(&self) -> bool {
        self.was_cut.load(Ordering::Acquire)
    }
}
