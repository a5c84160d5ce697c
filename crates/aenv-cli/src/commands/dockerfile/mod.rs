//! Dockerfiles as lists of build steps.

mod copy;
mod lines;
#[cfg(test)]
mod tests;
mod words;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use self::{
    lines::{Heredoc, Line},
    words::{Variables, quote, shell_words},
};
use crate::error::CliError;

/// What a Dockerfile asks for: its stages, in order.
#[derive(Debug, PartialEq)]
pub(super) struct Dockerfile {
    pub(super) stages: Vec<Stage>,
}

/// From one `FROM` to the next.
#[derive(Debug, PartialEq)]
pub(super) struct Stage {
    /// `AS`.
    pub(super) name: Option<String>,
    pub(super) from: From,
    /// The steps, in order.
    pub(super) steps: Vec<Step>,
}

/// What a stage begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum From {
    /// An OCI image.
    Image(String),
    /// `template:NAME`.
    Template(String),
    /// An earlier stage, by its number.
    Stage(usize),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// `RUN`.
    Run(String),
    /// `COPY` of each source, in the order of the file.
    Copy { origin: Origin, source: String, destination: String, owner: String, mode: String },
    /// `ENV`.
    Env(Vec<(String, String)>),
    /// `WORKDIR`.
    Workdir(String),
    /// `USER`.
    User(String),
}

/// Where a `COPY` takes its files from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    /// The build's folder.
    Context,
    /// An earlier stage, by its number.
    Stage(usize),
    /// An image.
    Image(String),
    /// The Dockerfile itself: the text of a heredoc.
    Text(String),
}

impl Step {
    /// The step as the API takes it; `COPY` gets its hash from the caller.
    pub(super) fn body(&self, files_hash: Option<&str>) -> Value {
        match self {
            Self::Run(command) => json!({ "type": "RUN", "args": [command] }),
            Self::Copy { source, destination, owner, mode, .. } => {
                json!({ "type": "COPY", "args": [source, destination, owner, mode], "filesHash": files_hash })
            }
            Self::Env(pairs) => {
                let args: Vec<&String> = pairs.iter().flat_map(|(key, value)| [key, value]).collect();
                json!({ "type": "ENV", "args": args })
            }
            Self::Workdir(path) => json!({ "type": "WORKDIR", "args": [path] }),
            Self::User(name) => json!({ "type": "USER", "args": [name] }),
        }
    }
}

impl Dockerfile {
    /// The stage of this name or number, among those before `limit`.
    fn find(&self, name: &str, limit: usize) -> Option<usize> {
        let named = |stage: &Stage| stage.name.as_deref().is_some_and(|own| own.eq_ignore_ascii_case(name));
        let stages = &self.stages[..limit];
        stages.iter().rposition(named).or_else(|| name.parse().ok().filter(|number| *number < limit))
    }

    /// The stage that is to become the template: the one that was asked for, or the last.
    pub(super) fn target(&self, asked: Option<&str>) -> Result<usize, CliError> {
        let Some(name) = asked else { return Ok(self.stages.len() - 1) };
        let found = self.find(name, self.stages.len());
        found.ok_or_else(|| CliError::Usage(format!("the Dockerfile has no stage {name:?}")))
    }

    /// The stages that the target needs, and itself, in order.
    pub(super) fn needed(&self, target: usize) -> Vec<usize> {
        let mut needed = vec![false; self.stages.len()];
        needed[target] = true;
        for number in (0..=target).rev().filter(|number| *number < self.stages.len()) {
            if !needed[number] {
                continue;
            }
            if let From::Stage(parent) = self.stages[number].from {
                needed[parent] = true;
            }
            for step in &self.stages[number].steps {
                if let Step::Copy { origin: Origin::Stage(source), .. } = step {
                    needed[*source] = true;
                }
            }
        }
        (0..self.stages.len()).filter(|number| needed[*number]).collect()
    }
}

