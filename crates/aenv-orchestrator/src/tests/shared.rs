//! Two nodes with one repository: a paused sandbox is resumed on either, and runs on one.

use std::{path::PathBuf, sync::Arc, time::Duration};

use aenv_types::SandboxId;
use aenv_volume::VolumeMount;

use super::{
    crash::runtime,
    lives::{LONG, Scene, team, until},
    standing::expire,
};
use crate::{
    CRASH_POINTS, CreateRequest, Orchestrator, PauseMode, Publication, SandboxError, SandboxState,
    SandboxView, Timeout, crash::HangPoint,
};

/// Two nodes, and the folder that they share.
fn pair() -> (Scene, Scene, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let node = || Scene { repository: Some(folder.path().join("repository")), ..Scene::new() };
    (node(), node(), folder)
}

async fn resume(node: &Orchestrator, id: &SandboxId) -> Result<SandboxView, SandboxError> {
    node.resume(&team(), id, Timeout::Set(LONG), PauseMode::Full).await.map(|(view, _)| view)
}

fn publication(node: &Orchestrator, id: &SandboxId) -> Option<Publication> {
    node.get(&team(), id).ok().and_then(|view| view.publication)
}

async fn pause(node: &Orchestrator, id: &SandboxId) {
    node.pause(&team(), id, PauseMode::Full).await.unwrap();
    until(|| publication(node, id) == Some(Publication::Published)).await;
}

fn name(scene: &Scene) -> &str {
    scene.folder.path().file_name().unwrap().to_str().unwrap()
}

/// The answer that a sandbox is on the node of that scene.
fn is_on<T>(answer: &Result<T, SandboxError>, scene: &Scene) -> bool {
    matches!(answer, Err(SandboxError::Elsewhere { node, .. }) if node == name(scene))
}

