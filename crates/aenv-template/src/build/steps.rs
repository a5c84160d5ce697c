//! The steps of a build, and the context that they change.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    guest::{Exec, Guest, GuestError},
    start::{StepKind, TemplateStep, exposed},
};

/// What the next step starts with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Context {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) user: String,
    /// Empty: the user's home.
    pub(crate) workdir: String,
    /// Ports such as `8080/tcp`.
    #[serde(default)]
    pub(crate) exposed: BTreeSet<String>,
}

/// The folders that programs of every distribution are in; appended to a PATH that lacks them.
const STANDARD_PATH: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

impl Context {
    /// Replaces `$NAME` and `${NAME}`; `\$` is a dollar sign. Unknown names are empty. No commands are run.
    pub(crate) fn expand(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(['$', '\\']) {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix("\\$") {
                out.push('$');
                rest = after;
                continue;
            }
            let (name, after) = match rest.strip_prefix("${").and_then(|r| r.split_once('}')) {
                Some((name, after)) => (name, after),
                None => {
                    let body = &rest[1..];
                    let end =
                        body.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(body.len());
                    body.split_at(end)
                }
            };
            if rest.starts_with('\\') || name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
                out.push_str(&rest[..1]);
                rest = &rest[1..];
            } else {
                out.push_str(self.env.get(name).map_or("", String::as_str));
                rest = after;
            }
        }
        out.push_str(rest);
        out
    }

    fn set_env(&mut self, pairs: &[String]) {
        for pair in pairs.chunks_exact(2) {
            let mut value = self.expand(&pair[1]);
            if pair[0] == "PATH" {
                let has = |dir: &&str| value.split(':').any(|own| own == *dir);
                let lacking: Vec<&str> = STANDARD_PATH.into_iter().filter(|dir| !has(dir)).collect();
                for dir in lacking {
                    value.push(':');
                    value.push_str(dir);
                }
            }
            self.env.insert(pair[0].clone(), value);
        }
    }
}

/// Makes a folder and gives it, and every parent that had to be made, to the user.
const MAKE_WORKDIR: &str = r#"
set -eu
dir=$1 owner=$2 top=
path=$dir
while [ ! -e "$path" ] && [ "$path" != / ]; do top=$path; path=$(dirname -- "$path"); done
mkdir -p -- "$dir"
if [ -n "$top" ]; then chown -R -h -- "$owner" "$top"; fi
"#;

/// Makes a user that does not exist.
const MAKE_USER: &str = r#"
set -eu
name=$1
if id -- "$name" >/dev/null 2>&1; then exit 0; fi
if command -v useradd >/dev/null 2>&1; then useradd --create-home --shell /bin/bash -- "$name"
else adduser -D -s /bin/bash -- "$name"; fi
"#;

/// Runs one step. `on_line` gets what it prints.
pub(crate) async fn run_step(
    guest: &Guest<'_>,
    context: &mut Context,
    step: &TemplateStep,
    upload: Option<&std::path::Path>,
) -> Result<(), String> {
    match step.kind {
        StepKind::Env => context.set_env(&step.args),
        StepKind::Expose => context.exposed.extend(step.args.iter().filter_map(|arg| exposed(arg))),
        StepKind::User => {
            let name = context.expand(&step.args[0]);
            root(guest, MAKE_USER, &[&name])
                .await
                .map_err(|e| format!("failed to set user '{name}': {e}"))?;
            context.user = name;
        }
        StepKind::Workdir => {
            let given = context.expand(&step.args[0]);
            let path =
                guest.absolute(&given, &context.workdir, &context.user).await.map_err(|e| e.to_string())?;
            let failed = |e| format!("failed to set workdir '{given}': {e}");
            root(guest, MAKE_WORKDIR, &[&path, &context.user]).await.map_err(failed)?;
            context.workdir = path;
        }
        StepKind::Run => {
            let command = &step.args[0];
            let user = step.args.get(1).filter(|user| !user.is_empty()).unwrap_or(&context.user);
            let exec = Exec {
                program: "/bin/bash",
                args: &["-l", "-c", command],
                user,
                cwd: &context.workdir,
                env: &context.env,
            };
            guest.exec(exec).await.map_err(|e| format!("failed to run command '{command}': {e}"))?;
        }
        StepKind::Copy => {
            let archive = upload.ok_or("the files of this step were not uploaded")?;
            super::copy::run(guest, context, &step.args, archive)
                .await
                .map_err(|e| format!("failed to copy '{}' to '{}': {e}", step.args[0], step.args[1]))?;
        }
    }
    Ok(())
}

/// Runs one of our own scripts as root; outside data comes as arguments, never as text of the script.
pub(crate) async fn root(guest: &Guest<'_>, script: &str, args: &[&str]) -> Result<(), GuestError> {
    let mut all = vec!["-c", script, "aenv"];
    all.extend(args);
    guest.exec(Exec { program: "/bin/sh", args: &all, user: "root", cwd: "/", env: &BTreeMap::new() }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        let env = [("A".to_owned(), "1".to_owned()), ("LONG_NAME".to_owned(), "two".to_owned())];
        Context { env: env.into(), user: "user".to_owned(), workdir: String::new(), exposed: BTreeSet::new() }
    }

    #[test]
    fn variables_are_expanded_and_commands_are_not() {
        let context = context();
        assert_eq!(context.expand("$A-${LONG_NAME}-$B-$"), "1-two--$");
        assert_eq!(context.expand("\\$A $(id) `id` \\n $1"), "$A $(id) `id` \\n $1");
        assert_eq!(context.expand("${A"), "${A");
    }

    #[test]
    fn path_keeps_the_standard_folders() {
        let mut context = context();
        context.set_env(&["PATH".to_owned(), "/opt/bin:/usr/bin".to_owned()]);
        assert_eq!(
            context.env["PATH"],
            "/opt/bin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin:/bin"
        );
    }
}
