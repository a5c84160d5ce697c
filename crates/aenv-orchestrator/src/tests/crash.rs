//! A server that dies at each crash point of each verb: nothing that was acknowledged is lost, nothing half-made stays.

use std::{sync::Arc, time::Duration};

use aenv_types::{Checkpoint, SandboxId};
use tokio::runtime::Runtime;

use super::lives::{LONG, SHALLOW, Scene, team, until};
use crate::{
    CRASH_POINTS, CreateRequest, Orchestrator, PauseMode, SandboxError, SandboxState, StandbySettings,
    Timeout, crash::HangPoint,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Create,
    /// A create that takes a standby, and the making of the next one.
    Claim,
    Pause,
    PauseDisk,
    Resume,
    Capture,
    /// A capture that makes a stack deep, and the merge after it.
    CaptureDeep,
    Fork,
    Rollback,
    Kill,
    KillPaused,
}

const VERBS: [Verb; 11] = [
    Verb::Create,
    Verb::Claim,
    Verb::Pause,
    Verb::PauseDisk,
    Verb::Resume,
    Verb::Capture,
    Verb::CaptureDeep,
    Verb::Fork,
    Verb::Rollback,
    Verb::Kill,
    Verb::KillPaused,
];

pub(super) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// What was acknowledged before the verb.
struct Before {
    id: SandboxId,
    earlier: Arc<Checkpoint>,
}

async fn prepare(scene: &Scene, node: &Orchestrator, verb: Verb) -> Before {
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 1);
    let earlier = Arc::new(node.capture(&team(), &id, PauseMode::Full).await.unwrap());
    scene.world.write(&id, 2);
    if matches!(verb, Verb::Resume | Verb::KillPaused) {
        node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    }
    if verb == Verb::CaptureDeep {
        while scene.memory_layers(node, &id) < SHALLOW {
            node.capture(&team(), &id, PauseMode::Full).await.unwrap();
        }
    }
    if verb == Verb::Claim {
        node.create(from(scene, &earlier)).await.unwrap();
        until(|| node.standbys() == 1).await;
    }
    Before { id, earlier }
}

fn from(scene: &Scene, checkpoint: &Arc<Checkpoint>) -> CreateRequest {
    CreateRequest { checkpoint: Arc::clone(checkpoint), ..scene.request(LONG) }
}

async fn act(scene: &Scene, node: &Orchestrator, verb: Verb, before: &Before) -> Result<(), SandboxError> {
    let (team, id) = (team(), &before.id);
    match verb {
        Verb::Create => node.create(scene.request(LONG)).await.map(drop),
        Verb::Claim => {
            node.create(from(scene, &before.earlier)).await?;
            until(|| node.standbys() == 1).await;
            Ok(())
        }
        Verb::Pause => node.pause(&team, id, PauseMode::Full).await,
        Verb::PauseDisk => node.pause(&team, id, PauseMode::Filesystem).await,
        Verb::Resume => node.resume(&team, id, Timeout::Set(LONG), PauseMode::Full).await.map(drop),
        Verb::Capture => node.capture(&team, id, PauseMode::Full).await.map(drop),
        Verb::CaptureDeep => {
            node.capture(&team, id, PauseMode::Full).await?;
            until(|| scene.memory_layers(node, id) < SHALLOW).await;
            Ok(())
        }
        Verb::Fork => node.fork(&team, id, 2, LONG).await.map(drop),
        Verb::Rollback => node.rollback(&team, id, Arc::clone(&before.earlier)).await.map(drop),
        Verb::Kill | Verb::KillPaused => node.kill(&team, id).await,
    }
}

/// Whether a verb may pass a point.
fn may_pass(verb: Verb, point: &str) -> bool {
    use Verb::{
        Capture, CaptureDeep, Claim, Create, Fork, Kill, KillPaused, Pause, PauseDisk, Resume, Rollback,
    };
    match point.split('.').next().unwrap_or_default() {
        "create" => matches!(verb, Create | Claim | Fork),
        "launch" => matches!(verb, Create | Claim | Fork | Resume | Rollback),
        "standby" => verb == Claim,
        "capture" => matches!(verb, Pause | PauseDisk | Capture | Fork),
        "pause" => matches!(verb, Pause | PauseDisk),
        "resume" => verb == Resume,
        "snapshot" => verb == Capture,
        "merge" => verb == CaptureDeep,
        "fork" => verb == Fork,
        "rollback" => verb == Rollback,
        "kill" => matches!(verb, Kill | KillPaused),
        "share" => false,
        _ => matches!(verb, Pause | KillPaused | Rollback),
    }
}

