//! Starting a process: who it is, where it runs, what it holds open.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, process::CommandExt as _},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use nix::{
    libc,
    pty::{OpenptyResult, Winsize, openpty},
};
use tokio::net::unix::pipe;

use super::{input::Input, output::Source};
use crate::users::User;

/// `IOPRIO_WHO_PROCESS`, and best-effort class (2) at level 4: what a process has by default, whatever envd itself has.
const IOPRIO: (libc::c_int, libc::c_int) = (1, (2 << 13) | 4);
/// Ordinary processes die before envd does.
const OOM_SCORE: &[u8] = b"100";

/// What a process's standard streams are.
#[derive(Clone, Copy, Debug)]
pub enum Streams {
    /// Pipes, and `/dev/null` for stdin.
    Output,
    /// Pipes.
    InputAndOutput,
    /// A terminal of this size.
    Terminal(Winsize),
}

/// A process to start; everything is resolved.
#[derive(Debug)]
pub struct Plan {
    /// The program, a path or a name that is looked up in `PATH` of `env`.
    pub cmd: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// Who it is.
    pub user: User,
    /// What it reads and writes.
    pub streams: Streams,
}

/// A process that runs.
pub struct Started {
    /// To reap it.
    pub child: Child,
    /// Names it even when its pid has been given to another.
    pub pidfd: OwnedFd,
    /// The way in.
    pub input: Input,
    /// The ways out: stdout (or the terminal), stderr.
    pub sources: Vec<Source>,
}

/// Starts it. When this returns, the program has been executed.
pub fn spawn(plan: Plan) -> io::Result<Started> {
    let mut command = Command::new(&plan.cmd);
    command.args(&plan.args).env_clear().envs(&plan.env);
    let terminal = match plan.streams {
        Streams::Terminal(size) => {
            let pty = openpty(&size, None)?;
            set_cloexec(&pty)?;
            command.stdin(pty.slave.try_clone()?).stdout(pty.slave.try_clone()?).stderr(pty.slave);
            Some(pty.master)
        }
        streams => {
            let stdin =
                if matches!(streams, Streams::InputAndOutput) { Stdio::piped() } else { Stdio::null() };
            command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
            None
        }
    };
    let child_side = ChildSide::new(&plan, terminal.is_some())?;
    // SAFETY: the closure runs between fork and exec of a process with several threads; it makes system calls on values that
    // were made before, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(move || child_side.enter()) };
    let mut child = command.spawn()?;
    drop(command);
    match adopt(&mut child, terminal) {
        Ok((pidfd, input, sources)) => Ok(Started { child, pidfd, input, sources }),
        Err(error) => {
            // Nobody would read or reap it.
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

fn adopt(child: &mut Child, terminal: Option<OwnedFd>) -> io::Result<(OwnedFd, Input, Vec<Source>)> {
    let pidfd = pidfd_open(child.id())?;
    if let Some(master) = terminal {
        let (source, input) = Source::terminal(master)?;
        return Ok((pidfd, input, vec![source]));
    }
    let input = match child.stdin.take() {
        Some(stdin) => Input::pipe(pipe::Sender::from_owned_fd(stdin.into())?),
        None => Input::None,
    };
    let mut sources = Vec::with_capacity(2);
    if let Some(stdout) = child.stdout.take() {
        sources.push(Source::Stdout(pipe::Receiver::from_owned_fd(stdout.into())?));
    }
    if let Some(stderr) = child.stderr.take() {
        sources.push(Source::Stderr(pipe::Receiver::from_owned_fd(stderr.into())?));
    }
    Ok((pidfd, input, sources))
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes a pid and flags and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = libc::c_int::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor (close-on-exec), nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set_cloexec(pty: &OpenptyResult) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    fcntl(&pty.slave, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(())
}

/// What the child does to itself before it becomes the program.
struct ChildSide {
    groups: Vec<libc::gid_t>,
    uid: libc::uid_t,
    gid: libc::gid_t,
    cwd: CString,
    takes_terminal: bool,
}

impl ChildSide {
    fn new(plan: &Plan, takes_terminal: bool) -> io::Result<Self> {
        Ok(Self {
            groups: plan.user.groups.clone(),
            uid: plan.user.uid,
            gid: plan.user.gid,
            cwd: CString::new(plan.cwd.as_os_str().as_bytes())?,
            takes_terminal,
        })
    }

    fn enter(&self) -> io::Result<()> {
        self.become_ordinary();
        let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        if self.takes_terminal {
            // SAFETY: setsid takes nothing; TIOCSCTTY takes an int by value, and descriptor 0 is the terminal.
            unsafe {
                check(libc::setsid())?;
                check(libc::ioctl(0, libc::TIOCSCTTY as _, 0))?;
            }
        }
        // SAFETY: the calls read `groups` (a live vector of that length) and `cwd` (a live C string), or take plain numbers.
        unsafe {
            libc::umask(0o022);
            check(libc::setgroups(self.groups.len() as _, self.groups.as_ptr()))?;
            check(libc::setgid(self.gid))?;
            check(libc::setuid(self.uid))?;
            // As the user, so that a folder that it cannot enter is refused as it would be by a shell.
            check(libc::chdir(self.cwd.as_ptr()))
        }
    }

    /// Undoes envd's own protection. None of it is worth failing a start for.
    fn become_ordinary(&self) {
        // SAFETY: plain numbers; a static C string and a static buffer of the given length; the descriptor is closed again.
        unsafe {
            let oom = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if oom >= 0 {
                libc::write(oom, OOM_SCORE.as_ptr().cast(), OOM_SCORE.len());
                libc::close(oom);
            }
            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
            libc::syscall(libc::SYS_ioprio_set, IOPRIO.0, 0, IOPRIO.1);
        }
    }
}
