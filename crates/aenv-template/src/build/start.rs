//! What a build is started with.

use aenv_image::{ImageReference, RegistryAuth};
use serde::{Deserialize, Serialize};

use crate::TemplateError;

/// A build's instructions, as they are kept on disk while it runs (0600: they may hold registry credentials).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BuildStart {
    /// What it is built on.
    pub source: Source,
    /// Uses no cached step.
    pub force: bool,
    /// The steps, in order.
    pub steps: Vec<TemplateStep>,
    /// Started once before the capture, and running in it.
    pub start_cmd: Option<String>,
    /// Tried every 2 s until it exits with 0; then the capture is taken.
    pub ready_cmd: Option<String>,
}

/// What a template is built on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// An OCI image.
    Image {
        /// Its reference.
        reference: ImageReference,
        /// Credentials for its registry.
        credentials: Option<RegistryAuth>,
    },
    /// Another template.
    Template {
        /// Its reference.
        reference: String,
    },
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateStep {
    /// What it does.
    pub kind: StepKind,
    /// Its arguments; their number and meaning depend on the kind.
    pub args: Vec<String>,
    /// Hash of the uploaded files of a `COPY`.
    pub files_hash: Option<String>,
    /// Runs even if its result is cached; so does every step after it.
    pub force: bool,
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum StepKind {
    /// `[source, destination, owner or "", mode or ""]` and `files_hash`.
    Copy,
    /// `[key, value, key, value, ...]`.
    Env,
    /// `[command, user?]`.
    Run,
    /// `[name]`.
    User,
    /// `[path]`.
    Workdir,
}

impl TemplateStep {
    /// Checks the number of arguments, before anything runs.
    pub fn checked(self, number: usize) -> Result<Self, TemplateError> {
        let count = self.args.len();
        let fits = match self.kind {
            StepKind::Copy => (2..=4).contains(&count) && self.files_hash.is_some(),
            StepKind::Env => count > 0 && count.is_multiple_of(2),
            StepKind::Run => (1..=2).contains(&count),
            StepKind::User | StepKind::Workdir => count == 1,
        };
        if !fits {
            return Err(TemplateError::Invalid(format!(
                "step {number} ({}) has the wrong arguments",
                self.title()
            )));
        }
        if let Some(bad) = self.args.iter().find(|arg| arg.contains('\0')) {
            return Err(TemplateError::Invalid(format!("step {number} has a NUL character in {bad:?}")));
        }
        Ok(self)
    }

    /// How logs show it, such as `RUN apt-get update`.
    pub fn title(&self) -> String {
        let name = match self.kind {
            StepKind::Copy => "COPY",
            StepKind::Env => "ENV",
            StepKind::Run => "RUN",
            StepKind::User => "USER",
            StepKind::Workdir => "WORKDIR",
        };
        let shown = match self.kind {
            StepKind::Run => &self.args[..self.args.len().min(1)],
            StepKind::Copy => &self.args[..self.args.len().min(2)],
            _ => &self.args[..],
        };
        format!("{name} {}", shown.join(" "))
    }
}

impl std::str::FromStr for StepKind {
    type Err = TemplateError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_uppercase().as_str() {
            "COPY" | "ADD" => Ok(Self::Copy),
            "ENV" | "ARG" => Ok(Self::Env),
            "RUN" => Ok(Self::Run),
            "USER" => Ok(Self::User),
            "WORKDIR" => Ok(Self::Workdir),
            _ => Err(TemplateError::Invalid(format!(
                "step type '{}' is unknown: use COPY, ENV, RUN, USER or WORKDIR",
                text.chars().take(40).collect::<String>()
            ))),
        }
    }
}
