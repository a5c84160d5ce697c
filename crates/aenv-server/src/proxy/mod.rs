//! The data plane: requests that belong to a sandbox go to its guest, byte for byte, both ways.
//!
//! Who a request belongs to is decided in [`target`], before the control plane sees it. [`forward`] brings it there; nothing is
//! buffered, no size is limited, and no live stream times out. When a sandbox ends, its connections break: a client must never
//! take half an answer for a whole one.
//!
//! This room holds no state of sandboxes but idle connections to guests. It never wakes a sandbox by itself: that is the
//! orchestrator's decision, asked for by [`Routes::route`].

pub mod access;
pub mod answer;
pub mod body;
pub mod connect;
pub mod forward;
pub mod headers;
pub mod target;
pub mod tunnel;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use aenv_orchestrator::{Gate, Orchestrator, Route, SandboxError, Wake};
use aenv_types::{SandboxId, Token};
use axum::body::Body;
use futures::future::BoxFuture;
use http::{Request, Response};

use crate::{events::Events, keys::Keys};
use connect::Pool;
use target::{Claim, Target};

/// What the data plane asks of the orchestrator.
pub trait Routes: Send + Sync + 'static {
    /// The way to a running sandbox. One in transition is waited for; one that is paused is resumed if it may be.
    fn route<'a>(&'a self, id: &'a SandboxId, wake: Wake) -> BoxFuture<'a, Result<Route, SandboxError>>;

    /// What traffic to a sandbox has to show, before it may wake it; `None` when there is no such sandbox.
    fn gate(&self, id: &SandboxId) -> Option<Gate>;

    /// Tokens of the running sandboxes, for the search by signature.
    fn envd_tokens(&self) -> Vec<(SandboxId, Token)>;
}

impl Routes for Orchestrator {
    fn route<'a>(&'a self, id: &'a SandboxId, wake: Wake) -> BoxFuture<'a, Result<Route, SandboxError>> {
        Box::pin(Self::route(self, id, wake))
    }

    fn gate(&self, id: &SandboxId) -> Option<Gate> {
        Self::gate(self, id)
    }

    fn envd_tokens(&self) -> Vec<(SandboxId, Token)> {
        Self::envd_tokens(self)
    }
}

/// The data plane of a server. Cheap to clone.
#[derive(Clone)]
pub struct Proxy {
    routes: Arc<dyn Routes>,
    keys: Keys,
    domains: Arc<[String]>,
    pool: Arc<Pool>,
    events: Option<Events>,
}

impl Proxy {
    /// A data plane over these routes. `domains`: those of host names that name a sandbox; any when empty.
    pub fn new(routes: Arc<dyn Routes>, keys: Keys, domains: &[String]) -> Self {
        let domains = domains.iter().map(|domain| domain.trim_matches('.').to_ascii_lowercase()).collect();
        Self { routes, keys, domains, pool: Arc::default(), events: None }
    }

    /// The same, noting what envd is asked to start.
    pub fn with_events(self, events: Events) -> Self {
        Self { events: Some(events), ..self }
    }

    /// Whose request this is.
    pub fn claim<B>(&self, request: &Request<B>) -> Claim {
        target::claim(request, &self.domains)
    }

    /// Answers a request that a sandbox was named for.
    pub async fn serve(&self, request: Request<Body>, target: Target) -> Response<Body> {
        forward::serve(self, request, target).await
    }

    /// Answers a request to a signed file URL, which names no sandbox: the one whose token made the signature is it.
    pub async fn serve_signed(&self, request: Request<Body>, file: target::SignedFile) -> Response<Body> {
        match access::find_signer(self.routes.envd_tokens(), &file) {
            Some(id) => self.serve(request, Target::envd(id)).await,
            None => answer::plain_error(http::StatusCode::UNAUTHORIZED, "invalid signature"),
        }
    }
}
