//! A node that lives several times over one world, and what each verb does.

use std::{sync::Arc, time::Duration};

use aenv_types::{
    CacheRecord, Checkpoint, CheckpointId, Digest, DiskImage, EgressPolicy, GuestContext, Home, LayerName,
    LayerRef, Lineage, MachineShape, Origin, SandboxId, TeamId, TemplateId, checkpoint::CHECKPOINT_FORMAT,
};

use super::{
    crash::runtime,
    world::{In, World},
};
use crate::{
    CreateRequest, Expiry, HomeLock, Lifecycle, OnTimeout, Orchestrator, Parts, PauseMode, ProxyOptions,
    SandboxError, SandboxState, Settings, Sharing, StandbySettings, StartError, Timeout, Wake,
    crash::{CrashPoints, HangPoint},
    seams::Seams,
};

/// Folders and a world that outlive servers.
pub(super) struct Scene {
    pub folder: tempfile::TempDir,
    pub world: Arc<World>,
    pub template: Arc<Checkpoint>,
    pub standby: StandbySettings,
    /// A folder that nodes share.
    pub repository: Option<std::path::PathBuf>,
    pub overcommit: f64,
    pub stand: Duration,
    pub shared: bool,
}

/// What is kept available of the world's memory.
pub(super) const RESERVE_MIB: u64 = 1000;
pub(super) const LONG: Duration = Duration::from_secs(3600);
pub(super) const SHAPE: MachineShape = MachineShape { vcpus: 1, memory_mib: 128, disk_mib: 64 };

