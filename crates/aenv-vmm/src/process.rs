//! VMM processes: started detached, watched through a pidfd, found again by pid and start time.
//!
//! A VMM belongs to the node, not to the server: it has its own session, no pipe to the server that it could block on or
//! die with, and an environment that holds nothing but the mark of its owner and what is preloaded.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::{fs::OpenOptionsExt, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
};

use crate::{
    EngineError, VmRecord,
    jail::{self, Room},
};

/// Name of the environment variable by which a VMM's owner (a server's runtime folder) is recognized.
pub(crate) const OWNER: &str = "AENV_VMM_OWNER";

const KILL_WAIT: Duration = Duration::from_secs(30);
const LOG_TAIL: u64 = 2048;

/// How to start one.
pub(crate) struct Start<'a> {
    pub(crate) program: &'a Path,
    pub(crate) arguments: Vec<String>,
    pub(crate) owner: &'a Path,
    /// A library that is loaded into it before its own.
    pub(crate) preload: Option<&'a Path>,
    /// Namespace to start it in.
    pub(crate) netns: BorrowedFd<'a>,
    /// Descriptors that it keeps, under the same numbers.
    pub(crate) keep: Vec<RawFd>,
    /// What it may see and do.
    pub(crate) confinement: Confinement,
    /// Its standard output; the log when there is none.
    pub(crate) console: Option<File>,
    /// Its standard error.
    pub(crate) log: &'a Path,
}

/// How a process gets into the jail.
pub(crate) enum Confinement {
    /// It does not.
    None,
    /// It enters by itself at the end of its start.
    Itself,
    /// It is started in a root of its own. The program is a path in there.
    Room(Room),
}

/// A process, and the watch that knows when it ended.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) start_time: u64,
    pidfd: Arc<OwnedFd>,
    ended: watch::Receiver<Option<String>>,
}

