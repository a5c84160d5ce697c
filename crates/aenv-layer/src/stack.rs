mod read;
mod seal;

use std::{path::Path, sync::Arc};

use aenv_store::{BlockDevice, DeviceError};
use parking_lot::{Mutex, RwLock};
use thiserror::Error;
use uuid::Uuid;

pub use seal::{SealError, SealedLayer};

use crate::{format::MAX_STACK_LAYERS, generation::Generation, index::Index, layer::Layer, upper::Upper};

/// Why layers and an upper do not make a stack.
#[derive(Debug, Error)]
pub enum StackError {
    /// Too many layers.
    #[error("{0} layers are more than the {MAX_STACK_LAYERS} that a stack may have; compact them")]
    TooDeep(usize),
    /// A size that no disk can have.
    #[error("a disk of {0} bytes is not possible: use a multiple of 512, below 512 PiB")]
    Size(u64),
    /// The upper goes on from a layer that is not the top one, so that the disk would miss writes.
    #[error(
        "the upper was begun on layer {expected}, but the top layer is {found:?}; add the layer that was sealed from it"
    )]
    UpperOfOther {
        /// The layer that the upper was begun on.
        expected: Uuid,
        /// The top layer given.
        found: Option<Uuid>,
    },
}

/// Layers, base first, and an upper over them, as one disk. Without an upper it is read-only.
///
/// Reads and writes run in any number of threads; no lock is held across their I/O. Sealing swaps a fresh upper in at once;
/// the sealed one goes on to be read until it has become a layer.
pub struct Stack {
    size: u64,
    may_wait: bool,
    state: Holder,
    /// Held while a seal runs.
    sealing: Mutex<()>,
}

/// Where a stack's state is. One without an upper never changes: its readers share nothing that any of them writes to.
enum Holder {
    Fixed(Arc<State>),
    Changing(RwLock<Arc<State>>),
}

/// What a stack is made of at one moment. Replaced as a whole, never changed.
struct State {
    layers: Vec<Arc<Layer>>,
    /// The layers' indexes in one.
    merged: Arc<Merged>,
    /// Uppers that are being sealed, oldest first.
    frozen: Vec<Arc<Generation>>,
    top: Option<Arc<Generation>>,
}

/// A range of a disk that is all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Whether there is data. Otherwise it reads as zeros, without any I/O.
    pub data: bool,
}

/// The index of a stack's layers.
enum Merged {
    /// A single layer's own index: nothing to merge.
    Single(Arc<Layer>),
    /// Of any other number of layers.
    Several(Index),
}

impl Merged {
    fn of(layers: &[Arc<Layer>]) -> Self {
        match layers {
            [layer] => Self::Single(layer.clone()),
            _ => Self::Several(Index::merge(&layers.iter().map(|layer| layer.index()).collect::<Vec<_>>())),
        }
    }

    fn index(&self) -> &Index {
        match self {
            Self::Single(layer) => layer.index(),
            Self::Several(index) => index,
        }
    }
}

impl Stack {
    /// Stacks layers (base first) and an upper to a disk of `size` bytes. What the layers have beyond `size` is hidden; where
    /// they have nothing, the disk reads as zeros.
    pub fn new(lower: Vec<Arc<Layer>>, upper: Option<Upper>, size: u64) -> Result<Self, StackError> {
        if lower.len() > MAX_STACK_LAYERS {
            return Err(StackError::TooDeep(lower.len()));
        }
        if !size.is_multiple_of(512) || size > 1 << 58 {
            return Err(StackError::Size(size));
        }
        let top = upper.map(|upper| upper.generation);
        if let Some(generation) = &top {
            let found = lower.last().map(|layer| layer.uuid());
            if !generation.parent().is_nil() && found != Some(generation.parent()) {
                return Err(StackError::UpperOfOther { expected: generation.parent(), found });
            }
            generation.set_virtual_size(size);
        }
        let merged = Arc::new(Merged::of(&lower));
        let writable = top.is_some();
        let may_wait = lower.iter().any(|layer| layer.source().may_wait());
        let state = Arc::new(State { layers: lower, merged, frozen: Vec::new(), top });
        let state = if writable { Holder::Changing(RwLock::new(state)) } else { Holder::Fixed(state) };
        Ok(Self { size, may_wait, state, sealing: Mutex::new(()) })
    }

    /// The layers, base first; grows by one with each seal.
    pub fn layers(&self) -> Vec<Arc<Layer>> {
        self.snapshot().layers.clone()
    }

    /// Whether it can be written.
    pub fn writable(&self) -> bool {
        self.snapshot().top.is_some()
    }

    /// Segments in the index of its layers, and in that of its upper.
    pub fn segments(&self) -> (usize, usize) {
        let state = self.snapshot();
        let upper = state.uppers().map(|generation| generation.segments()).sum();
        (state.merged.index().mappings().len(), upper)
    }

    /// What is at a byte of the disk: data or zeros, and how far that reaches at least. `None` beyond the end.
    pub fn extent(&self, offset: u64) -> Option<Extent> {
        (offset < self.size).then(|| self.with_state(|state| read::extent(state, offset, self.size)))
    }

    /// Makes everything written so far a layer at `target`, which must not exist and be on the same filesystem as the upper,
    /// and goes on with a fresh upper in the same folder. Takes O(index) and one fsync, never a copy of the data; reads and
    /// writes go on all the time. `None`: nothing was written since the last seal.
    ///
    /// When it fails, the disk goes on as it was, with everything written; a later seal takes it all.
    pub fn seal(&self, target: &Path) -> Result<Option<SealedLayer>, SealError> {
        seal::seal(self, target)
    }

    fn snapshot(&self) -> Arc<State> {
        match &self.state {
            Holder::Fixed(state) => Arc::clone(state),
            Holder::Changing(state) => Arc::clone(&state.read()),
        }
    }

    /// Runs `read` on the state of this moment, without a lock.
    fn with_state<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        match &self.state {
            Holder::Fixed(state) => read(state),
            Holder::Changing(_) => read(&self.snapshot()),
        }
    }

    /// Only a stack with an upper has another state later.
    fn replace(&self, state: State) {
        if let Holder::Changing(current) = &self.state {
            *current.write() = Arc::new(state);
        }
    }

    /// Writes to the upper that is on top when the write begins.
    fn write_with(
        &self,
        write: impl Fn(&crate::generation::WriteGuard<'_>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        loop {
            let state = self.snapshot();
            let top = state.top.as_ref().ok_or(DeviceError::ReadOnly)?;
            // A closed upper has been replaced already: the next snapshot has the new one.
            if let Some(guard) = top.begin_write() {
                return write(&guard);
            }
        }
    }
}

impl State {
    /// The uppers, newest first.
    fn uppers(&self) -> impl Iterator<Item = &Arc<Generation>> {
        self.top.iter().chain(self.frozen.iter().rev())
    }
}

impl BlockDevice for Stack {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DeviceError> {
        DeviceError::check_range(offset, buf.len() as u64, self.size)?;
        self.with_state(|state| read::read(state, buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), DeviceError> {
        DeviceError::check_range(offset, buf.len() as u64, self.size)?;
        self.write_with(|guard| guard.write(buf, offset))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let state = self.snapshot();
        state.frozen.iter().chain(&state.top).try_for_each(|generation| generation.flush())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        DeviceError::check_range(offset, len, self.size)?;
        self.write_with(|guard| guard.discard(offset, len))
    }

    fn may_wait(&self) -> bool {
        self.may_wait
    }
}
