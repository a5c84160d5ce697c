//! One TCP connection of a guest: whom it is for, whether that is allowed, and how it goes on.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    os::fd::AsFd,
    sync::Arc,
};

use aenv_types::EgressPolicy;
use nix::sys::socket::{getsockopt, sockopt::OriginalDst};
use thiserror::Error;
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    HostName,
    dial::dial,
    gate::Context,
    inject,
    peek::{self, PeekError, Protocol},
    resolver::ResolveError,
    tunnel::{self, Policies},
};

/// Why a connection did not get through.
#[derive(Debug, Error)]
pub(crate) enum Refusal {
    #[error("nothing allows {0}, and it does not say whom it is for: {1}")]
    Nameless(SocketAddrV4, PeekError),
    #[error("nothing allows {0}")]
    Address(SocketAddrV4),
    #[error("nothing allows the name {0}")]
    Name(HostName),
    #[error("{0} cannot be resolved: {1}")]
    Unresolved(HostName, ResolveError),
    #[error("a new policy does not allow it")]
    Replaced,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What was found out about a connection, and under which policy it was let through.
#[derive(Clone)]
pub(crate) struct Passage {
    pub destination: SocketAddrV4,
    /// What the guest said, where it was asked.
    pub name: Option<HostName>,
    pub policy: Arc<EgressPolicy>,
}

impl Passage {
    fn address_allowed(&self, policy: &EgressPolicy) -> bool {
        policy.allows_address(IpAddr::V4(*self.destination.ip()))
    }

    fn name_allowed(&self, policy: &EgressPolicy) -> bool {
        self.name.as_ref().is_some_and(|name| policy.allows_name(name.as_str()))
    }

    /// Whether the connection may go on as it is under another policy.
    pub(crate) fn still(&self, now: &EgressPolicy) -> bool {
        let headers = |policy: &EgressPolicy| {
            let headers = policy.headers_for(self.name.as_ref()?.as_str())?;
            Some(
                headers
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .collect::<Vec<_>>(),
            )
        };
        let unasked = self.name.is_none()
            && self.policy.rules.is_empty()
            && !now.rules.is_empty()
            && Protocol::of_port(self.destination.port()).is_some();
        (self.address_allowed(now) || self.name_allowed(now))
            && now.proxy == self.policy.proxy
            && headers(now) == headers(&self.policy)
            && !unasked
    }

