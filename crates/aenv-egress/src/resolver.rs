//! Addresses of names, asked for in the slot's namespace and remembered for as long as the answers say.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use aenv_net::NamespaceSlot;
use hickory_proto::{
    op::{Message, Query, ResponseCode},
    rr::{Name, RData, RecordType},
};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, timeout},
};

use crate::HostName;

/// A resolver that does not answer within this is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// Resolvers that are asked, one after the other.
const MAX_RESOLVERS: usize = 3;
/// Answers that are remembered for one sandbox.
const MAX_NAMES: usize = 1024;
/// Addresses of a name that are used.
const MAX_ADDRESSES: usize = 32;
/// How long an answer is used without asking again, whatever it says itself.
const FRESH: (u32, u32) = (5, 300);
const PORT: u16 = 53;

/// Why a name has no addresses.
#[derive(Debug, Error)]
pub(crate) enum ResolveError {
    #[error("the resolver says {0}")]
    Answer(ResponseCode),
    #[error("no resolver answers: {0}")]
    Silent(io::Error),
    #[error("there is no resolver with an IPv4 address")]
    None,
}

/// What a name is, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub addresses: Vec<Ipv4Addr>,
    pub fresh_until: Instant,
}

impl Addresses {
    /// Seconds for which the answer may be used.
    pub(crate) fn ttl(&self) -> u32 {
        let left = self.fresh_until.saturating_duration_since(Instant::now()).as_secs();
        u32::try_from(left).unwrap_or(FRESH.1)
    }
}

/// Names of one sandbox.
#[derive(Default)]
pub(crate) struct Resolver {
    known: Mutex<HashMap<HostName, Addresses>>,
}

impl Resolver {
    /// Addresses of a name. An existing name without IPv4 addresses gives an empty list.
    pub(crate) async fn lookup(
        &self,
        slot: &NamespaceSlot,
        servers: &[IpAddr],
        name: &HostName,
    ) -> Result<Addresses, ResolveError> {
        if let Some(known) = self.known.lock().get(name)
            && known.fresh_until > Instant::now()
        {
            return Ok(known.clone());
        }
        let found = ask_all(slot, servers, name).await?;
        let mut known = self.known.lock();
        if known.len() >= MAX_NAMES && !known.contains_key(name) {
            let now = Instant::now();
            known.retain(|_, answer| answer.fresh_until > now);
            if known.len() >= MAX_NAMES {
                known.clear();
            }
        }
        known.insert(name.clone(), found.clone());
        Ok(found)
    }

    /// Whether this sandbox was given that address for the name, at any time that is remembered.
    pub(crate) fn gave(&self, name: &HostName, address: Ipv4Addr) -> bool {
        self.known.lock().get(name).is_some_and(|known| known.addresses.contains(&address))
    }

    /// Forgets everything: the resolvers have changed.
    pub(crate) fn forget(&self) {
        self.known.lock().clear();
    }
}

async fn ask_all(
    slot: &NamespaceSlot,
    servers: &[IpAddr],
    name: &HostName,
) -> Result<Addresses, ResolveError> {
    let servers = servers.iter().filter_map(|server| match server {
        IpAddr::V4(v4) => Some(SocketAddrV4::new(*v4, PORT)),
        IpAddr::V6(_) => None,
    });
    let mut last = ResolveError::None;
    for server in servers.take(MAX_RESOLVERS) {
        match timeout(PATIENCE, ask(slot, server, name)).await {
            Ok(Ok(answer)) => match read_answer(&answer) {
                Err(ResolveError::Answer(code)) if code != ResponseCode::NXDomain => {
                    last = ResolveError::Answer(code);
                }
                found => return found,
            },
            Ok(Err(error)) => last = ResolveError::Silent(error),
            Err(_) => {
                let late = format!("{server} has not answered within {} s", PATIENCE.as_secs());
                last = ResolveError::Silent(io::Error::new(io::ErrorKind::TimedOut, late));
            }
        }
    }
    Err(last)
}

