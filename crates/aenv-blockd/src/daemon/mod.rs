//! The process behind the socket: it owns the mount, the open stacks and the list of exports. It knows no sandboxes and
//! decides nothing; whatever it shows, the control plane asked for.
//!
//! ```text
//! control   lines on the socket          -> table
//! table     names, inodes, holders       -> backend (opens), state (keeps), shown (how)
//! files     FUSE requests, by inode      -> node -> BlockDevice
//! ublk      requests of block devices    -> node -> BlockDevice
//! ```

pub mod backend;
mod bytes;
mod check;
mod control;
mod files;
mod fill;
mod mount;
mod node;
mod pool;
#[cfg(test)]
pub(crate) mod ram_disk;
pub mod remotes;
mod shown;
pub mod stacks;
mod state;
mod table;
mod trace;
mod ublk;

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Seek, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fuser::{INodeNo, Notifier, Session, SessionACL};
use nix::mount::{MntFlags, umount2};
use thiserror::Error;
use tokio::{net::UnixListener, sync::oneshot, time::MissedTickBehavior};
use tracing::{debug, error, info, warn};

use self::{backend::Backend, files::Files, table::Table};

use crate::exports::ExportChoice;

pub use self::{mount::MountError, shown::RestoreError, state::LoadStateError};

/// How far the kernel reads ahead in a memory image, in KiB.
const READAHEAD_KIB: u32 = 512;

/// How soon after a file is gone the kernel is told to forget its pages.
const FORGET_EVERY: Duration = Duration::from_secs(1);

/// Where a blockd keeps its things.
#[derive(Clone, Debug)]
pub struct Config {
    /// The control socket. Beside it lies the pid file, `<socket without extension>.pid`, whose lock says that we live.
    pub socket: PathBuf,
    /// Folder that the exports are mounted on; made when missing.
    pub mount: PathBuf,
    /// File that keeps the list of exports.
    pub state: PathBuf,
    /// Threads that serve FUSE requests, and as many that do the I/O of ublk devices.
    pub workers: usize,
    /// How disks are to be shown.
    pub export: ExportChoice,
}

impl Config {
    /// Workers for this machine: most of them wait for the disk.
    pub fn default_workers() -> usize {
        std::thread::available_parallelism().map_or(8, |cores| (cores.get() * 2).clamp(8, 32))
    }

    fn pid_file(&self) -> PathBuf {
        self.socket.with_extension("pid")
    }
}

/// Why a blockd did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// Another one lives.
    #[error("another blockd serves this node: it holds {path}")]
    AlreadyRunning {
        /// Its pid file.
        path: PathBuf,
    },
    /// Something could not be made.
    #[error("{path}: {source}")]
    Io {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The exports of the blockd before could not be taken over, or not be shown as demanded.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The exports could not be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
}

/// Why a running blockd ended other than by being asked to.
#[derive(Debug, Error)]
pub enum RunError {
    /// The mount went away, or the kernel closed the connection.
    #[error("the FUSE session ended: {message}")]
    SessionEnded {
        /// How.
        message: String,
    },
}

/// A blockd that serves.
pub struct Daemon {
    config: Config,
    table: Arc<Table>,
    listener: UnixListener,
    notifier: Notifier,
    session_end: oneshot::Receiver<io::Result<()>>,
    /// Locked for as long as we live.
    _pid_file: File,
}

