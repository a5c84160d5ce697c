//! Slots with real namespaces, real rules, and guests behind real taps. Needs root.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

mod lab;

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{Ipv4Addr, UdpSocket},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_net::{Network, NetworkConfig, NetworkError, Slot, Slots, guest};
use aenv_types::EgressPolicy;
use lab::{
    ECHO, FAR, Guest, HOST, METADATA, PRIVATE, WORLD, config, connect, echoes, ip, on_private_host, until,
};

fn policy(internet: bool, allow: &[&str], deny: &[&str]) -> EgressPolicy {
    let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    EgressPolicy { internet, allow: parse(allow), deny: parse(deny), ..EgressPolicy::default() }
}

async fn slot_and_guest(slots: &Slots) -> (Arc<dyn Slot>, Guest) {
    let slot = slots.acquire().await.unwrap();
    let guest = Guest::behind(&slot.record());
    (slot, guest)
}

#[test]
fn a_guest_reaches_the_world_and_nothing_of_the_host() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;
        let (_other, other_guest) = slot_and_guest(&slots).await;
        let host_end = host_address(&slot.record().netns);

        assert!(guest.place.reaches(WORLD, ECHO), "the world");
        assert!(guest.place.reaches(FAR, ECHO), "the world behind a router");
        assert!(!guest.place.reaches(HOST, ECHO), "the host's uplink address");
        assert!(!guest.place.reaches(host_end, ECHO), "the host's end of the veth pair");
        assert!(!guest.place.reaches(METADATA, ECHO), "a metadata service");
        assert!(!guest.place.reaches(PRIVATE, ECHO), "a private address");
        assert!(!guest.place.reaches(guest::GATEWAY, ECHO), "the namespace itself");
        for address in 0..8 {
            let neighbour = Ipv4Addr::new(10, 200, 0, address);
            assert!(!guest.place.reaches(neighbour, ECHO), "{neighbour}, another slot's");
        }
        assert!(other_guest.place.reaches(WORLD, ECHO), "the second guest works at the same time");

        // What `ip netns` lists is what there is.
        let name = slot.record().netns.file_name().unwrap().to_string_lossy().into_owned();
        assert!(ip("netns list").contains(&name));
    });
}

#[test]
fn always_denied_beats_allow_and_allow_beats_deny() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;

        slot.set_policy(&policy(true, &["203.0.113.2"], &["0.0.0.0/0"])).await.unwrap();
        assert!(guest.place.reaches(WORLD, ECHO), "allowed");
        assert!(!guest.place.reaches(FAR, ECHO), "denied with everything else");
        assert!(!guest.place.reaches(FAR, 53), "DNS is denied with everything else");

        slot.set_policy(&policy(true, &[], &["203.0.113.0/24", "203.0.113.2"])).await.unwrap();
        assert!(!guest.place.reaches(WORLD, ECHO), "denied twice");
        assert!(guest.place.reaches(FAR, ECHO), "not denied");

        slot.set_policy(&policy(true, &["0.0.0.0/0", "10.0.0.0/8", "169.254.169.254"], &[])).await.unwrap();
        assert!(guest.place.reaches(WORLD, ECHO));
        for never in [PRIVATE, METADATA, HOST] {
            assert!(!guest.place.reaches(never, ECHO), "{never} was opened by a policy");
        }

        slot.set_policy(&policy(false, &[], &[])).await.unwrap();
        for closed in [WORLD, FAR] {
            assert!(!guest.place.reaches(closed, ECHO), "{closed} without internet");
        }
        assert!(!guest.place.reaches(FAR, 53), "DNS without internet");
        // The server's own way in stays.
        let port = guest.serve();
        slot.dial(port).await.unwrap();

        slot.set_policy(&EgressPolicy::default()).await.unwrap();
        assert!(guest.place.reaches(WORLD, ECHO), "open again");
    });
}