/// What `docker build` sets without being asked; seen by those who declare them.
const PLATFORM: [(&str, &str); 6] = [
    ("BUILDPLATFORM", "linux/amd64"),
    ("TARGETPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("TARGETOS", "linux"),
    ("BUILDARCH", "amd64"),
    ("TARGETARCH", "amd64"),
];

/// Reads a Dockerfile. What is not supported is refused with the line that has it.
pub(super) fn parse(text: &str, build_args: &BTreeMap<String, String>) -> Result<Dockerfile, CliError> {
    let mut reader = Reader {
        build_args,
        global: Variables::default(),
        file: Dockerfile { stages: Vec::new() },
        variables: Vec::new(),
        shell: None,
    };
    for (name, value) in PLATFORM {
        reader.global.set(name, value);
    }
    for line in lines::read(text)? {
        let number = line.number;
        reader
            .instruction(line)
            .map_err(|what| CliError::Usage(format!("Dockerfile line {number}: {what}")))?;
    }
    if reader.file.stages.is_empty() {
        return Err(CliError::Usage("the Dockerfile has no FROM".to_owned()));
    }
    Ok(reader.file)
}

struct Reader<'a> {
    build_args: &'a BTreeMap<String, String>,
    /// Set before the first FROM: seen by FROM, and by stages that declare them again.
    global: Variables,
    file: Dockerfile,
    /// Of each stage.
    variables: Vec<Variables>,
    /// `SHELL` of the present stage.
    shell: Option<Vec<String>>,
}

impl Reader<'_> {
    fn instruction(&mut self, line: Line) -> Result<(), String> {
        let (instruction, rest) = line.text.split_once(char::is_whitespace).unwrap_or((&line.text, ""));
        let rest = rest.trim();
        let instruction = instruction.to_ascii_uppercase();
        match instruction.as_str() {
            "FROM" => return self.from(rest),
            "ARG" => return self.arg(rest),
            _ if self.file.stages.is_empty() => {
                return Err("the first instruction must be FROM (or ARG)".to_owned());
            }
            _ => {}
        }
        let number = self.file.stages.len() - 1;
        let steps = match instruction.as_str() {
            "RUN" => {
                let command = run_command(rest, &line.heredocs).ok_or("RUN needs a command")?;
                vec![Step::Run(in_shell(self.shell.as_deref(), command))]
            }
            "ENV" => {
                let pairs = env_pairs(rest).ok_or("ENV needs KEY=VALUE")?;
                let before = self.variables[number].clone();
                let pairs: Vec<_> =
                    pairs.into_iter().map(|(key, value)| (key, before.replace_known(&value))).collect();
                for (key, value) in &pairs {
                    self.variables[number].set(key, value);
                }
                vec![Step::Env(pairs)]
            }
            "WORKDIR" => {
                vec![Step::Workdir(self.variables[number].replace_known(&shell_words(rest).join(" ")))]
            }
            "USER" => {
                let user = self.variables[number].replace_known(rest);
                vec![Step::User(user.split(':').next().unwrap_or_default().to_owned())]
            }
            "COPY" | "ADD" => {
                let stage_of = |name: &str| self.file.find(name, number);
                copy::steps(&instruction, rest, &line.heredocs, &self.variables[number], &stage_of)?
            }
            "SHELL" => {
                let words: Option<Vec<String>> = serde_json::from_str(rest).ok();
                self.shell = Some(words.filter(|words| !words.is_empty()).ok_or("SHELL needs a list")?);
                Vec::new()
            }
            // They say how a container is run, not what is in the image.
            "CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL" | "VOLUME" | "STOPSIGNAL" | "HEALTHCHECK"
            | "MAINTAINER" => Vec::new(),
            "ONBUILD" => return Err("ONBUILD is not supported".to_owned()),
            _ => return Err(format!("unknown instruction {instruction:?}")),
        };
        self.file.stages[number].steps.extend(steps);
        Ok(())
    }

    fn from(&mut self, rest: &str) -> Result<(), String> {
        let words: Vec<&str> = rest.split_whitespace().filter(|word| !word.starts_with("--")).collect();
        let (image, name) = match words[..] {
            [image] => (image, None),
            [image, word, name] if word.eq_ignore_ascii_case("as") => (image, Some(name.to_owned())),
            _ => return Err("FROM needs an image, and may have AS NAME".to_owned()),
        };
        let image = self.global.replace_all(image);
        let number = self.file.stages.len();
        let (from, variables) = if let Some(parent) = self.file.find(&image, number) {
            (From::Stage(parent), self.variables[parent].clone())
        } else if image == "scratch" {
            return Err("an empty image cannot be booted; begin with one that has a shell".to_owned());
        } else if let Some(template) = image.strip_prefix("template:") {
            (From::Template(template.to_owned()), Variables::default())
        } else if image.is_empty() {
            return Err("FROM needs an image".to_owned());
        } else {
            (From::Image(image), Variables::default())
        };
        self.file.stages.push(Stage { name, from, steps: Vec::new() });
        self.variables.push(variables);
        self.shell = None;
        Ok(())
    }

    fn arg(&mut self, rest: &str) -> Result<(), String> {
        if rest.is_empty() {
            return Err("ARG needs a name".to_owned());
        }
        for word in shell_words(rest) {
            let (name, default) = word.split_once('=').map_or((&*word, None), |(n, d)| (n, Some(d)));
            let scope = self.variables.last().unwrap_or(&self.global);
            let default = default.map(|text| scope.replace_known(text));
            let inherited = self.global.get(name).cloned().filter(|_| !self.variables.is_empty());
            let Some(value) = self.build_args.get(name).cloned().or(default).or(inherited) else { continue };
            let Some(stage) = self.file.stages.last_mut() else {
                self.global.set(name, &value);
                continue;
            };
            // Seen by later RUN steps, as in docker; it stays in the template's environment, which is said in the docs.
            if let Some(variables) = self.variables.last_mut() {
                variables.set(name, &value);
            }
            stage.steps.push(Step::Env(vec![(name.to_owned(), value)]));
        }
        Ok(())
    }
}

