//! One request, to its guest and back.

use std::{io, time::Duration};

use aenv_envd_api::PORT;
use aenv_orchestrator::{Route, SandboxError, Wake};
use axum::{body::Body, response::IntoResponse};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version, header, uri::PathAndQuery};
use hyper::body::Incoming;

use super::{
    Proxy, access,
    answer::{self, Reader},
    body::GuestBody,
    connect::{self, Lease},
    headers,
    target::Target,
    tunnel,
};
use crate::{events::Event, failure::sandbox_error};

/// After a broken connection, how long the orchestrator may take to say that the sandbox ended.
const END_NOTICE: Duration = Duration::from_millis(300);

/// Port of the code interpreter's service in its template.
const CODE_INTERPRETER: u16 = 49999;

/// How often a route is asked for anew when its generation ended before the request was sent.
const ATTEMPTS: u32 = 3;

struct Context<'a> {
    proxy: &'a Proxy,
    target: Target,
    reader: Reader,
}

/// Answers a request that belongs to `target`.
pub async fn serve(proxy: &Proxy, request: Request<Body>, target: Target) -> Response<Body> {
    let reader = Reader::of(request.headers());
    let path = target.path.as_ref().map_or(request.uri().path(), PathAndQuery::path);
    if target.port == PORT && access::is_host_only(path) {
        return answer::plain_error(StatusCode::NOT_FOUND, "there is nothing here");
    }
    Context { proxy, target, reader }.run(request).await
}