impl Scene {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = home(folder.path());
        home.create().unwrap();
        // The base of the template is named by digest: it is not the node's own.
        let base = LayerName::Digest(aenv_types::Digest::of(b"7"));
        std::fs::write(home.layer(&base), "7").unwrap();
        let disk = DiskImage {
            drive: "root".into(),
            size: SHAPE.disk_bytes(),
            layers: vec![LayerRef { name: base, size: 1 }],
        };
        let template = Checkpoint {
            format: CHECKPOINT_FORMAT,
            id: CheckpointId::random(),
            created_at: chrono::Utc::now(),
            shape: SHAPE,
            engine: None,
            vm_state: None,
            memory: None,
            disks: vec![disk],
            guest: GuestContext::default(),
            lineage: Lineage {
                parent: None,
                origin: Origin::Template { template: TemplateId::random(), build: uuid::Uuid::new_v4() },
            },
        };
        let (world, template) = (Arc::default(), Arc::new(template));
        Self {
            folder,
            world,
            template,
            standby: StandbySettings::OFF,
            overcommit: 1.0,
            stand: Duration::ZERO,
            shared: true,
            repository: None,
        }
    }

    pub fn home(&self) -> Home {
        home(self.folder.path())
    }

    pub async fn start(&self) -> Result<Orchestrator, StartError> {
        self.start_to_crash(&Arc::default()).await
    }

    /// A server that hangs at a point once the test has armed it.
    pub async fn start_to_crash(&self, point: &Arc<HangPoint>) -> Result<Orchestrator, StartError> {
        let home = self.home();
        home.create().map_err(|error| StartError::Part(error.to_string()))?;
        let lock = HomeLock::take(&home)?;
        // A new server's network holds no slot yet.
        self.world.state.lock().slots.values_mut().for_each(|held| *held = false);
        let all = In(Arc::clone(&self.world));
        let kept = home.clone();
        let limits = aenv_volume::Limits { count: 9, quota: 1 << 20, disk_reserve: 0 };
        let volumes = aenv_volume::Volumes::open(&home, limits);
        let volumes = volumes.map_err(|error| StartError::Part(error.to_string()))?;
        let sharing = match &self.repository {
            None => None,
            Some(root) => {
                let backend = aenv_repository::Backend::PosixFs { root: root.clone() };
                let repository = aenv_repository::Repository::open(backend, home.clone()).await;
                let repository = repository.map_err(|error| StartError::Part(error.to_string()))?;
                let name = self.folder.path().file_name().unwrap().to_str().unwrap();
                Some(Sharing { repository, node: name.to_owned(), publish: true })
            }
        };
        let parts = Parts {
            home,
            lock,
            exports: Arc::new(all.clone()),
            network: Arc::new(all.clone()),
            engine: Arc::new(all.clone()),
            kernel: "kernel".into(),
            initramfs: "initramfs".into(),
            caches: vec![Arc::new(move || cached(&kept))],
            modules: None,
            volumes,
            settings: Settings {
                max_running: 8,
                memory_mib: 128 * 8,
                memory_overcommit: self.overcommit,
                memory_reserve_mib: RESERVE_MIB,
                memory_idle: Duration::from_secs(60),
                stand_after_deadline: self.stand,
                share_memory_across_teams: self.shared,
                auto_resume_min_timeout: Duration::from_secs(300),
                disk_reserve_bytes: 0,
                parallel_launches: 4,
                cache_bytes: 1 << 30,
                blobs: crate::Blobs::Elsewhere,
                standby: self.standby,
            },
            sharing,
        };
        let (agent, images) = (Arc::new(all.clone()), Arc::new(all.clone()));
        let seams = Seams { agent, images, host: Arc::new(all) };
        Orchestrator::start_with(parts, seams, CrashPoints::Hang(Arc::clone(point))).await
    }

    pub fn request(&self, timeout: Duration) -> CreateRequest {
        CreateRequest {
            team: team(),
            checkpoint: Arc::clone(&self.template),
            shape: None,
            template: TemplateId::random(),
            alias: None,
            timeout,
            lifecycle: Lifecycle {
                on_timeout: OnTimeout::Pause,
                pause_mode: PauseMode::Full,
                auto_resume: true,
            },
            metadata: [("a".to_owned(), "b".to_owned())].into(),
            env: [("K".to_owned(), "V".to_owned())].into(),
            secure: true,
            egress: EgressPolicy::default(),
            network: serde_json::Value::Null,
            mcp: serde_json::Value::Null,
            allow_internet_access: None,
            proxy: ProxyOptions::default(),
            volumes: Vec::new(),
            hidden: false,
            limits: crate::TeamLimits::default(),
        }
    }

    /// Nothing is there but what these sandboxes need.
    pub fn assert_clean(&self, running: &[SandboxId]) {
        let mut alive = self.world.alive();
        alive.sort();
        let mut expected = running.to_vec();
        expected.sort();
        assert_eq!(alive, expected, "VMMs");
        let state = self.world.state.lock();
        assert_eq!(state.disks.len(), running.len(), "disk exports: {:?}", state.disks.keys());
        assert_eq!(state.memories.len(), running.len(), "memory exports: {:?}", state.memories.keys());
        assert_eq!(state.slots.len(), running.len(), "slots");
        let names = |path| std::fs::read_dir(path).unwrap().count();
        assert_eq!(names(self.home().runtime().join("sandboxes")), running.len(), "runtime folders");
        assert_eq!(names(self.home().staging()), 0, "staging");
    }

    /// Local layers and vm states on disk.
    /// Layers of memory that the next capture builds on.
    pub fn memory_layers(&self, node: &Orchestrator, id: &SandboxId) -> usize {
        let launched = node.node.registry.any(id).unwrap().now().record.launched.clone().unwrap();
        launched.captured.unwrap_or(launched.memory).len()
    }

    pub fn local_layers(&self) -> usize {
        let entries = std::fs::read_dir(self.home().layers()).unwrap();
        entries
            .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with("local-"))
            .count()
    }
}

/// A cache whose records are empty files, each with the name of the layer that it keeps.
fn cached(home: &Home) -> std::io::Result<Vec<CacheRecord>> {
    let record = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_str()?.replacen('-', ":", 1).parse().ok()?;
        Some(CacheRecord {
            file: Some(entry.path()),
            last_used: entry.metadata().ok()?.modified().ok()?,
            own_bytes: 0,
            layers: vec![LayerRef { name, size: 1 }],
        })
    };
    Ok(std::fs::read_dir(home.cache())?.flatten().filter_map(record).collect())
}

fn home(folder: &std::path::Path) -> Home {
    Home::new(folder.join("home"), folder.join("run"))
}

pub(super) fn team() -> TeamId {
    TeamId::default_team()
}

async fn resume(node: &Orchestrator, id: &SandboxId) -> Result<(crate::SandboxView, bool), SandboxError> {
    node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await
}

/// Layers that a stack of memory may have before it is merged.
pub(super) const SHALLOW: usize = 16;

