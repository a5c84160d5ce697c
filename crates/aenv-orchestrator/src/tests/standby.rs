//! Standbys: who claims them, who gets none, and when they end.

use std::{sync::Arc, time::Duration};

use aenv_types::{Checkpoint, MachineShape, SandboxId};

use super::{
    crash::runtime,
    lives::{LONG, SHAPE, Scene, team, until},
    world::WarmUps,
};
use crate::{
    CreateRequest, Orchestrator, PauseMode, SandboxError, SandboxView, StandbySettings, TeamLimits,
    TeamResource,
};

/// A node with two standbys of a checkpoint (memory and disk hold 5), and the sandbox for which they were made.
struct Ready {
    scene: Scene,
    node: Orchestrator,
    checkpoint: Arc<Checkpoint>,
    first: SandboxId,
}

impl Ready {
    async fn new() -> Self {
        let keep = Duration::from_secs(3600);
        Self::with(StandbySettings { count: 2, templates: 1, keep }).await
    }

    async fn with(standby: StandbySettings) -> Self {
        Self::of(Scene { standby, ..Scene::new() }).await
    }

    async fn of(scene: Scene) -> Self {
        let node = scene.start().await.unwrap();
        let source = node.create(scene.request(LONG)).await.unwrap().id;
        assert_eq!(node.standbys(), 0, "a boot has no standby");
        scene.world.write(&source, 5);
        let checkpoint = Arc::new(node.capture(&team(), &source, PauseMode::Full).await.unwrap());
        node.kill(&team(), &source).await.unwrap();
        let request = CreateRequest { checkpoint: Arc::clone(&checkpoint), ..scene.request(LONG) };
        let first = node.create(request).await.unwrap().id;
        until(|| node.standbys() == scene.standby.count).await;
        Self { scene, node, checkpoint, first }
    }

    fn request(&self) -> CreateRequest {
        CreateRequest { checkpoint: Arc::clone(&self.checkpoint), ..self.scene.request(LONG) }
    }

    async fn create(&self) -> SandboxView {
        self.node.create(self.request()).await.unwrap()
    }

    /// The server ends; nothing is left but these sandboxes.
    async fn end(self, running: &[SandboxId]) {
        self.node.shutdown().await;
        self.scene.assert_clean(running);
        assert!(self.scene.world.standing().is_empty());
    }
}

#[tokio::test]
async fn a_create_takes_the_oldest_standby_with_its_id() {
    let ready = Ready::new().await;
    let standing = ready.scene.world.standing();
    assert_eq!(standing.len(), 2);
    assert_eq!(ready.node.list(None).len(), 1, "standbys are in no list");
    for id in &standing {
        assert!(matches!(ready.node.get(&team(), id), Err(SandboxError::NotFound(_))));
        assert!(ready.node.gate(id).is_none());
    }
    let claimed = ready.create().await;
    assert_eq!(claimed.id, standing[0]);
    assert!(claimed.timings.queue_ms.abs() < f64::EPSILON);
    assert_eq!(ready.scene.world.values(&claimed.id), Some((5, 5)));
    let token = claimed.envd_token.as_ref().unwrap().expose().to_owned();
    let inits = {
        let state = ready.scene.world.state.lock();
        let guest = state.vms.values().find(|guest| guest.spec.sandbox == claimed.id).unwrap();
        assert_eq!(guest.token.as_deref(), Some(token.as_str()));
        guest.inits.len()
    };
    assert_eq!(inits, 1);
    // Another one is made for it, and it lives like any sandbox.
    until(|| ready.node.standbys() == 2).await;
    ready.scene.world.write(&claimed.id, 6);
    ready.node.pause(&team(), &claimed.id, PauseMode::Full).await.unwrap();
    let (node, id) = (&ready.node, &claimed.id);
    node.resume(&team(), id, crate::Timeout::Set(LONG), PauseMode::Full).await.unwrap();
    assert_eq!(ready.scene.world.values(id), Some((6, 6)));
    let running = [ready.first.clone(), claimed.id];
    ready.end(&running).await;
}

