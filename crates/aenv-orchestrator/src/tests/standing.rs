//! Sandboxes that were paused at their deadline and whose VMM stands beside that: who goes on in place, and when it ends.

use std::time::Duration;

use aenv_types::SandboxId;

use super::{
    crash::runtime,
    lives::{LONG, Scene, team, until},
};
use crate::{
    CreateRequest, Orchestrator, PauseMode, SandboxError, SandboxState, SandboxView, TeamLimits, Timeout,
    Wake,
};

const SHORT: Duration = Duration::from_millis(50);

/// A node on which they stand for so long, and one that does. Its memory and disk hold 5.
async fn standing(stand: Duration) -> (Scene, Orchestrator, SandboxId) {
    let scene = Scene { stand, ..Scene::new() };
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    scene.world.write(&id, 5);
    expire(&node, &id).await;
    (scene, node, id)
}

pub(super) async fn expire(node: &Orchestrator, id: &SandboxId) {
    node.set_timeout(&team(), id, Timeout::Set(SHORT)).await.unwrap();
    until(|| node.get(&team(), id).is_ok_and(|view| view.state == SandboxState::Paused)).await;
    until(|| node.node.registry.any(id).unwrap().now().stage == crate::sandbox::Stage::Paused).await;
}

async fn resume(node: &Orchestrator, id: &SandboxId) -> Result<(SandboxView, bool), SandboxError> {
    node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await
}

/// Its VMM.
fn pid(scene: &Scene, id: &SandboxId) -> Option<i32> {
    let state = scene.world.state.lock();
    state.vms.iter().find(|(_, guest)| guest.spec.sandbox == *id).map(|(pid, _)| *pid)
}

#[tokio::test]
async fn a_resume_goes_on_in_place_and_loses_nothing() {
    let (scene, node, id) = standing(LONG).await;
    let before = pid(&scene, &id).unwrap();
    assert_eq!(scene.world.standing(), std::slice::from_ref(&id));
    let (view, was_paused) = resume(&node, &id).await.unwrap();
    assert!(was_paused && view.state == SandboxState::Running);
    assert_eq!(pid(&scene, &id), Some(before));
    assert_eq!(scene.world.values(&id), Some((5, 5)));
    {
        let state = scene.world.state.lock();
        let inits = &state.vms[&before].inits;
        assert!(inits.len() == 2 && inits[0] != inits[1], "{inits:?}");
    }
    // What it is captured in now counts from its launch, and again.
    for value in 6..9 {
        scene.world.write(&id, value);
        if value == 7 {
            node.capture(&team(), &id, PauseMode::Full).await.unwrap();
            continue;
        }
        expire(&node, &id).await;
        node.collect_soon();
        resume(&node, &id).await.unwrap();
        assert_eq!(pid(&scene, &id), Some(before));
    }
    node.pause(&team(), &id, PauseMode::Full).await.unwrap();
    assert_eq!(pid(&scene, &id), None, "who asks for a pause has an end");
    scene.assert_clean(&[]);
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((8, 8)));
    scene.assert_clean(&[id]);
}

#[tokio::test]
async fn traffic_goes_on_in_place_and_old_connections_are_broken() {
    let scene = Scene { stand: LONG, ..Scene::new() };
    let node = scene.start().await.unwrap();
    let id = node.create(scene.request(LONG)).await.unwrap().id;
    let route = node.route(&id, Wake::Never).await.unwrap();
    let before = pid(&scene, &id);
    expire(&node, &id).await;
    assert!(route.ended.is_cancelled());
    assert!(matches!(node.route(&id, Wake::Never).await, Err(SandboxError::Paused(_))));
    let route = node.route(&id, Wake::IfAutoResume).await.unwrap();
    assert!(!route.ended.is_cancelled());
    assert_eq!(pid(&scene, &id), before);
}

#[tokio::test]
async fn it_ends_by_the_clock_by_itself_and_by_a_kill() {
    let (scene, node, id) = standing(SHORT).await;
    until(|| pid(&scene, &id).is_none()).await;
    until(|| scene.world.state.lock().slots.is_empty()).await;
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((5, 5)));
    let (scene, node, id) = standing(LONG).await;
    scene.world.power_off(&id);
    until(|| scene.world.state.lock().slots.is_empty()).await;
    assert_eq!(node.get(&team(), &id).unwrap().state, SandboxState::Paused);
    resume(&node, &id).await.unwrap();
    expire(&node, &id).await;
    assert!(pid(&scene, &id).is_some());
    node.kill(&team(), &id).await.unwrap();
    scene.assert_clean(&[]);
}

#[tokio::test]
async fn what_cannot_go_on_in_place_is_launched() {
    for harm in 0..4 {
        let (scene, node, id) = standing(LONG).await;
        let before = pid(&scene, &id);
        {
            let mut state = scene.world.state.lock();
            match harm {
                0 => state.blockd += 1,
                1 => state.stuck = 1,
                2 => state.silent = 1,
                _ => {}
            }
        }
        let mode = if harm == 3 { PauseMode::Filesystem } else { PauseMode::Full };
        node.resume(&team(), &id, Timeout::Set(LONG), mode).await.unwrap();
        assert_ne!(pid(&scene, &id), before, "{harm}");
        let memory = if harm == 3 { 0 } else { 5 };
        assert_eq!(scene.world.values(&id), Some((memory, 5)), "{harm}");
        scene.assert_clean(&[id]);
    }
}

#[tokio::test]
async fn it_counts_for_no_team_and_gives_way() {
    let (scene, node, id) = standing(LONG).await;
    let limits = TeamLimits { running: Some(1), memory_mib: None };
    let other = node.create(CreateRequest { limits, ..scene.request(LONG) }).await.unwrap().id;
    node.kill(&team(), &other).await.unwrap();
    assert!(pid(&scene, &id).is_some());
    // Memory for eight.
    let mut running = Vec::new();
    for _ in 0..8 {
        running.push(node.create(scene.request(LONG)).await.unwrap().id);
    }
    assert_eq!(pid(&scene, &id), None);
    scene.assert_clean(&running);
    let full = resume(&node, &id).await;
    assert!(matches!(full, Err(SandboxError::Full { .. })), "{full:?}");
    node.kill(&team(), &running[0]).await.unwrap();
    resume(&node, &id).await.unwrap();
    assert_eq!(scene.world.values(&id), Some((5, 5)));
    // And when the host is short.
    expire(&node, &id).await;
    scene.world.state.lock().available_mib = 1;
    node.node.pressure.look();
    until(|| pid(&scene, &id).is_none()).await;
}

#[test]
fn the_next_server_finds_it_paused() {
    let life = runtime();
    let (scene, id) = life.block_on(async {
        let (scene, _node, id) = standing(LONG).await;
        (scene, id)
    });
    drop(life);
    assert!(pid(&scene, &id).is_some());
    runtime().block_on(async {
        let next = scene.start().await.unwrap();
        scene.assert_clean(&[]);
        assert_eq!(next.get(&team(), &id).unwrap().state, SandboxState::Paused);
        resume(&next, &id).await.unwrap();
        assert_eq!(scene.world.values(&id), Some((5, 5)));
    });
}
