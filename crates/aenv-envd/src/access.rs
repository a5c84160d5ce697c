//! Who may call what: the access token, signatures of `/files` URLs, and calls that only the host makes.

use std::{net::SocketAddr, sync::Arc};

use aenv_envd_api::signature::{self, FileOperation};
use aenv_types::Token;
use axum::{
    Json,
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::guest::Guest;

/// The body of every HTTP error.
#[derive(Debug, Serialize)]
struct ErrorBody {
    code: u16,
    message: String,
}

/// An HTTP error with the body that E2B's clients read.
pub fn error_response(status: StatusCode, message: impl Into<String>) -> Response {
    (status, Json(ErrorBody { code: status.as_u16(), message: message.into() })).into_response()
}

/// What of the query matters for access.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SignedQuery {
    path: String,
    username: String,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

/// Lets a request through when it shows the token, or a signature where one may stand for it.
pub async fn require_token(State(guest): State<Arc<Guest>>, request: Request, next: Next) -> Response {
    let Some(token) = guest.settings().token.clone() else {
        return next.run(request).await;
    };
    let shown = shows_token(request.headers(), &token);
    if shown == Some(Comparison::Same) {
        return next.run(request).await;
    }
    let operation = match (request.uri().path(), request.method()) {
        ("/files", &Method::GET | &Method::HEAD) => FileOperation::Read,
        ("/files", &Method::POST) => FileOperation::Write,
        _ => {
            let message =
                "unauthorized access, please provide a valid access token or method signing if supported";
            return error_response(StatusCode::UNAUTHORIZED, message);
        }
    };
    let refusal = match shown {
        Some(_) => Err("access token present in header but does not match"),
        None => check_signature(request.uri().query().unwrap_or_default(), operation, &token),
    };
    match refusal {
        Ok(()) => next.run(request).await,
        Err(message) => error_response(StatusCode::UNAUTHORIZED, message),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Same,
    Different,
}

fn shows_token(headers: &HeaderMap, token: &Token) -> Option<Comparison> {
    let shown = headers.get("x-access-token").filter(|shown| !shown.is_empty())?;
    let same: bool = shown.as_bytes().ct_eq(token.expose().as_bytes()).into();
    Some(if same { Comparison::Same } else { Comparison::Different })
}

fn check_signature(query: &str, operation: FileOperation, token: &Token) -> Result<(), &'static str> {
    let query: SignedQuery = serde_urlencoded::from_str(query).map_err(|_| "invalid signature")?;
    let given = query.signature.as_deref().ok_or("missing signature query parameter")?;
    let expiry = query.signature_expiration;
    if !signature::verify(given, &query.path, operation, &query.username, token, expiry) {
        return Err("invalid signature");
    }
    match expiry {
        Some(expiry) if expiry < chrono::Utc::now().timestamp() => Err("signature is already expired"),
        _ => Ok(()),
    }
}

/// Answers 404 to everybody but the host.
pub async fn require_host(
    State(guest): State<Arc<Guest>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
    next: Next,
) -> Response {
    if guest.config.is_host(peer.ip()) {
        return next.run(request).await;
    }
    error_response(StatusCode::NOT_FOUND, "not found")
}

/// The user name of an `Authorization: Basic` header. `Err` when there is one that cannot be read.
pub fn basic_user(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    const WRONG: &str = "the Authorization header must be 'Basic' with base64 of 'user:'";
    let Some(header) = headers.get("authorization") else {
        return Ok(None);
    };
    let text = header.to_str().map_err(|_| WRONG)?;
    let Some((scheme, credentials)) = text.split_once(' ') else {
        return Err(WRONG);
    };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let decoded = STANDARD.decode(credentials.trim()).map_err(|_| WRONG)?;
    let decoded = String::from_utf8(decoded).map_err(|_| WRONG)?;
    let name = decoded.split_once(':').map_or(decoded.as_str(), |(name, _)| name);
    Ok(Some(name.to_owned()).filter(|name| !name.is_empty()))
}
