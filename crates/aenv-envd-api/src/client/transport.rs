//! HTTP/1.1 over a guest's [`Dial`], and the same as a transport of the generated RPC clients.

use std::sync::Arc;

use aenv_types::Dial;
use connectrpc::{
    ConnectError,
    client::{ClientBody, ClientTransport},
};
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response, Uri, header::HOST, uri::PathAndQuery};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;

use super::{EnvdError, RequestBody};
use crate::PORT;

/// The name that envd is called by in `Host`.
pub(super) const AUTHORITY: &str = "envd";

/// The sending half of a connection.
pub(super) type Sender = http1::SendRequest<RequestBody>;

/// Opens connections to one guest's envd.
#[derive(Clone)]
pub struct DialTransport {
    dial: Arc<dyn Dial>,
}

impl DialTransport {
    pub(super) fn new(dial: Arc<dyn Dial>) -> Self {
        Self { dial }
    }

    /// A fresh connection; it closes when the sender and the answer's body are dropped.
    pub(super) async fn connect(&self) -> Result<Sender, EnvdError> {
        let stream = self.dial.dial(PORT).await.map_err(EnvdError::Unreachable)?;
        stream.set_nodelay(true).map_err(EnvdError::Unreachable)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(EnvdError::Broken)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to a guest agent ended");
            }
        });
        Ok(sender)
    }
}

impl ClientTransport for DialTransport {
    type ResponseBody = Incoming;
    type Error = ConnectError;

    fn send(
        &self,
        request: Request<ClientBody>,
    ) -> BoxFuture<'static, Result<Response<Incoming>, ConnectError>> {
        let transport = self.clone();
        Box::pin(async move {
            let unavailable = |error: &dyn std::error::Error| ConnectError::unavailable(error.to_string());
            let mut sender = transport.connect().await.map_err(|error| unavailable(&error))?;
            let (mut parts, body) = request.into_parts();
            // On HTTP/1.1 the request line carries the path, the authority stands in `Host`.
            let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
            parts.uri = Uri::from(path);
            parts.headers.insert(HOST, HeaderValue::from_static(AUTHORITY));
            let body = body.map_err(std::io::Error::other).boxed_unsync();
            sender.send_request(Request::from_parts(parts, body)).await.map_err(|error| unavailable(&error))
        })
    }
}
