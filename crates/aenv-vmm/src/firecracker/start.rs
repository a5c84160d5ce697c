//! A Firecracker process from its start to the first answer of its API.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::sys::stat::Mode;
use tokio::net::unix::pipe;

use super::{
    api::Api,
    root::{self, Root, inside},
};
use crate::{
    EngineError, VmSpec, cgroup, console,
    jail::{Jail, Jailed, Mount, Room},
    process::{Confinement, Process, Start, io_error},
};

/// A process start on a busy machine, until its API listens.
const START_WAIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_micros(300);
/// Time for the reason of an end to arrive after the connection broke.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// What Firecracker itself says, and its console, in a VM's runtime folder.
pub(crate) const OWN_LOG: &str = "firecracker.log";
pub(crate) const CONSOLE: &str = "console";

/// A process whose API listens. It is killed when this goes away, unless it became a VM.
pub(crate) struct Started {
    running: Option<Running>,
}

/// A process that lives by itself.
pub(crate) struct Running {
    pub(crate) process: Process,
    pub(crate) root: Arc<Root>,
    pub(crate) api: Api,
}

/// What a process finds in its root beside its disks.
pub(crate) enum Purpose<'a> {
    Boot { kernel: &'a Path, initramfs: &'a Path },
    Load { state: Vec<u8> },
}

pub(crate) async fn start(
    binary: &Path,
    owner: &Path,
    jail: Option<&Arc<Jail>>,
    spec: &VmSpec,
    purpose: Purpose<'_>,
) -> Result<Started, EngineError> {
    let mut jailed = match jail {
        Some(jail) => Some(jail.claim().await?),
        None => None,
    };
    let log = spec.runtime.join(OWN_LOG);
    let room = furnish(binary, jailed.as_ref(), spec, &log, purpose)?;
    let netns = File::open(&spec.netns).map_err(|e| io_error(format!("open {}", spec.netns.display()), e))?;
    let process = Process::start(Start {
        program: Path::new(&inside(root::PROGRAM)),
        arguments: [
            "--api-sock",
            &inside(root::SOCKET),
            "--log-path",
            &inside(root::LOG),
            "--level",
            "Warning",
        ]
        .map(str::to_owned)
        .to_vec(),
        owner,
        preload: None,
        netns: netns.as_fd(),
        keep: Vec::new(),
        confinement: Confinement::Room(room),
        console: Some(new_console(&spec.runtime)?),
        log: &log,
    })?;
    // It became its uid before it was that program.
    if let Some(jailed) = &mut jailed {
        jailed.entered();
    }
    // Moving a process between groups may make the kernel wait for all CPUs: it is done while the process starts.
    let (pid, sandbox, shape) = (process.pid, spec.sandbox.clone(), spec.shape);
    let joined = tokio::task::spawn_blocking(move || cgroup::join(pid, &sandbox, shape));
    let root = Root::of(process.pid);
    let root = match root {
        Ok(root) => Arc::new(root),
        Err(error) => {
            process.kill();
            return Err(io_error("look into the root of a VMM", error));
        }
    };
    let running = Running { api: Api::new(Arc::clone(&root)), root, process };
    let started = Started { running: Some(running) };
    let listens = started.wait_until_it_listens().await;
    joined.await.map_err(|e| EngineError::Start(e.to_string()))?;
    match listens {
        Ok(()) => Ok(started),
        Err(error) => Err(started.fail(error, spec).await),
    }
}

