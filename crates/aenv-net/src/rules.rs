//! The nftables rules, as documents for `nft -j -f -`. Each document is one transaction.
//!
//! In a slot's namespace, `inet aenv`:
//!
//! ```text
//! chain forward  (policy drop)
//!   not IPv4; ct state invalid or untracked                      drop
//!   from tap0, source is not the guest                           drop
//!   tap0 -> veth0, more connections than the limit               refuse
//!   tap0 -> veth0                                                egress
//!   veth0 -> tap0, ct state established or related               egress     (replies obey the policy too)
//! chain egress
//!   to a resolver of the node, port 53                           policy
//!   to an always-denied range                                    refuse
//!   TCP to a port whose connections must pass the egress gate    refuse     (new ones are handed to it: module `gate`)
//!                                                                policy
//! chain policy
//!   to an allowed range                                          accept
//!   to a refused range                                           refuse     (0.0.0.0/0 when internet is off)
//!                                                                accept
//! chain refuse   TCP: reset; otherwise ICMP "prohibited", so that programs in the guest fail at once
//! chain input    (policy drop): answers to the server's own connections, ping of the gateway, services, what was handed to the gate
//! chain services  empty, but for the port of a service that the server offers to this guest
//! ```
//!
//! Every packet of a connection is judged, not only its first one, and in both directions by the *original* destination: when the
//! policy changes, connections that it no longer allows end with their next packet.
//!
//! A slot that is *isolated* has the same rules, but its guest's packets are not forwarded at all (`wiring::forward`): they meet only
//! what the `input` chain lets in.
//!
//! `netdev aenv` at the tap's ingress lets through only IPv4 and ARP from the guest's own MAC and IPv4 address.
//!
//! On the host, `inet aenv<tag>`: nothing from a slot reaches the host itself or another slot (of any instance), nothing from outside
//! reaches a slot unasked, and what leaves is masqueraded.

use std::{borrow::Cow, path::Path};

use aenv_types::{EgressPolicy, EgressTarget};
use nftables::{
    batch::Batch,
    expr::{
        CT, CTDir, Expression, Fib, FibFlag, FibResult, Meta, MetaKey, NamedExpression, Payload,
        PayloadField, Prefix, SetItem,
    },
    schema::{
        Chain, Element, FlushObject, NfCmd, NfListObject, Nftables, Rule, Set, SetFlag, SetType,
        SetTypeValue, Table,
    },
    stmt::{CTCount, JumpTarget, Match, Operator, Reject, RejectType, Statement},
    types::{NfChainPolicy, NfChainType, NfFamily, NfHook, RejectCode},
};

use crate::{Cidr, NetworkConfig, NetworkError, guest, wiring::VETH};

mod gate;

pub use gate::{DNS_PORT, GATE_PORT};

/// Name of the tables in a slot's namespace.
const TABLE: &str = "aenv";

