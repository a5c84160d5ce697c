//! Who asks. `X-API-Key` (or the same key as a bearer token) on every control-plane call but the public ones.

use aenv_api::ApiError;
use axum::{
    extract::{FromRequestParts, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, header, request::Parts};

use crate::{
    failure::Failure,
    keys::{Caller, Keys},
};

/// The key that a request carries.
pub fn presented(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok().map(str::trim).filter(|key| !key.is_empty());
    }
    bearer(headers)
}

/// The bearer token that a request carries.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim()).filter(|token| !token.is_empty())
}

/// Lets requests with a valid key through and tells handlers whose it is.
pub async fn require_key(State(keys): State<Keys>, mut request: Request, next: Next) -> Response {
    let Some(key) = presented(request.headers()) else {
        return ApiError::unauthorized("no API key: send it as header X-API-Key").into_response();
    };
    let Some(caller) = keys.check(key) else {
        return ApiError::unauthorized(
            "this API key is not valid on this server; `aenv key list` shows the valid ones",
        )
        .into_response();
    };
    if keys.is_stale(&caller.key_id) {
        keys.touch(&caller.key_id);
    }
    request.extensions_mut().insert(caller.clone());
    let mut response = next.run(request).await;
    // For the audit log.
    response.extensions_mut().insert(caller);
    response
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| ApiError::unauthorized("no API key: send it as header X-API-Key").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            pairs.iter().map(|(n, v)| (n.parse().unwrap(), v.parse().unwrap())).collect::<HeaderMap>()
        };
        assert_eq!(presented(&headers(&[("x-api-key", " k ")])), Some("k"));
        assert_eq!(presented(&headers(&[("authorization", "bearer t")])), Some("t"));
        assert_eq!(presented(&headers(&[("authorization", "Basic t")])), None);
        assert_eq!(presented(&headers(&[("x-api-key", "")])), None);
        assert_eq!(presented(&headers(&[])), None);
    }
}
