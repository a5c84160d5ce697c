//! A blob of an OCI registry.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use aenv_store::{BlockSource, SourceError};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use parking_lot::Mutex;
use reqwest::{Client, RequestBuilder, Response, Url, redirect};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::runtime::Handle;

use crate::{
    bounds::{Bounds, Failure},
    challenge::Challenge,
    credentials::DockerConfig,
};

/// Redirects that one request follows.
const REDIRECTS: usize = 5;

/// Bytes that the answer with a token may have.
const LONGEST_TOKEN: usize = 1 << 20;

/// The longest that a registry's `Retry-After` is heeded.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What docker's credential helpers call the user when the password is an identity token, which is shown as it is.
const TOKEN_USER: &str = "<token>";

/// User and password for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User.
    pub user: String,
    /// Password, or a token in its place.
    pub password: String,
}

impl Credentials {
    /// The identity token that they are, if they are one.
    pub fn identity_token(&self) -> Option<&str> {
        (self.user == TOKEN_USER).then_some(self.password.as_str())
    }
}

/// As whom a registry is read, when it wants to know.
#[derive(Clone, Debug)]
pub enum Identity {
    /// As nobody.
    Anonymous,
    /// With these.
    Known(Credentials),
    /// With what docker's `config.json` of this machine has for the registry, looked up each time.
    Docker,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Which blob.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlobName {
    /// Host of the registry, with its port where it is not the usual one.
    pub registry: String,
    /// Repository, such as `library/debian`.
    pub repository: String,
    /// Digest, such as `sha256:…`.
    pub digest: String,
}

/// A name that no blob can have.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no name of a blob in a registry")]
pub struct InvalidBlobName(String);

impl BlobName {
    /// Its URL. Registries on this machine are spoken to in plain HTTP, all others by TLS.
    fn url(&self) -> Result<Url, InvalidBlobName> {
        let invalid = || InvalidBlobName(format!("{}/{}@{}", self.registry, self.repository, self.digest));
        let safe = |text: &str, more: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        let steps = self.repository.split('/').all(|step| safe(step, "._-") && step != "." && step != "..");
        if !safe(&self.registry, ".-:[]") || !steps || !safe(&self.digest, ":+._-") {
            return Err(invalid());
        }
        let scheme = if is_loopback(&self.registry) { "http" } else { "https" };
        let host = if self.registry == "docker.io" { "registry-1.docker.io" } else { &self.registry };
        let url = format!("{scheme}://{host}/v2/{}/blobs/{}", self.repository, self.digest);
        Url::parse(&url).map_err(|_| invalid())
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// What all blobs share: connections, and what registries wanted to see. Clones are the same one.
#[derive(Clone)]
pub struct RegistryClient {
    http: Client,
    /// The header `Authorization` for a repository of a registry.
    shown: Arc<Mutex<HashMap<(String, String), String>>>,
}

impl RegistryClient {
    /// A client without connections.
    pub fn new() -> Result<Self, SourceError> {
        let policy = redirect::Policy::custom(|attempt| {
            let was_safe = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
            if attempt.previous().len() > REDIRECTS {
                attempt.error("too many redirects")
            } else if was_safe && attempt.url().scheme() != "https" {
                attempt.error("a redirect from https to http")
            } else {
                attempt.follow()
            }
        });
        let http =
            Client::builder().redirect(policy).connect_timeout(Duration::from_secs(5)).no_gzip().build();
        let http = http.map_err(|error| SourceError::Remote {
            context: "preparing for registries".to_owned(),
            message: error.to_string(),
        })?;
        Ok(Self { http, shown: Arc::default() })
    }
}

/// A blob, read by ranges.
pub struct RegistrySource {
    runtime: Handle,
    reader: Arc<Reader>,
    bounds: Bounds,
}

struct Reader {
    client: RegistryClient,
    name: BlobName,
    url: Url,
    size: u64,
    identity: Identity,
}

impl RegistrySource {
    /// The blob `name`, which has `size` bytes. Nothing is asked of the registry yet.
    pub fn new(
        runtime: Handle,
        client: RegistryClient,
        name: BlobName,
        size: u64,
        identity: Identity,
        bounds: Bounds,
    ) -> Result<Self, InvalidBlobName> {
        let url = name.url()?;
        Ok(Self { runtime, reader: Arc::new(Reader { client, name, url, size, identity }), bounds })
    }
}

impl BlockSource for RegistrySource {
    fn may_wait(&self) -> bool {
        true
    }

    fn size(&self) -> u64 {
        self.reader.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        SourceError::check_range(offset, buf.len() as u64, self.reader.size)?;
        if buf.is_empty() {
            return Ok(());
        }
        let context = format!(
            "blob {} of {}/{}",
            self.reader.name.digest, self.reader.name.registry, self.reader.name.repository
        );
        let (reader, bounds, len, named) =
            (Arc::clone(&self.reader), self.bounds, buf.len(), context.clone());
        let read = async move { bounds.attempts(&named, || reader.range(offset, len)).await };
        let bytes = self.bounds.wait(&self.runtime, &context, read)?;
        buf.copy_from_slice(&bytes);
        Ok(())
    }
}

impl Reader {
    /// One attempt. A registry that wants to see something first gets it, once.
    async fn range(&self, offset: u64, len: usize) -> Result<Bytes, Failure> {
        let key = (self.name.registry.clone(), self.name.repository.clone());
        let mut shown = self.client.shown.lock().get(&key).cloned();
        let mut asked = false;
        loop {
            let mut request = self.client.http.get(self.url.clone());
            request = request.header(header::RANGE, format!("bytes={offset}-{}", offset + len as u64 - 1));
            if let Some(shown) = &shown {
                request = request.header(header::AUTHORIZATION, shown);
            }
            let response = send(request).await?;
            if response.status() != StatusCode::UNAUTHORIZED {
                return self.bytes(response, offset, len).await;
            }
            if asked {
                return Err(Failure::Denied("the registry refuses what it asked to see (401)".to_owned()));
            }
            asked = true;
            let fresh = self.answer(response.headers()).await?;
            self.client.shown.lock().insert(key.clone(), fresh.clone());
            shown = Some(fresh);
        }
    }

    /// The header that a challenge asks for.
    async fn answer(&self, headers: &HeaderMap) -> Result<String, Failure> {
        let header = text(headers, header::WWW_AUTHENTICATE.as_str());
        let refused = |message: String| Failure::Denied(message);
        let Some(challenge) = Challenge::parse(header) else {
            return Err(refused(format!(
                "the registry asks for an unknown kind of login: {}",
                short(header)
            )));
        };
        let credentials = match &self.identity {
            Identity::Anonymous => None,
            Identity::Known(credentials) => Some(credentials.clone()),
            Identity::Docker => DockerConfig::load(None).find(&self.name.registry).await,
        };
        if let Some(token) = credentials.as_ref().and_then(Credentials::identity_token) {
            return Ok(format!("Bearer {token}"));
        }
        let (realm, service) = match challenge {
            Challenge::Basic => {
                let missing =
                    || refused("the registry wants a user and a password, and there are none".to_owned());
                let Credentials { user, password } = credentials.as_ref().ok_or_else(missing)?;
                // Built by the HTTP client, so that the encoding is its own.
                let request = self.client.http.get(self.url.clone()).basic_auth(user, Some(password)).build();
                let built =
                    request.ok().and_then(|request| request.headers().get(header::AUTHORIZATION).cloned());
                let header = built.and_then(|value| value.to_str().map(str::to_owned).ok());
                return header.ok_or_else(|| refused("user or password cannot be sent".to_owned()));
            }
            Challenge::Bearer { realm, service } => (realm, service),
        };
        let url = Url::parse(&realm)
            .ok()
            .filter(|url| url.scheme() == "https" || url.scheme() == self.url.scheme());
        let mut url = url.ok_or_else(|| refused(format!("tokens are not given out at {}", short(&realm))))?;
        url.query_pairs_mut().append_pair("scope", &format!("repository:{}:pull", self.name.repository));
        if let Some(service) = service {
            url.query_pairs_mut().append_pair("service", &service);
        }
        let mut request = self.client.http.get(url);
        if let Some(Credentials { user, password }) = &credentials {
            request = request.basic_auth(user, Some(password));
        }
        let response = send(request).await?;
        if let Some(failure) = refusal(&response) {
            return Err(failure);
        }
        let bytes = body(response, LONGEST_TOKEN).await?;
        let token: TokenAnswer = parse_token(&bytes)
            .ok_or_else(|| refused("the registry's token server gives out something else".to_owned()))?;
        Ok(format!("Bearer {}", token.0))
    }

    /// The bytes of an answer, if they are those that were asked for.
    async fn bytes(&self, response: Response, offset: u64, len: usize) -> Result<Bytes, Failure> {
        if let Some(failure) = refusal(&response) {
            return Err(failure);
        }
        let kind = text(response.headers(), header::CONTENT_TYPE.as_str());
        if kind.starts_with("text/html") {
            return Err(Failure::Wrong(
                "a web page came in place of the blob: is there a proxy that wants a login?".to_owned(),
            ));
        }
        let last = offset + len as u64 - 1;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let expected = format!("bytes {offset}-{last}/{}", self.size);
                let range = text(response.headers(), header::CONTENT_RANGE.as_str());
                if range != expected {
                    return Err(Failure::Wrong(format!("the range {} came, not {expected}", short(range))));
                }
            }
            StatusCode::OK if offset == 0 && len as u64 == self.size => {}
            StatusCode::OK => {
                return Err(Failure::Final("the registry knows no ranges: it sends whole blobs".to_owned()));
            }
            other => return Err(Failure::Final(format!("the registry answered with {other}"))),
        }
        let bytes = body(response, len).await?;
        if bytes.len() < len {
            return Err(Failure::Passing(format!("{} of {len} bytes came", bytes.len()), None));
        }
        Ok(bytes)
    }
}

/// What a token server gives out.
struct TokenAnswer(String);

fn parse_token(bytes: &[u8]) -> Option<TokenAnswer> {
    #[derive(Deserialize)]
    struct Answer {
        token: Option<String>,
        access_token: Option<String>,
    }
    let answer: Answer = serde_json::from_slice(bytes).ok()?;
    let token = answer.token.or(answer.access_token)?;
    // It becomes a header.
    (!token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())).then_some(TokenAnswer(token))
}