impl Context<'_> {
    async fn run(&self, request: Request<Body>) -> Response<Body> {
        // Before anybody is woken for it.
        let Some(gate) = self.proxy.routes.gate(&self.target.id) else { return self.gone() };
        if let Err(fault) = access::check_traffic_token(&gate, self.target.port, request.headers()) {
            return self.refuse(StatusCode::FORBIDDEN, fault.message());
        }
        for _ in 0..ATTEMPTS {
            let route = match self.proxy.routes.route(&self.target.id, Wake::IfAutoResume).await {
                Ok(route) => route,
                Err(error) => return self.no_route(error),
            };
            match self.connection(&route).await {
                Ok((lease, reused)) => {
                    self.note(&route, request.uri().path());
                    return self.exchange(&route, lease, reused, request).await;
                }
                // A refusal is the guest's own answer: it lives.
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused && !route.ended.is_cancelled() =>
                {
                    return self.no_connection(&error);
                }
                // It was paused or killed in between: ask again, the request has not been touched.
                Err(_) if ended_soon(&route).await => {}
                Err(error) => return self.no_connection(&error),
            }
        }
        self.gone()
    }

    /// What a sandbox is told to do shows in its log; not the arguments, which may hold secrets.
    fn note(&self, route: &Route, path: &str) {
        let started = match path {
            "/process.Process/Start" if self.target.port == PORT => "process started",
            "/execute" if self.target.port == CODE_INTERPRETER => "code executed",
            _ => return,
        };
        if let Some(events) = &self.proxy.events {
            events.push(Event::info(&route.team, &route.id, started).with("call", path));
        }
    }

    async fn connection(&self, route: &Route) -> io::Result<(Lease, bool)> {
        if self.target.port == PORT
            && let Some(lease) = self.proxy.pool.take(route).await
        {
            return Ok((lease, true));
        }
        connect::open(route, self.target.port).await.map(|lease| (lease, false))
    }

    async fn exchange(
        &self,
        route: &Route,
        lease: Lease,
        reused: bool,
        mut request: Request<Body>,
    ) -> Response<Body> {
        let upgrade = headers::upgrade_of(request.headers());
        let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let request = match self.prepare(route, request, upgrade.as_ref()) {
            Ok(request) => request,
            Err(message) => return answer::plain_error(StatusCode::BAD_REQUEST, &message),
        };
        let sent = tokio::select! {
            biased;
            () = route.ended.cancelled() => return self.gone(),
            sent = self.send(route, lease, reused, request) => sent,
        };
        let (response, lease) = match sent {
            Ok(sent) => sent,
            Err(_) if ended_soon(route).await => return self.gone(),
            Err(error) => {
                tracing::debug!(sandbox = %self.target.id, port = self.target.port, %error, "a guest broke off");
                return self
                    .refuse(StatusCode::BAD_GATEWAY, "The sandbox closed the connection before it answered");
            }
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && let Some(client) = client
        {
            return self.switch(route, response, lease, client);
        }
        self.relay(route, response, lease)
    }

    /// Sends, and sends again on a fresh connection when a kept one turned out closed before a byte was written.
    async fn send(
        &self,
        route: &Route,
        mut lease: Lease,
        reused: bool,
        request: Request<Body>,
    ) -> io::Result<(Response<Incoming>, Lease)> {
        match lease.sender().try_send_request(request).await {
            Ok(response) => Ok((response, lease)),
            Err(mut failed) => match failed.take_message() {
                Some(request) if reused => {
                    let mut fresh = connect::open(route, self.target.port).await?;
                    let response = fresh.sender().send_request(request).await.map_err(io::Error::other)?;
                    Ok((response, fresh))
                }
                _ => Err(io::Error::other(failed.into_error())),
            },
        }
    }

    fn prepare(
        &self,
        route: &Route,
        request: Request<Body>,
        upgrade: Option<&HeaderValue>,
    ) -> Result<Request<Body>, String> {
        let (mut parts, body) = request.into_parts();
        let host = match &route.proxy.mask_request_host {
            Some(mask) => HeaderValue::from_str(&mask.replace("${PORT}", &self.target.port.to_string())).ok(),
            None => parts.headers.get(header::HOST).cloned().or_else(|| {
                parts.uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
            }),
        };
        headers::strip_hop_by_hop(&mut parts.headers);
        headers::strip_platform(&mut parts.headers, |key| self.proxy.keys.check(key).is_some());
        let host = host.unwrap_or_else(|| HeaderValue::from_static("localhost"));
        parts.headers.insert(header::HOST, host);
        if let Some(protocol) = upgrade {
            parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(header::UPGRADE, protocol.clone());
        }
        let path = self.target.path.clone().or_else(|| parts.uri.path_and_query().cloned());
        parts.uri = path.map_or_else(Uri::default, Uri::from);
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        Ok(Request::from_parts(parts, body))
    }

    fn relay(&self, route: &Route, response: Response<Incoming>, lease: Lease) -> Response<Body> {
        let (mut parts, body) = response.into_parts();
        let closes = parts
            .headers
            .get(header::CONNECTION)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"close"));
        headers::strip_hop_by_hop(&mut parts.headers);
        parts.version = Version::default();
        parts.extensions.clear();
        let keeps = self.target.port == PORT && !closes;
        let home = keeps.then(|| (self.proxy.pool.clone(), route.id.clone()));
        let body = GuestBody::new(body, route.ended.clone(), lease, home);
        Response::from_parts(parts, Body::new(body))
    }

    fn switch(
        &self,
        route: &Route,
        mut response: Response<Incoming>,
        lease: Lease,
        client: hyper::upgrade::OnUpgrade,
    ) -> Response<Body> {
        let guest = hyper::upgrade::on(&mut response);
        tokio::spawn(tunnel::join(client, guest, route.ended.clone(), lease.into_tunnel()));
        let (mut parts, _) = response.into_parts();
        let protocol = parts.headers.get(header::UPGRADE).cloned();
        headers::strip_hop_by_hop(&mut parts.headers);
        parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol {
            parts.headers.insert(header::UPGRADE, protocol);
        }
        parts.extensions.clear();
        Response::from_parts(parts, Body::empty())
    }

    fn no_route(&self, error: SandboxError) -> Response<Body> {
        match error {
            SandboxError::NotFound(_)
            | SandboxError::Deleted(_)
            | SandboxError::Elsewhere { .. }
            | SandboxError::Paused(_)
            | SandboxError::Failed { .. } => self.gone(),
            SandboxError::Running(_) => {
                self.refuse(StatusCode::CONFLICT, "The sandbox is in transition; ask again")
            }
            other => sandbox_error(other).into_response(),
        }
    }

    fn no_connection(&self, error: &io::Error) -> Response<Body> {
        tracing::debug!(sandbox = %self.target.id, port = self.target.port, %error, "a guest was not reached");
        answer::port_closed(self.reader, self.target.id.as_str(), self.target.port)
    }

    fn gone(&self) -> Response<Body> {
        answer::not_found(self.reader, self.target.id.as_str())
    }

    fn refuse(&self, status: StatusCode, message: &str) -> Response<Body> {
        answer::refusal(self.reader, status, self.target.id.as_str(), message, None)
    }
}

/// Whether the route's generation has ended, or ends within a moment.
async fn ended_soon(route: &Route) -> bool {
    tokio::time::timeout(END_NOTICE, route.ended.cancelled()).await.is_ok()
}
