//! Extractors that answer with the envelope: bodies, queries and path ids. Nothing of axum's own text reaches a client.

use std::time::Duration;

use aenv_api::ApiError;
use aenv_types::SandboxId;
use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, Path, Request},
};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header, request::Parts};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use crate::failure::Failure;

/// Bytes that a control-plane body may have.
pub const MAX_BODY: usize = 1 << 20;

/// Time in which a control-plane body must have arrived.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read and thrown away of a body that is too large, so that its sender gets the answer.
const DISCARD_BYTES: usize = 64 << 20;
/// How long that may take.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// A JSON body.
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let (parts, body) = request.into_parts();
        let bytes = read(&parts.headers, body).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(ApiError::bad_request("the request has no body; send a JSON object").into());
        }
        check_type(&parts.headers)?;
        parse(&bytes).map(Json).map_err(Failure)
    }
}

/// A JSON body that may be missing, or `null`: then it is the default.
pub struct JsonOr<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for JsonOr<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let (parts, body) = request.into_parts();
        let bytes = read(&parts.headers, body).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self(T::default()));
        }
        check_type(&parts.headers)?;
        parse::<Option<T>>(&bytes).map(|value| Self(value.unwrap_or_default())).map_err(Failure)
    }
}

/// Parses JSON; the error says where and what.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| {
        if error.is_data() {
            ApiError::bad_request(format!("the body does not fit: {error}"))
        } else {
            ApiError::bad_request(format!("the body is not valid JSON: {error}")).with_code("invalid_json")
        }
    })
}

/// Reads on for a while without keeping anything: a client that is still sending does not see an answer before it is done,
/// and a connection that is closed under it loses the answer.
pub async fn discard(mut body: Body) {
    let rest = async {
        let mut read = 0;
        while let Some(Ok(frame)) = body.frame().await {
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > DISCARD_BYTES {
                return;
            }
        }
    };
    // Whoever has not ended by then loses the answer.
    tokio::time::timeout(DISCARD_TIME, rest).await.ok();
}

async fn read(headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let too_large = || {
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is larger than {MAX_BODY} bytes, the limit of this call"),
        )
        .with_code("body_too_large")
    };
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > MAX_BODY as u64) {
        discard(body).await;
        return Err(too_large());
    }
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING).filter(|e| e.as_bytes() != b"identity") {
        let message = format!("Content-Encoding {encoding:?} is not taken here; send the body as it is");
        return Err(
            ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).with_code("unsupported_media_type")
        );
    }
    let collect = async {
        let mut body = body;
        let mut all = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ApiError::bad_request("the body ended early"))?;
            let Ok(data) = frame.into_data() else { continue };
            if all.len() + data.len() > MAX_BODY {
                discard(body).await;
                return Err(too_large());
            }
            all.extend_from_slice(&data);
        }
        Ok(all.freeze())
    };
    tokio::time::timeout(BODY_TIMEOUT, collect).await.unwrap_or_else(|_| {
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive within 30 s")
            .with_code("body_timeout"))
    })
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        format!("Content-Type is {essence:?}; send application/json"),
    )
    .with_code("unsupported_media_type"))
}

/// The query, decoded once. Names may repeat.
#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// From the text after `?`.
    pub fn parse(text: &str) -> Self {
        Self(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    /// The first value of this name that is not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, v)| n == name && !v.is_empty()).map(|(_, v)| v.as_str())
    }

    /// All values of a name, with commas as separators too.
    pub fn list(&self, name: &str) -> Vec<&str> {
        let values = self.0.iter().filter(|(n, _)| n == name);
        values.flat_map(|(_, v)| v.split(',')).map(str::trim).filter(|v| !v.is_empty()).collect()
    }

    /// A whole number.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        let wrong = |text: &str| {
            let shown: String = text.chars().take(40).collect();
            ApiError::bad_request(format!("{name} is {shown:?}; it takes a whole number"))
        };
        self.get(name).map(|text| text.parse().map_err(|_| wrong(text))).transpose()
    }

    /// A whole number within a range.
    pub fn integer_in(
        &self,
        name: &str,
        range: std::ops::RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        match self.integer(name)? {
            Some(n) if !range.contains(&n) => Err(ApiError::bad_request(format!(
                "{name} is {n}; it takes {} to {}",
                range.start(),
                range.end()
            ))),
            value => Ok(value),
        }
    }

    /// One of a few words.
    pub fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
                let shown: String = text.chars().take(40).collect();
                Err(ApiError::bad_request(format!("{name} is {shown:?}; it takes {}", words.join(" or "))))
            }
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

