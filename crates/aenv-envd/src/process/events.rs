//! A subscriber's queue as the stream that a client reads.

use aenv_envd_api::proto::process::{
    __buffa::oneof::process_event::{Event as Kind, data_event::Output},
    ProcessEvent,
    process_event::{DataEvent, EndEvent, KeepAlive, StartEvent},
};
use connectrpc::ConnectError;
use futures::{Stream, stream};
use nix::sys::signal::Signal;
use tokio::sync::mpsc;

use super::{
    output::Chunk,
    registry::{Core, End, Event},
};
use crate::pace::{Next, Pace};

enum State {
    Start(u32, mpsc::Receiver<Event>),
    Following(mpsc::Receiver<Event>),
    Over,
}

/// The stream of a process: its start, its output, its end.
pub fn stream_of(
    pid: u32,
    events: mpsc::Receiver<Event>,
    pace: Pace,
) -> impl Stream<Item = Result<ProcessEvent, ConnectError>> + Send {
    stream::unfold(State::Start(pid, events), move |state| async move {
        let (kind, state) = match state {
            State::Start(pid, events) => {
                (Kind::from(StartEvent { pid, ..Default::default() }), State::Following(events))
            }
            State::Following(mut events) => match pace.next(events.recv()).await {
                Next::Item(Event::Data(chunk)) => (Kind::from(data(chunk)), State::Following(events)),
                Next::Item(Event::End(end)) => (Kind::from(end_event(end)), State::Over),
                Next::Silent => (Kind::from(KeepAlive::default()), State::Following(events)),
                Next::Late => {
                    return Some((
                        Err(ConnectError::deadline_exceeded("the deadline of the call has passed")),
                        State::Over,
                    ));
                }
                Next::Closed => {
                    let message = "the sandbox was launched anew: connect to the process again";
                    return Some((Err(ConnectError::unavailable(message)), State::Over));
                }
            },
            State::Over => return None,
        };
        Some((Ok(ProcessEvent { event: Some(kind), ..Default::default() }), state))
    })
}

fn data(chunk: Chunk) -> DataEvent {
    let output = match chunk {
        Chunk::Stdout(bytes) => Output::Stdout(bytes.into()),
        Chunk::Stderr(bytes) => Output::Stderr(bytes.into()),
        Chunk::Terminal(bytes) => Output::Pty(bytes.into()),
    };
    DataEvent { output: Some(output), ..Default::default() }
}

/// In Go's words, which E2B's clients show to users.
fn end_event(end: End) -> EndEvent {
    match end {
        End::Exited(code) => {
            let status = format!("exit status {code}");
            let error = (code != 0).then(|| status.clone());
            EndEvent { exit_code: code, exited: true, status, error, ..Default::default() }
        }
        End::Signalled(number, core) => {
            let core = if core == Core::Dumped { " (core dumped)" } else { "" };
            let status = format!("signal: {}{core}", signal_name(number));
            EndEvent {
                exit_code: -1,
                exited: false,
                error: Some(status.clone()),
                status,
                ..Default::default()
            }
        }
    }
}

fn signal_name(number: i32) -> String {
    let name = match Signal::try_from(number) {
        Ok(Signal::SIGHUP) => "hangup",
        Ok(Signal::SIGINT) => "interrupt",
        Ok(Signal::SIGQUIT) => "quit",
        Ok(Signal::SIGILL) => "illegal instruction",
        Ok(Signal::SIGTRAP) => "trace/breakpoint trap",
        Ok(Signal::SIGABRT) => "aborted",
        Ok(Signal::SIGBUS) => "bus error",
        Ok(Signal::SIGFPE) => "floating point exception",
        Ok(Signal::SIGKILL) => "killed",
        Ok(Signal::SIGUSR1) => "user defined signal 1",
        Ok(Signal::SIGSEGV) => "segmentation fault",
        Ok(Signal::SIGUSR2) => "user defined signal 2",
        Ok(Signal::SIGPIPE) => "broken pipe",
        Ok(Signal::SIGALRM) => "alarm clock",
        Ok(Signal::SIGTERM) => "terminated",
        _ => return format!("signal {number}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_read_as_gos() {
        let clean = end_event(End::Exited(0));
        assert_eq!(
            (clean.exit_code, clean.exited, clean.status.as_str(), clean.error),
            (0, true, "exit status 0", None)
        );
        let failed = end_event(End::Exited(3));
        assert_eq!(failed.error.as_deref(), Some("exit status 3"));
        let killed = end_event(End::Signalled(9, Core::Not));
        assert_eq!((killed.exit_code, killed.exited, killed.status.as_str()), (-1, false, "signal: killed"));
        assert_eq!(
            end_event(End::Signalled(11, Core::Dumped)).status,
            "signal: segmentation fault (core dumped)"
        );
        assert_eq!(end_event(End::Signalled(34, Core::Not)).status, "signal: signal 34");
    }
}
