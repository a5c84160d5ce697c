//! What a suite works with: a server, the operations that are measured, and a list of everything that was made, until it
//! is removed.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt, stream};
use http::Method;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use crate::{
    client::{Client, segment},
    commands::{child, sandbox_path},
    envd::{Envd, Process},
    error::CliError,
    output,
};

/// Seconds until the server removes a sandbox of a bench that could not do so itself.
const LIFE_SECS: u32 = 3600;
/// How long any one call may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Memory that is random; what is changed beyond it is copies of it, because an emulated guest makes random bytes slowly.
const RANDOM_MIB: u32 = 16;
/// Deletions at once.
const DELETIONS: usize = 8;

/// One run of a suite.
pub(super) struct Run {
    client: Client,
    template: String,
    floors: Value,
    spinner: ProgressBar,
    /// Paths to delete.
    made: Arc<Mutex<BTreeSet<String>>>,
    making: TaskTracker,
}

/// A sandbox of the run.
pub(super) struct Sandbox {
    pub(super) id: String,
    envd: Envd,
}

impl Run {
    pub(super) fn new(client: Client, template: &str, floors: Value, spinner: ProgressBar) -> Self {
        let template = template.to_owned();
        Self { client, template, floors, spinner, made: Arc::default(), making: TaskTracker::new() }
    }

    /// The template that is measured.
    pub(super) fn template(&self) -> &str {
        &self.template
    }

    /// What the bare engine takes; null where that is not known.
    pub(super) fn floors(&self) -> &Value {
        &self.floors
    }

    /// A remark.
    fn tell(&self, text: &str) {
        self.spinner.suspend(|| eprintln!("aenv: {}", output::plain(text)));
    }

    /// What is done now, for who watches.
    pub(super) fn say(&self, text: String) {
        self.spinner.set_message(text);
    }

    /// A sandbox from a template or snapshot.
    pub(super) async fn create(&self, template: &str) -> Result<Sandbox, CliError> {
        let body = json!({
            "templateID": template, "timeout": LIFE_SECS, "autoPause": false, "metadata": { "aenv": "bench" },
        });
        self.sandbox(&self.make("/v2/sandboxes".to_owned(), body).await?)
    }

    /// The same, until it has answered its first command.
    pub(super) async fn ready(&self, template: &str) -> Result<Sandbox, CliError> {
        let sandbox = self.create(template).await?;
        self.command(&sandbox).await?;
        Ok(sandbox)
    }

    /// Forks; one entry for each child.
    pub(super) async fn fork(
        &self,
        sandbox: &Sandbox,
        count: u32,
    ) -> Result<Vec<Result<Sandbox, CliError>>, CliError> {
        let body = json!({ "count": count, "timeout": LIFE_SECS });
        let results = self.make(sandbox_path(&sandbox.id, "/fork"), body).await?;
        let results = results.as_array().into_iter().flatten();
        Ok(results.map(|result| child(result).and_then(|child| self.sandbox(child))).collect())
    }

    /// A snapshot; its id.
    pub(super) async fn snapshot(&self, sandbox: &Sandbox) -> Result<String, CliError> {
        let made = self.make(sandbox_path(&sandbox.id, "/snapshots"), json!({})).await?;
        let id = made["snapshotID"].as_str();
        id.map(str::to_owned).ok_or_else(|| CliError::Sandbox("the answer names no snapshot".to_owned()))
    }

    pub(super) async fn pause(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        bounded(self.client.post(&sandbox_path(&sandbox.id, "/pause"), &json!({}))).await.map(drop)
    }

    /// Resumes a sandbox, until it has answered a command.
    pub(super) async fn resume(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        let connect = format!("/v2{}", sandbox_path(&sandbox.id, "/connect"));
        let resumed = bounded(self.client.post(&connect, &json!({ "timeout": LIFE_SECS }))).await?;
        self.command(&self.sandbox(&resumed)?).await
    }

    /// The shortest command, as the SDKs run it: in a login shell.
    pub(super) async fn command(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        bounded(sandbox.envd.shell("true")).await.map(drop)
    }

    /// The shortest command, without a shell.
    pub(super) async fn process(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        let process = Process { cmd: "/bin/true", ..Process::default() };
        bounded(sandbox.envd.output(&process, "`true`")).await.map(drop)
    }

    /// One request to envd that starts nothing.
    pub(super) async fn health(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        bounded(sandbox.envd.send(sandbox.envd.request(Method::GET, "/health", None))).await.map(drop)
    }

    /// Changes so much memory of the guest, in a file of that name.
    pub(super) async fn change_memory(
        &self,
        sandbox: &Sandbox,
        file: &str,
        mib: u32,
    ) -> Result<(), CliError> {
        let random = (1..=RANDOM_MIB).rev().find(|part| mib.is_multiple_of(*part)).unwrap_or(1);
        let copies = mib / random;
        let line = format!(
            "cd /dev/shm && head -c {random}M /dev/urandom > {file} && \
             for i in $(seq 2 {copies}); do head -c {random}M {file} >> {file} || exit; done"
        );
        bounded(sandbox.envd.shell(&line)).await.map(drop)
    }

