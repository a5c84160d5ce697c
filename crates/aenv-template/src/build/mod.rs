//! Builds: a queue of them, one task for each, their logs and their results.
//!
//! ```text
//! new_build ──> Waiting ──start──> Building ──> Ready
//!                                      │
//!                                      └─(step fails, template deleted)──> Error
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
    collections::{HashMap, hash_map::Entry},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aenv_image::Images;
use aenv_orchestrator::Orchestrator;
use aenv_repository::RepositoryError;
use aenv_types::{BuildId, CheckpointId, Home, TeamId, TemplateId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::{BuildStatus, Catalog, Template, TemplateError};

use self::log::LogFile;
pub use self::{
    cache::cached,
    log::{BuildLog, LogLevel, LogOrder, LogQuery},
    start::{BuildStart, Source, StepKind, TemplateStep},
    upload::{UploadGrant, Uploads},
};

/// Builds that run at once; further ones wait their turn.
const PARALLEL_BUILDS: usize = 2;
/// How often a result is given to a repository that is away, and the pause between: an hour in all.
const RESULT_TRIES: u32 = 720;
const RESULT_PAUSE: Duration = Duration::from_secs(5);

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
    log: LogFile,
    cancel: CancellationToken,
    /// Nothing of it is written any more.
    ended: CancellationToken,
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
    /// The part of its log that was asked for.
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
                    builds.spawn(request, log)?;
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
            _ => return Err(started_already(build)),
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
        self.spawn(request, log)
    }

    fn spawn(&self, request: Request, log: LogFile) -> Result<(), TemplateError> {
        let active = Active {
            log,
            cancel: CancellationToken::new(),
            ended: CancellationToken::new(),
            failure: Arc::default(),
        };
        match self.active.lock().entry(request.build) {
            // Two started it at the same time.
            Entry::Occupied(_) => return Err(started_already(request.build)),
            Entry::Vacant(place) => place.insert(active.clone()),
        };
        let builds = self.clone();
        tokio::spawn(async move { builds.drive(request, active).await });
        Ok(())
    }

    async fn drive(&self, request: Request, active: Active) {
        let outcome = self.outcome(&request, &active).await;
        let build = request.build;
        let (status, checkpoint) = match outcome {
            Ok(checkpoint) => (BuildStatus::Ready, Some(checkpoint)),
            Err(failure) => {
                tracing::info!(template = %request.template, %build, step = ?failure.step, message = failure.message, "a build failed");
                active.log.push(LogLevel::Error, failure.step.as_deref(), &failure.message);
                let text = serde_json::to_vec(&failure).expect("a failure has only text");
                if let Err(error) = std::fs::write(self.folder(build).join("failure.json"), text) {
                    tracing::warn!(%build, %error, "a build's failure cannot be kept");
                }
                *active.failure.lock() = Some(failure);
                (BuildStatus::Error, None)
            }
        };
        match self.keep_result(&request, status, checkpoint).await {
            // The template was deleted in the meantime: the build ends with it.
            Ok(()) | Err(TemplateError::NotFound(_)) => {
                if let Err(error) = std::fs::remove_file(self.folder(build).join("request.json")) {
                    tracing::warn!(%build, %error, "a finished build's request stays");
                }
            }
            Err(error) => tracing::error!(%build, %error, "a build's result cannot be written"),
        }
        self.active.lock().remove(&build);
        active.ended.cancel();
    }

    /// Waits for a turn and builds.
    async fn outcome(&self, request: &Request, active: &Active) -> Result<CheckpointId, Failure> {
        if self.turns.available_permits() == 0 {
            let text = format!("Waiting for a turn: {PARALLEL_BUILDS} builds run at once");
            active.log.push(LogLevel::Info, None, &text);
        }
        let _turn = tokio::select! {
            turn = self.turns.acquire() => turn.expect("the semaphore is never closed"),
            () = active.cancel.cancelled() => return Err(run::cancelled()),
        };
        let began = std::time::Instant::now();
        let run = run::Run {
            parts: &self.parts,
            team: &request.team,
            template: &request.template,
            build: request.build,
            start: &request.start,
            log: &active.log,
            cancel: &active.cancel,
        };
        let checkpoint = Box::pin(run.execute()).await?;
        let text = format!("Build finished, took {}s", began.elapsed().as_secs().max(1));
        active.log.push(LogLevel::Info, Some("finalize"), &text);
        Ok(checkpoint)
    }

    /// Writes how a build ended. While the repository is away it is tried again: until then the build seems to run.
    async fn keep_result(
        &self,
        request: &Request,
        status: BuildStatus,
        checkpoint: Option<CheckpointId>,
    ) -> Result<(), TemplateError> {
        let Request { team, template, build, .. } = request;
        for _ in 0..RESULT_TRIES {
            match self.parts.catalog.set_build(team, template, *build, status, checkpoint.clone()).await {
                Err(TemplateError::Repository(RepositoryError::Store { .. })) => {
                    tokio::time::sleep(RESULT_PAUSE).await;
                }
                other => return other,
            }
        }
        self.parts.catalog.set_build(team, template, *build, status, checkpoint).await
    }

    /// A build's status, and a part of its log.
    pub async fn view(
        &self,
        team: &TeamId,
        template: &TemplateId,
        build: BuildId,
        query: &LogQuery,
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
        let logs = log.map(|log| log.read(query)).transpose()?.unwrap_or_default();
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

    /// Ends the builds of a template that was deleted. Nothing of them stays.
    pub fn forget(&self, template: &Template) {
        let active = self.active.lock();
        for build in &template.builds {
            let ended = active.get(&build.id).map(|active| {
                active.cancel.cancel();
                active.ended.clone()
            });
            let folder = self.folder(build.id);
            tokio::spawn(async move {
                if let Some(ended) = ended {
                    ended.cancelled().await;
                }
                match tokio::fs::remove_dir_all(&folder).await {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        tracing::warn!(folder = %folder.display(), %error, "a build's log stays");
                    }
                    _ => {}
                }
            });
        }
    }
}

fn started_already(build: BuildId) -> TemplateError {
    TemplateError::Conflict(format!("build {build} was started already"))
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
