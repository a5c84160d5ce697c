//! The gate's DNS: answers for allowed names, and for nothing else, so that no query carries anything out.

use std::{net::IpAddr, sync::Arc, time::Duration};

use aenv_types::EgressPolicy;
use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{DNSClass, RData, Record, RecordType, rdata::A},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};

use crate::{HostName, gate::Context, resolver::ResolveError};

/// Queries of one sandbox that are answered at the same time; further ones over UDP are dropped.
const PARALLEL: usize = 64;
/// TCP connections of one sandbox.
const MAX_CONNECTIONS: usize = 16;
/// A TCP connection without a query for this long is closed.
const IDLE: Duration = Duration::from_secs(10);
/// Bytes of a query over TCP.
const MAX_QUERY: usize = 4096;
/// Bytes of an answer over UDP at most, whatever the guest says it takes.
const MAX_DATAGRAM: u16 = 1232;

/// Answers queries over UDP until the gate goes.
pub(crate) async fn serve_udp(context: Arc<Context>, socket: UdpSocket) {
    let (socket, places) = (Arc::new(socket), Arc::new(Semaphore::new(PARALLEL)));
    let mut queries = JoinSet::new();
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        while queries.try_join_next().is_some() {}
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "a query could not be received");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (context, socket, query) = (Arc::clone(&context), Arc::clone(&socket), buffer[..length].to_vec());
        queries.spawn(async move {
            let _place = place;
            if let Some((answer, room)) = answer(&context, &query).await
                && let Some(bytes) = fitting(answer, room)
                && let Err(error) = socket.send_to(&bytes, from).await
            {
                tracing::debug!(%error, "an answer could not be sent");
            }
        });
    }
}

/// Answers queries over TCP until the gate goes.
pub(crate) async fn serve_tcp(context: Arc<Context>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let context = Arc::clone(&context);
        connections.spawn(async move {
            let _place = place;
            if let Err(error) = conversation(&context, stream).await {
                tracing::debug!(%error, "a DNS connection ended");
            }
        });
    }
}

async fn conversation(context: &Context, mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        let Ok(length) = timeout(IDLE, stream.read_u16()).await else { return Ok(()) };
        let length = usize::from(length?);
        if length > MAX_QUERY {
            return Ok(());
        }
        let mut query = vec![0; length];
        timeout(IDLE, stream.read_exact(&mut query)).await??;
        let Some((answer, _)) = answer(context, &query).await else { return Ok(()) };
        let bytes = answer.to_vec().map_err(std::io::Error::other)?;
        let length = u16::try_from(bytes.len()).map_err(std::io::Error::other)?;
        timeout(IDLE, stream.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat())).await??;
    }
}

/// The answer to a query, and the room for it over UDP. `None`: it is no query, and deserves none.
async fn answer(context: &Context, bytes: &[u8]) -> Option<(Message, u16)> {
    let query = Message::from_vec(bytes).ok()?;
    if query.metadata.message_type != MessageType::Query {
        return None;
    }
    let room = query.max_payload().clamp(512, MAX_DATAGRAM);
    let mut answer = Message::response(query.metadata.id, query.metadata.op_code);
    answer.metadata.recursion_desired = query.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.add_queries(query.queries.iter().cloned());
    let policy = context.policy();
    match judge(&query, &policy, context.resolvers(&policy)) {
        Judgement::Answer(code) => answer.metadata.response_code = code,
        Judgement::Ask(name) => match context.lookup(&policy, &name).await {
            Ok(found) => {
                let owner = query.queries.first()?.name.clone();
                let ttl = found.ttl();
                // What no sandbox may reach is not told either.
                let reachable = found.addresses.iter().filter(|address| !context.is_denied(**address));
                answer.add_answers(
                    reachable.map(|address| Record::from_rdata(owner.clone(), ttl, RData::A(A(*address)))),
                );
            }
            Err(ResolveError::Answer(code)) => answer.metadata.response_code = code,
            Err(error) => {
                tracing::debug!(%name, %error, "a name could not be resolved");
                answer.metadata.response_code = ResponseCode::ServFail;
            }
        },
    }
    Some((answer, room))
}

/// What becomes of a query.
#[derive(Debug, PartialEq, Eq)]
enum Judgement {
    /// This code, and no records.
    Answer(ResponseCode),
    /// Addresses are to be found.
    Ask(HostName),
}

fn judge(query: &Message, policy: &EgressPolicy, resolvers: &[IpAddr]) -> Judgement {
    if query.metadata.op_code != OpCode::Query {
        return Judgement::Answer(ResponseCode::NotImp);
    }
    let [question] = query.queries.as_slice() else { return Judgement::Answer(ResponseCode::FormErr) };
    let Some(name) = permitted(question, policy, resolvers) else {
        return Judgement::Answer(ResponseCode::Refused);
    };
    match question.query_type {
        RecordType::A => Judgement::Ask(name),
        // Guests have no IPv6, and whatever else a name has is of no use through the gate. An existing name without records.
        _ => Judgement::Answer(ResponseCode::NoError),
    }
}