/// Waits until a level is reached.
pub(super) async fn until(mut reached: impl FnMut() -> bool) {
    let waited = async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waited).await.expect("the level is reached in time");
}

#[tokio::test]
async fn a_sandbox_is_created_paused_resumed_and_removed() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let view = node.create(scene.request(LONG)).await.unwrap();
    let id = view.id;
    assert_eq!(scene.world.values(&id), Some((0, 7)), "booted from the template's disk");
    scene.world.write(&id, 42);
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    assert_eq!(node.get(&team(), &id).unwrap().state, SandboxState::Paused);
    scene.assert_clean(&[]);
    assert!(matches!(node.pause(&team(), &id, PauseMode::Full).await, Err(SandboxError::Paused(_))));
    let (again, was_paused) = resume(&node, &id).await.unwrap();
    assert!(was_paused);
    assert_eq!(scene.world.values(&id), Some((42, 42)));
    assert_eq!(again.envd_token, view.envd_token);
    // Connecting to a running one leaves its deadline exactly as it is, unless it reaches beyond.
    let soon = Timeout::Extend(Duration::from_secs(5));
    let (same, was_paused) = node.resume(&team(), &id, soon, PauseMode::Full).await.unwrap();
    assert!(!was_paused);
    assert_eq!(same.end_at, again.end_at);
    node.kill(&team(), &id).await.unwrap();
    assert!(matches!(node.kill(&team(), &id).await, Err(SandboxError::NotFound(_))));
    assert!(node.list(None).is_empty());
    scene.assert_clean(&[]);
    until(|| scene.local_layers() == 0).await;
}

#[tokio::test]
async fn snapshots_of_one_pause_do_not_need_each_other() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 1);
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    // Two callers publish what is paused; meanwhile it is resumed, changed, and paused again.
    let first = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
    let second = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
    assert_ne!(first.id, second.id);
    resume(&node, &id).await.unwrap();
    scene.world.write(&id, 2);
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    // The first one is done. The collector has looked when what only it had is gone.
    node.release(&first.id);
    until(|| !scene.home().checkpoint(&first.id).exists()).await;
    node.collect_soon();
    let garbage = LayerName::new_local();
    std::fs::write(scene.home().layer(&garbage), "7").unwrap();
    until(|| {
        node.collect_soon();
        !scene.home().layer(&garbage).exists()
    })
    .await;
    let kept: Vec<_> =
        second.layers().map(|layer| layer.name).chain(second.vm_state.map(|s| s.name)).collect();
    assert!(kept.iter().all(|name| scene.home().has_layer(name)), "the second one has lost its layers");
}

#[tokio::test]
async fn what_a_cache_keeps_stays_until_it_is_forgotten() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let home = scene.home();
    let (kept, old, unnamed) = (LayerName::new_local(), LayerName::new_local(), LayerName::new_local());
    let record = |name: &LayerName| home.cache().join(name.file_name());
    for name in [&kept, &old] {
        std::fs::write(record(name), "").unwrap();
    }
    for name in [&kept, &old, &unnamed] {
        std::fs::write(home.layer(name), "7").unwrap();
    }
    node.collect_soon();
    until(|| !home.layer(&unnamed).exists()).await;
    assert!(home.layer(&kept).exists() && home.layer(&old).exists());
    // One that was of no use for weeks is forgotten, and then its layer goes.
    let weeks_ago = std::time::SystemTime::now() - Duration::from_secs(30 * 24 * 3600);
    std::fs::File::options().append(true).open(record(&old)).unwrap().set_modified(weeks_ago).unwrap();
    node.collect_soon();
    until(|| !home.layer(&old).exists()).await;
    assert!(!record(&old).exists());
    assert!(home.layer(&kept).exists());
}