fn is_gone<T>(answer: &Result<T, SandboxError>) -> bool {
    matches!(answer, Err(SandboxError::NotFound(_) | SandboxError::Deleted(_)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_sandbox_is_resumed_on_another_node_and_comes_back() {
    let (a, b, _folder) = pair();
    let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
    let made = on_a.create(a.request(LONG)).await.unwrap();
    let id = &made.id;
    a.world.write(id, 4);
    assert!(is_gone(&resume(&on_b, id).await));
    pause(&on_a, id).await;
    assert!(on_b.list(None).is_empty(), "a list is of what a node has");
    let found = on_b.find(&team(), id).await.unwrap();
    assert_eq!((found.state, found.publication), (SandboxState::Paused, Some(Publication::Published)));
    let other = "other".parse().unwrap();
    assert!(is_gone(&on_b.resume(&other, id, Timeout::Set(LONG), PauseMode::Full).await));
    assert!(is_gone(&on_b.kill(&other, id).await));

    let moved = resume(&on_b, id).await.unwrap();
    assert_eq!(b.world.values(id), Some((4, 4)));
    assert_eq!((moved.envd_token, moved.metadata), (made.envd_token, made.metadata));
    assert_eq!(moved.started_at, made.started_at);
    // The node that paused it finds out when it is asked, and keeps nothing.
    assert!(is_on(&resume(&on_a, id).await, &b));
    assert!(is_gone(&on_a.get(&team(), id)));
    a.assert_clean(&[]);
    until(|| a.local_layers() == 0).await;

    b.world.write(id, 5);
    pause(&on_b, id).await;
    resume(&on_a, id).await.unwrap();
    assert_eq!(a.world.values(id), Some((5, 5)));
    assert!(is_on(&on_b.kill(&team(), id).await, &a));
    assert_eq!(a.world.values(id), Some((5, 5)));
    a.world.write(id, 6);
    pause(&on_a, id).await;
    on_b.kill(&team(), id).await.unwrap();
    for node in [&on_a, &on_b] {
        assert!(is_gone(&resume(node, id).await));
        assert!(is_gone(&node.get(&team(), id)));
        assert!(is_gone(&node.kill(&team(), id).await));
    }
    for scene in [&a, &b] {
        scene.assert_clean(&[]);
        until(|| scene.local_layers() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_stands_goes_on_in_place_unless_another_node_has_it() {
    let (mut a, b, _folder) = pair();
    a.stand = LONG;
    let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
    let id = &on_a.create(a.request(LONG)).await.unwrap().id;
    for value in 1..4 {
        a.world.write(id, value);
        expire(&on_a, id).await;
        until(|| publication(&on_a, id) == Some(Publication::Published)).await;
        assert_eq!(a.world.standing(), std::slice::from_ref(id));
        if value < 3 {
            resume(&on_a, id).await.unwrap();
            assert!(is_on(&resume(&on_b, id).await, &a));
            assert_eq!(a.world.values(id), Some((value, value)));
        }
    }
    // Of three pauses of one launch it is the last that others see.
    resume(&on_b, id).await.unwrap();
    assert_eq!(b.world.values(id), Some((3, 3)));
    assert!(is_on(&resume(&on_a, id).await, &b));
    assert!(a.world.standing().is_empty());
    a.assert_clean(&[]);
    b.assert_clean(std::slice::from_ref(id));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_nodes_that_resume_it_one_does() {
    let (a, b, _folder) = pair();
    let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
    let id = &on_a.create(a.request(LONG)).await.unwrap().id;
    a.world.write(id, 1);
    let mut last = &on_a;
    for value in 2..8 {
        pause(last, id).await;
        let (of_a, of_b) = tokio::join!(resume(&on_a, id), resume(&on_b, id));
        let (winner, scene) = match (&of_a, &of_b) {
            (Ok(_), lost) if is_on(lost, &a) => (&on_a, &a),
            (lost, Ok(_)) if is_on(lost, &b) => (&on_b, &b),
            _ => panic!("{of_a:?} and {of_b:?}"),
        };
        assert_eq!(a.world.alive().len() + b.world.alive().len(), 1);
        assert_eq!(scene.world.values(id), Some((value - 1, value - 1)));
        scene.world.write(id, value);
        last = winner;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_that_is_away_holds_up_only_what_needs_it() {
    let (a, b, folder) = pair();
    let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
    let (root, aside): (PathBuf, PathBuf) = (folder.path().join("repository"), folder.path().join("aside"));
    let away = || {
        std::fs::rename(&root, &aside).unwrap();
        std::fs::write(&root, "").unwrap();
    };
    let back = || {
        std::fs::remove_file(&root).unwrap();
        std::fs::rename(&aside, &root).unwrap();
    };
    let id = &on_a.create(a.request(LONG)).await.unwrap().id;
    away();
    for value in 1..3 {
        a.world.write(id, value);
        on_a.pause(&team(), id, PauseMode::Full).await.unwrap();
        assert_eq!(publication(&on_a, id), Some(Publication::Pending));
        resume(&on_a, id).await.unwrap();
        assert_eq!(a.world.values(id), Some((value, value)));
    }
    on_a.pause(&team(), id, PauseMode::Full).await.unwrap();
    assert!(matches!(resume(&on_b, id).await, Err(SandboxError::RepositoryAway { .. })));
    back();
    until(|| publication(&on_a, id) == Some(Publication::Published)).await;

    away();
    // Whether another node has it is not known, so that it is neither resumed nor said to be removed.
    let refused =
        |answer: Result<(), SandboxError>| matches!(answer, Err(SandboxError::RepositoryAway { .. }));
    assert!(refused(resume(&on_a, id).await.map(drop)));
    assert!(refused(on_a.kill(&team(), id).await));
    assert!(refused(on_a.capture(&team(), id, PauseMode::Full).await.map(drop)));
    assert_eq!(publication(&on_a, id), Some(Publication::Published));
    back();
    resume(&on_a, id).await.unwrap();
    assert_eq!(a.world.values(id), Some((2, 2)));
    // What runs is this node's: it can be removed, and others are told later.
    away();
    on_a.kill(&team(), id).await.unwrap();
    back();
    assert!(is_on(&resume(&on_b, id).await, &a));
    on_a.shutdown().await;
    drop(on_a);
    let on_a = a.start().await.unwrap();
    tokio::time::timeout(Duration::from_secs(20), async {
        while !is_gone(&resume(&on_b, id).await) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the end is told by the next server");
    assert!(on_a.list(None).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_a_volume_stays_and_others_say_where() {
    let (a, b, _folder) = pair();
    let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
    let volume = on_a.node.volumes.create(&team(), "data".parse().unwrap()).unwrap();
    let mount = VolumeMount {
        volume: volume.id().clone(),
        name: "data".parse().unwrap(),
        path: "/data".parse().unwrap(),
    };
    let request = CreateRequest { volumes: vec![mount], ..a.request(LONG) };
    let id = &on_a.create(request).await.unwrap().id;
    on_a.pause(&team(), id, PauseMode::Full).await.unwrap();
    tokio::time::timeout(Duration::from_secs(20), async {
        while !is_on(&resume(&on_b, id).await, &a) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it is told where it is");
    assert_eq!(publication(&on_a, id), Some(Publication::Stays));
    assert!(is_on(&on_b.find(&team(), id).await, &a));
    resume(&on_a, id).await.unwrap();
    on_a.kill(&team(), id).await.unwrap();
    assert!(is_gone(&resume(&on_b, id).await));
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Publish,
    ResumeOwn,
    KillOwn,
    SnapshotOwn,
    TakeOver,
    KillOther,
}

/// A deed on a node that dies at a point; tells whether it did.
fn die(scenes: [&Scene; 2], deed: Deed, name: &'static str) -> Option<SandboxId> {
    let (life_a, life_b) = (runtime(), runtime());
    let [a, b] = scenes;
    let point = Arc::new(HangPoint::default());
    let on_b_dies = matches!(deed, Deed::TakeOver | Deed::KillOther);
    let never = Arc::default();
    let (of_a, of_b) = if on_b_dies { (&never, &point) } else { (&point, &never) };
    let on_a = life_a.block_on(a.start_to_crash(of_a)).unwrap();
    let id = life_a.block_on(async {
        let id = on_a.create(a.request(LONG)).await.unwrap().id;
        a.world.write(&id, 1);
        pause(&on_a, &id).await;
        resume(&on_a, &id).await.unwrap();
        a.world.write(&id, 2);
        if deed != Deed::Publish {
            pause(&on_a, &id).await;
        }
        id
    });
    let on_b = life_b.block_on(b.start_to_crash(of_b)).unwrap();
    *point.armed.lock() = Some(name);
    let act = async {
        match deed {
            Deed::Publish => pause(&on_a, &id).await,
            Deed::ResumeOwn => drop(resume(&on_a, &id).await.unwrap()),
            Deed::KillOwn => on_a.kill(&team(), &id).await.unwrap(),
            Deed::SnapshotOwn => {
                on_a.capture(&team(), &id, PauseMode::Full).await.unwrap();
                until(|| publication(&on_a, &id) == Some(Publication::Published)).await;
            }
            Deed::TakeOver => drop(resume(&on_b, &id).await.unwrap()),
            Deed::KillOther => on_b.kill(&team(), &id).await.unwrap(),
        }
    };
    let life = if on_b_dies { &life_b } else { &life_a };
    let died = life.block_on(async {
        tokio::select! {
            () = point.reached.notified() => true,
            () = act => false,
        }
    });
    drop((on_a, on_b));
    // Every task ends where it is, as in a process that was killed; the other node is restarted as well.
    drop((life_a, life_b));
    died.then_some(id)
}

#[test]
fn a_node_that_dies_loses_no_sandbox_and_runs_none_twice() {
    use Deed::{KillOther, KillOwn, Publish, ResumeOwn, SnapshotOwn, TakeOver};
    let mut passed = std::collections::BTreeSet::new();
    let more = ["resume.noted", "launch.vm", "resume.launched", "kill.noted", "kill.ended", "kill.journaled"];
    let points: Vec<_> = CRASH_POINTS
        .into_iter()
        .filter(|point| point.starts_with("share.") || more.contains(point))
        .collect();
    for deed in [Publish, ResumeOwn, KillOwn, SnapshotOwn, TakeOver, KillOther] {
        for point in &points {
            let (a, b, _folder) = pair();
            let Some(id) = die([&a, &b], deed, point) else { continue };
            passed.insert(*point);
            let at = format!("{deed:?} at {point}");
            let life = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            life.block_on(async {
                let (on_a, on_b) = (a.start().await.unwrap(), b.start().await.unwrap());
                let (of_a, of_b) = tokio::join!(resume(&on_a, &id), resume(&on_b, &id));
                let running: Vec<_> =
                    [(&a, &of_a), (&b, &of_b)].into_iter().filter(|(_, of)| of.is_ok()).collect();
                for (scene, _) in &running {
                    assert_eq!(scene.world.values(&id), Some((2, 2)), "{at}");
                }
                let killed = matches!(deed, KillOwn | KillOther);
                match running.len() {
                    1 => {}
                    0 => assert!(killed, "{at}: {of_a:?}, {of_b:?}"),
                    _ => panic!("{at}: it runs twice"),
                }
                for (scene, answer) in [(&a, of_a), (&b, of_b)] {
                    let ids: Vec<_> = answer.into_iter().map(|view| view.id).collect();
                    scene.assert_clean(&ids);
                }
            });
        }
    }
    let missed: Vec<_> = points.iter().filter(|point| !passed.contains(*point)).collect();
    assert!(missed.is_empty(), "no deed passes {missed:?}");
}
