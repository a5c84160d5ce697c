//! Processes that wait for work, by the form of machine that they can become.
//!
//! A form that was launched once is kept warm; the forms used longest ago give way. Processes are started one after another, so that
//! filling up never takes more than one core from the guests.

use std::{
    collections::VecDeque,
    fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::sync::OnceCell;

use super::{
    QemuConfig,
    command::Form,
    prepared::{Prepared, Starter},
    probe::Host,
};
use crate::{EngineError, jail::Jail, process::io_error, tap};

/// A launch that has just been served gets the cores for its first answer before the next process is started.
pub(crate) const AFTER_LAUNCH: Duration = Duration::from_millis(200);

/// Forms that are kept warm at the same time.
const FORMS: usize = 4;

pub(crate) struct Pool {
    config: QemuConfig,
    pub(crate) jail: Option<Arc<Jail>>,
    shelves: Mutex<Vec<Shelf>>,
    filling: tokio::sync::Mutex<()>,
    /// Namespace of processes that wait; they get only a tap of their sandbox's.
    empty: OnceCell<OwnedFd>,
}

/// Newest form last.
struct Shelf {
    form: Form,
    ready: VecDeque<Prepared>,
}

impl Pool {
    pub(crate) fn new(config: &QemuConfig, jail: Option<Arc<Jail>>) -> Self {
        Self {
            config: config.clone(),
            jail,
            shelves: Mutex::default(),
            filling: tokio::sync::Mutex::default(),
            empty: OnceCell::new(),
        }
    }

    /// A process of this form if one waits.
    pub(crate) fn take(&self, form: &Form) -> Option<Prepared> {
        let mut shelves = self.lock();
        let shelf = shelves.iter_mut().find(|shelf| shelf.form == *form)?;
        while let Some(prepared) = shelf.ready.pop_front() {
            if prepared.is_alive() {
                return Some(prepared);
            }
        }
        None
    }

    /// How many processes of this form wait.
    pub(crate) fn ready(&self, form: &Form) -> usize {
        self.lock().iter().find(|shelf| shelf.form == *form).map_or(0, |shelf| shelf.ready.len())
    }

    /// Ends every process that waits.
    pub(crate) fn empty_out(&self) {
        self.lock().clear();
    }

    pub(crate) fn pids(&self) -> Vec<i32> {
        self.lock().iter().flat_map(|shelf| shelf.ready.iter().filter_map(Prepared::pid)).collect()
    }

    /// Starts what is missing of this form, in the background, after `delay`.
    pub(crate) fn refill(self: &Arc<Self>, form: Form, host: Host, delay: Duration) {
        if self.config.warm == 0 {
            return;
        }
        self.touch(&form);
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            if let Err(error) = fill(pool, form, &host).await {
                tracing::warn!(%error, "no VMM could be made ready in advance");
            }
        });
    }

    /// Makes the form the newest one; the oldest gives way.
    fn touch(&self, form: &Form) {
        let mut shelves = self.lock();
        let shelf = match shelves.iter().position(|shelf| shelf.form == *form) {
            Some(at) => shelves.remove(at),
            None => Shelf { form: form.clone(), ready: VecDeque::new() },
        };
        shelves.push(shelf);
        if shelves.len() > FORMS {
            shelves.remove(0);
        }
    }

    async fn start(&self, form: &Form, host: &Host) -> Result<Prepared, EngineError> {
        let netns = self.empty.get_or_try_init(tap::empty_netns).await?;
        let folder = self.folder().join(uuid::Uuid::new_v4().simple().to_string());
        fs::create_dir_all(&folder).map_err(|e| io_error(folder.display().to_string(), e))?;
        let jail = self.jail.as_ref();
        let starter = Starter { config: &self.config, host, netns: netns.as_fd(), jail };
        let started = Prepared::start(&starter, form.clone(), &folder, None).await;
        if started.is_err() {
            remove(&folder);
        }
        started
    }

    /// Where processes that wait have their sockets.
    pub(crate) fn folder(&self) -> PathBuf {
        self.config.runtime.join("warm")
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn fill(pool: Weak<Pool>, form: Form, host: &Host) -> Result<(), EngineError> {
    loop {
        let Some(pool) = pool.upgrade() else { return Ok(()) };
        let turn = pool.filling.lock().await;
        if pool.ready(&form) >= pool.config.warm {
            return Ok(());
        }
        let prepared = pool.start(&form, host).await?;
        let mut shelves = pool.lock();
        match shelves.iter_mut().find(|shelf| shelf.form == form) {
            Some(shelf) => shelf.ready.push_back(prepared),
            // The form gave way meanwhile.
            None => return Ok(()),
        }
        drop(shelves);
        drop(turn);
    }
}

pub(crate) fn remove(folder: &Path) {
    if let Err(error) = fs::remove_dir_all(folder)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::debug!(%error, folder = %folder.display(), "a folder stays");
    }
}
