//! Saves the vm state without memory, and holds the process still afterwards.
//!
//! Firecracker saves state and memory in one request: first the state, whole and synced, then it opens the file for memory. All of
//! that is done by the one thread that emulates devices. The file that it is told is a named pipe, and opening a pipe for writing
//! waits for a reader. So the thread stands from the moment of the state on: no packet that comes in and no disk that answers
//! changes guest memory or a disk while they are captured, which stopped vCPUs alone do not achieve. A reader lets it go
//! on: it finds that a pipe cannot be given a size, and refuses the request, as every release does. No byte of memory is written.
//!
//! *A sink for memory* would cost a copy of all of it, *a file that cannot be opened* would let the thread go on too early, and
//! *dirty tracking* would cost every guest for the sake of what the page tables say anyway.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{sync::Mutex, task::JoinHandle};

use super::{
    api::{Api, Call},
    root::{HOLD, LARGEST_STATE, Root, STATE, inside},
};
use crate::{
    EngineError,
    process::{io_error, write_private},
};

/// Writing the state, and how long the process may be held: captures of a lot of memory take seconds.
const SAVE_WAIT: Duration = Duration::from_secs(30);
const HELD_WAIT: Duration = Duration::from_secs(3600);
/// A process that was let go on answers within this.
const RELEASE_WAIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_micros(100);

/// What Firecracker says when the file for memory is none.
const EXPECTED: &str = "memory backing file";

type Reply = JoinHandle<Result<Value, EngineError>>;

/// The request that is under way while the process is held.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    reply: Mutex<Option<Reply>>,
}

impl Hold {
    /// Saves the state of a VM whose vCPUs stand to `path`, and holds the process.
    pub(crate) async fn save(
        &self,
        api: &Api,
        root: &Arc<Root>,
        pid: i32,
        path: &Path,
    ) -> Result<(), EngineError> {
        self.release(root).await?;
        let arguments = json!({
            "snapshot_type": "Full", "snapshot_path": inside(STATE), "mem_file_path": inside(HOLD),
        });
        let (api, done) = (api.clone(), Arc::new(AtomicBool::new(false)));
        let set = Arc::clone(&done);
        let reply: Reply = tokio::spawn(async move {
            let answer = api.call(Call::put("/snapshot/create", arguments), HELD_WAIT).await;
            set.store(true, Ordering::Release);
            answer
        });
        // From here on it may be held, also when nobody waits for this any more.
        *self.reply.lock().await = Some(reply);
        let (place, path) = (Arc::clone(root), path.to_owned());
        let saved = tokio::task::spawn_blocking(move || {
            if !wait_until_held(pid, &done)? {
                return Ok(false);
            }
            let state = place.state()?;
            if state.is_empty() || state.len() as u64 > LARGEST_STATE {
                return Err(EngineError::Start(format!("the VMM saved a state of {} bytes", state.len())));
            }
            let written = write_private(&path, &state);
            written.map_err(|e| io_error(format!("write the vm state {}", path.display()), e))?;
            Ok(true)
        });
        match saved.await.map_err(|e| EngineError::Start(e.to_string()))? {
            Ok(true) => Ok(()),
            Ok(false) => {
                let reply = self.reply.lock().await.take();
                match reply {
                    Some(reply) => match reply.await {
                        Ok(Err(error)) => Err(error),
                        _ => Err(EngineError::Start(
                            "the VMM did not wait after it saved its state".to_owned(),
                        )),
                    },
                    None => {
                        Err(EngineError::Start("the VMM was let go on while it saved its state".to_owned()))
                    }
                }
            }
            Err(error) => {
                self.release(root).await?;
                Err(error)
            }
        }
    }

    /// Whether the process stands, and so do its vCPUs.
    pub(crate) async fn is_held(&self) -> bool {
        self.reply.lock().await.is_some()
    }

    /// Lets the process go on; its vCPUs stand.
    pub(crate) async fn release(&self, root: &Root) -> Result<(), EngineError> {
        let Some(mut reply) = self.reply.lock().await.take() else { return Ok(()) };
        // Open until the answer is there, so that it is never signalled for a pipe that nobody reads.
        let reader = root.open(HOLD, libc::O_RDONLY | libc::O_NONBLOCK);
        let _reader = reader.map_err(|e| io_error("let a VMM go on after a capture", e))?;
        match tokio::time::timeout(RELEASE_WAIT, &mut reply).await {
            Ok(Ok(Err(EngineError::Refused { message, .. }))) if message.contains(EXPECTED) => Ok(()),
            Ok(Ok(Err(error @ EngineError::Exited(_)))) => Err(error),
            Ok(other) => {
                tracing::warn!(?other, "a VMM ended a capture otherwise than expected");
                Ok(())
            }
            Err(_) => {
                reply.abort();
                let command = "going on after a capture".to_owned();
                Err(EngineError::TimedOut { command, secs: RELEASE_WAIT.as_secs() })
            }
        }
    }
}

/// Lets a process go on that an earlier server may have held; `talk` is what it is asked meanwhile.
pub(crate) async fn let_go<T>(root: &Root, talk: impl Future<Output = T>) -> T {
    let _reader = root.open(HOLD, libc::O_RDONLY | libc::O_NONBLOCK).ok();
    talk.await
}

/// Whether the process got as far as to wait for a reader; `false` when it has answered instead.
fn wait_until_held(pid: i32, answered: &AtomicBool) -> Result<bool, EngineError> {
    let deadline = Instant::now() + SAVE_WAIT;
    loop {
        if waits_in_open(pid) {
            return Ok(true);
        }
        if answered.load(Ordering::Acquire) {
            return Ok(false);
        }
        if Instant::now() > deadline {
            let command = "saving the vm state".to_owned();
            return Err(EngineError::TimedOut { command, secs: SAVE_WAIT.as_secs() });
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether the first thread of a process stands in `open` of a file that it does not empty: of all that Firecracker opens, only
/// the pipe makes it wait.
fn waits_in_open(pid: i32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/task/{pid}/syscall")).unwrap_or_default();
    stands_in_open(&call)
}

/// `number first second third ...`, numbers after the first one in hexadecimal, or `running`.
fn stands_in_open(call: &str) -> bool {
    let mut fields = call.split_ascii_whitespace();
    let Some(number) = fields.next().and_then(|text| text.parse::<libc::c_long>().ok()) else { return false };
    let flags = match number {
        libc::SYS_open => fields.nth(1),
        libc::SYS_openat => fields.nth(2),
        _ => return false,
    };
    let flags = flags.and_then(|text| i64::from_str_radix(text.trim_start_matches("0x"), 16).ok());
    flags.is_some_and(|flags| flags & i64::from(libc::O_WRONLY) != 0 && flags & i64::from(libc::O_TRUNC) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_opens_a_pipe_is_told_from_others() {
        assert!(stands_in_open("2 0x7f5a9d2b1e10 0x80041 0x1b6 0x0 0x0 0x0 0x7ffd 0x7f5a\n"));
        assert!(stands_in_open("257 0xffffff9c 0x7f5a9d2b1e10 0x80041 0x1b6 0x0 0x0 0x7ffd 0x7f5a\n"));
        assert!(
            !stands_in_open("257 0xffffff9c 0x7f5a9d2b1e10 0x80241 0x1b6 0x0 0x0 0x7ffd 0x7f5a\n"),
            "the state"
        );
        assert!(
            !stands_in_open("running\n") && !stands_in_open("") && !stands_in_open("232 0x5 0x7f 0x20\n")
        );
    }
}
