//! VMMs in the jail, on a real blockd, and a probe that is as they are. Needs what `qemu.rs` needs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

mod support;

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use aenv_blockd::{
    Client, DiskExport, ExportChoice, Exports, MemoryExport,
    daemon::{Config, Daemon, stacks::Stacks},
};
use aenv_types::{Home, SandboxId};
use aenv_vmm::{BootSpec, Drive, Engine, JailConfig, Qemu, QemuConfig, Vm, VmSpec};
use support::{Bench, Netns, Runtime, SHAPE};
use tokio::sync::oneshot;

const FIRST_UID: u32 = 1_900_000_000;

/// A blockd in a thread, which ends with this.
struct Node {
    home: Home,
    exports: Client,
    stop: Option<oneshot::Sender<()>>,
    blockd: Option<std::thread::JoinHandle<()>>,
    /// Last, after the mount in it went.
    runtime: Runtime,
}

impl Node {
    fn start() -> Self {
        let runtime = Runtime::new();
        let home = Home::new(runtime.path().join("home"), runtime.path());
        home.create().unwrap();
        let config = Config {
            socket: home.blockd_socket(),
            mount: home.exports(),
            state: home.runtime().join("blockd.state"),
            workers: 4,
            export: ExportChoice::Fuse,
        };
        let (stop, stopped) = oneshot::channel();
        let (up, is_up) = std::sync::mpsc::channel();
        let blockd = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                let daemon = Daemon::start(config, Stacks::default()).unwrap();
                up.send(()).unwrap();
                daemon.run(async { stopped.await.unwrap_or(()) }).await.unwrap();
            });
        });
        is_up.recv().unwrap();
        let exports = Client::new(home.blockd_socket());
        Self { home, exports, stop: Some(stop), blockd: Some(blockd), runtime }
    }

    fn engine(&self, warm: usize) -> Qemu {
        let jail = JailConfig { root: self.home.jail(), first_uid: FIRST_UID, uids: 65_536 };
        Qemu::new(QemuConfig { warm, jail: Some(jail), ..QemuConfig::new(self.runtime.path()) })
    }

    /// What a VM needs, with a copy of the root disk.
    async fn place(&self, root: &Path) -> Place {
        let sandbox = SandboxId::random();
        let name = format!("{sandbox}-root");
        let upper = self.runtime.path().join("uppers").join(&name);
        let size = fs::metadata(root).unwrap().len();
        let export = DiskExport { name, size, layers: vec![], upper: Some(upper) };
        let disk = self.exports.open_disk(export).await.unwrap();
        let mut target = File::options().write(true).open(&disk).unwrap();
        io::copy(&mut File::open(root).unwrap(), &mut target).unwrap();
        let memory = MemoryExport {
            holder: sandbox.to_string(),
            size: SHAPE.memory_bytes(),
            layers: vec![],
            group: None,
        };
        let ram = self.exports.open_memory(memory).await.unwrap();
        let netns = Netns::new();
        let runtime = self.home.sandbox_runtime(&sandbox);
        fs::create_dir_all(&runtime).unwrap();
        let spec = VmSpec {
            sandbox,
            shape: SHAPE,
            ram,
            drives: vec![Drive { path: disk, read_only: false }],
            netns: netns.path(),
            serial_log: runtime.join("serial.log"),
            runtime,
        };
        Place { spec, netns }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.take();
        self.blockd.take().unwrap().join().unwrap();
    }
}

struct Place {
    spec: VmSpec,
    netns: Netns,
}

