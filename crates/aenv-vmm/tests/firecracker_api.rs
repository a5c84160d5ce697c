//! The engine `firecracker` with a stand-in for the program, which speaks its API and runs no guest. Each request is checked
//! against the table of the API. Needs root, `ip`, and a static toolchain for the stand-in.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod api;
mod support;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use aenv_types::{EngineStamp, Virtualization};
use aenv_vmm::{
    BootSpec, Engine, EngineError, Firecracker, FirecrackerConfig, JailConfig, LaunchSpec,
    VirtualizationSetting,
};
use api::Request;
use support::{Place, Ram, Runtime, SHAPE};

const SOON: Duration = Duration::from_secs(60);
const FIRST_UID: u32 = 1_900_300_000;

/// A server's folders, and a stand-in that follows a script.
struct World {
    runtime: Runtime,
    base: tempfile::TempDir,
    binary: PathBuf,
}

impl World {
    fn new(script: &str) -> Self {
        let base = tempfile::tempdir().unwrap();
        let binary = base.path().join("firecracker");
        fs::copy(aenv_testkit::firecracker_double().unwrap(), &binary).unwrap();
        let mut file = File::options().append(true).open(&binary).unwrap();
        write!(file, "\n#script\n{script}\n").unwrap();
        for name in ["kernel", "initramfs"] {
            fs::write(base.path().join(name), name).unwrap();
        }
        File::create(base.path().join("root.img")).unwrap().set_len(1 << 20).unwrap();
        Self { runtime: Runtime::new(), base, binary }
    }

    fn config(&self) -> FirecrackerConfig {
        FirecrackerConfig {
            binary: self.binary.clone(),
            jail: Some(JailConfig { root: self.base.path().join("jail"), first_uid: FIRST_UID, uids: 1000 }),
            // Wherever this runs, a stand-in needs none.
            kvm: "/dev/null".into(),
            pvm_module: "/nonexistent".into(),
            ..FirecrackerConfig::new(self.runtime.path())
        }
    }

    fn engine(&self) -> Firecracker {
        Firecracker::new(self.config())
    }

    fn place(&self, engine: &Firecracker) -> Place {
        let ram = Ram::new(engine.kind(), self.base.path(), SHAPE.memory_bytes(), |_| {});
        Place::new(self.base.path(), &ram, &self.base.path().join("root.img"), &[])
    }

    fn boot(&self, place: &Place) -> BootSpec {
        BootSpec {
            vm: place.spec.clone(),
            kernel: self.base.path().join("kernel"),
            initramfs: self.base.path().join("initramfs"),
            cmdline: "added=1".to_owned(),
        }
    }

    async fn launch(&self, engine: &Firecracker, place: &Place) -> LaunchSpec {
        let state = self.base.path().join("state");
        fs::write(&state, "a state").unwrap();
        let stamp = engine.stamp(&self.base.path().join("kernel")).await.unwrap();
        LaunchSpec { vm: place.spec.clone(), state, stamp }
    }
}

