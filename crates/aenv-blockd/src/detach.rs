//! Leaving the process that started us.

use std::{
    io::{self, Read, Write},
    os::fd::OwnedFd,
    process::exit,
};

use anyhow::Context;
use nix::unistd::{ForkResult, fork, pipe2, setsid};

/// The far end of a start: the process that started us waits until [`Starter::ready`].
pub struct Starter {
    pipe: Option<OwnedFd>,
}

impl Starter {
    /// Stays a child of the process that started us.
    pub fn attached() -> Self {
        Self { pipe: None }
    }

    /// Goes on in a process of its own session, whose parent is nobody. The original process stays until that one is ready,
    /// and ends with 0, or with the exit code that it wanted to end with.
    ///
    /// # Safety
    /// The process must have one thread only.
    pub unsafe fn detached() -> anyhow::Result<Self> {
        let (read, write) = pipe2(nix::fcntl::OFlag::O_CLOEXEC).context("cannot make a pipe")?;
        // SAFETY: there is one thread (the caller's promise), so that the child may do all that a process may.
        match unsafe { fork() }.context("cannot fork")? {
            ForkResult::Parent { .. } => {
                drop(write);
                let mut code = [1];
                // No byte: it ended without a word, as with a panic.
                let _ = std::fs::File::from(read).read_exact(&mut code);
                exit(i32::from(code[0]));
            }
            ForkResult::Child => {
                drop(read);
                setsid().context("cannot begin a session")?;
                Ok(Self { pipe: Some(write) })
            }
        }
    }

    /// Tells the original process to end with `code`.
    pub fn finish(self, code: u8) -> io::Result<()> {
        match self.pipe {
            Some(pipe) => std::fs::File::from(pipe).write_all(&[code]),
            None => Ok(()),
        }
    }
}
