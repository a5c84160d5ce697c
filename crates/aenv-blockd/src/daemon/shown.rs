//! How disks are shown: as ublk devices where the machine has them, as files of the mount otherwise.

use std::sync::Arc;

use thiserror::Error;
use tracing::{info, warn};

use super::{
    node::Node,
    state::{LoadStateError, State},
    ublk::{Device, Devices, UblkFailure},
};
use crate::exports::{ExportChoice, ExportError, ExportKind};

/// Why exports could not be shown again.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The list of exports could not be read.
    #[error(transparent)]
    State(#[from] LoadStateError),
    /// It could not be written.
    #[error("{message}")]
    Keep {
        /// Why.
        message: String,
    },
    /// ublk is demanded and cannot be used.
    #[error("blockd.export is \"ublk\", which cannot be used: {why}")]
    NoUblk {
        /// Why.
        why: String,
    },
}

/// What was chosen, and what it needs.
pub(crate) struct Shown {
    choice: ExportChoice,
    kind: ExportKind,
    why: String,
    mark: u64,
    devices: Option<Devices>,
}

impl Shown {
    /// Decides for the disks to come. Devices that are there stay what they are.
    pub(crate) fn choose(choice: ExportChoice, kept: &State, workers: usize) -> Result<Self, RestoreError> {
        let mark = if kept.ublk_mark == 0 { rand::random_range(1..=u64::MAX) } else { kept.ublk_mark };
        let fuse = |why: String, devices| Self { choice, kind: ExportKind::Fuse, why, mark, devices };
        let needed = kept.disks.iter().any(|disk| disk.ublk.is_some());
        let shown = match (choice, Devices::open(mark, workers)) {
            (ExportChoice::Fuse, devices) => {
                fuse("blockd.export is \"fuse\"".to_owned(), devices.ok().filter(|_| needed))
            }
            (_, Ok(devices)) => match devices.probe() {
                Ok(()) => {
                    let why = "ublk_drv is there".to_owned();
                    Self { choice, kind: ExportKind::Ublk, why, mark, devices: Some(devices) }
                }
                Err(error) => fuse(error.to_string(), Some(devices)),
            },
            (_, Err(error)) => fuse(error.to_string(), None),
        };
        if choice == ExportChoice::Ublk && shown.kind != ExportKind::Ublk {
            return Err(RestoreError::NoUblk { why: shown.why });
        }
        info!(kind = ?shown.kind, why = shown.why, "how disks are shown");
        Ok(shown)
    }

    /// How disks are shown that are opened now.
    pub(crate) fn kind(&self) -> ExportKind {
        self.kind
    }

    /// Why so.
    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    /// What our devices are marked with.
    pub(crate) fn mark(&self) -> u64 {
        self.mark
    }

    pub(crate) fn devices(&self) -> Option<&Devices> {
        self.devices.as_ref()
    }

    /// A device for a disk that is opened now; `None` where it becomes a file.
    pub(crate) fn new_device(&self, node: &Arc<Node>) -> Result<Option<Device>, ExportError> {
        let Some(devices) = self.devices().filter(|_| self.kind == ExportKind::Ublk) else { return Ok(None) };
        match devices.add(node) {
            Ok(device) => {
                node.becomes_block_device(device.number());
                Ok(Some(device))
            }
            Err(error) if self.choice == ExportChoice::Auto => {
                warn!(export = node.name, %error, "the disk becomes a file");
                Ok(None)
            }
            Err(UblkFailure::Limit { limit }) => Err(ExportError::DeviceLimit { limit }),
            Err(error) => Err(ExportError::Io { message: error.to_string() }),
        }
    }

    /// The device that a disk had under an earlier blockd.
    pub(crate) fn take_over(&self, id: u32, node: &Arc<Node>) -> Result<Device, UblkFailure> {
        let devices = self.devices().ok_or(UblkFailure::Gone { id })?;
        let device = devices.take_over(id, node)?;
        node.becomes_block_device(device.number());
        Ok(device)
    }
}
