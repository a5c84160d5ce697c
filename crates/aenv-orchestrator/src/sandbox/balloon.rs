//! The balloon of a running sandbox.

use super::actor::Actor;
use crate::{SandboxError, pressure::Balloon};

impl Actor {
    /// Asks the guest to give so much back, if anything is asked, and tells how it is.
    pub(super) async fn balloon(&self, held_mib: Option<u32>) -> Result<Balloon, SandboxError> {
        self.running()?;
        let Some(generation) = &self.generation else { return Err(self.unfit(&self.stage)) };
        let failed = |error| SandboxError::internal("the guest's balloon was not reached", error);
        let vm = &generation.vm;
        if let Some(held_mib) = held_mib {
            let target_mib = self.record.shape.memory_mib.saturating_sub(held_mib);
            vm.set_balloon(target_mib).await.map_err(failed)?;
            self.cell.gauge.lock().ask(held_mib);
        }
        let held_mib = vm.balloon().await.map_err(failed)?;
        let host = &self.node.seams.host;
        let anonymous_mib = match vm.balloon_gives_way().await.map_err(failed)? {
            true => host.anonymous_mib(vm.record().pid),
            false => None,
        };
        Ok(Balloon { held_mib, anonymous_mib })
    }
}
