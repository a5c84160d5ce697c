//! Where the server is and which key it takes: environment first, then `~/.config/aenv/credentials` (0600).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::CliError;

/// Where a server listens unless told otherwise.
const DEFAULT_URL: &str = "http://127.0.0.1:8000";
/// Where a server on this machine keeps its first key.
const LOCAL_KEY: &str = "/var/lib/aenv/secrets/api-key";

/// A server and a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Credentials {
    /// Base URL of the API.
    pub(crate) url: String,
    /// API key.
    pub(crate) api_key: String,
    /// How a shell gets at the key.
    #[serde(skip)]
    pub(crate) shell: String,
}

fn path() -> Result<PathBuf, CliError> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    let base = config.or(home).ok_or_else(|| CliError::Usage("HOME is not set".to_owned()))?;
    Ok(base.join("aenv/credentials"))
}

fn first_of(names: &[&'static str]) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| Some((*name, std::env::var(name).ok().filter(|value| !value.is_empty())?)))
}

/// The key that a file consists of, and how a shell gets at it.
fn key_in(path: &str) -> Option<(String, String)> {
    Some((std::fs::read_to_string(path).ok()?.trim().to_owned(), format!("$(cat {path})")))
}

/// Environment (`AENV_*`, then E2B's names), then the file, then the key of a server on this machine.
pub(crate) fn load() -> Result<Credentials, CliError> {
    let path = path().ok();
    let text = path.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
    let file: Option<Credentials> = text.and_then(|text| toml::from_str(&text).ok());
    let url = first_of(&["AENV_URL", "E2B_API_URL"]).map(|(_, url)| url);
    let url = url.or_else(|| file.as_ref().map(|file| file.url.clone()));
    let in_file = || {
        let shown = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        Some((file?.api_key, format!("$(sed -n 's/^api_key = \"\\(.*\\)\"$/\\1/p' '{shown}')")))
    };
    let variable = |name| first_of(&[name]).map(|(name, key)| (key, format!("${name}")));
    let (api_key, shell) = variable("AENV_API_KEY")
        .or_else(|| first_of(&["AENV_API_KEY_FILE"]).and_then(|(_, path)| key_in(&path)))
        .or_else(|| variable("E2B_API_KEY"))
        .or_else(in_file)
        .or_else(|| key_in(LOCAL_KEY))
        .ok_or(CliError::NoKey)?;
    let url = url.unwrap_or_else(|| DEFAULT_URL.to_owned()).trim_end_matches('/').to_owned();
    Ok(Credentials { url, api_key, shell })
}

/// The authority of a server whose certificate no public one has signed (`AENV_CA_CERT`, a PEM file).
pub(crate) fn authority() -> Result<Option<reqwest::Certificate>, CliError> {
    let Some((_, path)) = first_of(&["AENV_CA_CERT"]) else { return Ok(None) };
    let text = std::fs::read(&path).map_err(CliError::io(path.clone()))?;
    let read = reqwest::Certificate::from_pem(&text);
    read.map(Some).map_err(|error| CliError::Usage(format!("{path} is no certificate in PEM form: {error}")))
}

/// Writes the file, whole or not at all.
pub(crate) fn save(credentials: &Credentials) -> Result<PathBuf, CliError> {
    let path = path()?;
    let folder = path.parent().expect("the path has a folder").to_owned();
    let text = toml::to_string(credentials).expect("two strings are TOML");
    let written =
        std::fs::create_dir_all(&folder).and_then(|()| aenv_durable::write_private(&path, text.as_bytes()));
    written.map_err(CliError::io(path.display().to_string()))?;
    Ok(path)
}

/// Removes the file; whether there was one.
pub(crate) fn remove() -> Result<bool, CliError> {
    let path = path()?;
    match std::fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(CliError::io(path.display().to_string())(error)),
    }
}