/// One question to one resolver, over UDP and, if the answer does not fit, over TCP.
async fn ask(slot: &NamespaceSlot, server: SocketAddrV4, name: &HostName) -> io::Result<Message> {
    let question = question(name)?;
    let bytes = question.to_vec().map_err(io::Error::other)?;
    let socket = slot.udp_socket().await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0; 4096];
    let answer = loop {
        let length = socket.recv(&mut buffer).await?;
        // Whatever is not the answer to this question is not looked at.
        if let Some(answer) = answer_to(&question, &buffer[..length]) {
            break answer;
        }
    };
    if !answer.metadata.truncation {
        return Ok(answer);
    }
    let mut stream = slot.tcp_socket().await?.connect(server.into()).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat()).await?;
    let mut whole = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut whole).await?;
    answer_to(&question, &whole)
        .ok_or_else(|| io::Error::other("the resolver's answer over TCP is another question's"))
}

fn question(name: &HostName) -> io::Result<Message> {
    let mut message = Message::query();
    message.metadata.id = rand::random();
    message.metadata.recursion_desired = true;
    let name = Name::from_ascii(format!("{name}.")).map_err(io::Error::other)?;
    message.add_query(Query::query(name, RecordType::A));
    Ok(message)
}

fn answer_to(question: &Message, bytes: &[u8]) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let same = answer.metadata.id == question.metadata.id
        && answer.metadata.message_type == hickory_proto::op::MessageType::Response
        && answer.queries == question.queries;
    same.then_some(answer)
}

fn read_answer(answer: &Message) -> Result<Addresses, ResolveError> {
    let code = answer.metadata.response_code;
    if code != ResponseCode::NoError {
        return Err(ResolveError::Answer(code));
    }
    let mut ttl = FRESH.1;
    let mut addresses = Vec::new();
    for record in &answer.answers {
        ttl = ttl.min(record.ttl);
        if let RData::A(address) = &record.data
            && addresses.len() < MAX_ADDRESSES
            && !addresses.contains(&address.0)
        {
            addresses.push(address.0);
        }
    }
    let fresh = Duration::from_secs(ttl.max(FRESH.0).into());
    Ok(Addresses { addresses, fresh_until: Instant::now() + fresh })
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::{
        Record,
        rdata::{A, CNAME},
    };

    use super::*;

    #[test]
    fn answers_are_read_through_aliases_and_bounded() {
        let question = question(&"www.example.com".parse().unwrap()).unwrap();
        let mut answer = question.clone().into_response();
        let edge = Name::from_ascii("edge.example.net.").unwrap();
        let own = question.queries[0].name.clone();
        answer.add_answer(Record::from_rdata(own, 60, RData::CNAME(CNAME(edge.clone()))));
        for last in 0..100 {
            answer.add_answer(Record::from_rdata(edge.clone(), 1, RData::A(A([192, 0, 2, last].into()))));
        }
        let bytes = answer.to_vec().unwrap();
        let found = read_answer(&answer_to(&question, &bytes).unwrap()).unwrap();
        assert_eq!(found.addresses.len(), MAX_ADDRESSES);
        assert!((3..=5).contains(&found.ttl()), "{}", found.ttl());

        answer.metadata.id = answer.metadata.id.wrapping_add(1);
        assert!(answer_to(&question, &answer.to_vec().unwrap()).is_none(), "another question's");
        answer.metadata.id = question.metadata.id;
        answer.queries[0].name = edge;
        assert!(answer_to(&question, &answer.to_vec().unwrap()).is_none(), "another name's");
        assert!(answer_to(&question, &bytes[..bytes.len() / 2]).is_none(), "cut off");
    }

    #[test]
    fn a_refusal_is_told() {
        let mut answer = question(&"a.b".parse().unwrap()).unwrap().into_response();
        answer.metadata.response_code = ResponseCode::NXDomain;
        assert!(matches!(read_answer(&answer), Err(ResolveError::Answer(ResponseCode::NXDomain))));
    }
}
