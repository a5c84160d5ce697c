//! A slot's interfaces, addresses and routes, by netlink.

use std::{fs, io, net::Ipv4Addr, os::fd::AsRawFd};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        address::AddressAttribute,
        link::{InfoData, InfoVeth, LinkAttribute},
    },
};
use tokio::runtime::Runtime;

use crate::{
    NetworkConfig, NetworkError, guest,
    netns::{self, Netns, kernel},
    rules, tap,
};

/// Name of the namespace's end of the veth pair.
pub(crate) const VETH: &str = "veth0";

/// Whether packets of the guest may leave the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forwarding {
    On,
    Off,
}

/// Why a slot was not made.
pub(crate) enum BuildError {
    /// Somebody else uses the name or the addresses: another number will do.
    Taken,
    /// It will not do with another number either.
    Failed(NetworkError),
}

impl From<NetworkError> for BuildError {
    fn from(error: NetworkError) -> Self {
        Self::Failed(error)
    }
}

/// Makes the whole namespace of a slot. Blocks, and leaves the calling thread inside: for a thread that ends afterwards.
pub(crate) fn build(config: &NetworkConfig, index: u32, host: &Netns) -> Result<Netns, BuildError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(kernel("starting a runtime for netlink"))?;
    let name = config.tag.slot_name(index);
    let on_host = connect(&runtime)?;
    let slot = match netns::create(&name) {
        Ok(slot) => slot,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(BuildError::Taken),
        Err(error) => return Err(kernel("making a network namespace")(error).into()),
    };
    let wired = wire(config, index, host, &runtime, &on_host);
    if wired.is_err() {
        let cleared = runtime
            .block_on(remove_link(&on_host, &name))
            .and_then(|_| netns::remove(&name).map_err(kernel("removing a network namespace")));
        if let Err(error) = cleared {
            tracing::warn!(%error, slot = name, "a half-made network slot stays for the next sweep");
        }
    }
    wired.map(|()| slot)
}

fn wire(
    config: &NetworkConfig,
    index: u32,
    host: &Netns,
    runtime: &Runtime,
    on_host: &Handle,
) -> Result<(), BuildError> {
    quiet_sysctls()?;
    tap::create(guest::TAP).map_err(kernel("making the tap (is /dev/net/tun there?)"))?;
    let inside = connect(runtime)?;
    let name = config.tag.slot_name(index);
    let (host_end, slot_end) = config.addresses(index);
    runtime.block_on(async {
        // Checking and taking the addresses must be one step for all servers of the host.
        let one_at_a_time = netns::lock().map_err(kernel("locking /run/netns"))?;
        if address_in_use(on_host, host_end).await? {
            return Err(BuildError::Taken);
        }
        let step = "making the veth pair";
        let peer = LinkMessageBuilder::<LinkUnspec>::new()
            .name(name.clone())
            .append_extra_attribute(LinkAttribute::NetNsFd(host.fd().as_raw_fd()))
            .build();
        let pair = LinkVeth::new(VETH, &name).set_info_data(InfoData::Veth(InfoVeth::Peer(peer))).build();
        inside.link().add(pair).execute().await.map_err(kernel(step))?;
        let host_veth = index_of(on_host, &name).await?;
        on_host.address().add(host_veth, host_end.into(), 31).execute().await.map_err(kernel(step))?;
        drop(one_at_a_time);
        on_host
            .link()
            .set(LinkUnspec::new_with_index(host_veth).up().build())
            .execute()
            .await
            .map_err(kernel(step))?;

        let step = "setting up the namespace's interfaces";
        let veth = index_of(&inside, VETH).await?;
        inside.address().add(veth, slot_end.into(), 31).execute().await.map_err(kernel(step))?;
        let tap = index_of(&inside, guest::TAP).await?;
        inside
            .address()
            .add(tap, guest::GATEWAY.into(), guest::PREFIX)
            .execute()
            .await
            .map_err(kernel(step))?;
        let loopback = LinkUnspec::new_with_name("lo").up().build();
        let tap_up = LinkUnspec::new_with_index(tap).address(guest::GATEWAY_MAC.to_vec()).up().build();
        for link in [loopback, tap_up, LinkUnspec::new_with_index(veth).up().build()] {
            inside.link().set(link).execute().await.map_err(kernel(step))?;
        }
        // The guest's address is fixed, so that no packet ever waits for ARP and no ARP answer can move it.
        let neighbour = inside.neighbours().add(tap, guest::ADDRESS.into()).link_layer_address(&guest::MAC);
        neighbour.execute().await.map_err(kernel(step))?;
        let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(host_end).build();
        inside.route().add(route).execute().await.map_err(kernel(step))?;
        Ok::<_, BuildError>(())
    })?;
    Ok(rules::apply("writing the namespace's rules", &rules::namespace(config))?)
}

