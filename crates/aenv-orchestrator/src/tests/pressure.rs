//! The host's memory: what gives way, in which order, and that guests have it back.

use std::time::{Duration, Instant};

use aenv_types::{MachineShape, SandboxId};

use super::{
    crash::runtime,
    lives::{LONG, RESERVE_MIB, SHAPE, Scene, team, until},
};
use crate::{CreateRequest, MetricSample, Orchestrator, PauseMode, SandboxError, Timeout, Wake};

const MEMORY_MIB: u32 = 512;
const USED_MIB: u32 = 100;

/// A node with an idle guest that uses little of its memory.
struct Idle {
    scene: Scene,
    node: Orchestrator,
    id: SandboxId,
}

impl Idle {
    async fn new() -> Self {
        let scene = Scene::new();
        let node = scene.start().await.unwrap();
        let shape = Some(MachineShape { memory_mib: MEMORY_MIB, ..SHAPE });
        let id = node.create(CreateRequest { shape, ..scene.request(LONG) }).await.unwrap().id;
        let idle = Self { scene, node, id };
        idle.rest();
        idle
    }

    /// Nobody has asked anything of it for long.
    fn rest(&self) {
        let cell = self.node.node.registry.any(&self.id).unwrap();
        cell.gauge.lock().rest();
    }

    /// It says what it uses, as it does each few seconds.
    fn sample(&self) -> MetricSample {
        let held = self.held();
        let mib = |mib: u32| u64::from(mib) << 20;
        let mut sample = MetricSample {
            at: chrono::Utc::now(),
            cpu_count: 1,
            // A balloon is work.
            cpu_used_pct: if held == 0 { 1.0 } else { 90.0 },
            mem_used: mib(USED_MIB + held),
            mem_total: mib(MEMORY_MIB),
            mem_cache: mib(MEMORY_MIB - USED_MIB - held),
            disk_used: 0,
            disk_total: 0,
        };
        let cell = self.node.node.registry.any(&self.id).unwrap();
        cell.gauge.lock().read(&mut sample, Instant::now());
        sample
    }

    fn held(&self) -> u32 {
        self.scene.world.balloon(&self.id)
    }

    /// Samples and rounds, until its balloon holds so much.
    async fn until_held(&self, held: u32) {
        until(|| {
            self.sample();
            self.node.node.pressure.look();
            self.held() == held
        })
        .await;
    }

    fn available(&self, mib: u64) {
        self.scene.world.state.lock().available_mib = mib;
    }

    /// It gives all that it can, and that is known.
    async fn squeeze(&self) {
        self.available(RESERVE_MIB / 2);
        self.until_held(MEMORY_MIB - USED_MIB - 64).await;
        until(|| {
            self.node.node.pressure.look();
            self.node.memory().given_back_mib == u64::from(MEMORY_MIB - USED_MIB - 64)
        })
        .await;
    }
}

#[tokio::test]
async fn an_idle_guest_gives_back_what_it_does_not_use_and_has_it_again_with_traffic() {
    let idle = Idle::new().await;
    idle.sample();
    idle.node.node.pressure.look();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(idle.held(), 0, "the host has plenty");
    idle.squeeze().await;
    // A client sees what it uses, not what it has given.
    assert_eq!(idle.sample().mem_used, u64::from(USED_MIB) << 20);
    idle.node.route(&idle.id, Wake::Never).await.unwrap();
    until(|| idle.held() == 0).await;
    // One that was just busy is left alone.
    idle.sample();
    idle.node.node.pressure.look();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(idle.held(), 0);
}

#[tokio::test]
async fn a_guest_that_takes_memory_back_by_itself_has_all_of_it() {
    let idle = Idle::new().await;
    idle.squeeze().await;
    for guest in idle.scene.world.state.lock().vms.values_mut() {
        guest.balloon -= 1;
    }
    idle.node.node.pressure.look();
    until(|| idle.held() == 0).await;
}