/// The sandbox that `{id}` of the path names. What is no id is a sandbox that does not exist: 404.
pub struct SandboxPath(pub SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for SandboxPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let PathText(text) = PathText::from_request_parts(parts, state).await?;
        sandbox_id(&text).map(SandboxPath).map_err(Failure)
    }
}

/// One segment of the path, decoded.
pub struct PathText(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathText {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.map(|Path(text)| Self(text))
            .map_err(|_| ApiError::not_found("the path is not valid UTF-8").into())
    }
}

/// Parses a sandbox id as clients send it.
pub fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    SandboxId::from_client(text).map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        ApiError::not_found(format!("Sandbox {shown:?} doesn't exist or you don't have access to it"))
            .with_code("sandbox_not_found")
    })
}

#[cfg(test)]
mod tests {
    use aenv_api::NewSandbox;
    use http_body_util::{Empty, Full};

    use super::*;

    async fn post(content_type: Option<&str>, body: impl Into<Bytes>) -> Result<NewSandbox, ApiError> {
        let mut builder = http::Request::post("/");
        if let Some(value) = content_type {
            builder = builder.header("content-type", value);
        }
        let request = builder.body(Body::new(Full::new(body.into()))).unwrap();
        Json::<NewSandbox>::from_request(request, &()).await.map(|json| json.0).map_err(|f| f.0)
    }

    #[tokio::test]
    async fn bodies_parse() {
        let json = Some("application/json; charset=utf-8");
        let sandbox = post(json, r#"{"templateID":"base","timeout":5,"unknown":[1]}"#).await.unwrap();
        assert_eq!((sandbox.template_id.as_str(), sandbox.timeout), ("base", Some(5)));
        assert!(post(None, r#"{"templateID":"base"}"#).await.is_ok());
    }

    #[tokio::test]
    async fn bad_bodies_are_told_apart() {
        let json = Some("application/json");
        let error = post(json, "{").await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.error_code), (400, Some("invalid_json")));
        let error = post(json, r#"{"templateID":"b","timeout":"5"}"#).await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.error_code), (400, Some("bad_request")));
        assert!(error.message.contains("invalid type: string \"5\""), "{error}");
        let error = post(json, r#"{"templateID":"b","metadata":{"a":1}}"#).await.unwrap_err();
        assert_eq!(error.status, 400);
        assert_eq!(post(json, "{}").await.unwrap_err().status, 400);
        assert_eq!(post(json, "[]").await.unwrap_err().status, 400);
        assert_eq!(post(json, "").await.unwrap_err().status, 400);
        assert_eq!(post(Some("text/plain"), "{}").await.unwrap_err().status, 415);
        assert_eq!(post(json, vec![b' '; MAX_BODY + 1]).await.unwrap_err().status, 413);
    }

    #[tokio::test]
    async fn a_missing_body_is_the_default() {
        let request = http::Request::post("/").body(Body::new(Empty::<Bytes>::new())).unwrap();
        let body =
            JsonOr::<aenv_api::PauseRequest>::from_request(request, &()).await.map_err(|f| f.0).unwrap();
        assert_eq!(body.0.memory, None);
    }

    #[test]
    fn queries_parse() {
        let query = Query::parse("limit=7&state=running%2Cpaused&empty=&x=a+b");
        assert_eq!(query.integer("limit").unwrap(), Some(7));
        assert_eq!(query.list("state"), ["running", "paused"]);
        assert_eq!(query.get("empty"), None);
        assert_eq!(query.get("x"), Some("a b"));
        assert!(query.integer("x").is_err());
        assert!(query.integer_in("limit", 1..=6).is_err());
    }

    #[test]
    fn hostile_ids_are_not_found() {
        for bad in ["", "A", "../etc/passwd", "a b", &"a".repeat(65)] {
            assert_eq!(sandbox_id(bad).unwrap_err().status, 404, "{bad:?}");
        }
        assert_eq!(sandbox_id("nonexistingsandbox").unwrap().as_str(), "nonexistingsandbox");
        assert_eq!(sandbox_id("iabc-6532622b").unwrap().as_str(), "iabc");
    }
}
