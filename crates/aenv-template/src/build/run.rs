//! One build, from its base to its checkpoint.

use std::{sync::Arc, time::Duration};

use aenv_image::PullProgress;
use aenv_orchestrator::{
    CaptureMode, CreateRequest, Lifecycle, OnTimeout, PauseMode, ProxyOptions, SandboxView, TeamLimits, Wake,
};
use aenv_types::{
    BuildId, Checkpoint, CheckpointId, DiskImage, EgressPolicy, GuestContext, Lineage, MachineShape, Origin,
    TeamId, TemplateId, checkpoint::CHECKPOINT_FORMAT,
};
use chrono::Utc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    BuildParts, BuildStart, Failure, LogLevel, Source,
    cache::{Cached, Key, StepCache},
    guest::{Exec, Guest},
    log::LogFile,
    provision,
    start::{StepKind, TemplateStep},
    steps::{self, Context},
};
use crate::TemplateError;

/// Longest a build may run.
const BUILD_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// How long the ready command may fail before the build does, and the pause between its tries.
const READY_LIMIT: Duration = Duration::from_secs(600);
const READY_PAUSE: Duration = Duration::from_secs(2);
/// The ready command of a template that has a start command and names none.
const DEFAULT_READY: &str = "sleep 20";

/// A build while it runs.
pub(super) struct Run<'a> {
    pub(super) parts: &'a BuildParts,
    pub(super) team: &'a TeamId,
    pub(super) template: &'a TemplateId,
    pub(super) build: BuildId,
    pub(super) start: &'a BuildStart,
    pub(super) log: &'a LogFile,
    pub(super) cancel: &'a CancellationToken,
}

/// What there is to do.
enum Planned {
    /// Nothing: it was built before.
    Done(CheckpointId),
    /// This.
    Steps(Box<Plan>),
}

/// How a build gets from its base to its result.
struct Plan {
    shape: MachineShape,
    base: Base,
    /// `keys[n]` stands for the disk after n steps.
    keys: Vec<Key>,
    result_key: Key,
    /// Steps that are cached.
    done: usize,
    /// What is launched to run the others.
    from: Arc<Checkpoint>,
    context: Context,
    /// Nothing is cached, not even the preparation of the image.
    fresh: bool,
}

/// What the first step starts on.
struct Base {
    key: Key,
    context: Context,
    labels: GuestContext,
    /// Launched with its memory when set; else `disks` are booted.
    checkpoint: Arc<Checkpoint>,
    /// An image that nothing has run in yet.
    needs_provisioning: bool,
}

