//! Registry credentials as Docker stores them: `config.json`, and the helper programs that it names.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use base64::Engine as _;
use serde::Deserialize;
use tokio::{io::AsyncWriteExt, process::Command};

use crate::registry::Credentials;

/// The longest that a credential helper may take.
const HELPER_BOUND: Duration = Duration::from_secs(20);

/// The parts of Docker's `config.json` that concern credentials.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DockerConfig {
    auths: HashMap<String, Stored>,
    creds_store: Option<String>,
    cred_helpers: HashMap<String, String>,
}

/// An element of `auths`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Stored {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

/// What a helper answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

impl DockerConfig {
    /// Reads the file, or the one at Docker's own place. A missing or broken one holds no credentials.
    pub fn load(configured: Option<&Path>) -> Self {
        let Some(path) = configured.map(Path::to_owned).or_else(default_path) else {
            return Self::default();
        };
        let Ok(bytes) = fs::read(&path) else { return Self::default() };
        serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "docker's config cannot be read, no credentials are used");
            Self::default()
        })
    }

    /// Credentials for a registry host, if there are any.
    pub async fn find(&self, host: &str) -> Option<Credentials> {
        let keys = keys(host);
        let helper = keys.iter().find_map(|key| self.cred_helpers.get(key)).or(self.creds_store.as_ref());
        if let Some(helper) = helper {
            for key in &keys[..1] {
                if let Some(found) = ask_helper(helper, key).await {
                    return Some(found);
                }
            }
        }
        keys.iter().find_map(|key| self.auths.get(key)).and_then(Stored::decode)
    }
}

impl Stored {
    fn decode(&self) -> Option<Credentials> {
        if let (Some(user), Some(password)) = (&self.username, &self.password) {
            return Some(Credentials { user: user.clone(), password: password.clone() });
        }
        let bytes = base64::engine::general_purpose::STANDARD.decode(self.auth.as_ref()?.trim()).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (user, password) = text.trim_end_matches('\0').split_once(':')?;
        Some(Credentials { user: user.to_owned(), password: password.to_owned() })
    }
}

fn default_path() -> Option<PathBuf> {
    let folder = std::env::var_os("DOCKER_CONFIG")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker")))?;
    Some(folder.join("config.json"))
}

/// What Docker may call a registry; the way that it is written today comes first.
fn keys(host: &str) -> Vec<String> {
    let host = if host == "docker.io" { "index.docker.io" } else { host };
    if host == "index.docker.io" {
        return ["https://index.docker.io/v1/", "index.docker.io", "docker.io"].map(str::to_owned).to_vec();
    }
    vec![
        host.to_owned(),
        format!("https://{host}"),
        format!("https://{host}/v1/"),
        format!("https://{host}/v2/"),
    ]
}

/// Runs `docker-credential-<helper> get`.
async fn ask_helper(helper: &str, key: &str) -> Option<Credentials> {
    if !helper.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
        tracing::warn!(helper, "docker's config names a credential helper that cannot be one");
        return None;
    }
    let ask = async {
        let mut child = Command::new(format!("docker-credential-{helper}"))
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .ok()?;
        child.stdin.take()?.write_all(key.as_bytes()).await.ok()?;
        let output = child.wait_with_output().await.ok()?;
        let answer: HelperAnswer = serde_json::from_slice(&output.stdout).ok()?;
        Some(Credentials { user: answer.username, password: answer.secret })
    };
    match tokio::time::timeout(HELPER_BOUND, ask).await {
        Ok(answer) => answer,
        Err(_) => {
            tracing::warn!(helper, "the credential helper did not answer within 20 s");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stored_credentials_are_found_by_any_of_dockers_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        // "user:pa:ss"
        fs::write(
            &path,
            r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dXNlcjpwYTpzcw=="},"https://r.example":{"username":"a","password":"b"},
            "127.0.0.1:5000":{"auth":"!"}}}"#,
        )
        .unwrap();
        let config = DockerConfig::load(Some(&path));
        let known =
            |user: &str, password: &str| Some(Credentials { user: user.into(), password: password.into() });
        assert_eq!(config.find("docker.io").await, known("user", "pa:ss"));
        assert_eq!(config.find("index.docker.io").await, known("user", "pa:ss"));
        assert_eq!(config.find("r.example").await, known("a", "b"));
        assert_eq!(config.find("127.0.0.1:5000").await, None);
        assert_eq!(config.find("other.example").await, None);
        assert_eq!(DockerConfig::load(Some(&dir.path().join("none"))).find("r.example").await, None);
    }
}
