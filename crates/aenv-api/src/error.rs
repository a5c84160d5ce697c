//! The error envelope `{code, message, error_code}`. Every answer that is not 2xx is one of these, made here and nowhere else.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Header by which clients know whether to ask again by themselves.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// The envelope as it is on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Error)]
pub struct ErrorBody {
    /// Equals the HTTP status.
    pub code: u16,
    /// What was wrong and what to do.
    pub message: String,
    /// Stable, machine-readable; absent where the status says it all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}

/// An answer that is not 2xx.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub struct ApiError {
    /// HTTP status, and `code` of the envelope.
    pub status: StatusCode,
    /// What was wrong and what to do.
    pub message: String,
    /// Stable code.
    pub error_code: Option<&'static str>,
    /// `Retry-After`, in whole seconds.
    pub retry_after_secs: Option<u64>,
}

impl ApiError {
    /// Any status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry_after_secs: None }
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with_code("bad_request")
    }

    /// 401.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).with_code("unauthorized")
    }

    /// 403.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message).with_code("forbidden")
    }

    /// 404.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message).with_code("not_found")
    }

    /// 409.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message).with_code("conflict")
    }

    /// 429, with the time after which it is worth asking again.
    pub fn too_many(message: impl Into<String>, retry_after_secs: u64) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limited");
        Self { retry_after_secs: Some(retry_after_secs), ..error }
    }

    /// 429 for a limit that no waiting changes: the clients are told not to ask again.
    pub fn quota(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("rate_limited")
    }

    /// 500. The message is public: detail belongs into the log, under the request id.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code("internal_server_error")
    }

    /// The same with another stable code.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { error_code: Some(code), ..self }
    }

    /// The envelope.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            code: self.status.as_u16(),
            message: self.message.clone(),
            error_code: self.error_code.map(str::to_owned),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(secs) = self.retry_after_secs {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(secs));
        } else if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_repeats_the_status() {
        let error = ApiError::not_found("gone");
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body, serde_json::json!({"code": 404, "message": "gone", "error_code": "not_found"}));
        assert_eq!(error.into_response().status(), 404);
    }

    #[test]
    fn a_busy_node_says_when_to_come_back() {
        let response = ApiError::too_many("full", 7).into_response();
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(response.status(), 429);
        let response = ApiError::quota("no more").into_response();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["should-retry"]),
            (429, &"false".parse().unwrap())
        );
    }
}
