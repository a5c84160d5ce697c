//! The host's client of one guest's envd.
//!
//! Each call is one HTTP/1.1 connection: a guest is one hop away, a connection costs less than keeping one right across
//! pauses, and closing it is how a call is cancelled.

mod error;
mod files;
mod process;
mod transport;

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use aenv_types::{Dial, Token};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub use error::EnvdError;
pub use files::Download;
pub use process::{ExitStatus, Output, ProcessStream, RunRequest};

use crate::{InitRequest, MOUNTED_HEADER, Metrics};
use transport::DialTransport;

/// Bound of small calls that name none.
const CALL_BOUND: Duration = Duration::from_secs(10);
/// No small answer is longer than this.
const MAX_ANSWER: usize = 1 << 20;
/// How long one attempt to reach a guest that may still be booting lasts.
const ATTEMPT_BOUND: Duration = Duration::from_millis(500);
/// Pause between attempts that were refused at once.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(5);

/// What an `/init` does with the guest's clock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clock {
    Now,
    Left,
}

/// A body of a request.
pub(crate) type RequestBody = UnsyncBoxBody<Bytes, io::Error>;

/// Talks to one guest's envd.
#[derive(Clone)]
pub struct EnvdClient {
    transport: DialTransport,
    token: Option<Token>,
}

impl EnvdClient {
    /// A client that reaches the guest through `dial` and shows `token` where envd asks for one.
    pub fn new(dial: Arc<dyn Dial>, token: Option<Token>) -> Self {
        Self { transport: DialTransport::new(dial), token }
    }

    /// Tells the guest who it is; returns as soon as envd has taken everything over. This is the readiness event of a launch.
    ///
    /// `timestamp` is set to the host's clock at the moment of sending. While envd cannot be reached (a guest that boots) it
    /// is tried again until `bound` has passed; a refusal by envd itself is final.
    pub async fn init(&self, request: &InitRequest, bound: Duration) -> Result<(), EnvdError> {
        self.tell(request, Clock::Now, bound).await
    }

    /// As [`Self::init`], but the guest's clock stays as it is.
    pub async fn init_without_clock(&self, request: &InitRequest, bound: Duration) -> Result<(), EnvdError> {
        self.tell(request, Clock::Left, bound).await
    }

    async fn tell(&self, request: &InitRequest, clock: Clock, bound: Duration) -> Result<(), EnvdError> {
        let deadline = Instant::now() + bound;
        loop {
            let attempt_end = deadline.min(Instant::now() + ATTEMPT_BOUND);
            let failure = match timeout_at(attempt_end, self.transport.connect()).await {
                Ok(Ok(sender)) => match timeout_at(deadline, self.init_once(sender, request, clock)).await {
                    Ok(Err(failure)) if failure.is_transport() => failure,
                    Ok(done) => return done,
                    Err(_) => return Err(EnvdError::TimedOut { bound }),
                },
                Ok(Err(failure)) => failure,
                Err(_) => EnvdError::TimedOut { bound },
            };
            if Instant::now() + ATTEMPT_PAUSE >= deadline {
                return Err(failure);
            }
            sleep(ATTEMPT_PAUSE).await;
        }
    }

    async fn init_once(
        &self,
        mut sender: transport::Sender,
        request: &InitRequest,
        clock: Clock,
    ) -> Result<(), EnvdError> {
        let now = || chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Nanos, true);
        let body = InitRequest { timestamp: (clock == Clock::Now).then(now), ..request.clone() };
        let json =
            serde_json::to_vec(&body).map_err(|error| EnvdError::Malformed { message: error.to_string() })?;
        let request = self.request(Method::POST, "/init", full(json))?;
        let answer = sender.send_request(request).await.map_err(EnvdError::Broken)?;
        let answer = expect_success(answer).await?;
        if body.volume_mounts.is_empty() || answer.headers().contains_key(MOUNTED_HEADER) {
            Ok(())
        } else {
            Err(EnvdError::NoVolumes)
        }
    }

    /// Loads kernel modules: each with its length before it (four bytes, the highest first), in the order in which they depend on
    /// each other. What is loaded already is no error.
    pub async fn load_modules(&self, modules: Vec<u8>, bound: Duration) -> Result<(), EnvdError> {
        timeout(bound, async { self.call(Method::POST, "/modules", full(modules)).await.map(drop) })
            .await
            .unwrap_or(Err(EnvdError::TimedOut { bound }))
    }

    /// Whether envd answers, within `bound`.
    pub async fn health(&self, bound: Duration) -> Result<(), EnvdError> {
        timeout(bound, async { self.call(Method::GET, "/health", full(Vec::new())).await.map(drop) })
            .await
            .unwrap_or(Err(EnvdError::TimedOut { bound }))
    }

    /// What the guest uses right now.
    pub async fn metrics(&self) -> Result<Metrics, EnvdError> {
        self.get_json("/metrics").await
    }

    /// The environment that every process of the guest is started with.
    pub async fn envs(&self) -> Result<BTreeMap<String, String>, EnvdError> {
        self.get_json("/envs").await
    }

    async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, EnvdError> {
        let answered = async {
            let answer = self.call(Method::GET, path, full(Vec::new())).await?;
            let body = collect(answer).await?;
            serde_json::from_slice(&body)
                .map_err(|error| EnvdError::Malformed { message: format!("{path}: {error}") })
        };
        timeout(CALL_BOUND, answered).await.unwrap_or(Err(EnvdError::TimedOut { bound: CALL_BOUND }))
    }

    /// One request on a connection of its own; an answer that is no success is an error.
    async fn call(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<Response<Incoming>, EnvdError> {
        let request = self.request(method, path, body)?;
        self.send(request).await
    }

    async fn send(&self, request: Request<RequestBody>) -> Result<Response<Incoming>, EnvdError> {
        let mut sender = self.transport.connect().await?;
        let answer = sender.send_request(request).await.map_err(EnvdError::Broken)?;
        expect_success(answer).await
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<Request<RequestBody>, EnvdError> {
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() =
            path.parse().map_err(|_| EnvdError::Malformed { message: format!("{path:?} is no path") })?;
        *request.headers_mut() = self.headers()?;
        request.headers_mut().insert(http::header::HOST, HeaderValue::from_static(transport::AUTHORITY));
        Ok(request)
    }

    fn headers(&self) -> Result<HeaderMap, EnvdError> {
        let mut headers = HeaderMap::new();
        if let Some(token) = &self.token {
            let mut value = HeaderValue::from_str(token.expose()).map_err(|_| EnvdError::Malformed {
                message: "the token cannot stand in a header".to_owned(),
            })?;
            value.set_sensitive(true);
            headers.insert("x-access-token", value);
        }
        Ok(headers)
    }
}

fn full(bytes: Vec<u8>) -> RequestBody {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

/// The answer, or the error that envd put into it.
async fn expect_success(answer: Response<Incoming>) -> Result<Response<Incoming>, EnvdError> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let body = collect(answer).await.unwrap_or_default();
    Err(EnvdError::Refused { status, message: message_of(&body, status) })
}

fn message_of(body: &[u8], status: StatusCode) -> String {
    let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    match json.as_ref().and_then(|json| json.get("message")).and_then(|message| message.as_str()) {
        Some(message) => message.to_owned(),
        None => status.canonical_reason().unwrap_or("no reason given").to_owned(),
    }
}

async fn collect(answer: Response<Incoming>) -> Result<Bytes, EnvdError> {
    match Limited::new(answer.into_body(), MAX_ANSWER).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => Err(EnvdError::Malformed { message: error.to_string() }),
    }
}
