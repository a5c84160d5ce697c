//! Rules that hand a guest's connections to the egress gate: two sockets of the server's in this namespace.
//!
//! ```text
//! chain gate  (nat, prerouting; decides once for each connection)
//!   not from tap0                                                 accept
//!   to an allowed range: TCP port in `forced`                     to the gate
//!   to an allowed range                                           accept     (leaves by the forward chain)
//!   port in `gated_dns`                                           to the gate's DNS
//!   to an always-denied range                                     accept     (the forward chain refuses it)
//!   TCP port in `forced` or `gated`                               to the gate
//! chain output
//!   what the gate sends out, to an always-denied range            refuse     (but for the node's resolvers, port 53)
//! ```
//!
//! `forced`: ports whose traffic must pass the gate even where its address is allowed. Connections of those ports that were
//! made before are refused in the forward chain.

use aenv_types::EgressPolicy;
use nftables::{
    batch::Batch,
    expr::{CT, Expression, MetaKey, NamedExpression, Range},
    schema::{Element, FlushObject, NfCmd, NfListObject, Set, SetFlag, SetType, SetTypeValue},
    stmt::{Match, NAT, Operator, Statement},
    types::{NfChainPolicy, NfChainType, NfHook},
};

use super::{Rules, any_of, goto, header, is, is_not, meta, original, state, text};
use crate::{guest, wiring::VETH};

/// Where the gate takes TCP connections, in every slot's namespace.
pub const GATE_PORT: u16 = 15001;
/// Where the gate takes DNS queries, in every slot's namespace.
pub const DNS_PORT: u16 = 15053;

const SETS: [&str; 3] = ["gated", "forced", "gated_dns"];
const DNS: u16 = 53;
/// Ports on which the gate can tell whom a connection is for.
const NAMED: [(u16, u16); 2] = [(80, 80), (443, 443)];
const ALL: (u16, u16) = (1, u16::MAX);

/// The gate's sets and chains of a fresh namespace; nothing is handed over yet.
pub(super) fn namespace(rules: &mut Rules) {
    for name in SETS {
        let set = Box::new(ports(rules, name));
        rules.batch.add(NfListObject::Set(set));
    }
    let tcp_port = || header("tcp", "dport");
    let to_gate = || redirect(GATE_PORT);
    rules.base("gate", NfChainType::NAT, NfHook::Prerouting, -100, NfChainPolicy::Accept);
    rules.rule("gate", [is_not(meta(MetaKey::Iifname), text(guest::TAP)), Statement::Accept(None)]);
    let allowed = || is(header("ip", "daddr"), text("@allowed"));
    let denied = || is(header("ip", "daddr"), text("@denied"));
    rules
        .rule("gate", [denied(), is_not(header("th", "dport"), text("@gated_dns")), Statement::Accept(None)]);
    rules.rule("gate", [allowed(), is(tcp_port(), text("@forced")), to_gate()]);
    rules.rule("gate", [allowed(), Statement::Accept(None)]);
    let dns =
        [is(meta(MetaKey::L4proto), any_of(&["tcp", "udp"])), is(header("th", "dport"), text("@gated_dns"))];
    rules.rule("gate", dns.into_iter().chain([redirect(DNS_PORT)]));
    for set in ["@forced", "@gated"] {
        rules.rule("gate", [is(tcp_port(), text(set)), to_gate()]);
    }

    rules.base("output", NfChainType::Filter, NfHook::Output, 0, NfChainPolicy::Accept);
    rules.rule("output", [is_not(meta(MetaKey::Oifname), text(VETH)), Statement::Accept(None)]);
    let port_53 = [
        is(header("ip", "daddr"), text("@resolvers")),
        is(meta(MetaKey::L4proto), any_of(&["tcp", "udp"])),
        is(header("th", "dport"), Expression::Number(DNS.into())),
    ];
    rules.rule("output", port_53.into_iter().chain([Statement::Accept(None)]));
    rules.rule("output", [denied(), goto("refuse")]);
}

/// What the `input` chain lets in for the gate: connections that were handed over, and answers to those that it made itself.
pub(super) fn input(rules: &mut Rules) {
    let from_veth = is(meta(MetaKey::Iifname), text(VETH));
    rules.rule("input", [from_veth, state(&["established", "related"]), Statement::Accept(None)]);
    for (protocol, port) in [("tcp", GATE_PORT), ("tcp", DNS_PORT), ("udp", DNS_PORT)] {
        let here = is(header(protocol, "dport"), Expression::Number(port.into()));
        let from_tap = is(meta(MetaKey::Iifname), text(guest::TAP));
        rules.rule("input", [from_tap, handed_over(), here, Statement::Accept(None)]);
    }
}

/// What the `egress` chain refuses because the gate must see it.
pub(super) fn egress(rules: &mut Rules) {
    let forced = is(original("proto-dst"), text("@forced"));
    rules.rule("egress", [is(meta(MetaKey::L4proto), text("tcp")), forced, goto("refuse")]);
}

/// Replaces what is handed over.
pub(super) fn policy(rules: &mut Rules, policy: &EgressPolicy) {
    let gated: &[_] = if policy.names_domains() { &NAMED } else { &[] };
    let forced: &[_] = match (policy.proxy.is_some(), policy.rules.is_empty()) {
        (true, _) => &[ALL],
        (false, false) => &NAMED,
        (false, true) => &[],
    };
    let dns: &[_] = if policy.names_domains() { &[(DNS, DNS)] } else { &[] };
    for (name, elements) in SETS.into_iter().zip([gated, forced, dns]) {
        let set = Box::new(ports(rules, name));
        rules.batch.add_cmd(NfCmd::Flush(FlushObject::Set(set)));
        if !elements.is_empty() {
            let set = ports(rules, name);
            fill(&mut rules.batch, &set, elements);
        }
    }
}

fn fill(batch: &mut Batch<'static>, set: &Set<'static>, elements: &[(u16, u16)]) {
    let number = |port: u16| Expression::Number(port.into());
    let elem = elements.iter().map(|(first, last)| {
        if first == last {
            return number(*first);
        }
        Expression::Range(Box::new(Range { range: [number(*first), number(*last)] }))
    });
    batch.add(NfListObject::Element(Element {
        family: set.family,
        table: set.table.clone(),
        name: set.name.clone(),
        elem: elem.collect(),
    }));
}

fn ports(rules: &Rules, name: &'static str) -> Set<'static> {
    Set {
        family: rules.family,
        table: rules.table.clone(),
        name: name.into(),
        set_type: SetTypeValue::Single(SetType::InetService),
        flags: Some([SetFlag::Interval].into()),
        ..Set::default()
    }
}

fn redirect(port: u16) -> Statement<'static> {
    let port = Some(Expression::Number(port.into()));
    Statement::Redirect(Some(NAT { addr: None, family: None, port, flags: None }))
}

/// The connection's destination was rewritten here, by the `gate` chain.
fn handed_over() -> Statement<'static> {
    let left = Expression::Named(NamedExpression::CT(CT { key: "status".into(), family: None, dir: None }));
    Statement::Match(Match { left, right: text("dnat"), op: Operator::IN })
}
