//! Any sequence of verbs, with any operation failing and servers dying in between, against a model.

use std::collections::BTreeMap;

use aenv_types::SandboxId;
use proptest::prelude::*;

use super::{
    lives::{LONG, Scene, team},
    world::value,
};
use crate::{Orchestrator, PauseMode, SandboxState, Timeout, launch::files};

#[derive(Clone, Debug)]
enum Step {
    Create,
    Write(usize, u64),
    Pause(usize, bool),
    Resume(usize),
    Capture(usize),
    Fork(usize),
    Kill(usize),
    /// The operation fails that is this many from now.
    FailIn(u32),
    /// The server ends without a word, and another one starts.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..4_usize;
    prop_oneof![
        2 => Just(Step::Create),
        4 => (which.clone(), 1..1000_u64).prop_map(|(which, value)| Step::Write(which, value)),
        4 => (which.clone(), any::<bool>()).prop_map(|(which, full)| Step::Pause(which, full)),
        4 => which.clone().prop_map(Step::Resume),
        2 => which.clone().prop_map(Step::Capture),
        1 => which.clone().prop_map(Step::Fork),
        1 => which.prop_map(Step::Kill),
        3 => (0..12_u32).prop_map(Step::FailIn),
        1 => Just(Step::Restart),
    ]
}

/// What was acknowledged: state, memory, disk.
type Model = BTreeMap<SandboxId, (SandboxState, u64, u64)>;

fn pick(model: &Model, which: usize) -> Option<SandboxId> {
    model.keys().nth(which % model.len().max(1)).cloned()
}

async fn take(scene: &Scene, node: &Orchestrator, model: &mut Model, step: Step) {
    use SandboxState::{Paused, Running};
    let team = team();
    match step {
        Step::Create => {
            if let Ok(view) = node.create(scene.request(LONG)).await {
                model.insert(view.id, (Running, 0, 7));
            }
        }
        Step::Write(which, value) => {
            if let Some(id) = pick(model, which)
                && model[&id].0 == Running
            {
                scene.world.write(&id, value);
                model.insert(id, (Running, value, value));
            }
        }
        Step::Pause(which, full) => {
            let Some(id) = pick(model, which) else { return };
            let mode = if full { PauseMode::Full } else { PauseMode::Filesystem };
            let (state, memory, disk) = model[&id];
            let paused = node.pause(&team, &id, mode).await;
            assert!(paused.is_err() || state == Running, "a paused sandbox was paused");
            if paused.is_ok() {
                model.insert(id, (Paused, if full { memory } else { 0 }, disk));
            }
        }
        Step::Resume(which) => {
            let Some(id) = pick(model, which) else { return };
            let (state, memory, disk) = model[&id];
            if let Ok((_, was_paused)) = node.resume(&team, &id, Timeout::Set(LONG), PauseMode::Full).await {
                assert_eq!(was_paused, state == Paused);
                model.insert(id, (Running, memory, disk));
            }
        }
        Step::Capture(which) => {
            let Some(id) = pick(model, which) else { return };
            if let Ok(checkpoint) = node.capture(&team, &id, PauseMode::Full).await {
                let there = checkpoint.layers().all(|layer| scene.home().layer(&layer.name).exists());
                assert!(there, "a layer of a captured checkpoint is missing");
                // One of a sandbox that is paused without its memory has none.
                if let Some(memory) = &checkpoint.memory {
                    let remembered = value(&files(&scene.home(), &memory.layers)).unwrap();
                    assert_eq!(remembered, model[&id].1, "the memory of a captured checkpoint");
                }
            }
        }
        Step::Fork(which) => {
            let Some(id) = pick(model, which) else { return };
            let (_, memory, disk) = model[&id];
            for child in node.fork(&team, &id, 2, LONG).await.into_iter().flatten().flatten() {
                model.insert(child.id, (Running, memory, disk));
            }
        }
        Step::Kill(which) => {
            let Some(id) = pick(model, which) else { return };
            node.kill(&team, &id).await.unwrap();
            model.remove(&id);
        }
        Step::FailIn(count) => scene.world.state.lock().fail_in = Some(count),
        Step::Restart => unreachable!("the driver does that"),
    }
}

fn check(scene: &Scene, node: &Orchestrator, model: &Model) {
    let mut shown: Vec<_> = node.list(None).into_iter().map(|view| (view.id, view.state)).collect();
    shown.sort_by(|a, b| a.0.cmp(&b.0));
    let expected: Vec<_> = model.iter().map(|(id, (state, ..))| (id.clone(), *state)).collect();
    assert_eq!(shown, expected);
    let mut running = Vec::new();
    for (id, (state, memory, disk)) in model {
        if *state == SandboxState::Running {
            assert_eq!(scene.world.values(id), Some((*memory, *disk)), "{id}");
            running.push(id.clone());
        }
    }
    scene.assert_clean(&running);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn the_node_does_what_the_model_says(steps in prop::collection::vec(step(), 1..40)) {
        let scene = Scene::new();
        let mut model = Model::new();
        let mut steps = steps.into_iter();
        let mut more = true;
        while more {
            let life = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            more = life.block_on(async {
                scene.world.state.lock().fail_in = None;
                let node = scene.start().await.unwrap();
                check(&scene, &node, &model);
                for step in steps.by_ref() {
                    if matches!(step, Step::Restart) {
                        return true;
                    }
                    take(&scene, &node, &mut model, step).await;
                    check(&scene, &node, &model);
                }
                false
            });
        }
    }
}