pub(crate) async fn send(request: RequestBuilder) -> Result<Response, Failure> {
    request.send().await.map_err(|error| {
        let message = error.to_string();
        if error.is_redirect() || error.is_builder() {
            Failure::Final(message)
        } else {
            Failure::Passing(message, None)
        }
    })
}

/// Why an answer is none, if its status says so.
fn refusal(response: &Response) -> Option<Failure> {
    let status = response.status();
    if status.is_success() {
        return None;
    }
    let message = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            format!("the registry does not allow it ({status})")
        }
        StatusCode::NOT_FOUND => format!("it is not there ({status})"),
        _ => format!("the registry answered with {status}"),
    };
    let passing = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        return Some(Failure::Denied(message));
    }
    if !passing {
        return Some(Failure::Final(message));
    }
    let seconds = text(response.headers(), header::RETRY_AFTER.as_str()).parse().ok();
    Some(Failure::Passing(message, seconds.map(|seconds| Duration::from_secs(seconds).min(LONGEST_PAUSE))))
}

/// The body, which may have so many bytes.
pub(crate) async fn body(mut response: Response, most: usize) -> Result<Bytes, Failure> {
    let mut bytes = BytesMut::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if bytes.len() + chunk.len() > most => {
                return Err(Failure::Wrong(format!("more than {most} bytes came")));
            }
            Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
            Ok(None) => return Ok(bytes.freeze()),
            Err(error) => return Err(Failure::Passing(error.to_string(), None)),
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// What a stranger said, for a message.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(registry: &str, repository: &str, digest: &str) -> BlobName {
        BlobName { registry: registry.into(), repository: repository.into(), digest: digest.into() }
    }

    #[test]
    fn urls() {
        let url = |registry: &str| name(registry, "a/b", "sha256:00").url().unwrap().to_string();
        assert_eq!(url("ghcr.io"), "https://ghcr.io/v2/a/b/blobs/sha256:00");
        assert_eq!(url("docker.io"), "https://registry-1.docker.io/v2/a/b/blobs/sha256:00");
        assert_eq!(url("127.0.0.1:5000"), "http://127.0.0.1:5000/v2/a/b/blobs/sha256:00");
        assert_eq!(url("[::1]:5000"), "http://[::1]:5000/v2/a/b/blobs/sha256:00");
        for (registry, repository, digest) in [
            ("a/b", "c", "sha256:00"),
            ("a@b", "c", "sha256:00"),
            ("a", "../c", "sha256:00"),
            ("a", "c?", "sha256:00"),
            ("a", "c//d", "sha256:00"),
            ("a", "c", "sha256:00/x"),
            ("a", "c", ""),
        ] {
            assert!(name(registry, repository, digest).url().is_err(), "{registry} {repository} {digest}");
        }
    }

    #[test]
    fn tokens_become_headers_only_when_they_can() {
        let token = |text: &str| parse_token(text.as_bytes()).map(|token| token.0);
        assert_eq!(token(r#"{"token":"abc"}"#).as_deref(), Some("abc"));
        assert_eq!(token(r#"{"access_token":"abc","expires_in":3}"#).as_deref(), Some("abc"));
        for other in [r#"{"token":"a\r\nb"}"#, r#"{"token":""}"#, "{}", "<html>", "[]"] {
            assert_eq!(token(other), None, "{other}");
        }
    }
}