#[tokio::test]
async fn notes_that_nothing_needs_go_and_others_stay() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let home = scene.home();
    let [cached, launched, unneeded, recent] =
        [b"cached", b"launch", b"unused", b"recent"].map(|of| Digest::of(of));
    let name = LayerName::Digest;
    for digest in [cached, launched, unneeded, recent] {
        std::fs::write(home.remote_layer(&name(digest)), "{}").unwrap();
    }
    std::fs::write(home.cache().join(name(cached).file_name()), "").unwrap();
    let hours_ago = std::time::SystemTime::now() - Duration::from_secs(3 * 3600);
    for digest in [cached, launched, unneeded] {
        let note = std::fs::File::options().append(true).open(home.remote_layer(&name(digest))).unwrap();
        note.set_modified(hours_ago).unwrap();
    }
    // A sandbox runs on one. Where its bytes are matters to blockd only.
    std::fs::write(home.layer(&name(launched)), "7").unwrap();
    let request = scene.request(LONG);
    let mut checkpoint = Checkpoint::clone(&request.checkpoint);
    checkpoint.id = CheckpointId::random();
    checkpoint.disks[0].layers = vec![LayerRef { name: name(launched), size: 1 }];
    let id = node.create(CreateRequest { checkpoint: Arc::new(checkpoint), ..request }).await.unwrap().id;

    let hour = Duration::from_secs(3600);
    assert_eq!(node.unneeded_notes(hour).await.unwrap(), [unneeded]);
    // Only what is asked for goes, and nothing that is needed by then.
    assert_eq!(node.remove_notes(vec![], hour).await.unwrap(), 0);
    let all = vec![cached, launched, unneeded, recent];
    assert_eq!(node.remove_notes(all, hour).await.unwrap(), 1);
    for digest in [cached, launched, recent] {
        assert!(home.remote_layer(&name(digest)).exists());
    }
    assert!(!home.remote_layer(&name(unneeded)).exists());
    node.kill(&team(), &id).await.unwrap();
    let unneeded = async {
        while node.unneeded_notes(hour).await.unwrap() != [launched] {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), unneeded)
        .await
        .expect("nothing needs the sandbox's note now");
}

#[tokio::test]
async fn a_filesystem_pause_keeps_the_disk_and_boots() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 5);
    node.pause(&team(), &id, PauseMode::Filesystem).await.unwrap();
    let asleep = node.route(&id, Wake::IfAutoResume).await;
    assert!(matches!(asleep, Err(SandboxError::Paused(_))), "a disk alone is not woken by traffic");
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((0, 5)));
}

#[tokio::test]
async fn captures_build_on_each_other_and_disks_accumulate() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let mut taken = Vec::new();
    for value in 1..=3 {
        scene.world.write(&id, value);
        taken.push(node.capture(&team(), &id, PauseMode::Full).await.unwrap());
        assert_eq!(scene.world.values(&id), Some((value, value)), "the source goes on");
    }
    for (index, checkpoint) in taken.iter().enumerate() {
        assert_eq!(checkpoint.memory.as_ref().unwrap().layers.len(), index + 1);
        assert_eq!(checkpoint.disks[0].layers.len(), index + 2);
        assert_eq!(checkpoint.guest.env["K"], "V");
    }
    let unchanged = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
    assert_eq!(unchanged.disks, taken[2].disks, "nothing was written, nothing is sealed");
    let rolled = node.rollback(&team(), &id, Arc::new(taken[0].clone())).await.unwrap();
    assert_eq!(rolled.id, id);
    assert_eq!(scene.world.values(&id), Some((1, 1)));
    let request = CreateRequest { checkpoint: Arc::new(taken[1].clone()), ..scene.request(LONG) };
    let other = node.create(request).await.unwrap().id;
    assert_eq!(scene.world.values(&other), Some((2, 2)));
    let foreign = node.rollback(&team(), &other, Arc::new(taken[0].clone())).await;
    assert!(matches!(foreign, Err(SandboxError::Invalid(_))));
}

#[tokio::test]
async fn after_a_capture_that_failed_the_next_one_counts_from_the_launch() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let home = scene.home();
    let layers = |taken: &Checkpoint| {
        let layers = &taken.memory.as_ref().unwrap().layers;
        layers
            .iter()
            .map(|layer| std::fs::read_to_string(home.layer(&layer.name)).unwrap())
            .collect::<Vec<_>>()
    };
    for failing in 0.. {
        scene.world.write(&id, 10 + u64::from(failing));
        let before = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
        let written = 100 + u64::from(failing);
        scene.world.write(&id, written);
        // Each operation of a capture in turn.
        scene.world.state.lock().fail_in = Some(failing);
        let failed = node.capture(&team(), &id, PauseMode::Full).await.is_err();
        let unused = scene.world.state.lock().fail_in.take();
        assert_eq!(failed, unused.is_none());
        let after = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
        let lost = "the layer of what was written is in none of the stacks";
        assert_eq!(layers(&after).iter().rfind(|text| !text.is_empty()).expect(lost), &written.to_string());
        if !failed {
            assert_eq!(layers(&after).len(), layers(&before).len() + 2);
            assert_eq!(layers(&after).last().unwrap(), "", "nothing was written since the last one");
            assert!(failing > 3, "a capture has {failing} operations");
            break;
        }
        let request = CreateRequest { checkpoint: Arc::new(after), ..scene.request(LONG) };
        let other = node.create(request).await.unwrap().id;
        assert_eq!(scene.world.values(&other), Some((written, written)));
        node.kill(&team(), &other).await.unwrap();
    }
}

