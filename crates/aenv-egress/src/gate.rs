//! The gate of one slot: its sockets, its policy, its tasks.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use aenv_net::{Cidr, GateSockets, NamespaceSlot, Slot};
use aenv_types::EgressPolicy;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
    task::JoinSet,
};

use crate::{
    Authority, HostName, SecretSource, Trust,
    connection::{self, Refusal},
    dns,
    resolver::{Addresses, ResolveError, Resolver},
    tunnel,
};

/// Connections of one sandbox that are under way at the same time; further ones are reset.
const MAX_CONNECTIONS: usize = 1024;

/// What all gates of a node share.
pub(crate) struct Shared {
    /// What no policy opens.
    pub denied: Vec<Cidr>,
    /// Resolvers of sandboxes whose policy names none.
    pub resolvers: Vec<IpAddr>,
    pub authority: Authority,
    pub trust: Trust,
    pub secrets: Arc<dyn SecretSource>,
}

/// What everything in one gate needs.
pub(crate) struct Context {
    pub slot: Arc<NamespaceSlot>,
    shared: Arc<Shared>,
    policies: watch::Receiver<Arc<EgressPolicy>>,
    resolver: Resolver,
}

impl Context {
    pub(crate) fn policy(&self) -> Arc<EgressPolicy> {
        self.policies.borrow().clone()
    }

    pub(crate) fn authority(&self) -> &Authority {
        &self.shared.authority
    }

    pub(crate) fn trust(&self) -> &Trust {
        &self.shared.trust
    }

    pub(crate) fn secrets(&self) -> &dyn SecretSource {
        &*self.shared.secrets
    }

    pub(crate) fn slot_index(&self) -> u32 {
        self.slot.record().index
    }

    /// Whether no sandbox may reach an address.
    pub(crate) fn is_denied(&self, address: Ipv4Addr) -> bool {
        let address = Cidr::new(address, 32);
        self.shared.denied.iter().any(|range| range.contains(&address))
    }

    /// The resolvers of a sandbox with this policy.
    pub(crate) fn resolvers<'a>(&'a self, policy: &'a EgressPolicy) -> &'a [IpAddr] {
        if policy.dns_servers.is_empty() { &self.shared.resolvers } else { &policy.dns_servers }
    }

    pub(crate) async fn lookup(
        &self,
        policy: &EgressPolicy,
        name: &HostName,
    ) -> Result<Addresses, ResolveError> {
        self.resolver.lookup(&self.slot, self.resolvers(policy), name).await
    }

    /// Addresses of a name that a connection to it may be made to. The one that the guest wants is first, or the only one, if
    /// it is the name's; it is left out if it is not.
    pub(crate) async fn addresses_of(
        &self,
        policy: &EgressPolicy,
        name: &HostName,
        wanted: Ipv4Addr,
    ) -> Result<Vec<Ipv4Addr>, Refusal> {
        let permitted = |address: &Ipv4Addr| {
            let reachable = policy.allows_name(name.as_str()) || policy.allows_address(IpAddr::V4(*address));
            reachable && !self.is_denied(*address)
        };
        if self.resolver.gave(name, wanted) && permitted(&wanted) {
            return Ok(vec![wanted]);
        }
        let found =
            self.lookup(policy, name).await.map_err(|error| Refusal::Unresolved(name.clone(), error))?;
        let mut addresses: Vec<Ipv4Addr> = found.addresses.into_iter().filter(permitted).collect();
        addresses.sort_by_key(|address| *address != wanted);
        Ok(addresses)
    }
}

/// A gate that is open. Dropping it ends every connection that goes through it.
pub(crate) struct Gate {
    policy: watch::Sender<Arc<EgressPolicy>>,
    context: Arc<Context>,
    _tasks: JoinSet<()>,
}

impl Gate {
    /// Opens the gate of a slot.
    pub(crate) fn open(
        slot: Arc<NamespaceSlot>,
        shared: Arc<Shared>,
        sockets: GateSockets,
        policy: &EgressPolicy,
    ) -> Self {
        let (sender, policies) = watch::channel(Arc::new(policy.clone()));
        let context = Arc::new(Context { slot, shared, policies, resolver: Resolver::default() });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(Arc::clone(&context), sockets.connections));
        tasks.spawn(dns::serve_udp(Arc::clone(&context), sockets.queries));
        tasks.spawn(dns::serve_tcp(Arc::clone(&context), sockets.long_queries));
        Self { policy: sender, context, _tasks: tasks }
    }

    /// Replaces the policy, and returns the one before; connections that the new one does not allow end.
    pub(crate) fn set_policy(&self, policy: Arc<EgressPolicy>) -> Arc<EgressPolicy> {
        let before = self.policy.send_replace(Arc::clone(&policy));
        if before.dns_servers != policy.dns_servers {
            self.context.resolver.forget();
        }
        before
    }
}

async fn accept(context: Arc<Context>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let guest = match listener.accept().await {
            Ok((guest, _)) => guest,
            Err(error) => {
                tracing::debug!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tunnel::reset_on_close(&guest);
            continue;
        };
        let (context, policies) = (Arc::clone(&context), context.policies.clone());
        connections.spawn(async move {
            let _place = place;
            connection::serve(context, guest, policies).await;
        });
    }
}