/// Requests that the stand-in has printed, of which there are at least `count`; all of them are right.
async fn requests(place: &Place, count: usize) -> Vec<Request> {
    let deadline = Instant::now() + SOON;
    loop {
        // The last line may be half there.
        let text = place.console();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let found: Vec<Request> = whole.lines().filter_map(Request::parse).collect();
        if found.len() >= count {
            api::check(&found);
            return found;
        }
        assert!(Instant::now() < deadline, "{text}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn calls(requests: &[Request]) -> Vec<&str> {
    requests.iter().map(|request| request.call.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_makes_the_machine_in_order() {
    let world = World::new("");
    let engine = world.engine();
    let place = world.place(&engine);
    let vm = engine.boot(world.boot(&place)).await.unwrap();
    let found = requests(&place, 7).await;
    let expected = [
        "PUT /machine-config",
        "PUT /boot-source",
        "PUT /drives/disk0",
        "PUT /network-interfaces/eth0",
        "PUT /balloon",
        "PUT /entropy",
        "PUT /actions",
    ];
    assert_eq!(calls(&found[..7]), expected[..]);
    assert_eq!(found[4].body["free_page_reporting"], true);
    assert_eq!(found[2].body["cache_type"], "Writeback", "a flush has to reach the disk");
    assert!(found[1].body["boot_args"].as_str().unwrap().ends_with(" added=1"));
    let mapping = vm.ram().unwrap();
    assert_eq!((mapping.pid, mapping.len), (vm.record().pid, SHAPE.memory_bytes()));
    vm.end().await.unwrap();
    assert!(vm.exited().await.contains("SIGKILL"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_without_reporting_and_a_cpu_template_are_respected() {
    let world = World::new("version 1.13.1");
    let template = world.base.path().join("cpu.json");
    fs::write(&template, r#"{"kvm_capabilities":["!56"]}"#).unwrap();
    let engine = Firecracker::new(FirecrackerConfig { cpu_template: Some(template), ..world.config() });
    let place = world.place(&engine);
    let vm = engine.boot(world.boot(&place)).await.unwrap();
    let found = requests(&place, 8).await;
    assert_eq!(calls(&found[..2]), ["PUT /machine-config", "PUT /cpu-config"]);
    assert_eq!(found[1].body["kvm_capabilities"][0], "!56");
    let balloon = found.iter().find(|request| request.call == "PUT /balloon").unwrap();
    assert_eq!(balloon.body.get("free_page_reporting"), None);
    let stamp = engine.stamp(&world.base.path().join("kernel")).await.unwrap();
    assert!(stamp.cpu_baseline.starts_with("template:"), "{}", stamp.cpu_baseline);
    vm.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launched_vm_is_captured_held_and_adopted() {
    let world = World::new("");
    let engine = world.engine();
    let place = world.place(&engine);
    let vm = engine.launch(world.launch(&engine, &place).await).await.unwrap();
    let mapping = vm.ram().unwrap();
    let memory = fs::read(format!("/proc/{}/maps", mapping.pid)).unwrap();
    assert!(String::from_utf8_lossy(&memory).contains(&format!("{:x}-", mapping.start)));
    vm.resume().await.unwrap();

    let saved = world.base.path().join("saved");
    let error = vm.save_state(&saved).await.err().unwrap().to_string();
    assert!(error.contains("running VM"), "{error}");
    for _ in 0..3 {
        vm.pause().await.unwrap();
        vm.save_state(&saved).await.unwrap();
        assert_eq!(fs::read(&saved).unwrap(), [7; 5000]);
        assert_eq!(fs::metadata(&saved).unwrap().mode() & 0o777, 0o600);
        vm.save_state(&saved).await.unwrap();
        vm.pause().await.unwrap();
        vm.resume().await.unwrap();
    }
    vm.set_balloon(96).await.unwrap();
    let found = requests(&place, 1 + 1 + 1 + 3 * 4 + 1).await;
    assert_eq!(vm.balloon().await.unwrap(), 32);
    assert!(vm.balloon_gives_way().await.unwrap());
    assert_eq!(found[0].body["mem_backend"]["backend_type"], "File");
    assert_eq!(found[0].body["resume_vm"], false);
    assert_eq!(found.last().unwrap().body["amount_mib"], 32);
    let captures = found.iter().filter(|request| request.call == "PUT /snapshot/create");
    assert!(captures.into_iter().skip(1).count() == 6);

    // A server that dies while it holds a VM leaves it held; the next one lets it go on.
    vm.pause().await.unwrap();
    vm.save_state(&saved).await.unwrap();
    let record = vm.record();
    drop(vm);
    let adopted = world.engine().adopt(&record).await.unwrap();
    adopted.resume().await.unwrap();
    assert_eq!(adopted.ram().unwrap(), mapping);
    let engine = world.engine();
    assert_eq!(engine.sweep(std::slice::from_ref(&record)).await.unwrap(), 0);
    assert_eq!(engine.sweep(&[]).await.unwrap(), 1);
    tokio::time::timeout(SOON, adopted.exited()).await.unwrap();
    assert!(matches!(engine.adopt(&record).await, Err(EngineError::Gone)));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_wrong_has_a_reason_and_leaves_nothing() {
    for (script, reason) in [
        ("refuse PUT /snapshot/load bad state", "PUT /snapshot/load was refused: bad state"),
        ("die PUT /snapshot/load", "the double dies as it was told"),
        ("hang PUT /snapshot/load", "was not answered within 15 s"),
    ] {
        let world = World::new(script);
        let engine = world.engine();
        let place = world.place(&engine);
        let spec = world.launch(&engine, &place).await;
        let began = Instant::now();
        let error = engine.launch(spec).await.err().unwrap().to_string();
        assert!(error.contains(reason), "{error}");
        assert!(began.elapsed() < Duration::from_secs(100));
        assert_eq!(engine.sweep(&[]).await.unwrap(), 0, "{script} leaves a process");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_is_refused_and_a_vm_that_dies_are_told_of() {
    let world = World::new("refuse PUT /entropy no dice");
    let engine = world.engine();
    let place = world.place(&engine);
    let error = engine.boot(world.boot(&place)).await.err().unwrap();
    assert!(matches!(&error, EngineError::Refused { command, .. } if command == "PUT /entropy"), "{error}");

    let world = World::new("die PATCH /vm");
    let engine = world.engine();
    let place = world.place(&engine);
    let vm = engine.launch(world.launch(&engine, &place).await).await.unwrap();
    let error = vm.resume().await.err().unwrap();
    assert!(matches!(&error, EngineError::Exited(why) if why.contains("exit code 7")), "{error}");
    assert!(vm.exited().await.contains("exit code 7"));
    vm.end().await.unwrap();

    // Its disk is not there: nothing was started.
    let mut place = world.place(&engine);
    place.spec.drives[0].path = world.base.path().join("nothing");
    let error = engine.launch(world.launch(&engine, &place).await).await.err().unwrap().to_string();
    assert!(error.contains("nothing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_before_anything_starts() {
    let world = World::new("");
    let engine = world.engine();
    let place = world.place(&engine);
    let good = world.launch(&engine, &place).await;
    let with = |change: fn(&mut EngineStamp)| {
        let mut stamp = good.stamp.clone();
        change(&mut stamp);
        LaunchSpec { stamp, ..good.clone() }
    };
    for spec in [
        with(|stamp| stamp.version = "1.15.1".to_owned()),
        with(|stamp| stamp.virtualization = Virtualization::Pvm),
        with(|stamp| stamp.cpu_baseline = "host:other".to_owned()),
        LaunchSpec { state: "/dev/null".into(), ..good.clone() },
    ] {
        let error = engine.launch(spec).await.err().unwrap();
        assert!(matches!(error, EngineError::Incompatible(_)), "{error}");
    }
    let mut large = world.boot(&place);
    large.vm.shape.memory_mib = 65_538;
    assert!(engine.boot(large).await.err().unwrap().to_string().contains("65536"));
    assert!(!place.spec.runtime.join("firecracker.log").exists());
    engine.launch(good).await.unwrap().end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_cannot_run_it_hears_why() {
    let world = World::new("version 1.12.1");
    let lacks = |config: FirecrackerConfig| async move {
        let report = Firecracker::new(config).probe().await;
        report
            .missing
            .into_iter()
            .map(|missing| format!("{} {}", missing.what, missing.mend))
            .collect::<String>()
    };
    assert!(lacks(world.config()).await.contains("1.12.1 is too old"));
    let world = World::new("");
    assert_eq!(lacks(world.config()).await, "");
    let pvm = FirecrackerConfig { pvm_module: "/proc".into(), ..world.config() };
    assert!(lacks(pvm.clone()).await.contains("CONFIG_PVM_GUEST"));
    let asked = VirtualizationSetting::Only(Virtualization::Pvm);
    assert_eq!(lacks(FirecrackerConfig { virtualization: asked, ..pvm }).await, "");
    let none = FirecrackerConfig { kvm: "/nonexistent".into(), ..world.config() };
    assert!(lacks(none).await.contains("Firecracker needs KVM"));
    let dynamic = FirecrackerConfig { binary: "/bin/true".into(), ..world.config() };
    assert!(lacks(dynamic).await.contains("cannot be run"));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_pvm_only_a_kernel_that_was_built_for_it_is_booted() {
    let world = World::new("");
    let virtualization = VirtualizationSetting::Only(Virtualization::Pvm);
    let config = FirecrackerConfig { virtualization, pvm_module: "/proc".into(), ..world.config() };
    let engine = Firecracker::new(config);
    let place = world.place(&engine);
    let error = engine.boot(world.boot(&place)).await.err().unwrap();
    assert!(matches!(&error, EngineError::Kernel(why) if why.contains("CONFIG_PVM_GUEST")), "{error}");
    assert!(!place.spec.runtime.join("firecracker.log").exists(), "something was started");

    fs::write(world.base.path().join("kernel.config"), "CONFIG_PVM_GUEST=y\n").unwrap();
    let engine =
        Firecracker::new(FirecrackerConfig { virtualization, pvm_module: "/proc".into(), ..world.config() });
    let vm = engine.boot(world.boot(&place)).await.unwrap();
    let found = requests(&place, 7).await;
    assert_eq!(found[0].body["track_dirty_pages"], false);
    vm.end().await.unwrap();
    // Its checkpoints are of this mode, and go on in no other.
    let made = world.launch(&engine, &place).await;
    assert_eq!(made.stamp.virtualization, Virtualization::Pvm);
    let error = world.engine().launch(made.clone()).await.err().unwrap();
    assert!(matches!(&error, EngineError::Incompatible(why) if why.contains("Pvm")), "{error}");
    engine.launch(made).await.unwrap().end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_has_a_root_a_uid_and_no_rights() {
    let world = World::new("");
    let engine = world.engine();
    let place = world.place(&engine);
    let vm = engine.launch(world.launch(&engine, &place).await).await.unwrap();
    let pid = vm.record().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let uid: u32 = field("Uid:")[0].parse().unwrap();
    assert!((FIRST_UID..FIRST_UID + 1000).contains(&uid));
    for ids in ["Uid:", "Gid:"] {
        assert!(field(ids).iter().all(|id| *id == uid.to_string()), "{ids}");
    }
    assert!(field("Groups:").iter().all(|group| *group == uid.to_string()));
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(field("NoNewPrivs:"), ["1"]);

    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let mut names: Vec<_> =
        fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["dev", "drives", "firecracker", "hold", "log", "memory", "state", "vm"]);
    let owner = |name: &str| {
        let meta = fs::metadata(root.join(name)).unwrap();
        (meta.uid(), meta.permissions().mode() & 0o777)
    };
    assert_eq!(owner(""), (0, 0o711));
    assert_eq!(owner("drives/0"), (uid, 0o644));
    for name in ["state", "hold", "log"] {
        assert_eq!(owner(name), (uid, 0o600), "{name}");
    }
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap();
    let points: Vec<&str> = mounts.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
    assert_eq!(points.len(), 5, "{mounts}");
    assert!(!Path::new("/proc/self/mounts").read_link().is_ok_and(|link| link == root));
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = descriptor.unwrap().path();
        assert!(!fs::metadata(&path).is_ok_and(|meta| meta.is_dir()), "{path:?} is an open folder");
    }

    // What it puts into its folder is not followed out of it.
    let socket = root.join("vm/api.sock");
    assert!(fs::symlink_metadata(&socket).unwrap().file_type().is_socket());
    fs::remove_file(&socket).unwrap();
    std::os::unix::fs::symlink("/run/other.sock", &socket).unwrap();
    assert!(vm.resume().await.is_err());
    vm.end().await.unwrap();
    let own = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!own.contains(world.base.path().to_str().unwrap()), "a mount is left on the host");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_never_listens_is_given_up() {
    let world = World::new("silent");
    let engine = world.engine();
    let place = world.place(&engine);
    let error = engine.launch(world.launch(&engine, &place).await).await.err().unwrap();
    assert!(matches!(error, EngineError::TimedOut { .. }), "{error}");
    assert_eq!(engine.sweep(&[]).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_launch_costs_beside_firecracker() {
    const ROUNDS: usize = 60;
    let world = World::new("");
    let engine = world.engine();
    let place = world.place(&engine);
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        let spec = world.launch(&engine, &place).await;
        let began = Instant::now();
        let vm = engine.launch(spec).await.unwrap();
        vm.resume().await.unwrap();
        took.push(began.elapsed());
        vm.end().await.unwrap();
    }
    took.sort();
    let at = |share: usize| took[ROUNDS * share / 100].as_secs_f64() * 1000.0;
    println!(
        "launch and resume beside Firecracker, n={ROUNDS}: least {:.1} ms, p50 {:.1} ms, p90 {:.1} ms",
        at(0),
        at(50),
        at(90)
    );
    // Far above what it takes: a loaded machine must not fail it.
    assert!(at(50) < 200.0);
}

#[test]
fn the_table_agrees_with_the_published_description() {
    let Some(path) = std::env::var_os("FIRECRACKER_API") else {
        println!("SKIPPED: FIRECRACKER_API names no firecracker.yaml to check the table against");
        return;
    };
    api::check_table(&fs::read_to_string(path).unwrap());
}
