//! The words that every other crate speaks: ids, digests, machine shapes, checkpoints, policies.
//!
//! This room owns *types at the edge*: whatever arrives from outside as text (an id, a layer name, a CIDR)
//! becomes one of these types or an error. Beyond the [`Dial`] seam and the folders of a [`Home`] it does no I/O, and it knows no HTTP.

#![forbid(unsafe_code)]

pub mod cache;
pub mod checkpoint;
pub mod dial;
pub mod digest;
pub mod home;
pub mod id;
pub mod network;
pub mod shape;

pub use cache::CacheRecord;
pub use checkpoint::{
    Checkpoint, DiskImage, EngineKind, EngineStamp, GuestContext, LayerRef, Lineage, MemoryImage, Origin,
    Virtualization, VmState,
};
pub use dial::{Dial, DialFuture};
pub use digest::{Digest, LayerName, ParseDigestError};
pub use home::Home;
pub use id::{BuildId, CheckpointId, ParseIdError, SandboxId, TeamId, TemplateId, Token, VolumeId};
pub use network::{
    EgressPolicy, EgressProxy, EgressTarget, HeaderRule, ParseTargetError, ProxyTls, UnclosedPlaceholder,
    ValuePart, value_parts,
};
pub use shape::{MachineShape, ShapeError};
