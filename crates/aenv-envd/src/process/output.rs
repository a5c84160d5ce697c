//! The read ends of a process's output.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
};

use bytes::Bytes;
use nix::{errno::Errno, fcntl, unistd};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::unix::pipe,
};

use super::input::Input;

/// Largest piece of stdout or stderr in one event.
pub const PIPE_CHUNK: usize = 32 << 10;
/// Largest piece of a terminal's output in one event.
const TERMINAL_CHUNK: usize = 16 << 10;

/// A stream of a process, and what its bytes are called in events.
pub enum Source {
    /// A pipe from its stdout.
    Stdout(pipe::Receiver),
    /// A pipe from its stderr.
    Stderr(pipe::Receiver),
    /// The master of its terminal.
    Terminal(Arc<AsyncFd<OwnedFd>>),
}

/// A piece of output.
#[derive(Clone, Debug)]
pub enum Chunk {
    /// Of stdout.
    Stdout(Bytes),
    /// Of stderr.
    Stderr(Bytes),
    /// Of the terminal.
    Terminal(Bytes),
}

impl Source {
    /// Both directions of a terminal.
    pub fn terminal(master: OwnedFd) -> io::Result<(Self, Input)> {
        let flags = fcntl::OFlag::from_bits_retain(fcntl::fcntl(&master, fcntl::FcntlArg::F_GETFL)?);
        fcntl::fcntl(&master, fcntl::FcntlArg::F_SETFL(flags | fcntl::OFlag::O_NONBLOCK))?;
        // SAFETY: the `AsyncFd` owns the descriptor and gives it out only by reference.
        let master = Arc::new(unsafe { AsyncFd::register(master) }?);
        Ok((Self::Terminal(Arc::clone(&master)), Input::terminal(master)))
    }

    /// Waits until there is something to read, or the end. Can be cancelled without losing anything.
    pub async fn ready(&self) -> io::Result<()> {
        match self {
            Self::Stdout(pipe) | Self::Stderr(pipe) => pipe.readable().await,
            Self::Terminal(master) => master.readable().await.map(|mut guard| guard.retain_ready()),
        }
    }

    /// Reads what is there: `None` at the end, `WouldBlock` when there is nothing yet.
    pub fn read(&self, buffer: &mut [u8; PIPE_CHUNK]) -> io::Result<Option<Chunk>> {
        let taken = match self {
            Self::Stdout(pipe) | Self::Stderr(pipe) => pipe.try_read(buffer)?,
            Self::Terminal(master) => read_terminal(master, &mut buffer[..TERMINAL_CHUNK])?,
        };
        if taken == 0 {
            return Ok(None);
        }
        let bytes = Bytes::copy_from_slice(&buffer[..taken]);
        Ok(Some(match self {
            Self::Stdout(_) => Chunk::Stdout(bytes),
            Self::Stderr(_) => Chunk::Stderr(bytes),
            Self::Terminal(_) => Chunk::Terminal(bytes),
        }))
    }
}

fn read_terminal(master: &AsyncFd<OwnedFd>, buffer: &mut [u8]) -> io::Result<usize> {
    master.try_io(Interest::READABLE, |fd| match unistd::read(fd, buffer) {
        // The other side is closed: a terminal says so with an error, not with an empty read.
        Err(Errno::EIO) => Ok(0),
        other => other.map_err(io::Error::from),
    })
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout(_) => f.write_str("Stdout"),
            Self::Stderr(_) => f.write_str("Stderr"),
            Self::Terminal(master) => write!(f, "Terminal({})", master.get_ref().as_raw_fd()),
        }
    }
}
