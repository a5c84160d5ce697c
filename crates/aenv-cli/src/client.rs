//! The API's client.

use std::time::Duration;

use http::Method;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{credentials::Credentials, error::CliError};

/// One server, one key.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    credentials: Credentials,
}

/// A page of a list, and how to get the next one.
pub(crate) struct Page {
    pub(crate) items: Vec<Value>,
    pub(crate) next: Option<String>,
}

impl Client {
    pub(crate) fn new(credentials: Credentials) -> Result<Self, CliError> {
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("aenv/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(10))
            .no_proxy();
        if let Some(authority) = crate::credentials::authority()? {
            http = http.add_root_certificate(authority);
        }
        let http = http
            .build()
            .map_err(|error| CliError::Usage(format!("the HTTP client cannot be made: {error}")))?;
        Ok(Self { http, credentials })
    }

    /// From the environment or the credentials file.
    pub(crate) fn load() -> Result<Self, CliError> {
        Self::new(crate::credentials::load()?)
    }

    pub(crate) fn url(&self) -> &str {
        &self.credentials.url
    }

    /// How a shell gets at the key.
    pub(crate) fn key_in_shell(&self) -> &str {
        &self.credentials.shell
    }

    pub(crate) fn http(&self) -> &reqwest::Client {
        &self.http
    }

    /// A request to the control plane.
    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.credentials.url);
        self.http.request(method, url).header("X-API-Key", &self.credentials.api_key)
    }

    /// Sends a request; an answer that is no success becomes an error.
    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, CliError> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(api_error(response).await)
    }

    pub(crate) fn unreachable(&self, error: &reqwest::Error) -> CliError {
        let mut message = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            message = inner.to_string();
            source = inner.source();
        }
        CliError::Unreachable { url: self.credentials.url.clone(), message }
    }

    async fn json<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, CliError> {
        let response = self.send(request).await?;
        response
            .json()
            .await
            .map_err(|error| CliError::Sandbox(format!("the server's answer cannot be read: {error}")))
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, CliError> {
        self.json(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &impl Serialize) -> Result<Value, CliError> {
        let response = self.send(self.request(Method::POST, path).json(body)).await?;
        let text = response.text().await.map_err(|error| self.unreachable(&error))?;
        if text.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&text)
            .map_err(|error| CliError::Sandbox(format!("the server's answer cannot be read: {error}")))
    }

    pub(crate) async fn put(&self, path: &str, body: &impl Serialize) -> Result<(), CliError> {
        self.send(self.request(Method::PUT, path).json(body)).await.map(drop)
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<(), CliError> {
        self.send(self.request(Method::DELETE, path)).await.map(drop)
    }

    /// One page of a list.
    pub(crate) async fn page(&self, path: &str, token: Option<&str>) -> Result<Page, CliError> {
        let mut request = self.request(Method::GET, path);
        if let Some(token) = token {
            request = request.query(&[("nextToken", token)]);
        }
        let response = self.send(request).await?;
        let next = response.headers().get("x-next-token").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let items = response.json().await;
        let items = items
            .map_err(|error| CliError::Sandbox(format!("the server's answer cannot be read: {error}")))?;
        Ok(Page { items, next: next.filter(|token| !token.is_empty()) })
    }

    /// Every page of a list.
    pub(crate) async fn all(&self, path: &str) -> Result<Vec<Value>, CliError> {
        let mut all = Vec::new();
        let mut token = None;
        loop {
            let page = self.page(path, token.as_deref()).await?;
            all.extend(page.items);
            match page.next {
                Some(next) => token = Some(next),
                None => return Ok(all),
            }
        }
    }
}

/// The error envelope of an answer.
pub(crate) async fn api_error(response: reqwest::Response) -> CliError {
    let status = response.status().as_u16();
    let retry_after =
        response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
    let text = response.text().await.unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    let message = match body["message"].as_str() {
        Some(message) => message.to_owned(),
        None => format!("the server answered {status}: {}", text.chars().take(300).collect::<String>()),
    };
    CliError::Api { status, message, code: body["error_code"].as_str().map(str::to_owned), retry_after }
}

/// A path segment, percent-encoded.
pub(crate) fn segment(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
