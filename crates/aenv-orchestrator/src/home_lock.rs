//! One server for each home.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
    time::{Duration, Instant},
};

use aenv_types::Home;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use crate::StartError;

/// How long a process that a dead server was just starting may keep the server's lock: until its `exec`.
const INHERITED: Duration = Duration::from_secs(10);

/// Keeps other servers off a home for as long as it lives. Taken before anything of the home is touched.
#[derive(Debug)]
pub struct HomeLock {
    _file: Flock<File>,
}

impl HomeLock {
    /// Takes the lock of this home, whose folders exist. [`StartError::Locked`] names who has it. Waits for nobody but the children of a
    /// server that is dead.
    pub fn take(home: &Home) -> Result<Self, StartError> {
        let path = home.server_lock();
        let refused = |error: io::Error| StartError::Part(format!("{}: {error}", path.display()));
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let deadline = Instant::now() + INHERITED;
        let mut file = options.map_err(refused)?;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(mut locked) => {
                    locked.set_len(0).map_err(refused)?;
                    writeln!(locked, "{}", std::process::id()).map_err(refused)?;
                    return Ok(Self { _file: locked });
                }
                Err((file, Errno::EWOULDBLOCK)) => file,
                Err((_, error)) => return Err(refused(error.into())),
            };
            let pid = holder(&path).map_err(refused)?;
            if is_alive(pid) || Instant::now() > deadline {
                return Err(StartError::Locked { pid, home: home.path().to_owned() });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn holder(path: &Path) -> io::Result<i32> {
    Ok(fs::read_to_string(path)?.trim().parse().unwrap_or_default())
}

/// Whether a process runs; one that nobody has waited for yet does not.
fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_of_a_dead_server_are_waited_for_and_a_server_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path(), folder.path());
        let hold = |pid: u32| {
            fs::write(home.server_lock(), format!("{pid}\n")).unwrap();
            let file = File::open(home.server_lock()).unwrap();
            Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap()
        };
        let held = hold(std::process::id());
        let began = Instant::now();
        assert!(matches!(HomeLock::take(&home), Err(StartError::Locked { .. })));
        assert!(began.elapsed() < INHERITED);
        drop(held);
        // Larger than any process id that Linux gives out.
        let held = hold(1 << 23);
        let child = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(held);
        });
        HomeLock::take(&home).unwrap();
        child.join().unwrap();
        assert_eq!(holder(&home.server_lock()).unwrap() as u32, std::process::id());
    }
}