#[test]
fn an_isolated_guest_answers_the_server_and_reaches_nobody() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;
        let mut held = guest.place.run(|| connect(WORLD, ECHO)).unwrap();
        slot.isolate().await.unwrap();
        for closed in [WORLD, FAR, HOST] {
            let start = Instant::now();
            assert!(!guest.place.reaches(closed, ECHO), "{closed}");
            assert!(start.elapsed() >= Duration::from_secs(1), "{closed}: it was told so");
        }
        let port = guest.serve();
        let mut stream = slot.dial(port).await.unwrap().into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        assert!(echoes(&mut stream), "the server");

        // Also what is in force already, as the default is, opens it; and what waited arrives.
        let waiting = std::thread::spawn(move || echoes(&mut held));
        let opened = Instant::now();
        slot.set_policy(&EgressPolicy::default()).await.unwrap();
        println!("opening with the rules that are there: {:?}", opened.elapsed());
        assert!(guest.place.reaches(WORLD, ECHO) && guest.place.reaches(FAR, ECHO));
        assert!(waiting.join().unwrap(), "a connection of before");

        slot.isolate().await.unwrap();
        slot.set_policy(&policy(false, &["203.0.113.2"], &[])).await.unwrap();
        assert!(guest.place.reaches(WORLD, ECHO));
        assert!(!guest.place.reaches(FAR, ECHO), "it was opened beyond its rules");

        slot.isolate().await.unwrap();
        let record = slot.record();
        drop((slot, slots));
        let slots = Slots::open(config()).await.unwrap();
        let slot = slots.adopt(&record).await.unwrap();
        slot.set_policy(&EgressPolicy::default()).await.unwrap();
        assert!(guest.place.reaches(FAR, ECHO), "one that was taken over stays isolated");
    });
}

#[test]
fn a_resolver_in_a_denied_range_answers_on_its_port_only() {
    on_private_host(|| async {
        let mut config = config();
        config.dns_servers = vec![PRIVATE.into()];
        let slots = Slots::open(config).await.unwrap();
        let (_slot, guest) = slot_and_guest(&slots).await;
        assert!(guest.place.reaches(PRIVATE, 53));
        assert!(!guest.place.reaches(PRIVATE, ECHO));
    });
}

#[test]
fn one_port_of_the_gateway_is_opened_for_one_guest() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;
        let (other, other_guest) = slot_and_guest(&slots).await;
        let open = |guest: &Guest, port| guest.place.run(move || connect(guest::GATEWAY, port).is_some());
        assert!(!open(&guest, 2049), "nobody listens");
        let listener = slot.listen(2049).await.unwrap();
        assert!(open(&guest, 2049));
        assert_eq!(listener.accept().await.unwrap().1.ip(), guest::ADDRESS);
        assert!(!open(&guest, 2050) && !open(&guest, 22), "other ports stay closed");
        assert!(!open(&other_guest, 2049), "another slot's guest");
        // As after a restart of the server, whoever had a connection before.
        drop(listener);
        let _listener = slot.listen(2049).await.unwrap();
        let _other = other.listen(2049).await.unwrap();
        assert!(open(&guest, 2049) && open(&other_guest, 2049));
        slot.set_policy(&policy(false, &[], &[])).await.unwrap();
        assert!(open(&guest, 2049), "a service is no egress");
    });
}

#[test]
fn sockets_of_the_gate_get_answers_and_reach_nothing_denied() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let slot = slots.take().await.unwrap();
        let connects = async |address: Ipv4Addr| {
            let socket = slot.tcp_socket().await.unwrap();
            let connected = socket.connect((address, ECHO).into());
            tokio::time::timeout(Duration::from_secs(4), connected).await.is_ok_and(|made| made.is_ok())
        };
        assert!(connects(WORLD).await, "an answer did not come back");
        for never in [PRIVATE, METADATA, HOST] {
            assert!(!connects(never).await, "{never} was reached");
        }
    });
}

#[test]
fn a_new_policy_ends_connections_that_it_does_not_allow() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;
        let mut ending = guest.place.run(|| connect(WORLD, ECHO)).unwrap();
        let mut staying = guest.place.run(|| connect(FAR, ECHO)).unwrap();
        assert!(echoes(&mut ending) && echoes(&mut staying));
        slot.set_policy(&policy(true, &[], &["203.0.113.0/24"])).await.unwrap();
        assert!(!echoes(&mut ending), "an open connection outlived its permission");
        assert!(echoes(&mut staying), "a connection that is still allowed was cut");
    });
}

