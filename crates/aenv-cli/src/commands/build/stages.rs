//! What a build needs for its time: templates of earlier stages, and sandboxes to take files out of them.

use std::collections::HashMap;

use indicatif::ProgressBar;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::super::{files::Transfer, template};
use crate::{
    args::Machine,
    client::{Client, segment},
    envd::{Envd, Process},
    error::CliError,
    output::Format,
};

/// Seconds that a sandbox for copying lives if this program does not end it.
const SANDBOX_SECONDS: u32 = 1800;

/// Packs `$1`, a path or pattern below `/`, into `$2`. The same files make the same bytes where tar can sort.
const PACK: &str = r#"
set -euo pipefail
shopt -s dotglob
cd / && IFS=
set -- "$2" $1
archive=$1; shift
[ -e "$1" ] || [ -L "$1" ] || { echo "/$1 does not exist" >&2; exit 1; }
sort=; if tar --sort=name -cf /dev/null -T /dev/null 2>/dev/null; then sort=--sort=name; fi
tar $sort -cf - -- "$@" | gzip -n -1 > "$archive"
"#;

pub(super) struct Scratch<'a> {
    client: &'a Client,
    machine: &'a Machine,
    templates: Vec<String>,
    /// By template.
    sandboxes: HashMap<String, Value>,
    /// Templates of images that something is copied from.
    images: HashMap<String, String>,
}

impl<'a> Scratch<'a> {
    pub(super) fn new(client: &'a Client, machine: &'a Machine) -> Self {
        let (templates, sandboxes, images) = Default::default();
        Self { client, machine, templates, sandboxes, images }
    }

    /// Asks for the build of a template that goes when the whole build ends.
    pub(super) async fn template(&mut self) -> Result<Value, CliError> {
        let name = format!("aenv-stage-{}", unique());
        let build = template::begin(self.client, &name, self.machine, &Value::Null).await?;
        self.templates.push(build["templateID"].as_str().unwrap_or_default().to_owned());
        Ok(build)
    }

    /// Waits for such a build, and returns its template.
    pub(super) async fn finish(&self, build: &Value) -> Result<String, CliError> {
        template::wait(self.client, build, Format::Table).await?;
        Ok(build["templateID"].as_str().unwrap_or_default().to_owned())
    }

    /// The template of an image that something is copied from.
    pub(super) async fn image(&mut self, image: &str, force: bool) -> Result<String, CliError> {
        if let Some(template) = self.images.get(image) {
            return Ok(template.clone());
        }
        let build = self.template().await?;
        let start = match image.strip_prefix("template:") {
            Some(name) => json!({ "fromTemplate": name, "steps": [], "force": force }),
            None => json!({ "fromImage": image, "steps": [], "force": force }),
        };
        template::start_build(self.client, &build, &start).await?;
        let template = self.finish(&build).await?;
        self.images.insert(image.to_owned(), template.clone());
        Ok(template)
    }

    /// Packs what a path or pattern names in a template. Returns the archive and its hash.
    pub(super) async fn pack(
        &mut self,
        template: &str,
        source: &str,
    ) -> Result<(String, tempfile::NamedTempFile), CliError> {
        let path = source.trim_start_matches("./").trim_matches('/');
        let path = if path.is_empty() { "." } else { path };
        if path.split('/').any(|part| part == "..") {
            return Err(CliError::Usage(format!("COPY {source}: a source must not contain '..'")));
        }
        let envd = self.sandbox(template).await?;
        let inside = format!("/tmp/{}.tar.gz", unique());
        let args = ["-c", PACK, "aenv", path, &inside].map(str::to_owned);
        let process = Process { cmd: "/bin/bash", args: &args, user: Some("root"), ..Process::default() };
        envd.output(&process, &format!("COPY {source}")).await?;
        let archive = tempfile::NamedTempFile::new().map_err(CliError::io("a temporary file"))?;
        let reopen = || archive.reopen().map_err(CliError::io("a temporary file"));
        let transfer = Transfer { envd, user: Some("root".to_owned()) };
        let mut file = tokio::fs::File::from_std(reopen()?);
        transfer.get(&inside, &mut file, &ProgressBar::hidden()).await.map_err(|error| match error {
            CliError::Sandbox(message) => CliError::Sandbox(format!("COPY {source}: {message}")),
            error => error,
        })?;
        let mut hasher = Sha256::new();
        std::io::copy(&mut reopen()?, &mut hasher).map_err(CliError::io("a temporary file"))?;
        let hash = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((hash, archive))
    }

    async fn sandbox(&mut self, template: &str) -> Result<Envd, CliError> {
        if !self.sandboxes.contains_key(template) {
            let body = json!({ "templateID": template, "timeout": SANDBOX_SECONDS, "autoPause": false });
            let sandbox = self.client.post("/v2/sandboxes", &body).await?;
            self.sandboxes.insert(template.to_owned(), sandbox);
        }
        Envd::new(self.client, &self.sandboxes[template])
    }

    /// Removes everything. What cannot be removed is said, and does not fail the build.
    pub(super) async fn clean(&mut self) {
        let sandboxes = self.sandboxes.drain().map(|(_, sandbox)| {
            format!("/sandboxes/{}", segment(sandbox["sandboxID"].as_str().unwrap_or_default()))
        });
        let templates = self.templates.drain(..).rev().map(|id| format!("/templates/{}", segment(&id)));
        for path in sandboxes.chain(templates) {
            if let Err(error) = self.client.delete(&path).await {
                eprintln!("aenv: {path} stays: {error}");
            }
        }
    }
}

/// A name that no other build has.
fn unique() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}
