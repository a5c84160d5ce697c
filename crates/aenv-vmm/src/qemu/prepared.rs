//! A QEMU process that is up and waits to be told its memory, disks and network. Until it has become a VM it dies with its handle.

use std::{
    fs,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream as StdStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::future::try_join_all;
use serde_json::json;
use tokio::net::UnixStream;

use super::{
    QemuConfig,
    command::{CommandLine, Confined, Form, furnish},
    probe::Host,
    qmp::Qmp,
    sockets,
};
use crate::{
    BootSpec, EngineError, VmSpec,
    jail::{Jail, Jailed},
    process::{Confinement, Process, Start, io_error},
    tap::Tap,
};

/// A process start on a busy machine, until the greeting.
const START_WAIT: Duration = Duration::from_secs(60);
/// The first command after it.
const FIRST_WAIT: Duration = Duration::from_secs(5);
/// Any single command.
pub(crate) const COMMAND_WAIT: Duration = Duration::from_secs(30);
/// Time for the reason of an end to arrive after the connection broke.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// Name under which QEMU keeps the tap.
const TAP: &str = "tap";

pub(crate) struct Prepared {
    pub(crate) form: Form,
    parts: Option<Parts>,
    folder: PathBuf,
    jailed: Option<Jailed>,
}

/// What is left when it has become a VM.
pub(crate) struct Parts {
    pub(crate) process: Process,
    pub(crate) qmp: Qmp,
    pub(crate) console: StdStream,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if let Some(parts) = &self.parts {
            parts.process.kill();
        }
    }
}

/// Kills a process that nobody has taken over.
struct Unfinished(Option<Process>);

impl Unfinished {
    fn done(mut self) -> Option<Process> {
        self.0.take()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(process) = &self.0 {
            process.kill();
        }
    }
}

/// What a start needs beside the form.
pub(crate) struct Starter<'a> {
    pub(crate) config: &'a QemuConfig,
    pub(crate) host: &'a Host,
    pub(crate) netns: BorrowedFd<'a>,
    pub(crate) jail: Option<&'a Arc<Jail>>,
}

impl Prepared {
    /// Starts a process whose sockets and log are in `folder`, and waits until it answers.
    pub(crate) async fn start(
        starter: &Starter<'_>,
        form: Form,
        folder: &Path,
        boot: Option<&BootSpec>,
    ) -> Result<Self, EngineError> {
        let listen = |name: &str| {
            sockets::listen(folder, name)
                .map_err(|e| io_error(format!("make {}", folder.join(name).display()), e))
        };
        let mut jailed = match starter.jail {
            Some(jail) => Some(jail.admit().await?),
            None => None,
        };
        let own_boot = match (starter.jail, boot) {
            (Some(jail), Some(boot)) => Some(jail.boot(boot).await?),
            _ => None,
        };
        let version = crate::version::parse(&starter.host.version).unwrap_or_default();
        let confined =
            jailed.as_ref().map(|jailed| Confined { root: jailed.root(), uid: jailed.uid(), version });
        let (qmp, console) = (listen(sockets::QMP)?, listen(sockets::CONSOLE)?);
        let line = CommandLine {
            form: &form,
            virtualization: starter.host.virtualization,
            cpu: &starter.host.cpu,
            qmp: qmp.listener.as_raw_fd(),
            console: console.listener.as_raw_fd(),
            boot: own_boot.as_ref().or(boot),
            confined,
        };
        let process = Process::start(Start {
            program: &starter.config.binary,
            arguments: line.arguments(),
            owner: &starter.config.runtime,
            preload: starter.config.tracker.as_deref(),
            netns: starter.netns,
            keep: vec![qmp.listener.as_raw_fd(), console.listener.as_raw_fd()],
            confinement: if jailed.is_some() { Confinement::Itself } else { Confinement::None },
            console: None,
            log: &folder.join(sockets::LOG),
        })?;
        drop((qmp.listener, console.listener));
        // Also when this future is dropped half way.
        let unfinished = Unfinished(Some(process));
        let opened = match tokio_stream(qmp.stream) {
            Ok(stream) => Qmp::open(stream, START_WAIT, FIRST_WAIT).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(qmp) => {
                // The negotiation is answered by the main loop, which begins in the jail.
                if let Some(jailed) = &mut jailed {
                    jailed.entered();
                }
                let parts = unfinished.done().map(|process| Parts { process, qmp, console: console.stream });
                Ok(Self { form, parts, folder: folder.to_owned(), jailed })
            }
            Err(error) => Err(match &unfinished.0 {
                Some(process) => explain(process, error).await,
                None => error,
            }),
        }
    }