/// The rules of a fresh namespace, with the default policy.
pub fn namespace(config: &NetworkConfig) -> Nftables<'static> {
    let mut rules = Rules::new(NfFamily::INet, TABLE);
    rules.set("denied", &config.denied());
    let resolvers = config.dns_servers.iter().filter_map(|ip| match ip {
        std::net::IpAddr::V4(v4) => Some(Cidr::new(*v4, 32)),
        std::net::IpAddr::V6(_) => None,
    });
    rules.set("resolvers", &resolvers.collect::<Vec<_>>());
    rules.set("allowed", &[]);
    rules.set("refused", &[]);
    rules.refuse_chain();
    gate::namespace(&mut rules);

    rules.chain("policy");
    rules.rule("policy", [is(original("ip daddr"), text("@allowed")), Statement::Accept(None)]);
    rules.rule("policy", [is(original("ip daddr"), text("@refused")), goto("refuse")]);
    rules.rule("policy", [Statement::Accept(None)]);

    rules.chain("egress");
    let port_53 = [
        is(original("ip daddr"), text("@resolvers")),
        is(meta(MetaKey::L4proto), any_of(&["tcp", "udp"])),
        is(original("proto-dst"), Expression::Number(53)),
    ];
    rules.rule("egress", port_53.into_iter().chain([goto("policy")]));
    rules.rule("egress", [is(original("ip daddr"), text("@denied")), goto("refuse")]);
    gate::egress(&mut rules);
    rules.rule("egress", [goto("policy")]);

    let (from_tap, to_tap) =
        (is(meta(MetaKey::Iifname), text(guest::TAP)), is(meta(MetaKey::Oifname), text(guest::TAP)));
    let (from_veth, to_veth) =
        (is(meta(MetaKey::Iifname), text(VETH)), is(meta(MetaKey::Oifname), text(VETH)));
    let guest_ip = || text(guest::ADDRESS.to_string());
    rules.base("forward", NfChainType::Filter, NfHook::Forward, 0, NfChainPolicy::Drop);
    rules.rule("forward", [is_not(meta(MetaKey::Nfproto), text("ipv4")), Statement::Drop(None)]);
    rules.rule("forward", [state(&["invalid", "untracked"]), Statement::Drop(None)]);
    rules.rule(
        "forward",
        [from_tap.clone(), is_not(header("ip", "saddr"), guest_ip()), Statement::Drop(None)],
    );
    let too_many =
        Statement::CTCount(CTCount { val: Expression::Number(config.connection_limit), inv: Some(true) });
    let crowd = [from_tap.clone(), to_veth.clone(), state(&["new"]), too_many, goto("refuse")];
    rules.rule("forward", crowd);
    rules.rule("forward", [from_tap.clone(), to_veth.clone(), goto("egress")]);
    rules.rule("forward", [from_veth, to_tap, state(&["established", "related"]), goto("egress")]);

    rules.base("input", NfChainType::Filter, NfHook::Input, 0, NfChainPolicy::Drop);
    rules.rule("input", [is(meta(MetaKey::Iifname), text("lo")), Statement::Accept(None)]);
    rules.rule("input", [from_tap.clone(), state(&["established", "related"]), Statement::Accept(None)]);
    let ping = is(header("icmp", "type"), text("echo-request"));
    rules.rule("input", [from_tap.clone(), ping, Statement::Accept(None)]);
    rules.chain("services");
    rules.rule("input", [from_tap, is(meta(MetaKey::L4proto), text("tcp")), jump("services")]);
    gate::input(&mut rules);

    rules.base("postrouting", NfChainType::NAT, NfHook::Postrouting, 100, NfChainPolicy::Accept);
    rules.rule("postrouting", [to_veth, is(header("ip", "saddr"), guest_ip()), Statement::Masquerade(None)]);

    let mut ingress = Rules { batch: rules.batch, family: NfFamily::NetDev, table: TABLE.into() };
    ingress.table();
    let chain = ingress.bare_chain("tap");
    ingress.batch.add(NfListObject::Chain(Chain {
        _type: Some(NfChainType::Filter),
        hook: Some(NfHook::Ingress),
        prio: Some(0),
        dev: Some(guest::TAP.into()),
        policy: Some(NfChainPolicy::Drop),
        ..chain
    }));
    let mac = || text(mac_text(guest::MAC));
    ingress.rule("tap", [is_not(header("ether", "saddr"), mac()), Statement::Drop(None)]);
    ingress.rule("tap", [is(header("ip", "saddr"), guest_ip()), Statement::Accept(None)]);
    let own_arp = [
        is(header("arp", "htype"), Expression::Number(1)),
        is(header("arp", "saddr ether"), mac()),
        is(header("arp", "saddr ip"), guest_ip()),
    ];
    ingress.rule("tap", own_arp.into_iter().chain([Statement::Accept(None)]));
    ingress.batch.to_nftables()
}

