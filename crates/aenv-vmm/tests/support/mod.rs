//! What tests and benchmarks of real VMs share: a namespace with a tap, memory files, a way to talk to the agent, a capture.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    net::{SocketAddr, TcpStream},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use aenv_net::guest::{ADDRESS, GATEWAY, PREFIX, TAP};
use aenv_testkit::{GuestArtifacts, GuestDaemon, guest_artifacts, tiny_root};
use aenv_types::{EngineKind, EngineStamp, MachineShape, SandboxId};
use aenv_vmm::{BootSpec, Drive, Engine, LaunchSpec, Vm, VmSpec};

pub const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 128, disk_mib: 64 };
const AGENT: u16 = 49983;
const PATIENCE: Duration = Duration::from_secs(240);

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A namespace with the tap that every guest expects; removed with the value.
pub struct Netns {
    name: String,
}

impl Netns {
    pub fn new() -> Self {
        let name = format!("vmmt{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::SeqCst));
        ip(&["netns", "add", &name]);
        ip(&["-n", &name, "link", "set", "lo", "up"]);
        ip(&["-n", &name, "tuntap", "add", "dev", TAP, "mode", "tap", "vnet_hdr"]);
        ip(&["-n", &name, "addr", "add", &format!("{GATEWAY}/{PREFIX}"), "dev", TAP]);
        ip(&["-n", &name, "link", "set", TAP, "up"]);
        Self { name }
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Connects to the agent, trying until it listens.
    pub fn connect(&self) -> Agent {
        let stream = self.inside(|address| {
            let deadline = Instant::now() + PATIENCE;
            loop {
                match TcpStream::connect_timeout(&address, Duration::from_millis(500)) {
                    Ok(stream) => return stream,
                    Err(error) => assert!(Instant::now() < deadline, "the agent does not answer: {error}"),
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Agent { stream: BufReader::new(stream) }
    }

    /// Whether the guest answers at once.
    pub fn answers(&self) -> bool {
        self.inside(|address| TcpStream::connect_timeout(&address, Duration::from_millis(300)).is_ok())
    }

    /// Runs in the namespace, with the agent's address.
    fn inside<T: Send + 'static>(&self, work: impl FnOnce(SocketAddr) -> T + Send + 'static) -> T {
        let path = self.path();
        let thread = std::thread::spawn(move || {
            let netns = File::open(path).unwrap();
            nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work(SocketAddr::from((ADDRESS, AGENT)))
        });
        thread.join().unwrap()
    }
}

/// Talks to a guest all the time, until it is dropped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Traffic {
    pub fn start(netns: &Netns) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, path) = (Arc::clone(&stop), netns.path());
        let thread = std::thread::spawn(move || {
            nix::sched::setns(File::open(path).unwrap(), nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let address = SocketAddr::from((ADDRESS, AGENT));
            while !stopped.load(Ordering::SeqCst) {
                let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) else {
                    continue;
                };
                stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
                let mut reader = BufReader::new(&stream);
                let mut answer = String::new();
                for _ in 0..50 {
                    // A guest that stands does not answer; neither does one that was ended.
                    if (&stream).write_all(b"ping\n").is_err() || reader.read_line(&mut answer).is_err() {
                        break;
                    }
                    // A guest that is emulated should have time for something else.
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A server's runtime folder; whatever VMM is marked with it ends with it, also when the test fails.
pub struct Runtime {
    folder: tempfile::TempDir,
}

impl Runtime {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Runtime {
    /// VMMs that are marked with it.
    pub fn processes(&self) -> Vec<i32> {
        let mark = format!("AENV_VMM_OWNER={}", self.path().display());
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let marked = all.filter(|process| {
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            environment.split(|b| *b == 0).any(|e| e == mark.as_bytes())
        });
        marked.filter_map(|process| process.file_name().to_string_lossy().parse().ok()).collect()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL);
        }
    }
}

/// A connection to the agent in a guest.
pub struct Agent {
    stream: BufReader<TcpStream>,
}

impl Agent {
    pub fn ask(&mut self, line: &str) -> String {
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        self.stream.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }
}

/// A memory file that siblings share. For QEMU a sealed memfd, so that nobody can change it; a root of its own, as
/// Firecracker has, can only show files of a filesystem.
pub struct Ram {
    file: File,
    path: PathBuf,
}

impl Ram {
    /// Holds what `fill` writes, and zeroes after it.
    pub fn new(kind: EngineKind, base: &Path, bytes: u64, fill: impl FnOnce(&mut File)) -> Self {
        if kind == EngineKind::Firecracker {
            let path = base.join(format!("ram-{}", NEXT.fetch_add(1, Ordering::SeqCst)));
            let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            file.set_len(bytes).unwrap();
            fill(&mut file);
            return Self { file, path };
        }
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC;
        // SAFETY: the name is a C string; the descriptor is checked below.
        let fd = unsafe { libc::memfd_create(c"ram".as_ptr(), flags) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new and nobody else's.
        let mut file = unsafe { File::from_raw_fd(fd) };
        file.set_len(bytes).unwrap();
        fill(&mut file);
        let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: the call has no memory effects.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        Self { file, path }
    }

    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    }
}

/// One sandbox's place on the host.
pub struct Place {
    pub netns: Netns,
    pub folder: PathBuf,
    pub spec: VmSpec,
}

impl Place {
    pub fn new(base: &Path, ram: &Ram, root: &Path, extra: &[Drive]) -> Self {
        let sandbox = SandboxId::random();
        let netns = Netns::new();
        let folder = base.join(sandbox.as_str());
        std::fs::create_dir_all(folder.join("run")).unwrap();
        let own_root = folder.join("root.img");
        std::fs::copy(root, &own_root).unwrap();
        let mut drives = vec![Drive { path: own_root, read_only: false }];
        drives.extend_from_slice(extra);
        let spec = VmSpec {
            sandbox,
            shape: SHAPE,
            ram: ram.path(),
            drives,
            netns: netns.path(),
            runtime: folder.join("run"),
            serial_log: folder.join("serial.log"),
        };
        Self { netns, folder, spec }
    }

    pub fn console(&self) -> String {
        std::fs::read_to_string(&self.spec.serial_log).unwrap_or_default()
    }
}

/// All that tests share for one engine.
pub struct Bench {
    pub base: tempfile::TempDir,
    pub artifacts: GuestArtifacts,
    pub root: PathBuf,
    pub second: Drive,
}

impl Bench {
    pub fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let artifacts = guest_artifacts(GuestDaemon::Agent).unwrap();
        let (root, second) = (base.path().join("root.img"), base.path().join("second.img"));
        tiny_root(&root, 16).unwrap();
        // The disk is larger than its filesystem: init has to grow it.
        File::options().write(true).open(&root).unwrap().set_len(64 << 20).unwrap();
        tiny_root(&second, 8).unwrap();
        Self { base, artifacts, root, second: Drive { path: second, read_only: true } }
    }

    pub fn empty_ram(&self, engine: &dyn Engine) -> Ram {
        Ram::new(engine.kind(), self.base.path(), SHAPE.memory_bytes(), |_| {})
    }

    pub fn place(&self, ram: &Ram, root: &Path) -> Place {
        Place::new(self.base.path(), ram, root, std::slice::from_ref(&self.second))
    }

    pub async fn boot(&self, engine: &dyn Engine, place: &Place) -> Box<dyn Vm> {
        let spec = BootSpec {
            vm: place.spec.clone(),
            kernel: self.artifacts.kernel.clone(),
            initramfs: self.artifacts.initramfs.clone(),
            cmdline: String::new(),
        };
        engine.boot(spec).await.unwrap()
    }

    /// Stops the vCPUs, takes state, memory and root disk, and lets them go on.
    pub async fn capture(&self, engine: &dyn Engine, vm: &dyn Vm, from: &Place) -> Capture {
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let state = self.base.path().join(format!("state-{number}"));
        let root = self.base.path().join(format!("root-{number}.img"));
        vm.pause().await.unwrap();
        vm.save_state(&state).await.unwrap();
        let mapping = vm.ram().unwrap();
        let upper =
            mapping.upper.map(|upper| aenv_memory::Upper { offset: upper.offset, start: upper.start });
        let (pid, start, len) = (mapping.pid as u32, mapping.start, mapping.len);
        let scanned = aenv_memory::Ram { pid, start, len, upper };
        let changes = aenv_memory::scan(&scanned, aenv_memory::Since::Mapping).unwrap();
        let memory = File::open(format!("/proc/{}/mem", mapping.pid)).unwrap();
        let ram = Ram::new(engine.kind(), self.base.path(), mapping.len, |file| {
            // The image that it was launched from, and what was changed since.
            copy_sparse(&from.spec.ram, file);
            for range in &changes.ranges {
                let mut bytes = vec![0; range.len as usize];
                let address = match upper {
                    Some(upper) if range.offset >= upper.offset => upper.start + range.offset - upper.offset,
                    _ => start + range.offset,
                };
                memory.read_exact_at(&mut bytes, address).unwrap();
                file.write_all_at(&bytes, range.offset).unwrap();
            }
        });
        std::fs::copy(&from.spec.drives[0].path, &root).unwrap();
        vm.resume().await.unwrap();
        let stamp = engine.stamp(&self.artifacts.kernel).await.unwrap();
        Capture { state, ram, root, stamp }
    }
}

/// Copies a file of zeroes and little else.
fn copy_sparse(from: &Path, to: &File) {
    let target = format!("/proc/{}/fd/{}", std::process::id(), to.as_raw_fd());
    let copied = Command::new("cp").args(["--sparse=always", "--"]).arg(from).arg(target).status().unwrap();
    assert!(copied.success());
}

pub struct Capture {
    pub state: PathBuf,
    pub ram: Ram,
    pub root: PathBuf,
    pub stamp: EngineStamp,
}

impl Capture {
    pub fn spec(&self, place: &Place) -> LaunchSpec {
        LaunchSpec { vm: place.spec.clone(), state: self.state.clone(), stamp: self.stamp.clone() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.ram.read()
    }
}
