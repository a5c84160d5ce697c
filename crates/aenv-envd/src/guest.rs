//! What the daemon knows: settings of the current launch, running processes, watchers.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
};

use aenv_envd_api::InitRequest;
use aenv_types::Token;
use parking_lot::RwLock;

use crate::{
    config::Config,
    filesystem::Watchers,
    metrics::CpuMeter,
    process::Processes,
    users::{self, LookupError, User},
};

/// The user of requests that name none, unless `/init` says otherwise.
const DEFAULT_USER: &str = "user";

/// The one shared state of the daemon.
pub struct Guest {
    /// The command line.
    pub config: Config,
    /// Processes that were started through the API.
    pub processes: Processes,
    /// Watchers of clients that poll.
    pub watchers: Watchers,
    /// Remembers the CPU counters of the last `/metrics`.
    pub cpu: CpuMeter,
    /// Held while an `/init` does its work.
    pub init: tokio::sync::Mutex<()>,
    /// The last `/init` told of volumes.
    pub had_volumes: AtomicBool,
    settings: RwLock<Arc<Settings>>,
}

/// What `/init` told last.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// The token that requests must show.
    pub token: Option<Token>,
    /// The user of requests that name none.
    pub default_user: String,
    /// The folder of processes that name none; the user's home when `None`.
    pub default_workdir: Option<String>,
    /// Id of the launch.
    pub lifecycle_id: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            env: base_env(),
            token: None,
            default_user: DEFAULT_USER.to_owned(),
            default_workdir: None,
            lifecycle_id: None,
        }
    }
}

impl From<InitRequest> for Settings {
    fn from(request: InitRequest) -> Self {
        let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let mut env = base_env();
        env.extend(request.env_vars);
        Self {
            env,
            token: non_empty(request.access_token).map(Token::from),
            default_user: non_empty(request.default_user).unwrap_or_else(|| DEFAULT_USER.to_owned()),
            default_workdir: non_empty(request.default_workdir),
            lifecycle_id: request.lifecycle_id,
        }
    }
}

fn base_env() -> BTreeMap<String, String> {
    BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())])
}

impl Guest {
    /// A guest that has not been told anything yet.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            processes: Processes::default(),
            watchers: Watchers::default(),
            cpu: CpuMeter::default(),
            init: tokio::sync::Mutex::new(()),
            // An envd that was started again does not know.
            had_volumes: AtomicBool::new(true),
            settings: RwLock::new(Arc::new(Settings::default())),
        }
    }

    /// The settings as they are now.
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&self.settings.read())
    }

    /// Replaces the settings.
    pub fn set_settings(&self, settings: Settings) {
        *self.settings.write() = Arc::new(settings);
    }

    /// The user of a request: the named one, or the default.
    pub fn user(&self, name: Option<&str>) -> Result<User, LookupError> {
        match name.filter(|name| !name.is_empty()) {
            Some(name) => users::lookup(name),
            None => users::lookup(&self.settings().default_user),
        }
    }
}
