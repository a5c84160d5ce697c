//! What every engine must be able to do, told once over the trait.
#![allow(clippy::print_stdout, reason = "how far a long test has come")]

use std::time::Duration;

use aenv_vmm::{Engine, EngineError, Vm, VmRecord};

use crate::support::{Bench, Capture, Place, Runtime, Traffic};

const SOON: Duration = Duration::from_secs(60);

/// Boot, capture, launch twice, adopt, end; each step is checked from inside the guest.
pub async fn life_of_a_vm(engine: &dyn Engine) {
    let bench = Bench::new();
    let empty = bench.empty_ram(engine);
    let first = bench.place(&empty, &bench.root);
    let vm = bench.boot(engine, &first).await;
    boots_into_the_image(&first);

    let mut agent = first.netns.connect();
    assert_eq!(agent.ask("fill 8 7"), "ok");
    assert_eq!(agent.ask("file before"), "ok");
    let boot_id = agent.ask("boot");
    let capture = bench.capture(engine, &*vm, &first).await;
    let untouched = capture.bytes();
    assert!(agent.ask("ping").starts_with("pong "), "the source goes on after a capture");
    assert_eq!(agent.ask("file source"), "ok");

    let places = [bench.place(&capture.ram, &capture.root), bench.place(&capture.ram, &capture.root)];
    let mut children = Vec::new();
    for (number, place) in places.iter().enumerate() {
        let child = engine.launch(capture.spec(place)).await.unwrap();
        assert!(!place.netns.answers(), "the vCPUs of a launched VM run before they are told to");
        child.resume().await.unwrap();
        let mut agent = place.netns.connect();
        assert_eq!(agent.ask("boot"), boot_id);
        assert_eq!(agent.ask("check 7"), "same");
        assert_eq!(agent.ask("cat"), "before");
        assert_eq!(agent.ask(&format!("fill 8 {}", 100 + number)), "ok");
        assert_eq!(agent.ask(&format!("file child{number}")), "ok");
        children.push(child);
    }
    for (number, place) in places.iter().enumerate() {
        let mut agent = place.netns.connect();
        assert_eq!(agent.ask(&format!("check {}", 100 + number)), "same");
        assert_eq!(agent.ask("cat"), format!("child{number}"));
    }
    let mut agent = first.netns.connect();
    assert_eq!(agent.ask("check 7"), "same");
    assert_eq!(agent.ask("cat"), "source");
    assert!(untouched == capture.bytes(), "guests changed the memory file that siblings share");

    refuses_what_it_cannot_continue(engine, &bench, &capture).await;
    survives_the_server(engine, &places[0], children.remove(0)).await;

    let last = children.remove(0);
    assert_eq!(places[1].netns.connect().ask("off"), "ok");
    tokio::time::timeout(SOON, last.exited()).await.expect("a guest that powers off ends its VMM");
    vm.end().await.unwrap();
    vm.end().await.unwrap();
    let reason = vm.exited().await;
    assert!(reason.contains("SIGKILL"), "{reason}");
}

fn boots_into_the_image(place: &Place) {
    let mut agent = place.netns.connect();
    assert_eq!(agent.ask("ping"), "pong 1", "{}", place.console());
    let mounts = format!(" {} ", agent.ask("mounts"));
    for point in ["/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/sys/fs/cgroup"] {
        assert!(mounts.contains(&format!(" {point} ")), "{point} is not in {mounts}");
    }
    let size: u32 = agent.ask("size").parse().unwrap();
    assert!((50..64).contains(&size), "the filesystem has {size} MiB on a disk of 64");
    assert_eq!(agent.ask("zombies"), "0");
    assert!(agent.ask("envd").starts_with("not found"), "{}", agent.ask("envd"));
}

async fn refuses_what_it_cannot_continue(engine: &dyn Engine, bench: &Bench, capture: &Capture) {
    let place = bench.place(&capture.ram, &capture.root);
    let mut foreign = capture.spec(&place);
    foreign.stamp.version = "1.2.3".to_owned();
    let error = engine.launch(foreign).await.err().unwrap();
    assert!(matches!(error, EngineError::Incompatible(_)), "{error}");

    let mut damaged = capture.spec(&place);
    let whole = std::fs::read(&damaged.state).unwrap();
    damaged.state = place.folder.join("cut");
    std::fs::write(&damaged.state, &whole[..whole.len() / 2]).unwrap();
    let error = engine.launch(damaged).await.err().unwrap();
    assert!(matches!(error, EngineError::Exited(_) | EngineError::Refused { .. }), "{error}");

    let mut no_disk = capture.spec(&place);
    no_disk.vm.drives[0].path = place.folder.join("nothing");
    let error = engine.launch(no_disk).await.err().unwrap();
    assert!(error.to_string().contains("nothing"), "{error}");
    let left = engine_processes(&place.spec.runtime);
    assert!(left.is_empty(), "failed launches left {left:?}");
}