#[test]
fn forged_sources_are_dropped() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (_slot, guest) = slot_and_guest(&slots).await;
        let seen = lab::in_world(|| UdpSocket::bind((WORLD, 9000)).unwrap());
        seen.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        guest.place.run(|| lab::send_udp(guest::ADDRESS, (WORLD, 9000).into()));
        assert!(seen.recv(&mut [0; 16]).is_ok(), "the honest packet must arrive, or the test shows nothing");
        seen.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
        guest.place.run(|| {
            ip("addr add 198.51.100.99/32 dev eth0");
            lab::send_udp(Ipv4Addr::new(198, 51, 100, 99), (WORLD, 9000).into());
        });
        assert!(seen.recv(&mut [0; 16]).is_err(), "a forged IP source got out");
        guest.place.run(|| {
            ip("link set eth0 address 02:ae:00:00:00:99");
            lab::send_udp(guest::ADDRESS, (WORLD, 9000).into());
        });
        assert!(seen.recv(&mut [0; 16]).is_err(), "a forged MAC got out");
    });
}

#[test]
fn dialling_reaches_the_guest_and_says_why_not() {
    on_private_host(|| async {
        let slots = Slots::open(config()).await.unwrap();
        let (slot, guest) = slot_and_guest(&slots).await;
        let port = guest.serve();

        let stream = slot.dial(port).await.unwrap();
        assert!(stream.nodelay().unwrap());
        assert_eq!(stream.peer_addr().unwrap(), (guest::ADDRESS, port).into());
        let refused = slot.dial(1).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            let stream = slot.dial(port).await.unwrap();
            times.push(start.elapsed());
            drop(stream);
        }
        times.sort();
        println!("dial, one after the other: median {:?}, p90 {:?}", times[100], times[180]);

        let dials: Vec<_> = (0..1000)
            .map(|_| {
                let slot = Arc::clone(&slot);
                tokio::spawn(async move { slot.dial(port).await })
            })
            .collect();
        let mut streams = Vec::new();
        for dial in dials {
            streams.push(dial.await.unwrap().unwrap());
        }
        // Every socket is in the slot's namespace: its own end is the gateway's address.
        for stream in &streams {
            assert_eq!(stream.local_addr().unwrap().ip(), guest::GATEWAY);
        }
        let (received, sent) = slot.traffic().await.unwrap();
        assert!(received > 60_000 && sent > 60_000, "traffic counted: {received} and {sent}");

        let (silent, _) = (slots.acquire().await.unwrap(), ());
        let start = Instant::now();
        let error = silent.dial(port).await.unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(30), "the dial was not bounded");
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable), "{error}");
    });
}

#[test]
fn twenty_at_once_then_exhaustion_then_reuse() {
    on_private_host(|| async {
        let mut config = config();
        config.limit = 20;
        let slots = Arc::new(Slots::open(config).await.unwrap());
        let start = Instant::now();
        let taking: Vec<_> = (0..20)
            .map(|_| {
                let slots = Arc::clone(&slots);
                tokio::spawn(async move { slots.acquire().await.unwrap() })
            })
            .collect();
        let mut taken = Vec::new();
        for slot in taking {
            taken.push(slot.await.unwrap());
        }
        println!("20 slots at once: {:?}", start.elapsed());
        let numbers: BTreeSet<u32> = taken.iter().map(|slot| slot.record().index).collect();
        assert_eq!(numbers.len(), 20, "no slot twice");
        assert!(matches!(slots.acquire().await, Err(NetworkError::Exhausted { limit: 20 })));

        let back = taken.pop().unwrap();
        let path = back.record().netns;
        slots.release(back).await;
        until("the released slot's removal and replacement", || slots.ready() == 1).await;
        let again = slots.acquire().await.unwrap();
        assert!(Path::new(&path).exists(), "the number is used again");
        let guest = Guest::behind(&again.record());
        assert!(guest.place.reaches(WORLD, ECHO), "a slot made again works");
        slots.close().await;
    });
}