impl Process {
    /// Starts it. It runs on when the handle is dropped.
    pub(crate) fn start(start: Start<'_>) -> Result<Self, EngineError> {
        let failed = |context: &str, e: io::Error| EngineError::Start(format!("{context}: {e}"));
        let open = || File::options().create(true).append(true).read(true).open(start.log);
        let log = open().map_err(|e| failed("open its log", e))?;
        let copy = || log.try_clone().map_err(|e| failed("open its log", e));
        let nothing = File::open("/dev/null").map_err(|e| failed("open /dev/null", e))?;
        let mut command = Command::new(start.program);
        command.args(&start.arguments).current_dir("/").env_clear().env(OWNER, start.owner);
        if let Some(library) = start.preload {
            command.env("LD_PRELOAD", library);
        }
        command.stdin(Stdio::from(nothing));
        command.stdout(start.console.map_or_else(copy, Ok)?);
        command.stderr(copy()?);
        let (restricted, room) = match start.confinement {
            Confinement::None => (false, None),
            Confinement::Itself => {
                command.envs(jail::ENVIRONMENT);
                (true, None)
            }
            Confinement::Room(room) => (true, Some(room)),
        };
        let uid = room.as_ref().map_or(0, Room::uid);
        let netns = start.netns.as_raw_fd();
        let keep = start.keep;
        // SAFETY: the closure makes system calls only, on descriptors that outlive the spawn; it allocates nothing.
        unsafe {
            command.pre_exec(move || {
                if libc::setsid() < 0 || libc::setns(netns, libc::CLONE_NEWNET) < 0 {
                    return Err(io::Error::last_os_error());
                }
                libc::umask(0o077);
                if restricted {
                    jail::restrict()?;
                }
                if uid != 0 {
                    jail::become_user(uid)?;
                }
                for fd in &keep {
                    if libc::fcntl(*fd, libc::F_SETFD, 0) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let spawned = match room {
            None => command.spawn(),
            // A process is born with the root of the thread that starts it. That thread is of no other use afterwards.
            Some(room) => std::thread::scope(|scope| {
                let born = scope.spawn(|| room.enter().and_then(|()| command.spawn()));
                born.join().unwrap_or_else(|_| Err(io::Error::other("its thread ended early")))
            }),
        };
        let child = spawned.map_err(|e| failed(&start.program.display().to_string(), e))?;
        let pid = i32::try_from(child.id()).map_err(|e| EngineError::Start(e.to_string()))?;
        // The child is not reaped before its watch does it, so that its pid cannot be anyone else's here.
        Self::watch(pid, Some(log))
    }

    /// Takes over a process that is not a child of this one. [`EngineError::Gone`] when it ended or its pid was reused.
    pub(crate) fn attach(pid: i32, expected_start: u64, log: Option<File>) -> Result<Self, EngineError> {
        let process = Self::watch(pid, log)?;
        if process.start_time == expected_start { Ok(process) } else { Err(EngineError::Gone) }
    }

    fn watch(pid: i32, log: Option<File>) -> Result<Self, EngineError> {
        let pidfd = Arc::new(pidfd_open(pid).map_err(|_| EngineError::Gone)?);
        let start_time = start_time(pid).ok_or(EngineError::Gone)?;
        let duplicate = pidfd.try_clone().map_err(|source| io_error("duplicate a pidfd", source))?;
        // SAFETY: an OwnedFd returns the same descriptor until it is dropped, which AsyncFd does after deregistering it.
        let readable = unsafe { AsyncFd::register_with_interest(duplicate, Interest::READABLE) }
            .map_err(|error| io_error("watch a process", error.into()))?;
        let (sender, ended) = watch::channel(None);
        tokio::spawn(async move {
            let reason = match readable.readable().await {
                Ok(_) => exit_reason(readable.get_ref().as_fd(), log),
                Err(error) => format!("its watch failed: {error}"),
            };
            sender.send_replace(Some(reason));
        });
        Ok(Self { pid, start_time, pidfd, ended })
    }

    /// Resolves when it has ended, with why.
    pub(crate) async fn ended(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "it ended while the server was shutting down".to_owned(),
        }
    }

    /// Sends SIGKILL; a process that has ended is no error.
    pub(crate) fn kill(&self) {
        // SAFETY: the pidfd is open and names this process only, whatever became of its pid.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
    }

    /// Kills it and waits until it is gone.
    pub(crate) async fn end(&self) -> Result<(), EngineError> {
        self.kill();
        let waited = tokio::time::timeout(KILL_WAIT, self.ended()).await;
        waited.map(drop).map_err(|_| EngineError::TimedOut {
            command: format!("SIGKILL of process {}", self.pid),
            secs: KILL_WAIT.as_secs(),
        })
    }
}

/// What is known of an end: the exit status if it was our child, and the last lines of its log.
fn exit_reason(pidfd: BorrowedFd<'_>, log: Option<File>) -> String {
    let status = match waitid(Id::PIDFd(pidfd), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        Ok(WaitStatus::Exited(_, code)) => format!("exit code {code}"),
        Ok(WaitStatus::Signaled(_, signal, _)) => format!("{signal}"),
        Ok(other) => format!("{other:?}"),
        Err(_) => "its exit status went to another process".to_owned(),
    };
    let said = log.and_then(|file| tail(file).ok()).unwrap_or_default();
    let said = said.trim();
    if said.is_empty() { status } else { format!("{status}; it said: {said}") }
}

fn tail(mut file: File) -> io::Result<String> {
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call has no memory effects; its result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Field 22 of `/proc/<pid>/stat`; the name in field 2 may hold anything, so fields count from its last parenthesis.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Processes whose environment names `owner`.
pub(crate) fn owned_by(owner: &Path) -> Vec<i32> {
    let mark = CString::new(format!("{OWNER}={}", owner.display())).unwrap_or_default();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
    })
    .collect()
}

/// Ends the processes of `owner` that are neither in one of the records nor among `waiting`, and tells how many.
pub(crate) async fn sweep(owner: &Path, keep: &[VmRecord], waiting: &[i32]) -> Result<u32, EngineError> {
    let mut ended = 0;
    for pid in owned_by(owner) {
        let Some(start_time) = start_time(pid).filter(|_| !waiting.contains(&pid)) else { continue };
        if keep.iter().any(|record| record.pid == pid && record.start_time == start_time) {
            continue;
        }
        match Process::attach(pid, start_time, None) {
            Ok(process) => process.end().await?,
            Err(EngineError::Gone) => {}
            Err(other) => return Err(other),
        }
        ended += 1;
    }
    Ok(ended)
}

/// Writes a file that nobody else reads, in place of what is there.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(bytes)
}

pub(crate) fn io_error(context: impl Into<String>, source: io::Error) -> EngineError {
    EngineError::Io { context: context.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(folder: &Path, script: &[&str]) -> Process {
        let netns = File::open("/proc/self/ns/net").unwrap();
        Process::start(Start {
            program: Path::new("/bin/busybox"),
            arguments: script.iter().map(|s| (*s).to_owned()).collect(),
            owner: folder,
            preload: None,
            netns: netns.as_fd(),
            keep: Vec::new(),
            confinement: Confinement::None,
            console: None,
            log: &folder.join("log"),
        })
        .unwrap()
    }

    #[tokio::test]
    async fn an_end_is_told_with_status_and_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let process = start(folder.path(), &["cat", "/nonexistent"]);
        let reason = process.ended().await;
        assert!(reason.contains("exit code 1") && reason.contains("/nonexistent"), "{reason}");
        assert!(start_time(process.pid).is_none(), "it is a zombie");
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_owner_and_ended_twice() {
        let folder = tempfile::tempdir().unwrap();
        let process = start(folder.path(), &["sleep", "1000"]);
        assert_eq!(owned_by(folder.path()), [process.pid]);
        let again = Process::attach(process.pid, process.start_time, None).unwrap();
        let other = Process::attach(process.pid, process.start_time + 1, None);
        assert!(matches!(other, Err(EngineError::Gone)));
        process.end().await.unwrap();
        process.end().await.unwrap();
        again.ended().await;
        assert!(owned_by(folder.path()).is_empty());
    }
}