#[tokio::test]
async fn a_guest_warms_up_where_it_reaches_nobody() {
    let ready = Ready::new().await;
    let story = ready.scene.world.state.lock().story.clone();
    for id in ready.scene.world.standing() {
        let own: Vec<_> = story.iter().filter(|line| line.contains(id.as_str())).collect();
        assert_eq!(own, [&format!("vCPUs of {id}, isolated"), &format!("stop of {id}")]);
    }
    assert_eq!(ready.scene.world.state.lock().isolated.len(), 2);
}

#[tokio::test]
async fn rules_are_set_before_the_vcpus_run_for_somebody() {
    for (resolvers, rules) in [(vec!["9.9.9.9".parse().unwrap()], "rules [9.9.9.9]"), (vec![], "rules []")] {
        let ready = Ready::new().await;
        ready.scene.world.state.lock().story.clear();
        let mut request = ready.request();
        request.egress.dns_servers = resolvers;
        let claimed = ready.node.create(request).await.unwrap();
        let story = ready.scene.world.state.lock().story.clone();
        assert_eq!(story[..2], [rules.to_owned(), format!("vCPUs of {}", claimed.id)]);
    }
}

#[tokio::test]
async fn a_guest_that_does_not_answer_is_ended_and_not_tried_again_until_the_next_create() {
    let ready = Ready::with(StandbySettings { count: 1, templates: 1, keep: LONG }).await;
    let attempts = || {
        let state = ready.scene.world.state.lock();
        state.story.iter().filter(|line| line.ends_with("isolated")).count()
    };
    ready.scene.world.state.lock().warm_ups = WarmUps::Silent;
    let mut running = vec![ready.first.clone(), ready.create().await.id];
    for attempt in 2..4 {
        until(|| attempts() == attempt && ready.scene.world.alive().len() == running.len()).await;
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!((attempts(), ready.node.standbys()), (attempt, 0));
        running.push(ready.create().await.id);
    }
    until(|| attempts() == 4 && ready.scene.world.alive().len() == running.len()).await;
    ready.end(&running).await;
}

#[tokio::test]
async fn one_that_warms_up_is_not_claimed_and_stands_while_somebody_waits() {
    let ready = Ready::with(StandbySettings { count: 1, templates: 1, keep: LONG }).await;
    let warming_up = || {
        let state = ready.scene.world.state.lock();
        let line = state.story.iter().find_map(|line| line.strip_suffix(", isolated"));
        line.map(|line| line["vCPUs of ".len()..].to_owned())
    };
    ready.scene.world.state.lock().story.clear();
    ready.scene.world.state.lock().warm_ups = WarmUps::Slow;
    let claimed = ready.create().await.id;
    until(|| warming_up().is_some()).await;
    let standby = warming_up().unwrap();
    ready.scene.world.state.lock().story.clear();
    let other = ready.create().await.id;
    assert_ne!(other.as_str(), standby);
    let story = ready.scene.world.state.lock().story.clone();
    assert_eq!(story[..2], [format!("stop of {standby}"), format!("vCPUs of {other}")]);
    ready.scene.world.state.lock().warm_ups = WarmUps::Answered;
    until(|| ready.node.standbys() == 1).await;
    let story = ready.scene.world.state.lock().story.clone();
    assert_eq!(story[2..], [format!("vCPUs of {standby}, isolated"), format!("stop of {standby}")]);
    let last = ready.create().await.id;
    assert_eq!(last.as_str(), standby);
    let running = [ready.first.clone(), claimed, other, last];
    ready.end(&running).await;
}

#[tokio::test]
async fn one_that_warms_up_gives_way() {
    let ready = Ready::with(StandbySettings { count: 1, templates: 1, keep: LONG }).await;
    ready.scene.world.state.lock().warm_ups = WarmUps::Slow;
    let mut running = vec![ready.first.clone(), ready.create().await.id];
    until(|| ready.scene.world.alive().len() == 3).await;
    for _ in 3..=8 {
        running.push(ready.node.create(ready.scene.request(LONG)).await.unwrap().id);
    }
    ready.end(&running).await;
}