/// Removes a slot's veth pair and name; both may be gone already. Blocks.
pub(crate) fn remove(name: &str, host: &Netns) -> Result<(), NetworkError> {
    host.enter().map_err(kernel("entering the host's namespace"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(kernel("starting a runtime for netlink"))?;
    let on_host = connect(&runtime)?;
    runtime.block_on(remove_link(&on_host, name))?;
    netns::remove(name).map_err(kernel("removing a network namespace"))
}

/// Names of the host's interfaces that begin with `prefix`. Blocks.
pub(crate) fn links(prefix: &str) -> Result<Vec<String>, NetworkError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(kernel("starting a runtime for netlink"))?;
    let on_host = connect(&runtime)?;
    let mut names = Vec::new();
    runtime.block_on(async {
        let mut links = on_host.link().get().execute();
        while let Some(link) = links.try_next().await.map_err(kernel("listing interfaces"))? {
            for attribute in link.attributes {
                if let LinkAttribute::IfName(name) = attribute
                    && name.starts_with(prefix)
                {
                    names.push(name);
                }
            }
        }
        Ok(names)
    })
}

/// Interfaces that a slot must have, checked in the calling thread's namespace. Blocks.
pub(crate) fn check_inside() -> Result<(), NetworkError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(kernel("starting a runtime for netlink"))?;
    let inside = connect(&runtime)?;
    runtime.block_on(async {
        index_of(&inside, guest::TAP).await?;
        index_of(&inside, VETH).await.map(drop)
    })
}

fn connect(runtime: &Runtime) -> Result<Handle, NetworkError> {
    let _context = runtime.enter();
    let (connection, handle, _) = rtnetlink::new_connection().map_err(kernel("opening a netlink socket"))?;
    runtime.spawn(connection);
    Ok(handle)
}

async fn index_of(handle: &Handle, name: &str) -> Result<u32, NetworkError> {
    let missing =
        || NetworkError::Kernel { step: "looking up an interface", message: format!("{name} is not there") };
    let mut links = handle.link().get().match_name(name).execute();
    let link = links.try_next().await.map_err(|_| missing())?;
    link.map(|link| link.header.index).ok_or_else(missing)
}

async fn address_in_use(handle: &Handle, address: Ipv4Addr) -> Result<bool, NetworkError> {
    let mut addresses = handle.address().get().execute();
    let wanted = AddressAttribute::Local(address.into());
    while let Some(found) = addresses.try_next().await.map_err(kernel("listing addresses"))? {
        if found.attributes.contains(&wanted) {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn remove_link(handle: &Handle, name: &str) -> Result<(), NetworkError> {
    // Gone before, or between the two calls: both are what is wanted.
    let Ok(index) = index_of(handle, name).await else { return Ok(()) };
    match handle.link().del(index).execute().await {
        Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => Ok(()),
        deleted => deleted.map_err(kernel("removing a veth pair")),
    }
}

/// Lets packets that come from the guest's tap leave the calling thread's namespace, or drops them without a word. A switch of the
/// kernel's and no rule: it takes microseconds where `nft` takes a process.
pub(crate) fn forward(whether: Forwarding) -> Result<(), NetworkError> {
    let value = match whether {
        Forwarding::On => "1",
        Forwarding::Off => "0",
    };
    let name = format!("net/ipv4/conf/{}/forwarding", guest::TAP);
    fs::write(format!("/proc/sys/{name}"), value).map_err(|error| NetworkError::Kernel {
        step: "switching the guest's packets",
        message: format!("{name}: {error}"),
    })
}

/// No IPv6, forwarding, strict source checks and no redirects in the calling thread's namespace.
fn quiet_sysctls() -> Result<(), NetworkError> {
    let settings = [
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/rp_filter", "1"),
        ("ipv4/conf/default/rp_filter", "1"),
        ("ipv4/conf/all/accept_redirects", "0"),
        ("ipv4/conf/default/accept_redirects", "0"),
        ("ipv4/conf/all/send_redirects", "0"),
        ("ipv4/conf/default/send_redirects", "0"),
        ("ipv4/conf/all/accept_source_route", "0"),
    ];
    for (name, value) in settings {
        match fs::write(format!("/proc/sys/net/{name}"), value) {
            // A kernel without IPv6 needs none of its settings.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name.starts_with("ipv6") => {}
            written => written.map_err(|error| NetworkError::Kernel {
                step: "configuring the namespace",
                message: format!("net/{name}: {error}"),
            })?,
        }
    }
    Ok(())
}
