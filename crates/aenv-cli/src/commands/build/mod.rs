//! `build`: a Dockerfile becomes a template.
//!
//! Each further stage that the target needs becomes a template of its own, for the time of the build. What a later stage copies
//! from it is packed in a sandbox of that template, and travels like the files of the build's own folder.

mod context;
mod stages;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use http::Method;
use serde_json::{Value, json};

use self::{context::Ignore, stages::Scratch};
use super::{
    dockerfile::{self, Dockerfile, From, Origin, Step},
    pairs, template,
};
use crate::{
    Outcome,
    args::Build,
    client::{Client, segment},
    error::CliError,
    output::Format,
};

pub(super) async fn run(args: Build, format: Format) -> Outcome {
    let file = if args.path.is_dir() { args.path.join("Dockerfile") } else { args.path.clone() };
    let text = std::fs::read_to_string(&file).map_err(CliError::io(file.display().to_string()))?;
    let context = args.context.clone().or_else(|| file.parent().map(Path::to_owned)).unwrap_or_default();
    let context = if context.as_os_str().is_empty() { PathBuf::from(".") } else { context };
    let parsed = dockerfile::parse(&text, &pairs(&args.build_args)?)?;
    let target = parsed.target(args.target.as_deref())?;
    let client = Client::load()?;
    let mut build = Run {
        ignore: Ignore::load(&context)?,
        scratch: Scratch::new(&client, &args.machine),
        client: &client,
        file: &parsed,
        context,
        args: &args,
        built: HashMap::new(),
    };
    let outcome = tokio::select! {
        outcome = build.execute(target, format) => outcome,
        _ = tokio::signal::ctrl_c() => Err(CliError::Sandbox("the build was interrupted".to_owned())),
    };
    build.scratch.clean().await;
    outcome
}

struct Run<'a> {
    client: &'a Client,
    file: &'a Dockerfile,
    args: &'a Build,
    context: PathBuf,
    ignore: Ignore,
    scratch: Scratch<'a>,
    /// The templates of earlier stages.
    built: HashMap<usize, String>,
}

impl Run<'_> {
    async fn execute(&mut self, target: usize, format: Format) -> Outcome {
        let needed = self.file.needed(target);
        for stage in needed.iter().copied().filter(|stage| *stage != target) {
            let name = self.file.stages[stage].name.clone().unwrap_or_else(|| stage.to_string());
            eprintln!("[stage {name}]");
            let build = self.scratch.template().await?;
            let start = self.request(stage, &build).await?;
            template::start_build(self.client, &build, &start).await?;
            let template = self.scratch.finish(&build).await?;
            self.built.insert(stage, template);
        }
        if needed.len() > 1 {
            eprintln!("[stage {}]", self.file.stages[target].name.as_deref().unwrap_or(&self.args.name));
        }
        let build = template::begin(self.client, &self.args.name, &self.args.machine, &Value::Null).await?;
        let mut start = self.request(target, &build).await?;
        start["steps"].as_array_mut().expect("request made a list").extend(self.last_steps(target));
        start["startCmd"] = json!(self.args.start_cmd);
        start["readyCmd"] = json!(self.args.ready_cmd);
        template::start_build(self.client, &build, &start).await?;
        template::follow(self.client, &build, format).await
    }

    /// The start request of a stage, with everything uploaded that it copies.
    ///
    /// A Dockerfile's commands run as root in `/` until it says otherwise, unlike a template's steps.
    async fn request(&mut self, stage: usize, build: &Value) -> Result<Value, CliError> {
        let file = self.file;
        let mut steps = Vec::new();
        if matches!(file.stages[stage].from, From::Image(_)) {
            steps.push(Step::User("root".to_owned()).body(None));
            steps.push(Step::Workdir("/".to_owned()).body(None));
        }
        for step in &file.stages[stage].steps {
            let hash = match step {
                Step::Copy { origin, source, .. } => Some(self.upload(build, origin, source).await?),
                _ => None,
            };
            steps.push(step.body(hash.as_deref()));
        }
        let mut start = json!({ "steps": steps, "force": self.args.force });
        match &file.stages[stage].from {
            From::Image(image) => start["fromImage"] = json!(image),
            From::Template(name) => start["fromTemplate"] = json!(name),
            From::Stage(parent) => start["fromTemplate"] = json!(self.built[parent]),
        }
        Ok(start)
    }

    /// The last steps of the target: unless it names others, user and folder are those that sandboxes have.
    fn last_steps(&self, target: usize) -> Vec<Value> {
        let mut steps = Vec::new();
        if self.ancestry(target).any(|stage| matches!(self.file.stages[stage].from, From::Template(_))) {
            return steps;
        }
        if !self.says(target, |step| matches!(step, Step::User(_))) {
            steps.push(Step::User("user".to_owned()).body(None));
        }
        if !self.says(target, |step| matches!(step, Step::Workdir(_))) {
            steps.push(Step::Workdir("/home/user".to_owned()).body(None));
        }
        steps
    }

    /// The stages that this one is built on, itself first.
    fn ancestry(&self, stage: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(stage), |stage| match self.file.stages[*stage].from {
            From::Stage(parent) => Some(parent),
            _ => None,
        })
    }

    fn says(&self, stage: usize, what: fn(&Step) -> bool) -> bool {
        self.ancestry(stage).any(|stage| self.file.stages[stage].steps.iter().any(what))
    }

    /// Packs what a COPY names, and uploads it unless the server has it. Returns its hash.
    async fn upload(&mut self, build: &Value, origin: &Origin, source: &str) -> Result<String, CliError> {
        let (hash, archive) = match origin {
            Origin::Context => {
                let files = context::collect(&self.context, source, &self.ignore)?;
                if files.is_empty() {
                    let place = self.context.display();
                    return Err(CliError::Usage(format!("COPY {source}: nothing in {place} fits")));
                }
                context::pack(&self.context, &files)?
            }
            Origin::Text(text) => {
                let folder = tempfile::tempdir().map_err(CliError::io("a temporary folder"))?;
                let file = folder.path().join(source);
                std::fs::write(&file, text).map_err(CliError::io("a temporary file"))?;
                context::pack(folder.path(), &[PathBuf::from(source)])?
            }
            Origin::Stage(stage) => {
                let template = self.built[stage].clone();
                self.scratch.pack(&template, source).await?
            }
            Origin::Image(image) => {
                let template = self.scratch.image(image, self.args.force).await?;
                self.scratch.pack(&template, source).await?
            }
        };
        let template = segment(build["templateID"].as_str().unwrap_or_default());
        let answer = self.client.get(&format!("/templates/{template}/files/{hash}")).await?;
        if answer["present"] == true {
            return Ok(hash);
        }
        let url = answer["url"].as_str();
        let url = url.ok_or_else(|| CliError::Sandbox("the server names no upload URL".to_owned()))?;
        let size = archive.as_file().metadata().map_err(CliError::io("the archive"))?.len();
        let file = tokio::fs::File::open(archive.path()).await.map_err(CliError::io("the archive"))?;
        let stream = tokio_util::io::ReaderStream::with_capacity(file, 256 << 10);
        let request = self.client.http().request(Method::PUT, url).header("Content-Length", size);
        self.client.send(request.body(reqwest::Body::wrap_stream(stream))).await?;
        Ok(hash)
    }
}
