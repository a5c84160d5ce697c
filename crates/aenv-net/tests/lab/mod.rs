//! A host of its own for each test: a network and mount namespace with its own `/run/netns`, a "world" behind an uplink,
//! and guests whose frames travel through the slot's real tap.

use std::{
    cell::RefCell,
    fs::File,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use aenv_net::{NetworkConfig, SlotRecord, guest};
use nix::{
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, setns, unshare},
};

/// An address of the world's, on the uplink's own network.
pub const WORLD: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
/// A second one, further away.
pub const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// The host's address on the uplink.
pub const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// Addresses that the world has too, so that only a rule can keep a guest from them.
pub const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);
/// A cloud's metadata service.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// TCP echo in the world and on the host.
pub const ECHO: u16 = 7;

thread_local! {
    /// The world of the test that runs on this thread.
    static WORLD_PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Runs something in the world.
pub fn in_world<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    WORLD_PLACE.with_borrow(|world| world.as_ref().expect("a private host has a world").run(work))
}

/// Runs a test on a fresh private host with a world behind it.
pub fn on_private_host<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let host = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).unwrap();
        std::fs::create_dir_all("/run/netns").unwrap();
        mount(Some("tmpfs"), "/run/netns", Some("tmpfs"), MsFlags::empty(), none).unwrap();
        ip("link set lo up");
        serve_echo();
        let world = world();
        WORLD_PLACE.set(Some(world));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(test());
    });
    host.join().unwrap();
}

pub fn config() -> NetworkConfig {
    let mut config = NetworkConfig::new("tst".parse().unwrap());
    config.dns_servers = vec![FAR.into()];
    config
}

/// Runs `ip` in the calling thread's namespace: the tests' own view, independent of the code under test.
pub fn ip(arguments: &str) -> String {
    let output = std::process::Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Waits for a state that other tasks bring about.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen within 30 s");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A namespace held by a thread.
pub struct Place(Arc<File>);

impl Place {
    fn new(set_up: impl FnOnce() + Send + 'static) -> Self {
        let made = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            set_up();
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self(Arc::new(made.join().unwrap()))
    }

    pub fn of_slot(record: &SlotRecord) -> Self {
        Self(Arc::new(File::open(&record.netns).unwrap()))
    }

    /// Runs something in it.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let netns = Arc::clone(&self.0);
        let inside = thread::spawn(move || {
            setns(&*netns, CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        inside.join().unwrap()
    }

    /// Whether a TCP connection can be made and carries bytes.
    pub fn reaches(&self, address: Ipv4Addr, port: u16) -> bool {
        self.run(move || {
            echoes(&mut match connect(address, port) {
                Some(stream) => stream,
                None => return false,
            })
        })
    }
}

/// How long an answer may take: longer than the second after which TCP says something again that nobody heard.
const PATIENCE: Duration = Duration::from_secs(4);

/// A connection, if it can be made.
pub fn connect(address: Ipv4Addr, port: u16) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&(address, port).into(), PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Some(stream)
}

/// Whether a byte comes back.
pub fn echoes(stream: &mut TcpStream) -> bool {
    let mut answer = [0];
    stream.write_all(b"x").and_then(|()| stream.read_exact(&mut answer)).is_ok()
}

/// The world: a namespace at the other end of the uplink, with an echo service on all its addresses.
fn world() -> Place {
    let host = File::open("/proc/thread-self/ns/net").unwrap();
    let world = Place::new(move || {
        let here = File::open("/proc/thread-self/ns/net").unwrap();
        ip("link add up1 type veth peer name up0");
        use std::os::fd::AsRawFd;
        // `ip` takes a path; the descriptor's own is one.
        let pid = std::process::id();
        ip(&format!("link set up0 netns /proc/{pid}/fd/{}", host.as_raw_fd()));
        setns(&host, CloneFlags::CLONE_NEWNET).unwrap();
        ip(&format!("addr add {HOST}/24 dev up0"));
        ip("link set up0 up");
        ip(&format!("route add default via {WORLD}"));
        setns(&here, CloneFlags::CLONE_NEWNET).unwrap();
        ip(&format!("addr add {WORLD}/24 dev up1"));
        ip("link set up1 up");
        ip("link set lo up");
        for address in [FAR, PRIVATE, METADATA] {
            ip(&format!("addr add {address}/32 dev lo"));
        }
    });
    world.run(serve_echo);
    world
}

/// TCP echo on port 7 and 53 of all addresses of the calling thread's namespace.
fn serve_echo() {
    for port in [ECHO, 53] {
        let listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                thread::spawn(move || {
                    let mut reader = stream.try_clone().unwrap();
                    // Ends when the other side or the test does.
                    let _ = std::io::copy(&mut reader, &mut stream);
                });
            }
        });
    }
}