#[tokio::test]
async fn what_the_next_capture_builds_on_stays() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 1);
    // A fork whose child is gone: its checkpoint is nobody's.
    let [Ok(child)] = &node.fork(&team(), &id, 1, LONG).await.unwrap()[..] else { panic!("no child") };
    node.kill(&team(), &child.id).await.unwrap();
    // The sealed disk and the memory stay; the vm state goes.
    until(|| scene.local_layers() == 2).await;
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((1, 1)));
}

#[tokio::test]
async fn stacks_stay_shallow() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    for value in 1..=40 {
        scene.world.write(&id, value);
        node.pause(&team(), &id, PauseMode::Full).await.unwrap();
        resume(&node, &id).await.unwrap();
        assert_eq!(scene.world.values(&id), Some((value, value)));
        until(|| scene.memory_layers(&node, &id) <= SHALLOW).await;
    }
    for value in 41..=80 {
        scene.world.write(&id, value);
        node.capture(&team(), &id, PauseMode::Full).await.unwrap();
        until(|| scene.memory_layers(&node, &id) <= SHALLOW).await;
    }
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((80, 80)));
}

#[tokio::test]
async fn a_capture_waits_for_no_merge_unless_a_stack_gets_too_deep() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let turn = node.node.merges.acquire().await.unwrap();
    let mut deepest = 0;
    for value in 1..=60 {
        scene.world.write(&id, value);
        let checkpoint = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
        deepest = deepest.max(checkpoint.memory.unwrap().layers.len());
    }
    assert!(deepest > SHALLOW && deepest <= 48, "{deepest}");
    drop(turn);
    // What is merged is not what the stack has become meanwhile, so that a second merge may follow.
    until(|| scene.memory_layers(&node, &id) <= SHALLOW).await;
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((60, 60)));
}

#[tokio::test]
async fn a_checkpoint_that_was_released_goes_and_captures_go_on_from_its_layers() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 5);
    let taken = node.capture(&team(), &id, PauseMode::Full).await.unwrap();
    let manifest = scene.home().checkpoint(&taken.id);
    assert!(manifest.exists());
    node.release(&taken.id);
    until(|| !manifest.exists()).await;
    // The next capture has only what changed since.
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((5, 5)));
}

#[tokio::test]
async fn a_fork_launches_children_with_identities_of_their_own() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let source = node.create(scene.request(LONG)).await.unwrap();
    scene.world.write(&source.id, 9);
    // Eight places, one is taken: seven children fit, the rest is told so.
    let children = node.fork(&team(), &source.id, 9, LONG).await.unwrap();
    let full = children.iter().filter(|child| matches!(child, Err(SandboxError::Full { .. }))).count();
    assert_eq!(full, 2);
    let born: Vec<_> = children.into_iter().flatten().collect();
    assert_eq!(born.len(), 7);
    let mut tokens: Vec<_> =
        born.iter().map(|child| child.envd_token.as_ref().unwrap().expose().to_owned()).collect();
    tokens.push(source.envd_token.unwrap().expose().to_owned());
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), 8);
    for child in &born {
        assert_eq!(scene.world.values(&child.id), Some((9, 9)));
        assert_eq!(child.metadata["a"], "b");
    }
    scene.world.write(&source.id, 10);
    scene.world.write(&born[0].id, 11);
    assert_eq!(scene.world.values(&born[1].id), Some((9, 9)));
    let mut ids: Vec<_> = born.iter().map(|child| child.id.clone()).collect();
    for id in &ids {
        node.kill(&team(), id).await.unwrap();
    }
    ids.clear();
    // The source still runs on the sealed disk layer, and its next capture builds on this memory; the vm state is gone.
    until(|| scene.local_layers() == 2).await;
    assert_eq!(scene.world.values(&source.id), Some((10, 10)));
}