async fn boot(engine: &Qemu, bench: &Bench, place: &Place) -> Box<dyn Vm> {
    let spec = BootSpec {
        vm: place.spec.clone(),
        kernel: bench.artifacts.kernel.clone(),
        initramfs: bench.artifacts.initramfs.clone(),
        cmdline: String::new(),
    };
    let vm = engine.boot(spec).await.unwrap();
    assert_eq!(place.netns.connect().ask("ping"), "pong 1");
    vm
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_reaches_its_own_disk_and_nothing_else() {
    let (bench, node) = (Bench::new(), Node::start());
    let engine = node.engine(0);
    let (one, other) = (node.place(&bench.root).await, node.place(&bench.root).await);
    let (vm, neighbour) = (boot(&engine, &bench, &one).await, boot(&engine, &bench, &other).await);
    let (pid, other_pid) = (vm.record().pid, neighbour.record().pid);

    let uid = assert_confined(pid, &node.home);
    assert_ne!(uid, assert_confined(other_pid, &node.home));
    let owner = |place: &Place| {
        let meta = fs::metadata(&place.spec.drives[0].path).unwrap();
        (meta.uid(), meta.gid(), meta.mode() & 0o777)
    };
    assert_eq!(owner(&one), (uid, uid, 0o600));

    let inside = |path: &Path| Path::new("/").join(path.strip_prefix(node.home.jail()).unwrap());
    let (own, theirs) = (inside(&one.spec.drives[0].path), inside(&other.spec.drives[0].path));
    let hidden = [
        node.home.path().to_owned(),
        node.home.runtime().to_owned(),
        node.home.secrets(),
        other.spec.runtime.clone(),
        other.spec.drives[0].path.clone(),
        node.home.exports(),
        "/etc/shadow".into(),
        "/../../../etc/shadow".into(),
        "/proc".into(),
        "/dev/kvm".into(),
        "/sys".into(),
    ];
    let sockets = [node.home.blockd_socket(), other.spec.runtime.join("qmp.sock")];
    assert!(sockets.iter().all(|socket| socket.exists()));
    in_the_jail_of(pid, uid, move || {
        File::options().read(true).write(true).open(&own).expect("its own disk");
        for path in [&theirs, Path::new("/exports")] {
            assert_eq!(refusal(File::open(path)), libc::EACCES, "{}", path.display());
        }
        assert_eq!(refusal(File::options().write(true).open(&theirs)), libc::EACCES);
        assert_eq!(refusal(fs::read_dir("/exports")), libc::EACCES);
        for path in &hidden {
            assert_eq!(refusal(fs::symlink_metadata(path)), libc::ENOENT, "{}", path.display());
        }
        for socket in &sockets {
            assert_eq!(refusal(UnixStream::connect(socket)), libc::ENOENT, "{}", socket.display());
        }
        for folder in ["/", "/boot", "/exports", "/firmware", "/modules"] {
            let made = File::create(Path::new(folder).join("new"));
            assert!([libc::EACCES, libc::EPERM].contains(&refusal(made)), "{folder}");
        }
        assert_eq!(refusal(std::os::unix::fs::chown(&own, Some(0), None)), libc::EPERM);
        assert_eq!(refusal(std::os::unix::fs::chroot("/exports")), libc::EPERM);
        for process in [other_pid, 1] {
            for call in harm(process) {
                assert_eq!(refusal(call()), libc::EPERM, "process {process}");
            }
        }
    });

    vm.end().await.unwrap();
    neighbour.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confined_vm_is_saved_and_adopted() {
    let (bench, node) = (Bench::new(), Node::start());
    let engine = node.engine(1);
    let place = node.place(&bench.root).await;
    let vm = boot(&engine, &bench, &place).await;
    let descriptors = |pid: i32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let (pid, before) = (vm.record().pid, descriptors(vm.record().pid));
    let state = node.runtime.path().join("state");
    for _ in 0..3 {
        vm.pause().await.unwrap();
        vm.save_state(&state).await.unwrap();
        vm.resume().await.unwrap();
    }
    assert!(fs::metadata(&state).unwrap().len() > 4096);
    assert_eq!(descriptors(pid), before, "a capture leaves nothing open in the VMM");
    let mapping = vm.ram().unwrap();
    let record = vm.record();
    drop(vm);
    let adopted = node.engine(0).adopt(&record).await.unwrap();
    assert_eq!(adopted.ram().unwrap(), mapping);
    adopted.pause().await.unwrap();
    adopted.save_state(&state).await.unwrap();
    adopted.resume().await.unwrap();
    assert!(place.netns.connect().ask("ping").starts_with("pong "));
    adopted.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_waits_is_confined_and_takes_no_files_of_elsewhere() {
    let (bench, node) = (Bench::new(), Node::start());
    let engine = node.engine(1);
    engine.prewarm(SHAPE, 1).await.unwrap();
    let waited = async {
        while engine.warm(SHAPE, 1) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap();
    let pids = owned(node.runtime.path());
    assert_eq!(pids.len(), 1);
    assert_confined(pids[0], &node.home);

    let mut place = node.place(&bench.root).await;
    place.spec.drives[0].path = bench.root.clone();
    let spec = BootSpec {
        vm: place.spec.clone(),
        kernel: bench.artifacts.kernel.clone(),
        initramfs: bench.artifacts.initramfs.clone(),
        cmdline: String::new(),
    };
    let error = engine.boot(spec).await.err().unwrap().to_string();
    assert!(error.contains("root.img is not below"), "{error}");
}

/// Checks what `/proc` says of a process, and returns its uid.
fn assert_confined(pid: i32, home: &Home) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fields: HashMap<_, _> = status.lines().filter_map(|line| line.split_once(":\t")).collect();
    let uid: u32 = fields["Uid"].split('\t').next().unwrap().parse().unwrap();
    assert!((FIRST_UID..FIRST_UID + 65_536).contains(&uid), "{uid}");
    let all = [uid.to_string(), uid.to_string(), uid.to_string(), uid.to_string()].join("\t");
    assert_eq!((fields["Uid"], fields["Gid"]), (all.as_str(), all.as_str()));
    assert!(["", uid.to_string().as_str()].contains(&fields["Groups"].trim()), "{}", fields["Groups"]);
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(fields[set], "0000000000000000", "{set}");
    }
    assert_eq!((fields["NoNewPrivs"], fields["Seccomp"]), ("1", "2"));
    for link in ["root", "cwd"] {
        assert_eq!(fs::read_link(format!("/proc/{pid}/{link}")).unwrap(), home.jail());
    }
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = descriptor.unwrap().path();
        assert!(!fs::metadata(&path).is_ok_and(|meta| meta.is_dir()), "{path:?} is an open folder");
    }
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!((limit("Max core file size"), limit("Max open files")), ("0".into(), "1024".into()));
    uid
}

/// Runs as the VMM is: its root, its network, its uid, no groups, no capabilities.
fn in_the_jail_of(pid: i32, uid: u32, work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        let netns = File::open(format!("/proc/{pid}/ns/net")).unwrap();
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).unwrap();
        nix::sched::setns(netns, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        std::os::unix::fs::chroot(format!("/proc/{pid}/root")).unwrap();
        std::env::set_current_dir("/").unwrap();
        // SAFETY: these calls change this thread only, which the functions of libc would not do; they touch no memory.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, uid, uid, uid), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0);
        }
        work();
    });
    thread.join().unwrap();
}

fn refusal<T>(outcome: io::Result<T>) -> i32 {
    outcome.err().expect("it is refused").raw_os_error().unwrap()
}

/// What one process might do to another.
fn harm(pid: i32) -> [Box<dyn Fn() -> io::Result<()>>; 4] {
    fn told(result: libc::c_long) -> io::Result<()> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
    // SAFETY: the calls are refused; if one were not, the test fails, and at worst another process ends.
    unsafe {
        [
            Box::new(move || told(libc::kill(pid, 0).into())),
            Box::new(move || told(libc::kill(pid, libc::SIGSTOP).into())),
            Box::new(move || told(libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0))),
            Box::new(move || {
                let mut byte = 0_u8;
                let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
                let remote = libc::iovec { iov_base: 0x1000 as *mut libc::c_void, iov_len: 1 };
                told(libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) as _)
            }),
        ]
    }
}

fn owned(runtime: &Path) -> Vec<i32> {
    let mark = format!("AENV_VMM_OWNER={}", runtime.display());
    let folders: Vec<PathBuf> = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()).collect();
    let marked = folders.iter().filter(|folder| {
        let environment = fs::read(folder.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
    });
    marked.filter_map(|folder| folder.file_name()?.to_str()?.parse().ok()).collect()
}