#[tokio::test]
async fn a_claimed_guest_that_does_not_answer_is_launched_anew() {
    let ready = Ready::new().await;
    let standby = ready.scene.world.standing()[0].clone();
    ready.scene.world.state.lock().silent = 1;
    let view = ready.create().await;
    assert_eq!(view.id, standby);
    assert_eq!(ready.scene.world.values(&view.id), Some((5, 5)));
    assert_eq!(ready.node.list(None).len(), 2);
    let running = [ready.first.clone(), view.id];
    // Once only.
    until(|| ready.node.standbys() == 2).await;
    ready.scene.world.state.lock().silent = 2;
    let failed = ready.node.create(ready.request()).await;
    assert!(matches!(failed, Err(SandboxError::GuestUnresponsive { .. })), "{failed:?}");
    ready.end(&running).await;
}

#[tokio::test]
async fn they_give_their_network_slots() {
    let ready = Ready::new().await;
    ready.scene.world.state.lock().slot_limit = 4;
    let mut running = vec![ready.first.clone()];
    for number in 2..=4 {
        running.push(ready.node.create(ready.scene.request(LONG)).await.unwrap().id);
        assert!(ready.node.standbys() <= 4 - number);
    }
    let full = ready.node.create(ready.scene.request(LONG)).await;
    assert!(matches!(full, Err(SandboxError::Full { .. })), "{full:?}");
    ready.end(&running).await;
}

#[tokio::test]
async fn one_that_is_of_no_use_is_replaced_by_an_ordinary_launch() {
    let ready = Ready::new().await;
    let mut running = vec![ready.first.clone()];
    for harm in 0..3 {
        until(|| ready.node.standbys() == 2).await;
        let oldest = ready.scene.world.standing()[0].clone();
        let mut request = ready.request();
        {
            let mut state = ready.scene.world.state.lock();
            match harm {
                0 => state.stuck = 1,
                1 => state.blockd += 1,
                _ => {
                    // The first step of a claim.
                    request.egress.dns_servers = vec!["9.9.9.9".parse().unwrap()];
                    state.fail_in = Some(0);
                }
            }
        }
        let view = ready.node.create(request).await.unwrap();
        assert_ne!(view.id, oldest, "{harm}");
        assert!(!ready.scene.world.alive().contains(&oldest), "{harm}");
        assert_eq!(ready.scene.world.values(&view.id), Some((5, 5)), "{harm}");
        running.push(view.id);
        // The other one is of an earlier blockd as well.
        if harm == 1 {
            running.push(ready.create().await.id);
        }
    }
    ready.end(&running).await;
}

#[tokio::test]
async fn one_that_dies_is_removed_and_made_again_with_the_next_create() {
    let ready = Ready::new().await;
    let dead = ready.scene.world.standing()[0].clone();
    ready.scene.world.power_off(&dead);
    until(|| ready.node.standbys() == 1).await;
    until(|| ready.scene.world.state.lock().slots.len() == 2).await;
    let second = ready.create().await.id;
    until(|| ready.node.standbys() == 2).await;
    let running = [ready.first.clone(), second];
    ready.end(&running).await;
}

#[tokio::test]
async fn they_give_way_to_sandboxes() {
    let ready = Ready::new().await;
    // More than all of them hold: refused, and none is lost.
    let shape = Some(MachineShape { memory_mib: 1024, ..SHAPE });
    let large = CreateRequest { shape, ..ready.scene.request(LONG) };
    assert!(matches!(ready.node.create(large).await, Err(SandboxError::Full { .. })));
    assert_eq!(ready.node.standbys(), 2);
    // Another checkpoint: no claim. Memory for eight, one of them runs already.
    let mut running = vec![ready.first.clone()];
    for number in 2..=8 {
        running.push(ready.node.create(ready.scene.request(LONG)).await.unwrap().id);
        assert!(ready.node.standbys() <= 8 - number);
    }
    ready.scene.assert_clean(&running);
    let full = ready.node.create(ready.request()).await;
    assert!(matches!(full, Err(SandboxError::Full { .. })), "{full:?}");
    ready.node.pause(&team(), &running[3], PauseMode::Full).await.unwrap();
    running.remove(3);
    // What is free now is the reserve.
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(ready.node.standbys(), 0);
    ready.end(&running).await;
}

