//! Firecracker's API: HTTP over a unix socket, one request after another, each on a connection of its own. A connection costs a
//! tenth of a millisecond, and nothing has to be mended when one breaks.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;

use super::root::Root;
use crate::EngineError;

/// Answers are short; the longest holds the configuration of a VM with many disks.
const LONGEST_ANSWER: usize = 1 << 20;

/// A request: method, path, body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
}

impl Call {
    pub(crate) fn put(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::PUT, path: path.into(), body }
    }

    pub(crate) fn patch(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::PATCH, path: path.into(), body }
    }

    pub(crate) fn get(path: impl Into<String>) -> Self {
        Self { method: Method::GET, path: path.into(), body: Value::Null }
    }

    fn name(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

/// The API of one process.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    root: Arc<Root>,
}

impl Api {
    pub(crate) fn new(root: Arc<Root>) -> Self {
        Self { root }
    }

    /// Asks, and waits at most `wait` for the answer. [`EngineError::Exited`] when the process does not talk any more.
    pub(crate) async fn call(&self, call: Call, wait: Duration) -> Result<Value, EngineError> {
        let name = call.name();
        match tokio::time::timeout(wait, self.exchange(call)).await {
            Ok(answer) => answer,
            Err(_) => Err(EngineError::TimedOut { command: name, secs: wait.as_secs() }),
        }
    }

    async fn exchange(&self, call: Call) -> Result<Value, EngineError> {
        let name = call.name();
        let broken = |what: &dyn std::fmt::Display| EngineError::Exited(format!("{name}: {what}"));
        let stream = self.root.connect().await.map_err(|e| broken(&e))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(&e))?;
        let connection = tokio::spawn(connection);
        let body = if call.body.is_null() { String::new() } else { call.body.to_string() };
        let request = Request::builder()
            .method(call.method)
            .uri(&call.path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| EngineError::Start(format!("{name}: {e}")))?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(|e| broken(&e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await;
            Ok((status, body.map_err(|e| broken(&e))?.to_bytes()))
        };
        let answer = answer.await;
        connection.abort();
        let (status, body) = answer?;
        understand(name, status, &body)
    }
}

/// What an answer says: the body of a good one, the fault of another one.
fn understand(command: String, status: StatusCode, body: &[u8]) -> Result<Value, EngineError> {
    let said: Option<Value> = serde_json::from_slice(body).ok();
    if status.is_success() {
        return match said {
            Some(value) => Ok(value),
            None if body.is_empty() => Ok(Value::Null),
            None => Err(EngineError::Refused { command, message: "its answer is no JSON".to_owned() }),
        };
    }
    let fault = said.as_ref().and_then(|value| value["fault_message"].as_str());
    let message = match fault {
        Some(fault) => fault.trim().to_owned(),
        None => format!("HTTP {status}"),
    };
    Err(EngineError::Refused { command, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_told_and_other_answers_do_no_harm() {
        let understand = |status: u16, body: &[u8]| {
            understand("PUT /x".to_owned(), StatusCode::from_u16(status).unwrap(), body)
        };
        assert_eq!(understand(204, b"").unwrap(), Value::Null);
        assert_eq!(understand(200, br#"{"state":"Paused"}"#).unwrap()["state"], "Paused");
        let refused = |status, body: &[u8]| understand(status, body).unwrap_err().to_string();
        assert_eq!(
            refused(400, br#"{"fault_message":"no such disk\n"}"#),
            "PUT /x was refused: no such disk"
        );
        assert!(refused(500, b"<html>").contains("HTTP 500"));
        assert!(refused(400, br#"{"fault_message":7}"#).contains("HTTP 400"));
        assert!(refused(200, b"\xff").contains("no JSON"));
    }
}