    /// Whether the process still waits.
    pub(crate) fn is_alive(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| crate::process::start_time(parts.process.pid).is_some())
    }

    /// Where in the kernel its threads are, for the log when it does not answer.
    pub(crate) fn threads(&self) -> Vec<String> {
        let Some(pid) = self.pid() else { return Vec::new() };
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        threads.map(|t| format!("{} {}", read(t.path().join("comm")), read(t.path().join("wchan")))).collect()
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.parts.as_ref().map(|parts| parts.process.pid)
    }

    /// Moves sockets and log to the VM's own folder; fails across filesystems.
    pub(crate) fn move_to(&mut self, runtime: &Path) -> std::io::Result<()> {
        for name in sockets::FILES {
            fs::rename(self.folder.join(name), runtime.join(name))?;
        }
        fs::remove_dir(&self.folder)?;
        runtime.clone_into(&mut self.folder);
        Ok(())
    }

    /// Gives it memory, disks and network and lets it build the machine. A process that was started for a boot begins to run.
    pub(crate) async fn furnish(&self, spec: &VmSpec, tap: &Tap) -> Result<(), EngineError> {
        let Some(Parts { process, qmp, .. }) = &self.parts else { return Err(EngineError::Gone) };
        let furnished = async {
            // `getfd` is refused before the machine is built, `netdev_add` takes the number of a descriptor: so the tap travels
            // with a command that has no use for it, is found by what it is, and gets its name afterwards. Until then the
            // connection keeps it open.
            qmp.execute("query-version", json!({}), &[tap.as_fd()], COMMAND_WAIT).await?;
            let number = tap_in(process.pid)?;
            let devices = host_devices(spec)?;
            let (ram, drives) = match &self.jailed {
                Some(jailed) => (jailed.inside(&spec.ram)?, jailed.give(&spec.drives)?),
                None => (spec.ram.clone(), spec.drives.clone()),
            };
            let commands = furnish(&self.form, &ram, &drives, &devices, number);
            let sent = commands.into_iter().map(|(name, args)| qmp.execute(name, args, &[], COMMAND_WAIT));
            try_join_all(sent).await?;
            qmp.execute("getfd", json!({ "fdname": TAP }), &[], COMMAND_WAIT).await?;
            tap.let_packets_through()
        };
        match furnished.await {
            Ok(()) => Ok(()),
            Err(error) => Err(explain(process, error).await),
        }
    }

    /// Loads a vm state; the vCPUs stand then. `state` is the reading end of a pipe that holds all of it.
    pub(crate) async fn load(&self, state: OwnedFd) -> Result<(), EngineError> {
        let Some(Parts { process, qmp, .. }) = &self.parts else { return Err(EngineError::Gone) };
        let loaded = async {
            let mut events = qmp.events();
            let rights = [state.as_fd()];
            // Sent together, answered in order. `stop` holds for what is about to come in.
            let stop = qmp.execute("stop", json!({}), &[], COMMAND_WAIT);
            let told = json!({ "capabilities": [{ "capability": "events", "state": true }] });
            let tell = qmp.execute("migrate-set-capabilities", told, &[], COMMAND_WAIT);
            let give = qmp.execute("getfd", json!({ "fdname": "state" }), &rights, COMMAND_WAIT);
            let start = qmp.execute("migrate-incoming", json!({ "uri": "fd:state" }), &[], COMMAND_WAIT);
            futures::try_join!(stop, tell, give, start)?;
            loop {
                match events.recv().await {
                    Ok(event) if event.name == "MIGRATION" && event.data["status"] == "completed" => {
                        return Ok(());
                    }
                    // A state that cannot be loaded ends the process.
                    Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                    Err(tokio::sync::broadcast::error::RecvError::Closed) => {
                        return Err(EngineError::Exited("while it loaded the vm state".to_owned()));
                    }
                }
            }
        };
        match tokio::time::timeout(COMMAND_WAIT, loaded).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(explain(process, error).await),
            Err(_) => Err(EngineError::TimedOut {
                command: "loading the vm state".to_owned(),
                secs: COMMAND_WAIT.as_secs(),
            }),
        }
    }

    /// From now on it lives by itself.
    pub(crate) fn into_parts(mut self) -> Option<Parts> {
        self.parts.take()
    }

    /// Ends it and waits until it is gone.
    pub(crate) async fn discard(self) {
        if let Some(parts) = &self.parts
            && let Err(error) = parts.process.end().await
        {
            tracing::warn!(%error, "a VMM that failed to start stays");
        }
    }
}

/// A broken connection says little; the process's last words say why.
async fn explain(process: &Process, error: EngineError) -> EngineError {
    if !matches!(error, EngineError::Exited(_)) {
        return error;
    }
    match tokio::time::timeout(REASON_WAIT, process.ended()).await {
        Ok(reason) => EngineError::Exited(reason),
        Err(_) => error,
    }
}

pub(crate) fn tokio_stream(stream: StdStream) -> Result<UnixStream, EngineError> {
    stream
        .set_nonblocking(true)
        .and_then(|()| UnixStream::from_std(stream))
        .map_err(|e| io_error("use a socket of QEMU", e))
}

/// The number of the only tun descriptor of process `pid`.
fn tap_in(pid: i32) -> Result<RawFd, EngineError> {
    let folder = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(&folder).map_err(|e| io_error(folder, e))?.flatten();
    let is_tun = |path: &Path| fs::read_link(path).is_ok_and(|to| to == Path::new("/dev/net/tun"));
    let mut taps = entries.map(|entry| entry.path()).filter(|path| is_tun(path));
    let number = taps.next().and_then(|path| path.file_name()?.to_str()?.parse().ok());
    match (number, taps.next()) {
        (Some(number), None) => Ok(number),
        _ => Err(EngineError::Start("the tap did not arrive in the VMM".to_owned())),
    }
}

/// For each drive, whether it is a block device.
fn host_devices(spec: &VmSpec) -> Result<Vec<bool>, EngineError> {
    use std::os::unix::fs::FileTypeExt;
    let kind = |path: &Path| {
        let meta = fs::metadata(path).map_err(|e| io_error(format!("the disk {}", path.display()), e))?;
        Ok(meta.file_type().is_block_device())
    };
    spec.drives.iter().map(|drive| kind(&drive.path)).collect()
}