/// What a VM is to the network: a machine behind the slot's tap. Frames are carried between that tap and one in a namespace.
pub struct Guest {
    pub place: Place,
    _stop: mpsc::Sender<()>,
}

impl Guest {
    pub fn behind(record: &SlotRecord) -> Self {
        let slot_tap = Place::of_slot(record).run(|| open_tap(guest::TAP));
        let (sender, receiver) = mpsc::channel();
        let place = Place::new(move || {
            sender.send(open_tap("eth0")).unwrap();
            let mac = guest::MAC.map(|byte| format!("{byte:02x}")).join(":");
            ip("link set lo up");
            ip(&format!("link set eth0 address {mac} up"));
            ip(&format!("addr add {}/{} dev eth0", guest::ADDRESS, guest::PREFIX));
            ip(&format!("route add default via {}", guest::GATEWAY));
        });
        let guest_tap = receiver.recv().unwrap();
        let (stop, stopped) = mpsc::channel();
        thread::spawn(move || carry(slot_tap, guest_tap, &stopped));
        Self { place, _stop: stop }
    }

    /// Starts an echo service in the guest and returns its port.
    pub fn serve(&self) -> u16 {
        self.place.run(|| {
            let listener = TcpListener::bind("0.0.0.0:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    thread::spawn(move || {
                        let mut reader = stream.try_clone().unwrap();
                        let _ = std::io::copy(&mut reader, &mut stream);
                    });
                }
            });
            port
        })
    }
}

fn open_tap(name: &str) -> File {
    let path = std::ffi::CString::new("/dev/net/tun").unwrap();
    let fd = nix::fcntl::open(
        path.as_c_str(),
        nix::fcntl::OFlag::O_RDWR | nix::fcntl::OFlag::O_NONBLOCK,
        nix::sys::stat::Mode::empty(),
    )
    .unwrap();
    // SAFETY: all zeros is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    use std::os::fd::AsRawFd;
    // SAFETY: TUNSETIFF reads and writes the ifreq that the pointer is to.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), 0x4004_54ca, &request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    File::from(fd)
}

fn carry(mut one: File, mut other: File, stopped: &mpsc::Receiver<()>) {
    let mut frame = vec![0; 70_000];
    while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
        let mut ready =
            [PollFd::new(one.as_fd(), PollFlags::POLLIN), PollFd::new(other.as_fd(), PollFlags::POLLIN)];
        poll(&mut ready, PollTimeout::from(50_u8)).unwrap();
        while let Ok(length) = one.read(&mut frame) {
            // A tap that is down drops frames, as a cable does.
            let _ = other.write(&frame[..length]);
        }
        while let Ok(length) = other.read(&mut frame) {
            let _ = one.write(&frame[..length]);
        }
    }
}

/// Sends UDP from any source address that the guest gives itself; whether it arrives at a listener in the world is what counts.
pub fn send_udp(from: Ipv4Addr, to: SocketAddr) {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    socket.send_to(b"spoof", to).unwrap();
}
