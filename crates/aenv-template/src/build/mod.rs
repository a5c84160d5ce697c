//! Builds: a queue of them, one task for each, their logs and their results.
//!
//! ```text
//! new_build ──> Waiting ──start──> Building ──> Ready
//!                                      │
//!                                      └─(step fails, cancel)──> Error
//! ```
//!
//! A started build is a folder `<home>/builds/<id>/` with `request.json` (what it was started with) and `log.jsonl`. The request
//! goes when the build ends; a server that comes back and finds one starts that build again, from its cached steps.

mod cache;
mod copy;
mod guest;
mod log;
mod provision;
mod run;
mod start;
mod steps;
mod upload;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_image::Images;
use aenv_orchestrator::Orchestrator;
use aenv_types::{BuildId, Home, TeamId, TemplateId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::{BuildStatus, Catalog, Template, TemplateError};

use self::log::LogFile;
pub use self::{
    cache::cached,
    log::{BuildLog, LogLevel},
    start::{BuildStart, Source, StepKind, TemplateStep},
    upload::{UploadGrant, Uploads},
};

/// Builds that run at once; further ones wait their turn.
const PARALLEL_BUILDS: usize = 2;

/// What a build works with.
pub(crate) struct BuildParts {
    pub(crate) home: Home,
    pub(crate) catalog: Catalog,
    pub(crate) orchestrator: Orchestrator,
    pub(crate) images: Images,
    pub(crate) uploads: Uploads,
}

/// The node's builds. Cheap to clone.
#[derive(Clone)]
pub struct Builds {
    parts: Arc<BuildParts>,
    active: Arc<Mutex<HashMap<BuildId, Active>>>,
    turns: Arc<Semaphore>,
}

#[derive(Clone)]
struct Active {
    template: TemplateId,
    log: LogFile,
    cancel: CancellationToken,
    failure: Arc<Mutex<Option<Failure>>>,
}

/// Why a build failed, and in which step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What a user is told.
    pub message: String,
    /// `base`, a step's number from 1, or `finalize`.
    pub step: Option<String>,
}

/// A build as it is now.
#[derive(Clone, Debug)]
pub struct BuildView {
    /// How far it is.
    pub status: BuildStatus,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// Entries of its log from the offset that was asked for.
    pub logs: Vec<BuildLog>,
}

/// What `request.json` holds.
#[derive(Serialize, Deserialize)]
struct Request {
    team: TeamId,
    template: TemplateId,
    build: BuildId,
    start: BuildStart,
}

impl Builds {
    pub(crate) async fn open(parts: Arc<BuildParts>) -> Result<Self, TemplateError> {
        let folder = parts.home.path().join("builds");
        std::fs::create_dir_all(&folder).map_err(TemplateError::io(format!("{}", folder.display())))?;
        let builds = Self { parts, active: Arc::default(), turns: Arc::new(Semaphore::new(PARALLEL_BUILDS)) };
        let entries =
            std::fs::read_dir(&folder).map_err(TemplateError::io(format!("{}", folder.display())))?;
        for entry in entries.flatten() {
            let Ok(text) = std::fs::read(entry.path().join("request.json")) else { continue };
            match serde_json::from_slice::<Request>(&text) {
                Ok(request) => {
                    let log = LogFile::open(&entry.path().join("log.jsonl"))?;
                    log.push(LogLevel::Warn, None, "The server was restarted; the build starts again");
                    builds.spawn(request, log);
                }
                Err(error) => {
                    tracing::warn!(path = %entry.path().display(), %error, "a build request is damaged")
                }
            }
        }
        Ok(builds)
    }

    fn folder(&self, build: BuildId) -> PathBuf {
        self.parts.home.path().join("builds").join(build.to_string())
    }

    /// Starts a build that waits. Steps are checked before anything runs.
    pub async fn start(
        &self,
        team: &TeamId,
        template: &TemplateId,
        build: BuildId,
        mut start: BuildStart,
    ) -> Result<(), TemplateError> {
        let document = self.parts.catalog.get(team, template.as_str()).await?;
        match find(&document, build)?.status {
            BuildStatus::Waiting => {}
            _ => return Err(TemplateError::Conflict(format!("build {build} was started already"))),
        }
        let steps = std::mem::take(&mut start.steps);
        start.steps = steps
            .into_iter()
            .enumerate()
            .map(|(index, step)| step.checked(index + 1))
            .collect::<Result<_, _>>()?;
        let folder = self.folder(build);
        let request = Request { team: team.clone(), template: template.clone(), build, start };
        keep_request(&folder, &serde_json::to_vec(&request).expect("a request has only text"))?;
        let log = LogFile::open(&folder.join("log.jsonl"))?;
        self.parts.catalog.set_build(team, template, build, BuildStatus::Building, None).await?;
        self.spawn(request, log);
        Ok(())
    }

