//! After the boot: start envd again when it dies, reap every orphan, power off when asked.
//!
//! ```text
//!   start envd --> wait for a signal --+-- SIGCHLD: reap; envd among them? start it again, at most LIMIT times a minute
//!        ^                             +-- SIGTERM, SIGINT (ctrl-alt-del), SIGPWR: sync, power off
//!        +-----------------------------+
//! ```

use std::{
    ffi::{CStr, CString},
    fs::{self, File},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::{
        reboot::{reboot, set_cad_enabled},
        signal::{SigSet, Signal},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork, setsid, sync},
};

use crate::{Fatal, cmdline, say};

/// Starts of envd within [`WINDOW`] that are taken for bad luck.
const LIMIT: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);

const ENVIRONMENT: [&CStr; 4] = [
    c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    c"HOME=/root",
    c"TERM=linux",
    c"LANG=C.UTF-8",
];

/// Runs until the guest is told to power off, or envd dies too often.
pub fn keep_running(envd: &File) -> Result<(), Fatal> {
    // The kernel must not kill what keeps the sandbox reachable; envd gives its own children a normal score.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        say(format_args!("no protection from the OOM killer: {error}"));
    }
    set_cad_enabled(false).map_err(|errno| Fatal::new("take over ctrl-alt-del", errno))?;
    let signals = SigSet::from_iter([Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR]);
    signals.thread_block().map_err(|errno| Fatal::new("block signals", errno))?;

    let mut starts: Vec<Instant> = Vec::new();
    let mut running: Option<Pid> = None;
    loop {
        if running.is_none() {
            starts.retain(|start| start.elapsed() < WINDOW);
            if starts.len() >= LIMIT {
                return Err(Fatal::new("keep envd running", "it died too often within a minute"));
            }
            starts.push(Instant::now());
            running = Some(start(envd, &signals)?);
        }
        match signals.wait() {
            Ok(Signal::SIGCHLD) => running = reap(running),
            Ok(signal) => {
                say(format_args!("{signal}: powering off"));
                return Ok(());
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(Fatal::new("wait for a signal", errno)),
        }
    }
}

/// Takes every zombie; `None` when envd was among them.
fn reap(mut running: Option<Pid>) -> Option<Pid> {
    loop {
        match waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return running,
            Ok(status) if status.pid() == running => {
                say(format_args!("envd ended ({status:?}); starting it again"));
                running = None;
            }
            Ok(_) | Err(_) => {}
        }
    }
}

fn start(envd: &File, signals: &SigSet) -> Result<Pid, Fatal> {
    let name = CString::from(c"envd");
    let arguments = [name.as_c_str()];
    // SAFETY: this process has one thread, so the child may do anything between fork and exec.
    match unsafe { fork() }.map_err(|errno| Fatal::new("fork for envd", errno))? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let failed = exec(envd, signals, &arguments);
            say(format_args!("envd cannot be started: {failed}"));
            std::process::exit(127);
        }
    }
}

/// Returns only when it failed.
fn exec(envd: &File, signals: &SigSet, arguments: &[&CStr]) -> Errno {
    let _ = setsid();
    if let Err(errno) = signals.thread_unblock() {
        return errno;
    }
    // Close-on-exec stays: envd's image is a descriptor of nobody once it runs.
    if let Err(errno) = fcntl(envd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
        return errno;
    }
    let pointers: Vec<_> = arguments.iter().map(|a| a.as_ptr()).chain([std::ptr::null()]).collect();
    let environment: Vec<_> = ENVIRONMENT.iter().map(|e| e.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: both arrays end with a null pointer and their strings outlive the call.
    unsafe { libc::fexecve(envd.as_raw_fd(), pointers.as_ptr().cast(), environment.as_ptr().cast()) };
    Errno::last()
}

/// Writes everything out and ends the machine. Never returns.
pub fn power_off() -> ! {
    sync();
    // The disk is consistent by its journal in any case; a read-only root makes the next mount quick.
    let read_only = nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_RDONLY;
    let _ = nix::mount::mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>);
    sync();
    match reboot(cmdline::way_off()) {
        Ok(never) => match never {},
        Err(errno) => {
            say(format_args!("power off: {errno}"));
            loop {
                std::thread::park();
            }
        }
    }
}