async fn survives_the_server(engine: &dyn Engine, place: &Place, vm: Box<dyn Vm>) {
    let record = vm.record();
    let text = serde_json::to_string(&record).unwrap();
    let record_again: VmRecord = serde_json::from_str(&text).unwrap();
    assert_eq!(record, record_again);
    let mapping = vm.ram().unwrap();
    drop(vm);
    assert!(place.netns.connect().ask("ping").starts_with("pong "), "it runs on without a handle");

    let adopted = engine.adopt(&record).await.unwrap();
    assert_eq!(adopted.ram().unwrap(), mapping);
    adopted.pause().await.unwrap();
    adopted.pause().await.unwrap();
    adopted.resume().await.unwrap();
    assert!(place.netns.connect().ask("ping").starts_with("pong "));
    assert_eq!(adopted.balloon().await.unwrap(), 0);
    adopted.set_balloon(96).await.unwrap();
    let given = async {
        while adopted.balloon().await.unwrap() < 32 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, given).await.expect("the guest gave nothing back");
    assert!(adopted.balloon_gives_way().await.unwrap(), "it was booted without that feature");
    assert!(place.netns.connect().ask("ping").starts_with("pong "));

    let reused = VmRecord { start_time: record.start_time + 1, ..record.clone() };
    assert!(matches!(engine.adopt(&reused).await, Err(EngineError::Gone)));
    assert_eq!(record.kind, engine.kind());
    adopted.end().await.unwrap();
    assert!(matches!(engine.adopt(&record).await, Err(EngineError::Gone)));
}

/// Processes that have a file of this folder open.
fn engine_processes(folder: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let own = process.file_name().to_string_lossy() == std::process::id().to_string();
        let files = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut links = files.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        if !own && links.any(|link| link.starts_with(folder)) {
            found.push(process.file_name().to_string_lossy().into_owned());
        }
    }
    found
}

/// How often and how many: the numbers that are promised with `AENV_SUITE=full`, a few without it.
fn often(few: usize, full: usize) -> usize {
    if std::env::var("AENV_SUITE").is_ok_and(|which| which == "full") { full } else { few }
}

/// Capture and launch, again and again, each from the one before, while packets come in and the guest writes to its disk. What
/// memory knows to be on the disk is there in every one.
pub async fn captures_under_traffic(engine: &dyn Engine) {
    let bench = Bench::new();
    let empty = bench.empty_ram(engine);
    let mut place = bench.place(&empty, &bench.root);
    let mut vm = bench.boot(engine, &place).await;
    let mut agent = place.netns.connect();
    assert_eq!(agent.ask("fill 4 5"), "ok");
    assert_eq!(agent.ask("churn"), "ok");
    let mut ram = empty;
    let rounds = often(4, 50);
    for round in 0..rounds {
        let began = std::time::Instant::now();
        let traffic = Traffic::start(&place.netns);
        assert!(place.netns.connect().ask("ping").starts_with("pong "));
        // Memory that is given back makes holes in what is captured.
        vm.set_balloon(if round % 3 == 0 { 100 } else { 128 }).await.unwrap();
        let capture = bench.capture(engine, &*vm, &place).await;
        assert_eq!(place.netns.connect().ask("churned"), "ok", "the source in round {round}");
        drop(traffic);
        let next = bench.place(&capture.ram, &capture.root);
        let child = engine.launch(capture.spec(&next)).await.unwrap();
        child.resume().await.unwrap();
        let mut agent = next.netns.connect();
        assert_eq!(agent.ask("churned"), "ok", "round {round}");
        assert_eq!(agent.ask("check 5"), "same", "round {round}");
        vm.end().await.unwrap();
        println!("round {round} of {rounds} in {:.1} s", began.elapsed().as_secs_f64());
        std::fs::remove_dir_all(&place.folder).unwrap();
        (vm, place, ram) = (child, next, capture.ram);
    }
    vm.end().await.unwrap();
    drop(ram);
}

/// Many launches of one capture, one that is launched again in its own place, and launches that nobody waits for.
pub async fn forks_and_ends(engine: &dyn Engine, runtime: &Runtime) {
    let bench = Bench::new();
    let empty = bench.empty_ram(engine);
    let first = bench.place(&empty, &bench.root);
    let vm = bench.boot(engine, &first).await;
    let boot_id = first.netns.connect().ask("boot");
    let capture = bench.capture(engine, &*vm, &first).await;

    let places: Vec<Place> = (0..often(3, 16)).map(|_| bench.place(&capture.ram, &capture.root)).collect();
    let launches = places.iter().map(|place| async {
        let child = engine.launch(capture.spec(place)).await.unwrap();
        child.resume().await.unwrap();
        child
    });
    let children = futures::future::join_all(launches).await;
    for place in &places {
        assert_eq!(place.netns.connect().ask("boot"), boot_id);
    }
    for child in &children {
        child.end().await.unwrap();
    }

    let place = &places[0];
    std::fs::copy(&capture.root, &place.spec.drives[0].path).unwrap();
    let again = engine.launch(capture.spec(place)).await.unwrap();
    again.resume().await.unwrap();
    assert_eq!(place.netns.connect().ask("boot"), boot_id);

    // A VMM that dies while it is captured.
    again.pause().await.unwrap();
    again.save_state(&place.folder.join("state")).await.unwrap();
    let pid = nix::unistd::Pid::from_raw(again.record().pid);
    nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
    tokio::time::timeout(SOON, again.exited()).await.unwrap();
    assert!(matches!(again.resume().await, Err(EngineError::Exited(_))));
    again.end().await.unwrap();

    for millis in [0, 1, 2, 4, 8, 16, 32, 64] {
        let launch = engine.launch(capture.spec(place));
        if let Ok(launched) = tokio::time::timeout(Duration::from_millis(millis), launch).await {
            launched.unwrap().end().await.unwrap();
        }
    }
    vm.end().await.unwrap();
    let gone = async {
        while !runtime.processes().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("launches that nobody waited for left processes");
}
