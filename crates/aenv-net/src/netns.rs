//! Named network namespaces, made and found as iproute2 does: bind mounts in `/run/netns`.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};
use tokio::sync::oneshot;

use crate::NetworkError;

/// Where the names are.
pub(crate) const FOLDER: &str = "/run/netns";

/// A step takes milliseconds; one that takes this long has failed.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// A namespace that is held open.
#[derive(Clone)]
pub(crate) struct Netns(Arc<File>);

impl Netns {
    /// The namespace of the calling thread.
    pub(crate) fn current() -> io::Result<Self> {
        File::open("/proc/thread-self/ns/net").map(|file| Self(Arc::new(file)))
    }

    /// A named namespace. Fails when the file is not one (its mount is gone).
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if nix::sys::statfs::fstatfs(&file)?.filesystem_type() != nix::sys::statfs::NSFS_MAGIC {
            return Err(io::Error::other("the file is not a namespace"));
        }
        Ok(Self(Arc::new(file)))
    }

    /// Moves the calling thread into it. Only for threads that end, or that move back.
    pub(crate) fn enter(&self) -> io::Result<()> {
        Ok(setns(&*self.0, CloneFlags::CLONE_NEWNET)?)
    }

    /// The descriptor, for netlink.
    pub(crate) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Runs `work` in this namespace, in a thread of its own: for what takes milliseconds. A caller that goes away does not stop it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        step: &'static str,
        work: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let netns = self.clone();
        in_thread(step, move || {
            netns.enter().map_err(kernel(step))?;
            work()
        })
        .await
    }
}

/// Runs `work` in a new thread and waits for it without blocking the caller's.
pub(crate) async fn in_thread<T: Send + 'static>(
    step: &'static str,
    work: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
) -> Result<T, NetworkError> {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::Builder::new().name("aenv-netns".to_owned());
    // A receiver that is gone means that nobody waits for the answer any more.
    thread.spawn(move || drop(sender.send(work()))).map_err(kernel(step))?;
    let ended = || NetworkError::Kernel { step, message: "its thread ended without an answer".to_owned() };
    let late =
        |_| NetworkError::Kernel { step, message: format!("not done after {} s", STEP_LIMIT.as_secs()) };
    tokio::time::timeout(STEP_LIMIT, receiver).await.map_err(late)?.map_err(|_| ended())?
}

/// Turns an error into a [`NetworkError::Kernel`] of this step.
pub(crate) fn kernel<E: std::fmt::Display>(step: &'static str) -> impl FnOnce(E) -> NetworkError {
    move |error| NetworkError::Kernel { step, message: error.to_string() }
}

/// Path of a named namespace.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// Makes a namespace under this name and moves the calling thread into it.
///
/// `AlreadyExists` when the name is taken; nothing stays behind in any failure.
pub(crate) fn create(name: &str) -> io::Result<Netns> {
    let path = path(name);
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(&path)?;
    let mounted = unshare(CloneFlags::CLONE_NEWNET)
        .and_then(|()| mount(Some("/proc/thread-self/ns/net"), &path, NO_TEXT, MsFlags::MS_BIND, NO_TEXT));
    match mounted {
        Ok(()) => Netns::current(),
        Err(error) => {
            fs::remove_file(&path)?;
            Err(error.into())
        }
    }
}

/// Removes a name. The namespace itself goes when its last process and descriptor does. A missing name is no error.
pub(crate) fn remove(name: &str) -> io::Result<()> {
    let path = path(name);
    match umount2(&path, MntFlags::MNT_DETACH) {
        Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Names that begin with `prefix`.
pub(crate) fn list(prefix: &str) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(FOLDER)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(prefix) {
            names.push(name);
        }
    }
    Ok(names)
}

/// Makes the folder a shared mount, as iproute2 does, so that names are seen in other mount namespaces and go there too.
pub(crate) fn prepare_folder() -> io::Result<()> {
    fs::create_dir_all(FOLDER)?;
    let _one_at_a_time = lock()?;
    let share = || mount(NO_TEXT, FOLDER, NO_TEXT, MsFlags::MS_SHARED | MsFlags::MS_REC, NO_TEXT);
    match share() {
        // Not a mount yet.
        Err(nix::Error::EINVAL) => {
            mount(Some(FOLDER), FOLDER, NO_TEXT, MsFlags::MS_BIND | MsFlags::MS_REC, NO_TEXT)?;
            Ok(share()?)
        }
        shared => Ok(shared?),
    }
}

/// A lock between all servers of the host, for what must not happen twice at once. Waits 10 s at most.
pub(crate) fn lock() -> io::Result<Flock<File>> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut folder = File::open(FOLDER)?;
    loop {
        match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, nix::Error::EWOULDBLOCK)) if Instant::now() < deadline => folder = file,
            Err((_, nix::Error::EWOULDBLOCK)) => {
                return Err(io::Error::other("another server has held the lock on /run/netns for 10 s"));
            }
            Err((_, error)) => return Err(error.into()),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

const NO_TEXT: Option<&str> = None;