/// Replaces the policy of a namespace, in one transaction.
///
/// Domains are no business of address sets: connections that only a name can allow are handed to the egress gate. IPv6 ranges
/// have no effect, because a guest has no IPv6.
pub fn policy(policy: &EgressPolicy) -> Nftables<'static> {
    let mut rules = Rules { batch: Batch::new(), family: NfFamily::INet, table: TABLE.into() };
    let refused =
        if policy.internet { ranges(&policy.deny) } else { vec![Cidr::new([0, 0, 0, 0].into(), 0)] };
    rules.replace("allowed", &ranges(&policy.allow));
    rules.replace("refused", &refused);
    gate::policy(&mut rules, policy);
    rules.batch.to_nftables()
}

/// Lets the guest connect to this TCP port of its gateway, and to no other. Only in a namespace that [`namespace`] made.
pub fn service(port: u16) -> Nftables<'static> {
    let mut rules = Rules { batch: Batch::new(), family: NfFamily::INet, table: TABLE.into() };
    let chain = rules.bare_chain("services");
    rules.batch.add_cmd(NfCmd::Flush(FlushObject::Chain(chain)));
    let to_gateway = is(header("ip", "daddr"), text(guest::GATEWAY.to_string()));
    let from_guest = is(header("ip", "saddr"), text(guest::ADDRESS.to_string()));
    let to_port = is(header("tcp", "dport"), Expression::Number(port.into()));
    rules.rule("services", [to_gateway, from_guest, to_port, Statement::Accept(None)]);
    rules.batch.to_nftables()
}

/// The host's rules for one instance; they replace those of an earlier run in the same transaction.
pub fn host(config: &NetworkConfig) -> Nftables<'static> {
    let mut rules = Rules::new(NfFamily::INet, config.tag.table());
    let table = rules.this_table();
    rules.batch.delete(table);
    rules.table();
    rules.refuse_chain();
    let ours = || text(format!("{}*", config.tag.prefix()));
    let from_ours = || is(meta(MetaKey::Iifname), ours());
    let veth_cidr = || prefix(&config.veth_cidr);

    // Before any port forwarding of the host (-100) can give one of its services another address.
    rules.base("prerouting", NfChainType::Filter, NfHook::Prerouting, -150, NfChainPolicy::Accept);
    let flags = [FibFlag::Daddr].into();
    let kind = Expression::Named(NamedExpression::Fib(Fib { result: FibResult::Type, flags }));
    rules.rule(
        "prerouting",
        [from_ours(), is(kind, any_of(&["local", "broadcast", "multicast"])), goto("refuse")],
    );

    rules.base("input", NfChainType::Filter, NfHook::Input, -10, NfChainPolicy::Accept);
    rules.rule("input", [from_ours(), Statement::Drop(None)]);

    rules.base("forward", NfChainType::Filter, NfHook::Forward, -10, NfChainPolicy::Accept);
    rules.rule("forward", [from_ours(), is_not(meta(MetaKey::Nfproto), text("ipv4")), Statement::Drop(None)]);
    rules.rule("forward", [from_ours(), is_not(header("ip", "saddr"), veth_cidr()), Statement::Drop(None)]);
    rules.rule("forward", [from_ours(), is(meta(MetaKey::Oifname), text("aenv*")), goto("refuse")]);
    rules.rule("forward", [from_ours(), Statement::Accept(None)]);
    let to_ours = || is(meta(MetaKey::Oifname), ours());
    rules.rule("forward", [to_ours(), state(&["established", "related"]), Statement::Accept(None)]);
    rules.rule("forward", [to_ours(), Statement::Drop(None)]);

    if config.masquerade {
        rules.base("postrouting", NfChainType::NAT, NfHook::Postrouting, 100, NfChainPolicy::Accept);
        let leaves = is_not(meta(MetaKey::Oifname), text("aenv*"));
        rules.rule(
            "postrouting",
            [is(header("ip", "saddr"), veth_cidr()), leaves, Statement::Masquerade(None)],
        );
    }
    rules.batch.to_nftables()
}

