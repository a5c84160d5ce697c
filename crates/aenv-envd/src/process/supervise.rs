//! The task of each process: reads its output, reaps it, tells its end.

use std::{
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt as _},
    process::{Child, ExitStatus},
    sync::Arc,
    time::Duration,
};

use nix::sys::signal::Signal;
use tokio::{
    io::unix::AsyncFd,
    time::{Instant, sleep, sleep_until},
};

use super::{
    output::{PIPE_CHUNK, Source},
    registry::{Core, End, Process},
};
use crate::guest::Guest;

/// How long the end of a process can be asked for.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Most that is read after a process that was cut off has gone: what it wrote, not what its children go on writing.
const CUT_REST: usize = 4 << 20;

/// Watches a process until everything about it has been told, then forgets it.
pub async fn supervise(
    guest: Arc<Guest>,
    process: Arc<Process>,
    mut child: Child,
    pidfd: Arc<OwnedFd>,
    sources: Vec<Source>,
    deadline: Option<Instant>,
) {
    let killer = deadline.map(|deadline| tokio::spawn(kill_at(deadline, Arc::clone(&process))));
    let status = follow(&process, &mut child, pidfd, sources).await;
    if let Some(killer) = killer {
        killer.abort();
    }
    process.finish(end_of(status)).await;
    sleep(REMEMBERED).await;
    guest.processes.remove(&process);
}

async fn kill_at(deadline: Instant, process: Arc<Process>) {
    sleep_until(deadline).await;
    if let Err(error) = process.signal(Signal::SIGKILL) {
        tracing::warn!(pid = process.pid, %error, "a process outlives its deadline");
    }
    process.cut_output();
}

async fn follow(
    process: &Process,
    child: &mut Child,
    pidfd: Arc<OwnedFd>,
    sources: Vec<Source>,
) -> io::Result<ExitStatus> {
    // SAFETY: the shared owner that the `AsyncFd` holds keeps the descriptor open.
    let exit = unsafe { AsyncFd::register(pidfd) }.map_err(io::Error::from);
    let mut buffer = Box::new([0; PIPE_CHUNK]);
    let mut sources = sources.into_iter();
    let (mut first, mut second) = (sources.next(), sources.next());
    let mut status = None;
    loop {
        let is_done = (first.is_none() && second.is_none()) || process.is_cut();
        if let Some(status) = status.take_if(|_| is_done) {
            for source in [first, second].iter().flatten() {
                drain(process, source, &mut buffer).await;
            }
            return status;
        }
        tokio::select! {
            () = readable(first.as_ref()), if first.is_some() => relay(process, &mut first, &mut buffer).await,
            () = readable(second.as_ref()), if second.is_some() => relay(process, &mut second, &mut buffer).await,
            gone = reap(&exit, child), if status.is_none() => status = Some(gone),
            () = process.cut.notified() => {}
        }
    }
}

async fn readable(source: Option<&Source>) {
    if let Some(source) = source {
        // An error here comes again from the read.
        let _ = source.ready().await;
    }
}

/// Passes on one piece of output; forgets a stream that has ended.
async fn relay(process: &Process, source: &mut Option<Source>, buffer: &mut [u8; PIPE_CHUNK]) {
    let Some(open) = source else { return };
    match open.read(buffer) {
        Ok(Some(chunk)) => process.publish(chunk).await,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Ok(None) => *source = None,
        Err(error) => {
            tracing::warn!(pid = process.pid, ?open, %error, "a stream of a process broke");
            *source = None;
        }
    }
}

/// What a process left in a stream that others still hold open.
async fn drain(process: &Process, source: &Source, buffer: &mut [u8; PIPE_CHUNK]) {
    for _ in 0..CUT_REST / PIPE_CHUNK {
        match source.read(buffer) {
            Ok(Some(chunk)) => process.publish(chunk).await,
            Ok(None) | Err(_) => return,
        }
    }
}

async fn reap(exit: &io::Result<AsyncFd<Arc<OwnedFd>>>, child: &mut Child) -> io::Result<ExitStatus> {
    let exit = match exit {
        Ok(exit) => exit,
        Err(error) => return Err(io::Error::new(error.kind(), error.to_string())),
    };
    loop {
        let mut gone = exit.readable().await?;
        match child.try_wait()? {
            Some(status) => return Ok(status),
            None => gone.clear_ready(),
        }
    }
}

fn end_of(status: io::Result<ExitStatus>) -> End {
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => End::Exited(code),
            (None, signal) => {
                let core = if status.core_dumped() { Core::Dumped } else { Core::Not };
                End::Signalled(signal.unwrap_or_default(), core)
            }
        },
        Err(error) => {
            tracing::error!(%error, "a process could not be waited for");
            End::Signalled(0, Core::Not)
        }
    }
}
