//! One server for each home.

use std::{fs::File, io::Write as _};

use aenv_types::Home;
use nix::fcntl::{Flock, FlockArg};

use crate::StartError;

/// Keeps other servers off a home for as long as it lives. Taken before anything of the home is touched.
#[derive(Debug)]
pub struct HomeLock {
    _file: Flock<File>,
}

impl HomeLock {
    /// Takes the lock of this home, whose folders exist. [`StartError::Locked`] names who has it.
    pub fn take(home: &Home) -> Result<Self, StartError> {
        let path = home.server_lock();
        let refused = |error: std::io::Error| StartError::Part(format!("{}: {error}", path.display()));
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        match Flock::lock(options.map_err(refused)?, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                file.set_len(0).map_err(refused)?;
                writeln!(file, "{}", std::process::id()).map_err(refused)?;
                Ok(Self { _file: file })
            }
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                let text = std::fs::read_to_string(&path).map_err(refused)?;
                let pid = text.trim().parse().unwrap_or_default();
                Err(StartError::Locked { pid, home: home.path().to_owned() })
            }
            Err((_, error)) => Err(refused(error.into())),
        }
    }
}