/// What the process will see.
fn furnish(
    binary: &Path,
    jailed: Option<&Jailed>,
    spec: &VmSpec,
    log: &Path,
    purpose: Purpose<'_>,
) -> Result<Room, EngineError> {
    let uid = jailed.map_or(0, Jailed::uid);
    let mut room = Room::new(uid);
    let mut show = |source: &Path, name: String, writable| {
        room.mount(Mount { source: source.to_owned(), name, writable });
    };
    let own = |file: &Path| jailed.map_or(Ok(()), |jailed| jailed.own(file));
    show(binary, root::PROGRAM.to_owned(), false);
    File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)
        .map_err(|e| io_error(format!("make {}", log.display()), e))?;
    own(log)?;
    show(log, root::LOG.to_owned(), true);
    for (index, disk) in spec.drives.iter().enumerate() {
        own(&disk.path)?;
        show(&disk.path, root::drive(index), !disk.read_only);
    }
    let state = match purpose {
        Purpose::Boot { kernel, initramfs } => {
            show(kernel, root::KERNEL.to_owned(), false);
            show(initramfs, root::INITRAMFS.to_owned(), false);
            Vec::new()
        }
        Purpose::Load { state } => {
            show(&spec.ram, root::MEMORY.to_owned(), false);
            state
        }
    };
    room.file(root::STATE, state);
    room.pipe(root::HOLD);
    room.folder(root::FOLDER);
    Ok(room)
}

/// The pipe that becomes the standard output, which is the serial console. Open for reading as well: so a process that prints while
/// no server reads is not signalled, and what does not fit is dropped.
fn new_console(runtime: &Path) -> Result<File, EngineError> {
    let path = runtime.join(CONSOLE);
    let failed = |e: io::Error| io_error(format!("make {}", path.display()), e);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|e| failed(e.into()))?;
    File::options().read(true).write(true).open(&path).map_err(failed)
}

impl Started {
    async fn wait_until_it_listens(&self) -> Result<(), EngineError> {
        let Some(running) = &self.running else { return Err(EngineError::Gone) };
        let deadline = Instant::now() + START_WAIT;
        while running.root.connect().await.is_err() {
            if crate::process::start_time(running.process.pid).is_none() {
                return Err(EngineError::Exited("before it took its first command".to_owned()));
            }
            if Instant::now() > deadline {
                return Err(EngineError::TimedOut {
                    command: "its start".to_owned(),
                    secs: START_WAIT.as_secs(),
                });
            }
            // Finer than a timer of the runtime.
            let slept = tokio::task::spawn_blocking(|| std::thread::sleep(LOOK)).await;
            slept.map_err(|e| EngineError::Start(e.to_string()))?;
        }
        Ok(())
    }

    pub(crate) fn api(&self) -> Result<&Api, EngineError> {
        self.running.as_ref().map(|running| &running.api).ok_or(EngineError::Gone)
    }

    /// Ends it, and says why it failed.
    pub(crate) async fn fail(mut self, error: EngineError, spec: &VmSpec) -> EngineError {
        let Some(running) = self.running.take() else { return error };
        let error = explain(&running.process, error).await;
        if let Err(error) = running.process.end().await {
            tracing::warn!(%error, "a VMM that failed to start stays");
        }
        cgroup::remove(&spec.sandbox);
        error
    }

    /// From now on it lives by itself.
    pub(crate) fn into_running(mut self, spec: &VmSpec) -> Result<Running, EngineError> {
        follow_console(spec)?;
        self.running.take().ok_or(EngineError::Gone)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.process.kill();
        }
    }
}

/// Reads the console until the process ends.
pub(crate) fn follow_console(spec: &VmSpec) -> Result<(), EngineError> {
    let path: PathBuf = spec.runtime.join(CONSOLE);
    let opened = pipe::OpenOptions::new().open_receiver(&path);
    let reader = opened.map_err(|e| io_error(format!("open {}", path.display()), e))?;
    console::follow(reader, spec.serial_log.clone(), spec.runtime.join(OWN_LOG));
    Ok(())
}

/// A broken connection says little; the process's last words say why.
pub(crate) async fn explain(process: &Process, error: EngineError) -> EngineError {
    if !matches!(error, EngineError::Exited(_)) {
        return error;
    }
    match tokio::time::timeout(REASON_WAIT, process.ended()).await {
        Ok(reason) => EngineError::Exited(reason),
        Err(_) => error,
    }
}