#[tokio::test]
async fn a_guest_that_would_end_processes_first_keeps_its_memory() {
    let idle = Idle::new().await;
    idle.scene.world.state.lock().rigid = true;
    idle.available(1);
    for _ in 0..10 {
        idle.sample();
        idle.node.node.pressure.look();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(idle.held(), 0);
}

#[tokio::test]
async fn whatever_is_launched_has_all_its_memory() {
    let idle = Idle::new().await;
    idle.squeeze().await;
    let held = idle.held();
    let (node, id) = (&idle.node, &idle.id);
    // The source goes on as it was; no fork, resume or rollback does.
    let snapshot = node.capture(&team(), id, PauseMode::Full).await.unwrap();
    assert_eq!(idle.held(), held);
    idle.available(0);
    for child in node.fork(&team(), id, 1, LONG).await.unwrap() {
        let child = child.unwrap().id;
        assert_eq!(idle.scene.world.balloon(&child), 0);
        node.kill(&team(), &child).await.unwrap();
    }
    assert_eq!(idle.held(), held);
    node.pause(&team(), id, PauseMode::Full).await.unwrap();
    node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await.unwrap();
    assert_eq!(idle.held(), 0);
    node.rollback(&team(), id, std::sync::Arc::new(snapshot)).await.unwrap();
    assert_eq!(idle.held(), 0);
    until(|| node.memory().given_back_mib == 0).await;
}

#[test]
fn the_next_server_gives_it_back() {
    let life = runtime();
    let (scene, id) = life.block_on(async {
        let idle = Idle::new().await;
        idle.squeeze().await;
        (idle.scene, idle.id)
    });
    drop(life);
    assert!(scene.world.balloon(&id) > 0);
    scene.world.state.lock().available_mib = 0;
    runtime().block_on(async {
        let next = scene.start().await.unwrap();
        assert_eq!(scene.world.balloon(&id), 0);
        assert_eq!(next.list(None).len(), 1);
    });
}

#[tokio::test]
async fn standbys_go_first_and_none_is_made_while_memory_is_short() {
    let standby = crate::StandbySettings { count: 2, templates: 1, keep: LONG };
    let scene = Scene { standby, ..Scene::new() };
    let node = scene.start().await.unwrap();
    let source = node.create(scene.request(LONG)).await.unwrap().id;
    let checkpoint = std::sync::Arc::new(node.capture(&team(), &source, PauseMode::Full).await.unwrap());
    node.create(CreateRequest { checkpoint, ..scene.request(LONG) }).await.unwrap();
    until(|| node.standbys() == 2).await;
    scene.world.state.lock().available_mib = RESERVE_MIB / 2;
    until(|| {
        node.node.pressure.look();
        node.standbys() == 0
    })
    .await;
    scene.world.state.lock().available_mib = RESERVE_MIB + 1;
    node.node.pressure.look();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(node.standbys(), 0, "there is enough for what runs, and not for more");
    scene.world.state.lock().available_mib = 0;
    node.node.pressure.look();
    until(|| node.standbys() == 2).await;
}

#[tokio::test]
async fn more_than_there_is_may_be_promised() {
    let scene = Scene { overcommit: 1.5, ..Scene::new() };
    let node = scene.start().await.unwrap();
    let shape = Some(MachineShape { memory_mib: 384, ..SHAPE });
    let request = || CreateRequest { shape, ..scene.request(LONG) };
    for _ in 0..4 {
        node.create(request()).await.unwrap();
    }
    let memory = node.memory();
    assert_eq!((memory.promised_mib, memory.limit_mib), (4 * 384, 128 * 8 * 3 / 2));
    let full = node.create(scene.request(LONG)).await;
    assert!(matches!(full, Err(SandboxError::Full { .. })), "{full:?}");
    let last = node.list(None).pop().unwrap().id;
    node.kill(&team(), &last).await.unwrap();
    scene.world.state.lock().available_mib = RESERVE_MIB + 255;
    let full = node.create(request()).await;
    assert!(
        matches!(full, Err(SandboxError::Full { ref reason, .. }) if reason.contains("likely")),
        "{full:?}"
    );
    scene.world.state.lock().available_mib = 0;
    node.create(request()).await.unwrap();
}