#[tokio::test]
async fn a_teams_limit_holds_and_leaves_the_standby_there() {
    let ready = Ready::new().await;
    let limits = TeamLimits { running: Some(1), memory_mib: None };
    let refused = ready.node.create(CreateRequest { limits, ..ready.request() }).await;
    assert!(
        matches!(refused, Err(SandboxError::TeamFull { what: TeamResource::Running, .. })),
        "{refused:?}"
    );
    assert_eq!(ready.node.standbys(), 2);
    let limits = TeamLimits { running: Some(2), memory_mib: None };
    let expected = ready.scene.world.standing()[0].clone();
    assert_eq!(ready.node.create(CreateRequest { limits, ..ready.request() }).await.unwrap().id, expected);
    let refused = ready.node.create(CreateRequest { limits, ..ready.request() }).await;
    assert!(matches!(refused, Err(SandboxError::TeamFull { .. })), "a claimed one counts for its team");
}

#[tokio::test]
async fn teams_that_share_no_memory_share_no_standby() {
    let standby = StandbySettings { count: 1, templates: 2, keep: LONG };
    let ready = Ready::of(Scene { standby, shared: false, ..Scene::new() }).await;
    let own = ready.scene.world.standing()[0].clone();
    let blue: aenv_types::TeamId = "blue".parse().unwrap();
    let other = CreateRequest { team: blue.clone(), ..ready.request() };
    let first = ready.node.create(other.clone()).await.unwrap().id;
    assert_ne!(first, own);
    until(|| ready.node.standbys() == 2).await;
    let second = ready.node.create(other).await.unwrap().id;
    assert!(second != own && ready.create().await.id == own);
    let state = ready.scene.world.state.lock();
    for (id, team) in [(&first, &blue), (&second, &blue), (&own, &team()), (&ready.first, &team())] {
        assert_eq!(state.groups[id.as_str()], Some(team.to_string()));
    }
}

#[tokio::test]
async fn builds_take_none_and_want_none() {
    let ready = Ready::new().await;
    let standing = ready.scene.world.standing();
    let hidden = ready.node.create(CreateRequest { hidden: true, ..ready.request() }).await.unwrap();
    assert!(!standing.contains(&hidden.id));
    assert_eq!(ready.scene.world.standing(), standing);
    ready.node.forget_standbys(&ready.checkpoint.id);
    until(|| ready.scene.world.standing().is_empty()).await;
    let hidden = ready.node.create(CreateRequest { hidden: true, ..ready.request() }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(ready.scene.world.standing().is_empty());
    ready.node.kill(&team(), &hidden.id).await.unwrap();
}

#[tokio::test]
async fn they_end_with_the_demand() {
    let keep = Duration::from_secs(2);
    let ready = Ready::with(StandbySettings { count: 1, templates: 1, keep }).await;
    until(|| ready.node.standbys() == 0 && ready.scene.world.standing().is_empty()).await;
    let running = [ready.first.clone()];
    ready.end(&running).await;
}

#[tokio::test]
async fn checkpoints_that_were_used_last_have_them() {
    let ready = Ready::with(StandbySettings { count: 1, templates: 1, keep: LONG }).await;
    let old = ready.scene.world.standing();
    let other = Arc::new(ready.node.capture(&team(), &ready.first, PauseMode::Full).await.unwrap());
    let request = CreateRequest { checkpoint: Arc::clone(&other), ..ready.request() };
    let second = ready.node.create(request.clone()).await.unwrap().id;
    until(|| ready.node.standbys() == 1 && !ready.scene.world.standing().contains(&old[0])).await;
    let expected = ready.scene.world.standing()[0].clone();
    assert_eq!(ready.node.create(request).await.unwrap().id, expected);
    let running = [ready.first.clone(), second, expected];
    ready.end(&running).await;
}

#[test]
fn the_next_server_removes_them() {
    let life = runtime();
    let (scene, first) = life.block_on(async {
        let Ready { scene, first, .. } = Ready::new().await;
        (scene, first)
    });
    assert_eq!(scene.world.standing().len(), 2);
    drop(life);
    runtime().block_on(async {
        let next = scene.start().await.unwrap();
        scene.assert_clean(std::slice::from_ref(&first));
        assert_eq!(next.list(None).len(), 1);
        assert_eq!(next.standbys(), 0);
    });
}