    fn spawn(&self, request: Request, log: LogFile) {
        let active = Active {
            template: request.template.clone(),
            log,
            cancel: CancellationToken::new(),
            failure: Arc::default(),
        };
        self.active.lock().insert(request.build, active.clone());
        let builds = self.clone();
        tokio::spawn(async move { builds.drive(request, active).await });
    }

    async fn drive(&self, request: Request, active: Active) {
        let Request { team, template, build, start } = request;
        let _turn = self.turns.acquire().await.expect("the semaphore is never closed");
        let began = std::time::Instant::now();
        let run = run::Run {
            parts: &self.parts,
            team: &team,
            template: &template,
            build,
            start: &start,
            log: &active.log,
            cancel: &active.cancel,
        };
        let outcome = match Box::pin(run.execute()).await {
            Ok(checkpoint) => {
                active.log.push(
                    LogLevel::Info,
                    Some("finalize"),
                    &format!("Build finished, took {}s", began.elapsed().as_secs().max(1)),
                );
                (BuildStatus::Ready, Some(checkpoint))
            }
            Err(failure) => {
                tracing::info!(%template, %build, step = ?failure.step, message = failure.message, "a build failed");
                active.log.push(LogLevel::Error, failure.step.as_deref(), &failure.message);
                let text = serde_json::to_vec(&failure).expect("a failure has only text");
                if let Err(error) = std::fs::write(self.folder(build).join("failure.json"), text) {
                    tracing::warn!(%build, %error, "a build's failure cannot be kept");
                }
                *active.failure.lock() = Some(failure);
                (BuildStatus::Error, None)
            }
        };
        let (status, checkpoint) = outcome;
        match self.parts.catalog.set_build(&team, &template, build, status, checkpoint).await {
            // The template was deleted in the meantime: the build ends with it.
            Ok(()) | Err(TemplateError::NotFound(_)) => {
                if let Err(error) = std::fs::remove_file(self.folder(build).join("request.json")) {
                    tracing::warn!(%build, %error, "a finished build's request stays");
                }
            }
            Err(error) => tracing::error!(%build, %error, "a build's result cannot be written"),
        }
        self.active.lock().remove(&build);
    }

    /// A build's status, and up to `limit` entries of its log from number `offset` on.
    pub async fn view(
        &self,
        team: &TeamId,
        template: &TemplateId,
        build: BuildId,
        offset: usize,
        limit: usize,
    ) -> Result<BuildView, TemplateError> {
        let document = self.parts.catalog.get(team, template.as_str()).await?;
        let status = find(&document, build)?.status;
        let active = self.active.lock().get(&build).cloned();
        let (log, failure) = match active {
            Some(active) => (Some(active.log.clone()), active.failure.lock().clone()),
            None => {
                let folder = self.folder(build);
                let log = folder.join("log.jsonl").exists().then(|| LogFile::open(&folder.join("log.jsonl")));
                let failure = std::fs::read(folder.join("failure.json")).ok();
                (log.transpose()?, failure.and_then(|text| serde_json::from_slice(&text).ok()))
            }
        };
        let logs = log.map(|log| log.read(offset, limit)).transpose()?.unwrap_or_default();
        let failure = if status == BuildStatus::Error {
            Some(failure.unwrap_or(Failure {
                message: "the build failed; its reason was not kept".to_owned(),
                step: None,
            }))
        } else {
            None
        };
        Ok(BuildView { status, failure, logs })
    }

    /// Cancels every build of a template; how many there were.
    pub fn cancel(&self, template: &TemplateId) -> usize {
        let active = self.active.lock();
        let of_template = active.values().filter(|build| build.template == *template);
        of_template.map(|build| build.cancel.cancel()).count()
    }
}

fn find(template: &Template, build: BuildId) -> Result<&crate::Build, TemplateError> {
    template
        .builds
        .iter()
        .find(|found| found.id == build)
        .ok_or_else(|| TemplateError::NoBuild { build: build.to_string(), template: template.id.to_string() })
}

/// Writes `request.json` whole or not at all, readable by us only.
fn keep_request(folder: &Path, text: &[u8]) -> Result<(), TemplateError> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.and_then(|()| aenv_durable::write_private(&folder.join("request.json"), text))
        .map_err(TemplateError::io(format!("{}", folder.display())))
}
