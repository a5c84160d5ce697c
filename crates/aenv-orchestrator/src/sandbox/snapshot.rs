//! Snapshot and fork: capture, go on; and for a fork, launch children side by side.

use std::{sync::Arc, time::Duration};

use aenv_types::{Checkpoint, CheckpointId};
use futures::future::join_all;

use super::{Record, Reply, Stage, actor::Actor, spawn_new};
use crate::{
    CaptureMode, ChildResult, CreateRequest, SandboxError,
    admission::Permit,
    capture::{After, Shot, capture},
    checkpoints::Pin,
};

/// How long a checkpoint that a caller was given stays, should nothing be launched from it.
const KEPT_FOR_CALLER: Duration = Duration::from_secs(3600);

impl Actor {
    /// A checkpoint of the sandbox as it is now.
    pub(super) async fn snapshot(&mut self, mode: CaptureMode) -> Result<Checkpoint, SandboxError> {
        if self.stage == Stage::Paused {
            return self.checkpoint_of_paused(mode).await;
        }
        self.running()?;
        self.node.disk_room()?;
        let (checkpoint, _pin) = self.capture_and_go_on(mode, Stage::Snapshotting).await?;
        self.node.checkpoints.keep_for(&checkpoint.id, KEPT_FOR_CALLER);
        self.node.crash.pass("snapshot.captured").await;
        Ok(checkpoint)
    }

    async fn checkpoint_of_paused(&mut self, mode: CaptureMode) -> Result<Checkpoint, SandboxError> {
        self.claim().await?;
        let mut checkpoint = Checkpoint::clone(&*self.manifest().await?);
        // Each snapshot is a checkpoint of its own: what one caller releases or deletes is nobody else's.
        checkpoint.lineage.parent = Some(checkpoint.id);
        checkpoint.id = CheckpointId::random();
        if mode == CaptureMode::Filesystem {
            (checkpoint.engine, checkpoint.vm_state, checkpoint.memory) = (None, None, None);
        }
        let checkpoints = &self.node.checkpoints;
        checkpoints.keep_for(&checkpoint.id, KEPT_FOR_CALLER);
        checkpoints.put(&checkpoint).await.map_err(|error| {
            self.node.explain(SandboxError::internal("the snapshot could not be written", error))
        })?;
        Ok(checkpoint)
    }

    /// Captures once and launches a child for each place that could be had.
    pub(super) async fn fork(
        &mut self,
        places: Vec<Result<Permit, SandboxError>>,
        timeout: Duration,
        reply: Reply<Vec<ChildResult>>,
    ) {
        let captured = match self.running().and_then(|()| self.node.disk_room()) {
            Ok(()) => self.capture_and_go_on(CaptureMode::Full, Stage::Forking).await,
            Err(error) => Err(error),
        };
        let (checkpoint, pin) = match captured {
            Ok(captured) => captured,
            Err(error) => return drop(reply.send(Err(error))),
        };
        self.node.crash.pass("fork.captured").await;
        let request = child(&self.record, checkpoint, timeout);
        let node = Arc::clone(&self.node);
        self.node.tasks.spawn(async move {
            let children = places.into_iter().map(|place| {
                let (node, request) = (&node, &request);
                async move {
                    let pin = node.checkpoints.pin(&request.checkpoint.id);
                    let answer = spawn_new(node, request.clone(), place?, None, pin);
                    answer.await.unwrap_or(Err(SandboxError::ShuttingDown))
                }
            });
            let children = join_all(children).await;
            drop(pin);
            node.garbage.notify_one();
            let _ = reply.send(Ok(children));
        });
    }

    async fn capture_and_go_on(
        &mut self,
        mode: CaptureMode,
        stage: Stage,
    ) -> Result<(Checkpoint, Pin), SandboxError> {
        self.enter(stage);
        let id = CheckpointId::random();
        let pin = self.node.checkpoints.pin(&id);
        let node = Arc::clone(&self.node);
        let mut held = Vec::new();
        let outcome = match &self.generation {
            Some(generation) => {
                let shot = Shot { id, mode, after: After::GoOn };
                Box::pin(capture(&node, &mut self.record, generation, shot, &mut held)).await
            }
            None => Err(self.unfit(&self.stage)),
        };
        self.enter(Stage::Running);
        self.merge_if_deep();
        drop(held);
        outcome.map(|checkpoint| (checkpoint, pin)).map_err(|error| node.explain(error))
    }
}

/// A child is created like any sandbox: from the captured checkpoint, with the source's settings and an identity of its own.
fn child(source: &Record, checkpoint: Checkpoint, timeout: Duration) -> CreateRequest {
    CreateRequest {
        team: source.team.clone(),
        shape: Some(source.shape),
        checkpoint: Arc::new(checkpoint),
        template: source.template.clone(),
        alias: source.alias.clone(),
        timeout,
        lifecycle: source.lifecycle,
        metadata: source.metadata.clone(),
        env: source.env.clone(),
        secure: source.envd_token.is_some(),
        egress: source.egress.clone(),
        network: source.network.clone(),
        allow_internet_access: source.allow_internet_access,
        mcp: source.mcp.clone(),
        proxy: source.proxy.clone(),
        volumes: source.volumes.clone(),
        hidden: source.hidden,
        limits: source.limits,
    }
}
