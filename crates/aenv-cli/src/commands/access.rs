//! `auth` and `key`.

use std::io::{BufRead, IsTerminal};

use serde_json::{Value, json};

use crate::{
    Outcome,
    args::{Auth, KeyCommand, KeyLimits},
    client::{Client, segment},
    credentials::{self, Credentials},
    error::CliError,
    output::{self, Format},
};

pub(super) async fn auth(command: Auth, format: Format) -> Outcome {
    match command {
        Auth::Login { url, key } => {
            let api_key = match key {
                Some(key) => key,
                None => ask_key()?,
            };
            let url = url.trim_end_matches('/').to_owned();
            let credentials = Credentials { url: url.clone(), api_key, shell: String::new() };
            Client::new(credentials.clone())?.get("/v2/sandboxes?limit=1").await?;
            let path = credentials::save(&credentials)?;
            eprintln!("the server at {url} takes the key; both are kept in {}", path.display());
        }
        Auth::Logout => {
            let had = credentials::remove()?;
            eprintln!("{}", if had { "forgotten" } else { "there was nothing to forget" });
        }
        Auth::Status => {
            let client = Client::load()?;
            client.get("/v2/sandboxes?limit=1").await?;
            output::one(format, &json!({ "url": client.url(), "apiKey": "accepted" }));
        }
    }
    Ok(0)
}

fn ask_key() -> Result<String, CliError> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        eprint!("API key: ");
    }
    let mut line = String::new();
    stdin.lock().read_line(&mut line).map_err(CliError::io("standard input"))?;
    let key = line.trim();
    if key.is_empty() {
        return Err(CliError::Usage("no key was given".to_owned()));
    }
    Ok(key.to_owned())
}

pub(super) async fn key(command: KeyCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        KeyCommand::Create { name, team, limits } => {
            let body = json!({ "name": name, "team": team, "limits": wire(&limits) });
            let made = client.post("/api-keys", &body).await?;
            output::one(format, &made);
            eprintln!("the key is not shown again");
        }
        KeyCommand::List => {
            let keys = client.all("/api-keys").await?;
            output::rows(
                format,
                &keys,
                &[
                    ("ID", "id"),
                    ("NAME", "name"),
                    ("TEAM", "team"),
                    ("KEY", "mask.maskedValuePrefix"),
                    ("CREATED", "createdAt"),
                    ("LAST USED", "lastUsed"),
                    ("LIMITS", "limits"),
                ],
            );
        }
        KeyCommand::Revoke { id } => client.delete(&format!("/api-keys/{}", segment(&id))).await?,
    }
    Ok(0)
}

/// The limits that were given, as the API names them.
fn wire(limits: &KeyLimits) -> Value {
    let all = [
        ("maxRunningSandboxes", limits.max_running),
        ("maxTimeoutSecs", limits.max_timeout),
        ("maxMemoryMiB", limits.max_memory),
        ("maxStartingSandboxes", limits.max_starting),
        ("maxRequestsPerSecond", limits.max_requests),
        ("maxTemplates", limits.max_templates),
        ("maxSnapshots", limits.max_snapshots),
        ("maxRepositoryMiB", limits.max_repository),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), Value::from(value?)))).collect()
}
