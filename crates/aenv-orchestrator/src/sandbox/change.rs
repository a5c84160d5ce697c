//! Small changes of a running sandbox: its deadline, its network.

use std::sync::Arc;

use aenv_envd_api::InitRequest;

use super::{Record, actor::Actor, cell::NetworkChange};
use crate::{
    SandboxError, Timeout, deadline,
    journal::Survives,
    launch::{greet, policy_error},
};

impl Actor {
    pub(super) async fn set_timeout(&mut self, timeout: Timeout) -> Result<(), SandboxError> {
        self.running()?;
        self.apply_timeout(timeout).await
    }

    /// Moves the deadline. An extension that does not reach beyond it leaves it exactly as it is.
    pub(super) async fn apply_timeout(&mut self, timeout: Timeout) -> Result<(), SandboxError> {
        let end_at = match timeout {
            Timeout::Set(time) => deadline::after(time),
            Timeout::Extend(time) => self.record.end_at.max(deadline::after(time)),
        };
        if end_at == self.record.end_at {
            return Ok(());
        }
        let record = Record { end_at, ..self.record.clone() };
        self.node.journal.put(&record, Survives::PowerLoss).await?;
        self.record = record;
        self.deadline.clear();
        self.publish();
        Ok(())
    }

    pub(super) async fn set_network(&mut self, change: NetworkChange) -> Result<(), SandboxError> {
        self.running()?;
        let Some(generation) = &self.generation else { return Err(self.unfit(&self.stage)) };
        let NetworkChange { egress, network, allow_internet_access } = change;
        let record = Record { egress, network, allow_internet_access, ..self.record.clone() };
        generation.slot.set_policy(&record.egress).await.map_err(policy_error)?;
        if let Err(error) = self.node.journal.put(&record, Survives::PowerLoss).await {
            if let Err(undo) = generation.slot.set_policy(&self.record.egress).await {
                tracing::error!(sandbox = %self.record.id, error = %undo, "network rules could not be set back");
            }
            return Err(error.into());
        }
        let told = (self.record.egress.dns_servers != record.egress.dns_servers)
            || (self.record.egress.rules.is_empty() != record.egress.rules.is_empty());
        let dial = Arc::clone(&generation.slot) as _;
        self.record = record;
        self.publish();
        if told && let Err(error) = greet(&self.node, &self.record, dial, names_only).await {
            tracing::warn!(sandbox = %self.record.id, ?error, "a guest was not told of its new resolvers or CA");
        }
        Ok(())
    }
}

/// Resolvers, CA and environment; nothing that makes a guest another one.
fn names_only(whole: InitRequest) -> InitRequest {
    InitRequest { lifecycle_id: None, hostname: None, machine_id: None, entropy: None, ..whole }
}
