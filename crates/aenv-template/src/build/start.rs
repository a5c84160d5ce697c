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

impl BuildStart {
    /// How many of the first steps may come from the cache.
    pub(crate) fn cacheable(&self) -> usize {
        if self.force {
            return 0;
        }
        self.steps.iter().position(|step| step.force).unwrap_or(self.steps.len())
    }
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
    /// `[port, ...]`, such as `8080` or `53/udp`. Noted only: every port of a sandbox can be reached.
    Expose,
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
            StepKind::Expose => count > 0 && self.args.iter().all(|arg| exposed(arg).is_some()),
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
            StepKind::Expose => "EXPOSE",
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

/// A port as an image's config names it: with its protocol.
pub(crate) fn exposed(text: &str) -> Option<String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let fits = port.parse::<u16>().is_ok_and(|port| port > 0) && matches!(protocol, "tcp" | "udp");
    fits.then(|| format!("{port}/{protocol}"))
}

impl std::str::FromStr for StepKind {
    type Err = TemplateError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_uppercase().as_str() {
            "COPY" | "ADD" => Ok(Self::Copy),
            "ENV" | "ARG" => Ok(Self::Env),
            "EXPOSE" => Ok(Self::Expose),
            "RUN" => Ok(Self::Run),
            "USER" => Ok(Self::User),
            "WORKDIR" => Ok(Self::Workdir),
            _ => Err(TemplateError::Invalid(format!(
                "step type '{}' is unknown: use COPY, ENV, EXPOSE, RUN, USER or WORKDIR",
                text.chars().take(40).collect::<String>()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use aenv_image::AwsKey;

    use super::*;

    fn start(force: bool, steps: &[bool]) -> BuildStart {
        let step = |force: &bool| TemplateStep {
            kind: StepKind::Run,
            args: vec!["true".to_owned()],
            files_hash: None,
            force: *force,
        };
        let source = Source::Template { reference: "base".to_owned() };
        BuildStart {
            source,
            force,
            steps: steps.iter().map(step).collect(),
            start_cmd: None,
            ready_cmd: None,
        }
    }

    #[test]
    fn a_forced_step_is_built_and_all_after_it() {
        assert_eq!(start(false, &[false, false]).cacheable(), 2);
        assert_eq!(start(false, &[false, true, false]).cacheable(), 1);
        assert_eq!(start(false, &[true, false]).cacheable(), 0);
        assert_eq!(start(true, &[false, false]).cacheable(), 0);
    }

    #[test]
    fn ports_are_named_with_their_protocol() {
        assert_eq!(exposed("8080").as_deref(), Some("8080/tcp"));
        assert_eq!(exposed("53/udp").as_deref(), Some("53/udp"));
        for wrong in ["", "0", "70000", "80/", "80/x", "a", "1-9"] {
            assert_eq!(exposed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn requests_of_earlier_servers_are_read() {
        let text = r#"{"username":"u","password":"p"}"#;
        let read: RegistryAuth = serde_json::from_str(text).unwrap();
        assert!(matches!(&read, RegistryAuth::Password { username, .. } if username == "u"));
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        let key = AwsKey::new("AKIA".to_owned(), "hush".to_owned(), "eu-central-1".to_owned()).unwrap();
        let written = serde_json::to_string(&RegistryAuth::Aws(key.clone())).unwrap();
        let read: RegistryAuth = serde_json::from_str(&written).unwrap();
        assert!(matches!(read, RegistryAuth::Aws(read) if read == key));
    }
}