#[tokio::test]
async fn deadlines_pause_or_remove() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let pausing = node.create(scene.request(LONG)).await.unwrap().id;
    let mut request = scene.request(LONG);
    request.lifecycle.on_timeout = OnTimeout::Kill;
    let dying = node.create(request).await.unwrap().id;
    for id in [&pausing, &dying] {
        node.set_timeout(&team(), id, Timeout::Set(Duration::from_millis(50))).await.unwrap();
    }
    let state = |id: &SandboxId| node.get(&team(), id).ok().map(|view| view.state);
    until(|| state(&pausing) == Some(SandboxState::Paused) && state(&dying).is_none()).await;
    let mut expiries = node.expiries().unwrap();
    for _ in 0..2 {
        let Expiry { sandbox, done, .. } = expiries.recv().await.unwrap();
        assert_eq!(done, if sandbox == dying { OnTimeout::Kill } else { OnTimeout::Pause });
    }
    assert!(expiries.try_recv().is_err() && node.expiries().is_none());
    // Traffic wakes it once, whoever many call.
    let calls = (0..20).map(|_| node.route(&pausing, Wake::IfAutoResume));
    for route in futures::future::join_all(calls).await {
        assert_eq!(route.unwrap().id, pausing);
    }
    let view = node.get(&team(), &pausing).unwrap();
    assert!(view.end_at > chrono::Utc::now() + Duration::from_secs(3500));
    // The other one left the list before its VMM had ended.
    until(|| scene.world.state.lock().vms.len() == 1).await;
}

#[tokio::test]
async fn a_guest_that_powers_off_leaves_a_reason() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let route = node.route(&id, Wake::Never).await.unwrap();
    scene.world.power_off(&id);
    tokio::time::timeout(LONG, route.ended.cancelled()).await.unwrap();
    until(|| matches!(node.get(&team(), &id), Err(SandboxError::Failed { .. }))).await;
    assert!(node.list(None).is_empty());
    scene.assert_clean(&[]);
    node.kill(&team(), &id).await.unwrap();
    assert!(matches!(node.get(&team(), &id), Err(SandboxError::NotFound(_))));
}

#[tokio::test]
async fn a_caller_that_goes_away_cancels_nothing_and_a_kill_comes_through() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let owner = team();
    let pausing = node.pause(&owner, &id, PauseMode::Full);
    assert!(futures::FutureExt::now_or_never(pausing).is_none());
    until(|| node.get(&team(), &id).unwrap().state == SandboxState::Paused).await;
    // A resume whose guest never answers is ended by a kill.
    scene.world.state.lock().mute = true;
    let (resumed, killed) = tokio::join!(resume(&node, &id), async {
        until(|| !scene.world.alive().is_empty()).await;
        node.kill(&owner, &id).await
    });
    killed.unwrap();
    assert!(matches!(resumed, Err(SandboxError::Deleted(_))), "{resumed:?}");
    scene.assert_clean(&[]);
}

#[tokio::test]
async fn a_second_server_on_the_same_home_is_refused() {
    let scene = Scene::new();
    let node = scene.start().await.unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    let second = scene.start().await;
    assert!(matches!(second, Err(StartError::Locked { pid, .. }) if pid == own));
    node.shutdown().await;
    assert!(matches!(node.create(scene.request(LONG)).await, Err(SandboxError::ShuttingDown)));
    drop(node);
    scene.start().await.unwrap();
}

#[test]
fn the_sandbox_of_a_build_ends_with_its_server() {
    let scene = Scene::new();
    let life = runtime();
    let shown = life.block_on(async {
        let node = scene.start().await.unwrap();
        node.create(CreateRequest { hidden: true, ..scene.request(LONG) }).await.unwrap();
        node.create(scene.request(LONG)).await.unwrap().id
    });
    // As in a process that was killed.
    drop(life);
    runtime().block_on(async {
        let node = scene.start().await.unwrap();
        scene.assert_clean(&[shown]);
        node.shutdown().await;
    });
}