/// `RUN a b`, `RUN ["a", "b"]`, `RUN cat <<EOF > file` and `RUN <<EOF`, whose text is the command or, with `#!`, a program.
fn run_command(rest: &str, heredocs: &[Heredoc]) -> Option<String> {
    let mut rest = rest;
    while rest.starts_with("--") {
        rest = rest.split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim_start());
    }
    if rest.is_empty() {
        return None;
    }
    if let Ok(words) = serde_json::from_str::<Vec<String>>(rest) {
        return Some(words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" "));
    }
    let alone = rest.starts_with("<<") && !rest.contains(char::is_whitespace);
    if let ([heredoc], true) = (heredocs, alone) {
        if !heredoc.body.starts_with("#!") {
            return Some(heredoc.body.trim_end_matches('\n').to_owned());
        }
        let (marker, body) = (&heredoc.marker, &heredoc.body);
        return Some(format!(
            "f=$(mktemp) && cat >\"$f\" <<'{marker}'\n{body}{marker}\nchmod 700 \"$f\" && \"$f\"; s=$?; rm -f \"$f\"; exit $s"
        ));
    }
    let mut command = rest.to_owned();
    for heredoc in heredocs {
        command.push('\n');
        command.push_str(&heredoc.body);
        command.push_str(&heredoc.marker);
    }
    Some(command)
}

/// The command as an argument of the Dockerfile's own shell.
fn in_shell(shell: Option<&[String]>, command: String) -> String {
    let Some(shell) = shell else { return command };
    let words: Vec<String> = shell.iter().chain([&command]).map(|word| quote(word)).collect();
    words.join(" ")
}

fn env_pairs(rest: &str) -> Option<Vec<(String, String)>> {
    let first = rest.split_whitespace().next()?;
    if !first.contains('=') {
        let (key, value) = rest.split_once(char::is_whitespace)?;
        return Some(vec![(key.to_owned(), value.trim().to_owned())]);
    }
    let pair = |word: String| word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    shell_words(rest).into_iter().map(pair).collect()
}