/// Removes the host's rules of one instance; no error when there are none.
pub fn no_host(config: &NetworkConfig) -> Nftables<'static> {
    let mut rules = Rules::new(NfFamily::INet, config.tag.table());
    let table = rules.this_table();
    rules.batch.delete(table);
    rules.batch.to_nftables()
}

/// Applies a document in the calling thread's network namespace.
pub(crate) fn apply(step: &'static str, document: &Nftables<'_>) -> Result<(), NetworkError> {
    // A service's PATH often lacks the sbin folders.
    let nft = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"].into_iter().find(|nft| Path::new(nft).exists());
    nftables::helper::apply_ruleset_with_args(document, nft, nftables::helper::DEFAULT_ARGS).map_err(
        |error| {
            let message = match &error {
                nftables::helper::NftablesError::NftFailed { stderr, .. } => {
                    format!("nft: {}", stderr.trim())
                }
                nftables::helper::NftablesError::NftExecution { inner, .. } => {
                    format!("nft cannot be run ({inner}); install the nftables package")
                }
                other => other.to_string(),
            };
            NetworkError::Kernel { step, message }
        },
    )
}

fn ranges(targets: &[EgressTarget]) -> Vec<Cidr> {
    let range = |target: &EgressTarget| match target {
        EgressTarget::Cidr { addr: std::net::IpAddr::V4(addr), prefix } => Some(Cidr::new(*addr, *prefix)),
        EgressTarget::Cidr { .. } | EgressTarget::Domain(_) => None,
    };
    targets.iter().filter_map(range).collect()
}

/// An interval set refuses overlapping elements: keeps only ranges that lie in no other.
fn disjoint(ranges: &[Cidr]) -> Vec<Cidr> {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| (range.addr(), range.prefix()));
    let mut kept: Vec<Cidr> = Vec::with_capacity(sorted.len());
    for range in sorted {
        if !kept.last().is_some_and(|last| last.contains(&range)) {
            kept.push(range);
        }
    }
    kept
}

/// A document under construction, for one table.
struct Rules {
    batch: Batch<'static>,
    family: NfFamily,
    table: Cow<'static, str>,
}

impl Rules {
    fn new(family: NfFamily, table: impl Into<Cow<'static, str>>) -> Self {
        let mut rules = Self { batch: Batch::new(), family, table: table.into() };
        rules.table();
        rules
    }