impl Run<'_> {
    /// Runs the build to its end. Whatever happens, the sandbox that it used is gone afterwards.
    pub(super) async fn execute(&self) -> Result<CheckpointId, Failure> {
        let end = Instant::now() + BUILD_LIMIT;
        let plan = match self.until(end, self.plan()).await? {
            Planned::Done(checkpoint) => return Ok(checkpoint),
            Planned::Steps(plan) => plan,
        };
        // Not cut off: nobody would know of the sandbox that it makes.
        let sandbox = self.sandbox(plan.from.clone(), plan.shape).await.map_err(|e| failure("base", e))?;
        let outcome = self.until(end, self.steps(&plan, &sandbox)).await;
        if let Err(error) = self.parts.orchestrator.kill(self.team, &sandbox.id).await {
            tracing::warn!(sandbox = %sandbox.id, %error, "a build's sandbox could not be removed");
        }
        let checkpoint = outcome?;
        StepCache::new(&self.parts.home).keep_result(&plan.result_key, &checkpoint);
        Ok(checkpoint)
    }

    /// Works until it is done, cancelled, or has taken too long.
    async fn until<T>(
        &self,
        end: Instant,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(cancelled()),
            outcome = tokio::time::timeout_at(end, work) => outcome.unwrap_or_else(|_| {
                Err(failure("finalize", format!("the build took longer than {} s", BUILD_LIMIT.as_secs())))
            }),
        }
    }

    /// Finds out what there is to do.
    async fn plan(&self) -> Result<Planned, Failure> {
        let shape = self.shape().await.map_err(|e| failure("base", e))?;
        let base = self.base(shape).await.map_err(|e| failure("base", e))?;
        let cache = StepCache::new(&self.parts.home);
        let keys = self.keys(&base.key);
        let usable = self.start.cacheable();
        let result_key = self.result_key(&keys[keys.len() - 1], shape);
        if usable == self.start.steps.len()
            && let Some(checkpoint) = self.cached_result(&cache, &result_key).await
        {
            self.info("finalize", "CACHED: nothing has changed since an earlier build");
            return Ok(Planned::Done(checkpoint));
        }

        let cached = (0..=usable).rev().find_map(|done| Some((done, cache.find(&keys[done])?)));
        let (done, from, context) = match cached {
            Some((done, cached)) if done > 0 || base.needs_provisioning => {
                (done, Arc::new(self.disk_checkpoint(cached.disks, shape, &base)), cached.context)
            }
            _ => (0, base.checkpoint.clone(), base.context.clone()),
        };
        let fresh = cached_nothing(&from, &base);
        for (index, step) in self.start.steps.iter().enumerate().take(done) {
            self.info(&(index + 1).to_string(), &format!("CACHED {}", self.title(index, step)));
        }

        Ok(Planned::Steps(Box::new(Plan { shape, base, keys, result_key, done, from, context, fresh })))
    }

    /// Runs the steps that are not cached, and takes the checkpoint.
    async fn steps(&self, plan: &Plan, sandbox: &SandboxView) -> Result<CheckpointId, Failure> {
        let cache = StepCache::new(&self.parts.home);
        let mut context = plan.context.clone();
        let guest = self.guest(sandbox).await.map_err(|e| failure("base", e))?;
        if plan.fresh && plan.base.needs_provisioning {
            self.info("base", "Preparing the image: user, sudo, CA certificates");
            let guest = guest.for_step("base");
            provision::run(&guest)
                .await
                .map_err(|e| failure("base", format!("the image cannot be prepared: {e}")))?;
            context = Context { user: "user".to_owned(), ..context };
            self.keep(&cache, &plan.keys[0], sandbox, &context).await;
        }
        for (index, step) in self.start.steps.iter().enumerate().skip(plan.done) {
            let number = (index + 1).to_string();
            self.info(&number, &self.title(index, step));
            let upload = self.upload(step).map_err(|e| failure(&number, e))?;
            steps::run_step(&guest.for_step(&number), &mut context, step, upload.as_deref())
                .await
                .map_err(|e| failure(&number, e))?;
            if matches!(step.kind, StepKind::Run | StepKind::Copy) || index + 1 == self.start.steps.len() {
                self.keep(&cache, &plan.keys[index + 1], sandbox, &context).await;
            }
        }
        self.finish(&guest.for_step("finalize"), sandbox, &context, &plan.base, plan.shape).await
    }

    async fn shape(&self) -> Result<MachineShape, TemplateError> {
        let document = self.parts.catalog.get(self.team, self.template.as_str()).await?;
        Ok(super::find(&document, self.build)?.shape)
    }

    async fn base(&self, shape: MachineShape) -> Result<Base, TemplateError> {
        match &self.start.source {
            Source::Image { reference, credentials } => {
                self.info("base", &format!("FROM {reference}"));
                let show = |progress| self.show(&progress);
                let image = self.parts.images.pull(reference, credentials.clone(), &show).await?;
                // The filesystem of an image in overlaybd format has the size that its maker gave it.
                let size = shape.disk_bytes().max(image.disk_size);
                let disk = DiskImage { drive: "root".to_owned(), size, layers: image.layers };
                let origin = Origin::Image { reference: image.reference, manifest: image.manifest };
                let key = Key::root(&format!("image {} {}", image.manifest, provision::SCRIPT))
                    .then(&disk_key(shape));
                let context = Context {
                    env: image.guest.env.clone(),
                    user: "root".to_owned(),
                    workdir: String::new(),
                    exposed: image.guest.exposed_ports.iter().cloned().collect(),
                };
                // A template's user is `user`, and its workdir that user's home, until a step says otherwise.
                let labels = GuestContext { user: "user".to_owned(), workdir: String::new(), ..image.guest };
                let guest = GuestContext { user: "root".to_owned(), ..labels.clone() };
                let checkpoint = self.checkpoint(shape, vec![disk], guest, origin);
                Ok(Base { key, context, labels, checkpoint: Arc::new(checkpoint), needs_provisioning: true })
            }
            Source::Template { reference } => {
                self.info("base", &format!("FROM template {reference}"));
                let resolved = self.parts.catalog.resolve(self.team, reference).await?;
                let parent = resolved.checkpoint;
                let guest = parent.guest.clone();
                let context = Context {
                    env: guest.env.clone(),
                    user: guest.user.clone(),
                    workdir: guest.workdir.clone(),
                    exposed: guest.exposed_ports.iter().cloned().collect(),
                };
                let key = Key::root(&format!("template {}", parent.id)).then(&disk_key(shape));
                // Its memory is only of use on the same machine, and only when no start command runs in it.
                let same_machine =
                    parent.shape.vcpus == shape.vcpus && parent.shape.memory_mib == shape.memory_mib;
                let checkpoint = if same_machine && guest.start_cmd.is_none() {
                    parent
                } else {
                    Arc::new(self.checkpoint(
                        shape,
                        parent.disks.clone(),
                        guest.clone(),
                        parent.lineage.origin.clone(),
                    ))
                };
                Ok(Base { key, context, labels: guest, checkpoint, needs_provisioning: false })
            }
        }
    }

    /// `keys[n]` stands for the disk after n steps.
    fn keys(&self, base: &Key) -> Vec<Key> {
        let mut keys = vec![base.clone()];
        for step in &self.start.steps {
            let text = format!("{:?} {:?} {:?}", step.kind, step.args, step.files_hash);
            keys.push(keys[keys.len() - 1].then(&text));
        }
        keys
    }

    fn result_key(&self, last: &Key, shape: MachineShape) -> Key {
        last.then(&format!("{:?} {:?} {shape:?}", self.start.start_cmd, self.start.ready_cmd))
    }

    async fn cached_result(&self, cache: &StepCache, key: &Key) -> Option<CheckpointId> {
        if self.start.force {
            return None;
        }
        let id = cache.find_result(key)?;
        let committed = self.parts.catalog.repository().checkpoint(&id).await.ok()?;
        // A checkpoint belongs to one build: this one gets a manifest of its own over the same blobs.
        let own = Checkpoint {
            id: CheckpointId::random(),
            lineage: self.lineage(committed.lineage.parent),
            ..committed
        };
        self.parts.catalog.repository().commit(&own).await.ok().map(|checkpoint| checkpoint.id)
    }

    fn lineage(&self, parent: Option<CheckpointId>) -> Lineage {
        Lineage { parent, origin: Origin::Template { template: self.template.clone(), build: self.build } }
    }

    fn checkpoint(
        &self,
        shape: MachineShape,
        disks: Vec<DiskImage>,
        guest: GuestContext,
        origin: Origin,
    ) -> Checkpoint {
        Checkpoint {
            format: CHECKPOINT_FORMAT,
            id: CheckpointId::random(),
            created_at: Utc::now(),
            shape,
            engine: None,
            vm_state: None,
            memory: None,
            disks,
            guest,
            lineage: Lineage { parent: None, origin },
        }
    }

    fn disk_checkpoint(&self, disks: Vec<DiskImage>, shape: MachineShape, base: &Base) -> Checkpoint {
        let origin = base.checkpoint.lineage.origin.clone();
        self.checkpoint(shape, disks, base.labels.clone(), origin)
    }

    async fn sandbox(
        &self,
        from: Arc<Checkpoint>,
        shape: MachineShape,
    ) -> Result<SandboxView, TemplateError> {
        let request = CreateRequest {
            team: self.team.clone(),
            shape: Some(shape),
            checkpoint: from,
            template: self.template.clone(),
            alias: None,
            timeout: BUILD_LIMIT,
            lifecycle: Lifecycle {
                on_timeout: OnTimeout::Kill,
                pause_mode: PauseMode::Full,
                auto_resume: false,
            },
            metadata: std::collections::BTreeMap::new(),
            env: std::collections::BTreeMap::new(),
            secure: true,
            egress: EgressPolicy::default(),
            network: serde_json::Value::Null,
            allow_internet_access: None,
            mcp: serde_json::Value::Null,
            proxy: ProxyOptions::default(),
            volumes: Vec::new(),
            hidden: true,
            limits: TeamLimits::default(),
        };
        self.parts
            .orchestrator
            .create(request)
            .await
            .map_err(|error| TemplateError::Invalid(error.to_string()))
    }

    async fn guest(&self, sandbox: &SandboxView) -> Result<Guest<'_>, TemplateError> {
        let route = self.parts.orchestrator.route(&sandbox.id, Wake::Never).await;
        let route = route.map_err(|error| TemplateError::Invalid(error.to_string()))?;
        Ok(Guest::new(&route, self.log))
    }

    fn upload(&self, step: &TemplateStep) -> Result<Option<std::path::PathBuf>, TemplateError> {
        match &step.files_hash {
            Some(hash) if step.kind == StepKind::Copy => self.parts.uploads.find(self.team, hash),
            _ => Ok(None),
        }
    }

    async fn keep(&self, cache: &StepCache, key: &Key, sandbox: &SandboxView, context: &Context) {
        match self.parts.orchestrator.capture(self.team, &sandbox.id, CaptureMode::Filesystem).await {
            Ok(captured) => {
                cache.keep(key, &Cached { disks: captured.disks, context: context.clone() });
                self.parts.orchestrator.release(&captured.id);
            }
            Err(error) => tracing::warn!(sandbox = %sandbox.id, %error, "a step's result is not cached"),
        }
    }

    async fn finish(
        &self,
        guest: &Guest<'_>,
        sandbox: &SandboxView,
        context: &Context,
        base: &Base,
        shape: MachineShape,
    ) -> Result<CheckpointId, Failure> {
        let at_end = |e: String| failure("finalize", e);
        self.mark(guest).await.map_err(at_end)?;
        if let Some(command) = &self.start.start_cmd {
            self.info("finalize", &format!("Running start command: {command}"));
            let failed = |e| failure("finalize", format!("failed to run start command '{command}': {e}"));
            guest.start(bash(context, &["-l", "-c", command])).await.map_err(failed)?;
        }
        self.wait_ready(guest, context).await?;
        self.info("finalize", "Template is ready; taking its checkpoint");
        let captured = self.parts.orchestrator.capture(self.team, &sandbox.id, CaptureMode::Full).await;
        let captured = captured.map_err(|e| at_end(e.to_string()))?;
        let guest_context = GuestContext {
            env: context.env.clone(),
            user: context.user.clone(),
            workdir: context.workdir.clone(),
            start_cmd: self.start.start_cmd.clone(),
            ready_cmd: self.start.ready_cmd.clone(),
            exposed_ports: context.exposed.iter().cloned().collect(),
            labels: base.labels.labels.clone(),
        };
        let lineage = self.lineage(captured.lineage.parent.clone());
        let checkpoint = Checkpoint { shape, guest: guest_context, lineage, ..captured };
        let committed = self.parts.catalog.repository().commit(&checkpoint).await;
        self.parts.orchestrator.release(&checkpoint.id);
        committed.map(|checkpoint| checkpoint.id).map_err(|e| at_end(e.to_string()))
    }

    /// `/.e2b` tells programs in the guest which template they run in.
    async fn mark(&self, guest: &Guest<'_>) -> Result<(), String> {
        const SCRIPT: &str = r#"printf 'ENV_ID=%s\nTEMPLATE_ID=%s\nBUILD_ID=%s\n' "$1" "$1" "$2" > /.e2b"#;
        let build = self.build.to_string();
        steps::root(guest, SCRIPT, &[self.template.as_str(), &build]).await.map_err(|e| e.to_string())
    }

    async fn wait_ready(&self, guest: &Guest<'_>, context: &Context) -> Result<(), Failure> {
        let command = match (&self.start.ready_cmd, &self.start.start_cmd) {
            (Some(command), _) => command.as_str(),
            (None, Some(_)) => DEFAULT_READY,
            (None, None) => return Ok(()),
        };
        self.info("finalize", &format!("Waiting for template to be ready: {command}"));
        let began = tokio::time::Instant::now();
        loop {
            match guest.exec(bash(context, &["-l", "-c", command])).await {
                Ok(()) => return Ok(()),
                Err(error) if began.elapsed() > READY_LIMIT => {
                    return Err(failure(
                        "finalize",
                        format!(
                            "the ready command '{command}' failed for {} s: {error}",
                            READY_LIMIT.as_secs()
                        ),
                    ));
                }
                Err(_) => tokio::time::sleep(READY_PAUSE).await,
            }
        }
    }

    fn title(&self, index: usize, step: &TemplateStep) -> String {
        format!("[builder {}/{}] {}", index + 1, self.start.steps.len(), step.title())
    }

    fn info(&self, step: &str, text: &str) {
        let shown = if step == "base" { format!("[base] {text}") } else { text.to_owned() };
        self.log.push(LogLevel::Info, Some(step), &shown);
    }

    fn show(&self, progress: &PullProgress) {
        match progress {
            PullProgress::Resolved { layers, bytes } => {
                self.info("base", &format!("{layers} layers, {} MiB", bytes >> 20));
            }
            PullProgress::Reused { index } => {
                self.info("base", &format!("layer {} is here already", index + 1))
            }
            PullProgress::InPlace { index } => {
                self.info("base", &format!("layer {} is read where it is, when it is needed", index + 1));
            }
            PullProgress::Sealed { index } => self.info("base", &format!("layer {} is applied", index + 1)),
            PullProgress::Applying { .. } => {}
        }
    }
}

fn bash<'a>(context: &'a Context, args: &'a [&'a str]) -> Exec<'a> {
    Exec { program: "/bin/bash", args, user: &context.user, cwd: &context.workdir, env: &context.env }
}

fn cached_nothing(from: &Arc<Checkpoint>, base: &Base) -> bool {
    Arc::ptr_eq(from, &base.checkpoint)
}

fn disk_key(shape: MachineShape) -> String {
    format!("disk {}", shape.disk_mib)
}

/// The end of a build whose template was deleted.
pub(super) fn cancelled() -> Failure {
    Failure { message: "the build was cancelled".to_owned(), step: None }
}

fn failure(step: &str, message: impl ToString) -> Failure {
    Failure { message: message.to_string(), step: Some(step.to_owned()) }
}
