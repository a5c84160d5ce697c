//! What the data plane answers itself, in the form that the clients read.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde::Serialize;

#[derive(Serialize)]
struct Refusal<'a> {
    #[serde(rename = "sandboxId")]
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

/// Who is answered: a program gets JSON, a person in front of a browser a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// JSON.
    Program,
    /// HTML.
    Browser,
}

impl Reader {
    /// By what the request says of itself.
    pub fn of(headers: &HeaderMap) -> Self {
        let contains = |name, part| {
            headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok()).is_some_and(|v| v.contains(part))
        };
        if contains(header::ACCEPT, "text/html") && contains(header::USER_AGENT, "Mozilla/") {
            Self::Browser
        } else {
            Self::Program
        }
    }
}

/// The sandbox is unknown, killed, expired, or paused without auto-resume.
pub fn not_found(reader: Reader, id: &str) -> Response<Body> {
    refusal(reader, StatusCode::BAD_GATEWAY, id, "The sandbox was not found", None)
}

/// Nothing listens on the port.
pub fn port_closed(reader: Reader, id: &str, port: u16) -> Response<Body> {
    let message = "The sandbox is running but port is not open";
    refusal(reader, StatusCode::BAD_GATEWAY, id, message, Some(port))
}

/// Any other refusal that names a sandbox.
pub fn refusal(
    reader: Reader,
    status: StatusCode,
    id: &str,
    message: &str,
    port: Option<u16>,
) -> Response<Body> {
    match reader {
        Reader::Program => {
            let body = Refusal { sandbox_id: id, message, port, code: status.as_u16() };
            json(status, &body)
        }
        Reader::Browser => page(status, id, message, port),
    }
}

/// `{code, message}`, exactly.
pub fn plain_error(status: StatusCode, message: &str) -> Response<Body> {
    json(status, &serde_json::json!({ "code": status.as_u16(), "message": message }))
}

fn json(status: StatusCode, body: &impl Serialize) -> Response<Body> {
    let mut response = Response::new(Body::from(serde_json::to_vec(body).unwrap_or_default()));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn page(status: StatusCode, id: &str, message: &str, port: Option<u16>) -> Response<Body> {
    // Ids are [a-z0-9] once parsed, but what could not be parsed is shown too.
    let id: String = id.chars().filter(char::is_ascii_alphanumeric).collect();
    let port = port.map(|port| format!(" (port {port})")).unwrap_or_default();
    let text = format!(
        "<!doctype html><meta charset=utf-8><title>{message}</title>\
         <body style=\"font:16px system-ui;max-width:40em;margin:15vh auto;padding:0 1em\">\
         <h1 style=\"font-size:1.4em\">{message}{port}</h1><p>Sandbox <code>{id}</code></p>"
    );
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn text(response: Response<Body>) -> String {
        String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn the_clients_read_these_word_by_word() {
        let gone = not_found(Reader::Program, "iabc");
        assert_eq!(gone.status(), 502);
        assert_eq!(gone.headers()["content-type"], "application/json; charset=utf-8");
        assert_eq!(
            text(gone).await,
            r#"{"sandboxId":"iabc","message":"The sandbox was not found","code":502}"#
        );
        let closed = text(port_closed(Reader::Program, "iabc", 81)).await;
        let expected = r#"{"sandboxId":"iabc","message":"The sandbox is running but port is not open","port":81,"code":502}"#;
        assert_eq!(closed, expected);
        let signature = text(plain_error(StatusCode::UNAUTHORIZED, "invalid signature")).await;
        assert_eq!(signature, r#"{"code":401,"message":"invalid signature"}"#);
    }

    #[tokio::test]
    async fn a_browser_gets_a_page_without_injection() {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static("text/html,*/*"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("Mozilla/5.0"));
        let reader = Reader::of(&headers);
        assert_eq!(reader, Reader::Browser);
        assert!(!text(not_found(reader, "<script>")).await.contains("<script>"));
    }
}
