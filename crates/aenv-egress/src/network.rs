//! Slots with gates: the network that the orchestrator is given.

use std::{collections::HashMap, sync::Arc};

use aenv_net::{NamespaceSlot, Network, NetworkError, Slot, SlotRecord, Slots};
use aenv_types::{Dial, DialFuture, EgressPolicy};
use async_trait::async_trait;
use tokio::{net::TcpListener, sync::Mutex};

use crate::{
    Authority, SecretSource, Trust,
    gate::{Gate, Shared},
};

/// The node's slots, each with a gate from the first policy on that needs one.
pub struct GatedSlots {
    slots: Slots,
    shared: Arc<Shared>,
    /// Those that are taken.
    live: parking_lot::Mutex<HashMap<u32, Arc<GatedSlot>>>,
}

impl GatedSlots {
    /// Puts gates before these slots. `authority` speaks for hosts with header rules; `trust` knows the hosts themselves; `secrets`
    /// has what the rules' values name.
    pub fn new(slots: Slots, authority: Authority, trust: Trust, secrets: Arc<dyn SecretSource>) -> Self {
        let (denied, resolvers) = (slots.denied(), slots.resolvers().to_vec());
        let shared = Shared { denied, resolvers, authority, trust, secrets };
        Self { slots, shared: Arc::new(shared), live: parking_lot::Mutex::default() }
    }

    fn gated(&self, slot: Arc<NamespaceSlot>) -> Arc<dyn Slot> {
        let index = slot.record().index;
        let gated = Arc::new(GatedSlot { slot, shared: Arc::clone(&self.shared), gate: Mutex::default() });
        self.live.lock().insert(index, Arc::clone(&gated));
        gated
    }
}

#[async_trait]
impl Network for GatedSlots {
    async fn acquire(&self) -> Result<Arc<dyn Slot>, NetworkError> {
        Ok(self.gated(self.slots.take().await?))
    }

    async fn adopt(&self, record: &SlotRecord) -> Result<Arc<dyn Slot>, NetworkError> {
        Ok(self.gated(self.slots.take_over(record).await?))
    }

    async fn release(&self, slot: Arc<dyn Slot>) {
        let gated = self.live.lock().remove(&slot.record().index);
        if let Some(gated) = gated {
            // Its sockets would keep the namespace.
            gated.gate.lock().await.take();
        }
        self.slots.release(slot).await;
    }

    fn ca_bundle(&self) -> Option<&str> {
        Some(self.shared.authority.certificate())
    }

    async fn sweep(&self) -> Result<u32, NetworkError> {
        self.slots.sweep().await
    }

    async fn close(&self) {
        let live = std::mem::take(&mut *self.live.lock());
        for gated in live.into_values() {
            gated.gate.lock().await.take();
        }
        self.slots.close().await;
    }
}

/// A slot and its gate.
struct GatedSlot {
    slot: Arc<NamespaceSlot>,
    shared: Arc<Shared>,
    /// Open from the first policy that needs it until the slot is given back: connections may outlive the policy that they were
    /// made under.
    gate: Mutex<Option<Gate>>,
}

impl Dial for GatedSlot {
    fn dial(&self, port: u16) -> DialFuture<'_> {
        self.slot.dial(port)
    }
}

#[async_trait]
impl Slot for GatedSlot {
    fn record(&self) -> SlotRecord {
        self.slot.record()
    }

    async fn set_policy(&self, policy: &EgressPolicy) -> Result<(), NetworkError> {
        let mut gate = self.gate.lock().await;
        let mut before = None;
        match &*gate {
            Some(gate) => before = Some(gate.set_policy(Arc::new(policy.clone()))),
            None if policy.needs_gate() => {
                let sockets = self.slot.gate_sockets().await;
                let sockets = sockets.map_err(|error| NetworkError::Gate { message: error.to_string() })?;
                *gate = Some(Gate::open(Arc::clone(&self.slot), Arc::clone(&self.shared), sockets, policy));
            }
            None => {}
        }
        // Last: a connection is handed over only to a gate that knows the policy.
        let set = self.slot.set_policy(policy).await;
        if let (Err(_), Some(gate), Some(before)) = (&set, &*gate, before) {
            gate.set_policy(before);
        }
        set
    }

    async fn isolate(&self) -> Result<(), NetworkError> {
        self.slot.isolate().await
    }

    async fn listen(&self, port: u16) -> Result<TcpListener, NetworkError> {
        self.slot.listen(port).await
    }

    async fn traffic(&self) -> Result<(u64, u64), NetworkError> {
        self.slot.traffic().await
    }
}