    /// MiB of memory that the guest can still give to files; its memory file system may take all of it afterwards.
    pub(super) async fn available_memory(&self, sandbox: &Sandbox) -> Result<u32, CliError> {
        let line = "mount -o remount,size=100% /dev/shm && grep MemAvailable /proc/meminfo".to_owned();
        let args = ["-c".to_owned(), line];
        let process = Process { cmd: "/bin/sh", args: &args, user: Some("root"), ..Process::default() };
        let said = bounded(sandbox.envd.output(&process, "asking for the guest's memory")).await?;
        let kib = said.split_whitespace().nth(1).and_then(|kib| kib.parse::<u32>().ok());
        kib.map(|kib| kib / 1024)
            .ok_or_else(|| CliError::Sandbox("the guest does not know its memory".to_owned()))
    }

    /// Removes a sandbox.
    pub(super) async fn kill(&self, sandbox: &Sandbox) -> Result<(), CliError> {
        self.delete(&sandbox_path(&sandbox.id, "")).await
    }

    /// Removes what is not needed any more. What cannot be removed now is tried again, and told, at the end.
    pub(super) async fn discard(&self, sandboxes: &[Sandbox], snapshots: &[String]) {
        let sandboxes = sandboxes.iter().map(|sandbox| sandbox_path(&sandbox.id, ""));
        let paths = sandboxes.chain(snapshots.iter().map(|id| snapshot_path(id)));
        self.delete_all(paths.collect()).await;
    }

    /// Removes all that is left of the run; how much could not be removed.
    pub(super) async fn close(&self) -> usize {
        self.say("removing what was made".to_owned());
        self.making.close();
        let unanswered = tokio::time::timeout(LIMIT, self.making.wait()).await.is_err();
        let paths = self.made().iter().cloned().collect();
        let refused = self.delete_all(paths).await;
        for (path, error) in &refused {
            self.tell(&format!("{path} could not be deleted: {error}"));
        }
        if unanswered {
            self.tell("requests have no answer yet; `aenv delete --metadata aenv=bench` removes what may come of them");
        }
        self.spinner.finish_and_clear();
        refused.len() + usize::from(unanswered)
    }

    /// Sends a request that makes something. It goes on when nobody waits for it any more, so that what it makes is known.
    async fn make(&self, path: String, body: Value) -> Result<Value, CliError> {
        let (client, made) = (self.client.clone(), Arc::clone(&self.made));
        let answer = self.making.spawn(async move {
            let answer = client.post(&path, &body).await?;
            lock(&made).extend(paths_of(&answer));
            Ok::<_, CliError>(answer)
        });
        let answer = async { answer.await.map_err(|error| CliError::Sandbox(error.to_string()))? };
        bounded(answer).await
    }

    async fn delete(&self, path: &str) -> Result<(), CliError> {
        match bounded(self.client.delete(path)).await {
            Ok(()) | Err(CliError::Api { status: 404, .. }) => {
                self.made().remove(path);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn delete_all(&self, paths: Vec<String>) -> Vec<(String, CliError)> {
        let deletions = stream::iter(paths).map(|path| async move {
            let deleted = self.delete(&path).await;
            deleted.err().map(|error| (path, error))
        });
        deletions.buffered(DELETIONS).filter_map(std::future::ready).collect().await
    }

    fn sandbox(&self, answer: &Value) -> Result<Sandbox, CliError> {
        let envd = Envd::new(&self.client, answer)?;
        Ok(Sandbox { id: answer["sandboxID"].as_str().unwrap_or_default().to_owned(), envd })
    }

    fn made(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.made)
    }
}

/// The result, or an error when it does not come in time.
pub(super) async fn bounded<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::time::timeout(LIMIT, work).await.unwrap_or(Err(CliError::NoAnswer(LIMIT)))
}

fn lock(made: &Mutex<BTreeSet<String>>) -> MutexGuard<'_, BTreeSet<String>> {
    made.lock().unwrap_or_else(PoisonError::into_inner)
}

fn snapshot_path(id: &str) -> String {
    format!("/templates/{}", segment(id))
}

/// What an answer says was made: a snapshot, a sandbox or the children of a fork.
fn paths_of(answer: &Value) -> Vec<String> {
    if let Some(id) = answer["snapshotID"].as_str() {
        return vec![snapshot_path(id)];
    }
    let children = answer.as_array().into_iter().flatten().map(|result| &result["sandbox"]);
    let ids = children.chain([answer]).filter_map(|sandbox| sandbox["sandboxID"].as_str());
    ids.map(|id| sandbox_path(id, "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_made_is_known() {
        assert_eq!(paths_of(&json!({ "snapshotID": "s/1", "sandboxID": "i1" })), ["/templates/s%2F1"]);
        assert_eq!(paths_of(&json!({ "sandboxID": "i1" })), ["/sandboxes/i1"]);
        let forked = json!([{ "sandbox": { "sandboxID": "i2" } }, { "error": { "code": 429 } }]);
        assert_eq!(paths_of(&forked), ["/sandboxes/i2"]);
        assert!(paths_of(&Value::Null).is_empty());
    }
}
