//! Finding the running blockd, or starting one that outlives us.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use aenv_types::Home;
use thiserror::Error;
use tokio::{
    process::Command,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use crate::{ExportChoice, client::Client};

/// Bound of finding or starting a blockd.
pub const LAUNCH_BOUND: Duration = Duration::from_secs(10);

/// Exit code of an `aenv-blockd` that found another one alive.
pub const EXIT_ALREADY_RUNNING: u8 = 17;

/// A log above this size is set aside before a new blockd appends to it.
const LOG_LIMIT: u64 = 16 << 20;

const RESTART_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_RESTART_PAUSE: Duration = Duration::from_secs(10);

/// Why no blockd could be had.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// A folder or the log could not be made.
    #[error("{path}: {source}")]
    Prepare {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The program could not be run.
    #[error("cannot run {binary}: {source}; is aenv-blockd installed beside aenv-server?")]
    Spawn {
        /// The program.
        binary: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended at once, or never answered.
    #[error("blockd does not come up: {message}; its log {log} ends with: {tail}")]
    NotUp {
        /// What was seen last.
        message: String,
        /// Its log.
        log: PathBuf,
        /// The last lines of the log.
        tail: String,
    },
}

/// Where a node's blockd keeps its things.
#[derive(Clone, Debug)]
struct Places {
    binary: PathBuf,
    socket: PathBuf,
    mount: PathBuf,
    state: PathBuf,
    remotes: PathBuf,
    log: PathBuf,
    export: ExportChoice,
}

/// Finds the blockd that serves this node, or starts `binary` as one: detached, in a session of its own, so that it
/// outlives its caller; `export` is for one that is started. For as long as the client lives, a blockd that dies is started again.
pub async fn launch(home: &Home, binary: &Path, export: ExportChoice) -> Result<Client, LaunchError> {
    let places = Places {
        binary: binary.to_owned(),
        socket: home.blockd_socket(),
        mount: home.exports(),
        state: home.runtime().join("blockd.state"),
        remotes: home.blockd_remotes(),
        log: home.path().join("logs").join("blockd.log"),
        export,
    };
    let client = Client::new(&places.socket);
    places.ensure(&client).await?;
    tokio::spawn(keep_running(places, client.downgrade()));
    Ok(client)
}

/// Starts blockd again whenever it is gone, until nobody holds a client any more.
async fn keep_running(places: Places, watched: crate::client::WeakClient) {
    let mut pause = RESTART_PAUSE;
    loop {
        let Some(closed) = watched.closed().await else { return };
        closed.await;
        let Some(client) = watched.upgrade() else { return };
        warn!("blockd is gone; starting it again");
        match places.ensure(&client).await {
            Ok(()) => pause = RESTART_PAUSE,
            Err(error) => {
                tracing::error!(%error, "blockd could not be started again");
                pause = (pause * 2).min(LONGEST_RESTART_PAUSE);
            }
        }
        drop(client);
        sleep(pause).await;
    }
}

impl Places {
    /// Returns when a blockd answers, starting one where none does.
    async fn ensure(&self, client: &Client) -> Result<(), LaunchError> {
        if let Ok(pid) = client.pid().await {
            info!(pid, "found a running blockd");
            return Ok(());
        }
        let deadline = Instant::now() + LAUNCH_BOUND;
        self.start().await?;
        loop {
            match client.pid().await {
                Ok(pid) => {
                    info!(pid, "started blockd");
                    return Ok(());
                }
                Err(error) if Instant::now() >= deadline => return Err(self.not_up(error.to_string())),
                Err(_) => sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// Runs the program, which detaches itself: our child ends once it has, or has seen why it cannot.
    async fn start(&self) -> Result<(), LaunchError> {
        let log = self.open_log()?;
        let out =
            log.try_clone().map_err(|source| LaunchError::Prepare { path: self.log.clone(), source })?;
        let mut child = Command::new(&self.binary)
            .arg("--detach")
            .arg("--socket")
            .arg(&self.socket)
            .arg("--mount")
            .arg(&self.mount)
            .arg("--state")
            .arg(&self.state)
            .arg("--remotes")
            .arg(&self.remotes)
            .arg("--export")
            .arg(self.export.to_string())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| LaunchError::Spawn { binary: self.binary.clone(), source })?;
        match timeout(LAUNCH_BOUND, child.wait()).await {
            // Another one that lives, or is just coming up, is as good.
            Ok(Ok(status)) if status.success() || status.code() == Some(i32::from(EXIT_ALREADY_RUNNING)) => {
                Ok(())
            }
            Ok(Ok(status)) => Err(self.not_up(format!("it ended with {status}"))),
            Ok(Err(source)) => Err(LaunchError::Spawn { binary: self.binary.clone(), source }),
            Err(_) => Err(self.not_up(format!("it did not detach within {LAUNCH_BOUND:?}"))),
        }
    }

    fn open_log(&self) -> Result<File, LaunchError> {
        let failed = |source| LaunchError::Prepare { path: self.log.clone(), source };
        if let Some(folder) = self.log.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > LOG_LIMIT) {
            fs::rename(&self.log, self.log.with_extension("log.1")).map_err(failed)?;
        }
        OpenOptions::new().create(true).append(true).open(&self.log).map_err(failed)
    }

    fn not_up(&self, message: String) -> LaunchError {
        LaunchError::NotUp { message, log: self.log.clone(), tail: tail(&self.log) }
    }
}

/// The last lines of a log, at most 2 KiB.
fn tail(log: &Path) -> String {
    use std::io::{Read, Seek, SeekFrom};
    const BYTES: u64 = 2048;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let start = file.metadata()?.len().saturating_sub(BYTES);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        Err(error) => format!("({error})"),
    }
}