    fn this_table(&self) -> NfListObject<'static> {
        NfListObject::Table(Table { family: self.family, name: self.table.clone(), handle: None })
    }

    fn table(&mut self) {
        self.batch.add(self.this_table());
    }

    fn bare_chain(&self, name: &'static str) -> Chain<'static> {
        Chain { family: self.family, table: self.table.clone(), name: name.into(), ..Chain::default() }
    }

    fn chain(&mut self, name: &'static str) {
        self.batch.add(NfListObject::Chain(self.bare_chain(name)));
    }

    fn base(
        &mut self,
        name: &'static str,
        kind: NfChainType,
        hook: NfHook,
        prio: i32,
        policy: NfChainPolicy,
    ) {
        let (_type, hook, prio, policy) = (Some(kind), Some(hook), Some(prio), Some(policy));
        self.batch.add(NfListObject::Chain(Chain { _type, hook, prio, policy, ..self.bare_chain(name) }));
    }

    fn rule(&mut self, chain: &'static str, statements: impl IntoIterator<Item = Statement<'static>>) {
        self.batch.add(NfListObject::Rule(Rule {
            family: self.family,
            table: self.table.clone(),
            chain: chain.into(),
            expr: statements.into_iter().collect(),
            ..Rule::default()
        }));
    }

    fn refuse_chain(&mut self) {
        self.chain("refuse");
        let reset = Reject::new(Some(RejectType::TCPReset), None);
        let prohibited = Reject::new(Some(RejectType::ICMPX), Some(RejectCode::AdminProhibited));
        self.rule("refuse", [is(meta(MetaKey::L4proto), text("tcp")), Statement::Reject(Some(reset))]);
        self.rule("refuse", [Statement::Reject(Some(prohibited))]);
    }

    fn bare_set(&self, name: &'static str) -> Set<'static> {
        Set {
            family: self.family,
            table: self.table.clone(),
            name: name.into(),
            set_type: SetTypeValue::Single(SetType::Ipv4Addr),
            flags: Some([SetFlag::Interval].into()),
            ..Set::default()
        }
    }

    fn set(&mut self, name: &'static str, ranges: &[Cidr]) {
        self.batch.add(NfListObject::Set(Box::new(self.bare_set(name))));
        self.fill(name, ranges);
    }

    fn replace(&mut self, name: &'static str, ranges: &[Cidr]) {
        let set = Box::new(self.bare_set(name));
        self.batch.add_cmd(NfCmd::Flush(FlushObject::Set(set)));
        self.fill(name, ranges);
    }

    fn fill(&mut self, name: &'static str, ranges: &[Cidr]) {
        if !ranges.is_empty() {
            self.batch.add(NfListObject::Element(Element {
                family: self.family,
                table: self.table.clone(),
                name: name.into(),
                elem: disjoint(ranges).iter().map(prefix).collect(),
            }));
        }
    }
}

fn text(text: impl Into<Cow<'static, str>>) -> Expression<'static> {
    Expression::String(text.into())
}

fn prefix(range: &Cidr) -> Expression<'static> {
    let addr = Box::new(text(range.addr().to_string()));
    Expression::Named(NamedExpression::Prefix(Prefix { addr, len: range.prefix().into() }))
}

fn any_of(words: &'static [&'static str]) -> Expression<'static> {
    Expression::Named(NamedExpression::Set(words.iter().map(|word| SetItem::Element(text(*word))).collect()))
}

fn meta(key: MetaKey) -> Expression<'static> {
    Expression::Named(NamedExpression::Meta(Meta { key }))
}

fn header(protocol: &'static str, field: &'static str) -> Expression<'static> {
    let field = PayloadField { protocol: protocol.into(), field: field.into() };
    Expression::Named(NamedExpression::Payload(Payload::PayloadField(field)))
}

/// Something of the packet's connection, as its first packet had it.
fn original(key: &'static str) -> Expression<'static> {
    Expression::Named(NamedExpression::CT(CT { key: key.into(), family: None, dir: Some(CTDir::Original) }))
}

fn state(states: &'static [&'static str]) -> Statement<'static> {
    let key = Expression::Named(NamedExpression::CT(CT { key: "state".into(), family: None, dir: None }));
    is(key, any_of(states))
}

fn is(left: Expression<'static>, right: Expression<'static>) -> Statement<'static> {
    Statement::Match(Match { left, right, op: Operator::EQ })
}

fn is_not(left: Expression<'static>, right: Expression<'static>) -> Statement<'static> {
    Statement::Match(Match { left, right, op: Operator::NEQ })
}

fn jump(chain: &'static str) -> Statement<'static> {
    Statement::Jump(JumpTarget { target: chain.into() })
}

fn goto(chain: &'static str) -> Statement<'static> {
    Statement::Goto(JumpTarget { target: chain.into() })
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_become_disjoint() {
        let ranges: Vec<Cidr> =
            ["10.1.0.0/16", "10.0.0.0/8", "10.0.0.0/8", "9.9.9.9", "10.0.0.0/24", "11.0.0.0/8"]
                .iter()
                .map(|text| text.parse().unwrap())
                .collect();
        let kept: Vec<String> = disjoint(&ranges).iter().map(ToString::to_string).collect();
        assert_eq!(kept, ["9.9.9.9/32", "10.0.0.0/8", "11.0.0.0/8"]);
    }
}