/// The name that is asked for, if the policy lets it be.
fn permitted(question: &Query, policy: &EgressPolicy, resolvers: &[IpAddr]) -> Option<HostName> {
    if question.query_class != DNSClass::IN {
        return None;
    }
    let name: HostName = question.name.to_ascii().parse().ok()?;
    // Without domains the gate has nothing to do with DNS, but for what a guest began under an earlier policy.
    let open = !policy.names_domains() && resolvers.iter().any(|resolver| policy.allows_address(*resolver));
    (open || policy.allows_name(name.as_str())).then_some(name)
}

/// The bytes of an answer; without its records, and marked so, when they do not fit.
fn fitting(answer: Message, room: u16) -> Option<Vec<u8>> {
    let bytes = answer.to_vec().ok()?;
    if bytes.len() <= usize::from(room) {
        return Some(bytes);
    }
    let mut cut = answer;
    cut.answers.clear();
    cut.metadata.truncation = true;
    cut.to_vec().ok()
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::Name;

    use super::*;

    const RESOLVER: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 53))];

    fn query(name: &str, kind: RecordType) -> Message {
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message
    }

    fn policy(allow: &[&str]) -> EgressPolicy {
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        EgressPolicy { allow: parse(allow), deny: parse(&["0.0.0.0/0"]), ..EgressPolicy::default() }
    }

    #[test]
    fn only_allowed_names_are_asked_for() {
        let policy = policy(&["example.com", "*.example.org"]);
        let code = |name: &str, kind| judge(&query(name, kind), &policy, &RESOLVER);
        assert_eq!(code("Example.com.", RecordType::A), Judgement::Ask("example.com".parse().unwrap()));
        assert_eq!(code("a.example.org.", RecordType::A), Judgement::Ask("a.example.org".parse().unwrap()));
        for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::TXT, RecordType::ANY, RecordType::AXFR]
        {
            assert_eq!(code("example.com.", kind), Judgement::Answer(ResponseCode::NoError));
        }
        for name in
            ["secret.evil.net.", "secret.example.com.", "example.org.", ".", "1.2.0.192.in-addr.arpa."]
        {
            for kind in [RecordType::A, RecordType::TXT, RecordType::NULL] {
                assert_eq!(code(name, kind), Judgement::Answer(ResponseCode::Refused), "{name}");
            }
        }
    }

    #[test]
    fn odd_queries_get_codes() {
        let policy = policy(&["example.com"]);
        let mut two = query("example.com.", RecordType::A);
        two.add_query(two.queries[0].clone());
        assert_eq!(judge(&two, &policy, &RESOLVER), Judgement::Answer(ResponseCode::FormErr));
        let mut update = query("example.com.", RecordType::A);
        update.metadata.op_code = OpCode::Update;
        assert_eq!(judge(&update, &policy, &RESOLVER), Judgement::Answer(ResponseCode::NotImp));
        let mut chaos = query("example.com.", RecordType::TXT);
        chaos.queries[0].query_class = DNSClass::CH;
        assert_eq!(judge(&chaos, &policy, &RESOLVER), Judgement::Answer(ResponseCode::Refused));
    }

    #[test]
    fn without_domains_it_is_the_resolvers_address_that_counts() {
        let any = query("a.b.", RecordType::A);
        assert!(matches!(judge(&any, &EgressPolicy::default(), &RESOLVER), Judgement::Ask(_)));
        let closed = EgressPolicy { internet: false, ..EgressPolicy::default() };
        assert_eq!(judge(&any, &closed, &RESOLVER), Judgement::Answer(ResponseCode::Refused));
        assert_eq!(judge(&any, &policy(&["9.9.9.9"]), &RESOLVER), Judgement::Answer(ResponseCode::Refused));
    }

    #[test]
    fn what_does_not_fit_is_cut_and_marked() {
        let mut answer = query("example.com.", RecordType::A).into_response();
        let owner = answer.queries[0].name.clone();
        for last in 0..100 {
            answer.add_answer(Record::from_rdata(owner.clone(), 9, RData::A(A([192, 0, 2, last].into()))));
        }
        let cut = Message::from_vec(&fitting(answer.clone(), 512).unwrap()).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty());
        let whole = Message::from_vec(&fitting(answer, 4096).unwrap()).unwrap();
        assert!(!whole.metadata.truncation && whole.answers.len() == 100);
    }
}
