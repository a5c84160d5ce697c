//! The write end of a process: a pipe to its stdin, or its terminal.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Arc,
};

use nix::{libc, pty::Winsize, unistd};
use tokio::{
    io::{AsyncWriteExt as _, Interest, unix::AsyncFd},
    net::unix::pipe,
    sync::Mutex,
};

use super::ProcessError;

/// The way into a process.
pub enum Input {
    /// `/dev/null`.
    None,
    /// A pipe; `None` once it was closed.
    Pipe(Mutex<Option<pipe::Sender>>),
    /// The terminal.
    Terminal(Terminal),
}

/// The master of a terminal.
pub struct Terminal {
    /// Held while a piece is typed, so that pieces stay whole.
    whole: Mutex<()>,
    /// `None` once the process has ended.
    master: parking_lot::Mutex<Option<Arc<AsyncFd<OwnedFd>>>>,
}

impl Terminal {
    fn master(&self) -> Option<Arc<AsyncFd<OwnedFd>>> {
        self.master.lock().clone()
    }
}

mod ioctl {
    nix::ioctl_write_ptr_bad!(set_window_size, nix::libc::TIOCSWINSZ, nix::pty::Winsize);
}

impl Input {
    /// A pipe to a process's stdin.
    pub fn pipe(sender: pipe::Sender) -> Self {
        Self::Pipe(Mutex::new(Some(sender)))
    }

    /// A process's terminal.
    pub fn terminal(master: Arc<AsyncFd<OwnedFd>>) -> Self {
        Self::Terminal(Terminal { whole: Mutex::new(()), master: parking_lot::Mutex::new(Some(master)) })
    }

    /// Writes to stdin; waits while the process does not read.
    pub async fn write_stdin(&self, bytes: &[u8]) -> Result<(), ProcessError> {
        let failed = |message: String| ProcessError::Write { target: "stdin", message };
        match self {
            Self::Pipe(pipe) => match &mut *pipe.lock().await {
                Some(sender) => sender.write_all(bytes).await.map_err(|error| failed(error.to_string())),
                None => Err(failed("stdin is closed".to_owned())),
            },
            Self::None => Err(failed("the process was started without stdin".to_owned())),
            Self::Terminal(..) => Err(failed("the process has a terminal: send the input as pty".to_owned())),
        }
    }

    /// Types into the terminal.
    pub async fn write_terminal(&self, mut bytes: &[u8]) -> Result<(), ProcessError> {
        let failed = |message: String| ProcessError::Write { target: "tty", message };
        let Self::Terminal(terminal) = self else {
            return Err(failed("the process has no terminal".to_owned()));
        };
        let _whole = terminal.whole.lock().await;
        let master = terminal.master().ok_or_else(|| failed("the process has ended".to_owned()))?;
        while !bytes.is_empty() {
            let write = |fd: &OwnedFd| unistd::write(fd, bytes).map_err(io::Error::from);
            match master.async_io(Interest::WRITABLE, write).await {
                Ok(written) => bytes = &bytes[written..],
                Err(error) => return Err(failed(error.to_string())),
            }
        }
        Ok(())
    }

    /// Ends stdin.
    pub async fn close(&self) -> Result<(), ProcessError> {
        match self {
            Self::Pipe(pipe) => {
                pipe.lock().await.take();
                Ok(())
            }
            Self::None => Err(ProcessError::CloseStdin("the process was started without stdin")),
            Self::Terminal(..) => {
                Err(ProcessError::CloseStdin("the process has a terminal: send Ctrl-D instead"))
            }
        }
    }

    /// Lets go of a process that has ended, without waiting.
    pub fn release(&self) {
        match self {
            Self::Pipe(pipe) => {
                // Who holds the lock is writing, and will be told that nobody reads.
                if let Ok(mut pipe) = pipe.try_lock() {
                    pipe.take();
                }
            }
            Self::Terminal(terminal) => drop(terminal.master.lock().take()),
            Self::None => {}
        }
    }

    /// Gives the terminal a new size; the process gets SIGWINCH.
    pub fn resize(&self, size: Winsize) -> Result<(), ProcessError> {
        let Self::Terminal(terminal) = self else {
            return Err(ProcessError::Resize("the process has no terminal".to_owned()));
        };
        let master =
            terminal.master().ok_or_else(|| ProcessError::Resize("the process has ended".to_owned()))?;
        // SAFETY: TIOCSWINSZ reads one `winsize`, which `size` is; the descriptor lives as long as `master`.
        let resized = unsafe { ioctl::set_window_size(master.as_raw_fd(), &size) };
        resized.map(drop).map_err(|error| ProcessError::Resize(error.to_string()))
    }
}

/// A window size in characters.
pub fn window(cols: u32, rows: u32) -> Winsize {
    let short = |count: u32| libc::c_ushort::try_from(count).unwrap_or(libc::c_ushort::MAX);
    Winsize { ws_col: short(cols), ws_row: short(rows), ws_xpixel: 0, ws_ypixel: 0 }
}