/// Runs the verb in a server that dies at `point`; `None` if the verb did not pass it.
fn die(scene: &Scene, verb: Verb, name: &'static str) -> Option<Before> {
    let life = runtime();
    let (before, died) = life.block_on(async {
        let point = Arc::new(HangPoint::default());
        let node = scene.start_to_crash(&point).await.unwrap();
        let before = prepare(scene, &node, verb).await;
        *point.armed.lock() = Some(name);
        // Work that goes on after the answer (the collector's) may reach the point a little later.
        let patience = if name.starts_with("collect.") { 2000 } else { 60 };
        let act = async {
            let acted = act(scene, &node, verb, &before).await;
            tokio::time::sleep(Duration::from_millis(patience)).await;
            acted
        };
        let died = tokio::select! {
            () = point.reached.notified() => true,
            acted = act => {
                acted.unwrap();
                false
            }
        };
        (before, died)
    });
    // Every task ends where it is: nothing is cleaned up, as in a process that was killed.
    drop(life);
    died.then_some(before)
}

fn check(scene: &Scene, verb: Verb, point: &str, before: &Before) {
    let life = runtime();
    life.block_on(async {
        let node = scene.start().await.unwrap();
        let at = format!("{verb:?} at {point}");
        let id = &before.id;
        let state = node.get(&team(), id).map(|view| view.state);
        let allowed: &[Option<SandboxState>] = match verb {
            Verb::Create | Verb::Claim | Verb::Capture | Verb::CaptureDeep | Verb::Fork => {
                &[Some(SandboxState::Running)]
            }
            Verb::Pause | Verb::PauseDisk | Verb::Resume | Verb::Rollback => {
                &[Some(SandboxState::Running), Some(SandboxState::Paused)]
            }
            Verb::Kill => &[Some(SandboxState::Running), None],
            Verb::KillPaused => &[Some(SandboxState::Paused), None],
        };
        assert!(allowed.contains(&state.as_ref().ok().copied()), "{at}: {state:?}");
        let running: Vec<_> =
            node.list(None).into_iter().filter(|view| view.state == SandboxState::Running).collect();
        let ids: Vec<_> = running.iter().map(|view| view.id.clone()).collect();
        scene.assert_clean(&ids);
        for view in &running {
            let route = node.route(&view.id, crate::Wake::Never).await;
            assert!(route.is_ok(), "{at}");
        }
        if state.is_err() {
            return node.shutdown().await;
        }
        if matches!(state, Ok(SandboxState::Paused)) {
            node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await.unwrap();
        }
        let (memory, disk) = scene.world.values(id).unwrap_or_else(|| panic!("{at}: it does not run"));
        let expected: &[(u64, u64)] = match verb {
            Verb::PauseDisk => &[(2, 2), (0, 2)],
            Verb::Rollback => &[(2, 2), (1, 1)],
            _ => &[(2, 2)],
        };
        assert!(expected.contains(&(memory, disk)), "{at}: memory {memory}, disk {disk}");
        // And it is whole: what it holds is captured, and it can be written to, paused and resumed.
        node.pause(&team(), id, PauseMode::Full).await.unwrap();
        node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await.unwrap();
        assert_eq!(scene.world.values(id), Some((memory, disk)), "{at}");
        scene.world.write(id, 3);
        node.pause(&team(), id, PauseMode::Full).await.unwrap();
        node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await.unwrap();
        assert_eq!(scene.world.values(id), Some((3, 3)), "{at}");
        for view in node.list(None) {
            node.kill(&team(), &view.id).await.unwrap();
        }
        scene.assert_clean(&[]);
        node.shutdown().await;
    });
    drop(life);
    // A last start finds nothing to do and leaves no layer behind.
    let life = runtime();
    life.block_on(async {
        let node = scene.start().await.unwrap();
        assert!(node.list(None).is_empty());
        assert_eq!(scene.local_layers(), 0, "{verb:?} at {point}");
        assert_eq!(std::fs::read_dir(scene.home().sandboxes()).unwrap().count(), 0);
    });
}

#[test]
fn nothing_acknowledged_is_lost_at_any_crash_point() {
    let mut passed = std::collections::BTreeSet::new();
    for verb in VERBS {
        for point in CRASH_POINTS.into_iter().filter(|point| may_pass(verb, point)) {
            let mut scene = Scene::new();
            if verb == Verb::Claim {
                scene.standby = StandbySettings { count: 1, templates: 1, keep: LONG };
            }
            if let Some(before) = die(&scene, verb, point) {
                passed.insert(point);
                check(&scene, verb, point, &before);
            }
        }
    }
    // Those between nodes have a test of their own.
    let own = CRASH_POINTS.iter().filter(|point| !point.starts_with("share."));
    let missed: Vec<_> = own.filter(|point| !passed.contains(*point)).collect();
    assert!(missed.is_empty(), "no verb passes {missed:?}");
}