    /// Addresses that the connection may be made to. Of a name: those that the resolvers give, whatever the guest said.
    async fn addresses(&self, context: &Context) -> Result<Vec<Ipv4Addr>, Refusal> {
        let own = *self.destination.ip();
        if self.address_allowed(&self.policy) {
            return Ok(vec![own]);
        }
        let Some(name) = &self.name else { return Err(Refusal::Address(self.destination)) };
        context.addresses_of(&self.policy, name, own).await
    }
}

/// Serves one connection to its end.
pub(crate) async fn serve(context: Arc<Context>, mut guest: TcpStream, mut policies: Policies) {
    let policy = policies.borrow_and_update().clone();
    // Closed last: until then it is still known how the connection is to end.
    let ending = guest.as_fd().try_clone_to_owned();
    let served = async {
        let destination = original_destination(&guest)?;
        let mut seen = Vec::new();
        let passage = admit(&mut guest, destination, policy, &mut seen).await?;
        go_on(&context, guest, passage, seen, policies).await
    };
    match (served.await, ending) {
        (Err(refusal), Ok(ending)) => {
            tracing::debug!(slot = context.slot_index(), %refusal, "an outgoing connection was ended");
            tunnel::reset_on_close(&ending);
        }
        (Err(refusal), Err(error)) => tracing::debug!(%refusal, %error, "an outgoing connection was closed"),
        (Ok(()), _) => {}
    }
}

/// Finds out what is needed to judge a connection, and judges it.
async fn admit(
    guest: &mut TcpStream,
    destination: SocketAddrV4,
    policy: Arc<EgressPolicy>,
    seen: &mut Vec<u8>,
) -> Result<Passage, Refusal> {
    let mut passage = Passage { destination, name: None, policy };
    let policy = Arc::clone(&passage.policy);
    let by_address = passage.address_allowed(&policy);
    let Some(protocol) = Protocol::of_port(destination.port()) else {
        return if by_address { Ok(passage) } else { Err(Refusal::Address(destination)) };
    };
    if by_address && policy.rules.is_empty() {
        return Ok(passage);
    }
    match peek::host(guest, protocol, seen).await {
        Ok(name) => passage.name = Some(name),
        Err(PeekError::Io(error)) => return Err(error.into()),
        Err(_) if by_address => {}
        Err(error) => return Err(Refusal::Nameless(destination, error)),
    }
    match &passage.name {
        Some(name) if !by_address && !policy.allows_name(name.as_str()) => Err(Refusal::Name(name.clone())),
        _ => Ok(passage),
    }
}

async fn go_on(
    context: &Arc<Context>,
    mut guest: TcpStream,
    passage: Passage,
    seen: Vec<u8>,
    policies: Policies,
) -> Result<(), Refusal> {
    tunnel::keep_alive(&guest);
    let carried = async {
        let named = passage.name.as_ref().filter(|name| passage.policy.headers_for(name.as_str()).is_some());
        if let (Some(host), Some(protocol)) = (named, Protocol::of_port(passage.destination.port())) {
            let (host, passage) = (host.clone(), passage.clone());
            return Box::pin(inject::serve(Arc::clone(context), guest, seen, passage, host, protocol)).await;
        }
        let addresses = passage.addresses(context).await?;
        let port = passage.destination.port();
        let mut outside = dial(context, &passage.policy, &addresses, port).await?;
        outside.write_all(&seen).await?;
        drop(seen);
        Ok(tunnel::pass_on(&mut guest, &mut *outside).await?)
    };
    tokio::select! {
        carried = carried => carried,
        () = tunnel::until_forbidden(policies, |now| passage.still(now)) => Err(Refusal::Replaced),
    }
}

fn original_destination(stream: &impl AsFd) -> io::Result<SocketAddrV4> {
    let address = getsockopt(stream, OriginalDst)?;
    Ok(SocketAddrV4::new(u32::from_be(address.sin_addr.s_addr).into(), u16::from_be(address.sin_port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allow: &[&str]) -> EgressPolicy {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        EgressPolicy { allow: parse(allow), deny: parse(&["0.0.0.0/0"]), ..EgressPolicy::default() }
    }

    fn passage(name: Option<&str>, policy: EgressPolicy) -> Passage {
        Passage {
            destination: "192.0.2.7:443".parse().unwrap(),
            name: name.map(|name| name.parse().unwrap()),
            policy: Arc::new(policy),
        }
    }

    #[test]
    fn connections_end_when_the_policy_no_longer_fits() {
        let named = passage(Some("a.example.com"), policy(&["*.example.com"]));
        assert!(named.still(&policy(&["a.example.com", "b.net"])));
        assert!(named.still(&policy(&["192.0.2.0/24"])) && named.still(&EgressPolicy::default()));
        assert!(!named.still(&policy(&["b.example.com"])) && !named.still(&policy(&["192.0.3.0/24"])));

        let unnamed = passage(None, EgressPolicy::default());
        assert!(unnamed.still(&policy(&["192.0.2.7"])) && !unnamed.still(&policy(&["a.example.com"])));
    }

    #[test]
    fn connections_end_when_they_would_go_another_way() {
        let rule = |value: &str| aenv_types::HeaderRule {
            host: "a.example.com".into(),
            headers: [("x".to_owned(), value.to_owned().into())].into(),
        };
        let with = |rules| EgressPolicy { rules, ..policy(&["*.example.com", "192.0.2.7"]) };
        let named = passage(Some("a.example.com"), with(vec![rule("1")]));
        assert!(named.still(&with(vec![rule("1")])));
        assert!(!named.still(&with(vec![rule("2")])) && !named.still(&with(Vec::new())));
        let unasked = passage(None, with(Vec::new()));
        assert!(unasked.still(&with(Vec::new())) && !unasked.still(&with(vec![rule("1")])));
        let proxy = aenv_types::EgressProxy { host: "p".into(), port: 1, login: None, tls: None };
        assert!(!named.still(&EgressPolicy { proxy: Some(proxy), ..with(vec![rule("1")]) }));
    }
}