#[test]
fn a_slot_is_adopted_and_the_rest_swept() {
    on_private_host(|| async {
        // A pool that does not grow with the demand, so that what it leaves behind is known.
        let config = NetworkConfig { high_watermark: 2, ..config() };
        let first = Slots::open(config.clone()).await.unwrap();
        let (slot, guest) = slot_and_guest(&first).await;
        slot.set_policy(&policy(true, &[], &["203.0.113.2"])).await.unwrap();
        let lost = first.acquire().await.unwrap().record();
        let kept = slot.record();
        let port = guest.serve();
        until("a full pool", || first.ready() == 2).await;
        drop((slot, first)); // as kill -9 leaves it

        // Another instance's things, and somebody else's.
        ip("netns add aenvoth-0");
        ip("link add aenvoth-0 type veth peer name other0");
        ip("netns add somebody");

        let second = Slots::open(config.clone()).await.unwrap();
        let slot = second.adopt(&kept).await.unwrap();
        assert!(matches!(second.adopt(&kept).await, Err(NetworkError::Gone { .. })), "adopted twice");
        until("a full pool", || second.ready() == 2).await;
        assert_eq!(second.sweep().await.unwrap(), 3, "the lost slot and the first pool's two");
        assert_eq!(second.sweep().await.unwrap(), 0);
        assert!(!lost.netns.exists());
        assert!(matches!(second.adopt(&lost).await, Err(NetworkError::Gone { .. })), "adopted what is gone");
        assert!(ip("netns list").contains("aenvoth-0") && ip("netns list").contains("somebody"));
        assert!(ip("link show").contains("aenvoth-0"));

        slot.dial(port).await.unwrap();
        assert!(!guest.place.reaches(WORLD, ECHO), "the policy outlives the server");
        assert!(guest.place.reaches(FAR, ECHO), "so does the way out");
        slot.set_policy(&EgressPolicy::default()).await.unwrap();
        assert!(guest.place.reaches(WORLD, ECHO));

        drop(guest);
        second.close().await;
        assert!(!ip("netns list").contains("aenvtst-"), "something stayed: {}", ip("netns list"));
        assert!(!ip("link show").contains("aenvtst-"), "something stayed: {}", ip("link show"));
    });
}

#[test]
fn two_servers_share_a_host_and_an_address_range() {
    on_private_host(|| async {
        let other = NetworkConfig { tag: "oth".parse().unwrap(), ..config() };
        let (one, two) = tokio::join!(Slots::open(config()), Slots::open(other));
        let (one, two) = (one.unwrap(), two.unwrap());
        let (_slot, guest) = slot_and_guest(&one).await;
        let (other_slot, other_guest) = slot_and_guest(&two).await;
        assert!(guest.place.reaches(WORLD, ECHO) && other_guest.place.reaches(WORLD, ECHO));
        one.close().await;
        assert!(other_guest.place.reaches(WORLD, ECHO), "closing one server cut the other's guests");
        assert!(other_slot.record().netns.exists());
        two.close().await;
    });
}

#[test]
fn a_cancelled_acquire_loses_no_slot() {
    on_private_host(|| async {
        let mut config = config();
        config.limit = 2;
        config.low_watermark = 0;
        let slots = Slots::open(config).await.unwrap();
        for _ in 0..5 {
            let given_up = tokio::time::timeout(Duration::from_millis(3), slots.acquire()).await;
            if let Ok(slot) = given_up {
                slots.release(slot.unwrap()).await;
            }
        }
        until("both slots are free", || slots.usage().0 == 0).await;
        let one = slots.acquire().await.unwrap();
        let two = slots.acquire().await.unwrap();
        assert_ne!(one.record(), two.record());
        slots.close().await;
    });
}

fn host_address(netns: &Path) -> Ipv4Addr {
    let name = netns.file_name().unwrap().to_string_lossy();
    let shown = ip(&format!("-4 -o addr show dev {name}"));
    let address = shown.split_whitespace().nth(3).unwrap().split('/').next().unwrap();
    address.parse().unwrap()
}