impl Daemon {
    /// Takes the place of a dead blockd (its mount, its exports) or the first place, and begins to serve the mount. Needs a
    /// tokio runtime; connections are served by [`Daemon::run`].
    pub fn start(config: Config, backend: impl Backend) -> Result<Self, StartError> {
        let pid_file = lock_pid_file(&config.pid_file())?;
        mount::detach(&config.mount)?;
        let (mount, state) = (config.mount.clone(), config.state.clone());
        let table = Table::restore(mount, Box::new(backend), state, config.export, config.workers)?;
        let table = Arc::new(table);

        let device = mount::attach(&config.mount)?;
        let mounted = DetachOnDrop(&config.mount);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| StartError::Io { path, source }
        };
        let mut session_config = fuser::Config::default();
        session_config.n_threads = Some(config.workers.max(1));
        session_config.clone_fd = true;
        let files = Files::new(Arc::clone(&table), config.workers);
        let session = Session::from_fd(files, device, SessionACL::All, session_config)
            .map_err(failed(&config.mount))?;
        let notifier = session.notifier();
        let (ended, session_end) = oneshot::channel();
        std::thread::Builder::new()
            .name("session".to_owned())
            .spawn(move || {
                // Nobody listens any more when the daemon itself is ending.
                let _ = ended.send(session.run());
            })
            .map_err(failed(&config.mount))?;
        if let Err(error) = mount::set_readahead(&config.mount, READAHEAD_KIB) {
            warn!(%error, "the kernel's readahead stays as it is; cold memory images are read more slowly");
        }
        let listener = control::bind(&config.socket).map_err(failed(&config.socket))?;
        std::mem::forget(mounted);
        info!(socket = %config.socket.display(), mount = %config.mount.display(), "serving");
        Ok(Self { config, table, listener, notifier, session_end, _pid_file: pid_file })
    }

    /// Serves until `shutdown` resolves; then makes all disks durable and unmounts. Block devices stay, for the next blockd.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        let Self { config, table, listener, notifier, session_end, _pid_file } = self;
        let forgetting = forget(Arc::clone(&table), notifier);
        let result = tokio::select! {
            () = shutdown => Ok(()),
            end = session_end => Err(RunError::SessionEnded { message: match end {
                Ok(Ok(())) => "it was unmounted".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "its thread panicked".to_owned(),
            }}),
            () = control::serve(listener, Arc::clone(&table)) => Ok(()),
            () = forgetting => Ok(()),
        };
        // The mount first: nothing new is opened, and what is open ends with this process.
        drop(DetachOnDrop(&config.mount));
        if let Err(error) = fs::remove_file(&config.socket) {
            debug!(%error, "the socket was gone already");
        }
        let flushed = tokio::task::spawn_blocking(move || table.flush_all()).await;
        if let Err(error) = flushed {
            error!(%error, "flushing the disks panicked");
        }
        info!("ended");
        result
    }
}

/// Tells the kernel about files that are gone and pages that are wrong, so that it does not keep them. Apart from the workers, who answer what
/// the kernel asks meanwhile.
async fn forget(table: Arc<Table>, notifier: Notifier) {
    let mut ticks = tokio::time::interval(FORGET_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = table.changed() => {}
        }
        let (gone, spoiled) = (table.take_forgotten(), table.take_spoiled());
        if gone.is_empty() && spoiled.is_empty() {
            continue;
        }
        let notifier = notifier.clone();
        let told = tokio::task::spawn_blocking(move || {
            for ino in spoiled {
                if let Err(error) = notifier.inval_inode(INodeNo(ino), 0, 0) {
                    error!(ino, %error, "the kernel keeps pages of a memory image that a process wrote to");
                }
            }
            for (ino, name) in gone {
                let told = notifier
                    .inval_entry(INodeNo(table::ROOT), name.as_ref())
                    .and_then(|()| notifier.inval_inode(INodeNo(ino), 0, 0));
                if let Err(error) = told {
                    debug!(name, %error, "the kernel keeps a file that is gone");
                }
            }
        });
        if let Err(error) = told.await {
            error!(%error, "telling the kernel panicked");
        }
    }
}

struct DetachOnDrop<'a>(&'a Path);

impl Drop for DetachOnDrop<'_> {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0, MntFlags::MNT_DETACH) {
            debug!(%error, "the mount was gone already");
        }
    }
}

fn lock_pid_file(path: &Path) -> Result<File, StartError> {
    let failed = |source| StartError::Io { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let mut file =
        OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(StartError::AlreadyRunning { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    file.set_len(0).map_err(failed)?;
    file.rewind().map_err(failed)?;
    writeln!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
}
