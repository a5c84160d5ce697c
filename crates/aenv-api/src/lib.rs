//! Wire types of the HTTP API (E2B's and AgentENV's own) and the one error envelope.
//!
//! The OpenAPI document is generated from these types. Nothing here does I/O. Field names are exactly those that the
//! official clients send and read; unknown fields of a request are ignored, as the clients' own server does.

#![forbid(unsafe_code)]

pub mod account;
pub mod egress;
pub mod error;
pub mod image;
pub mod logs;
pub mod metrics;
pub mod network;
pub mod node;
pub mod repository;
pub mod sandbox;
pub mod secret;
pub mod template;
pub mod volume;

pub use account::{ApiKey, ApiKeyLimits, ApiKeyMask, ApiKeyUpdate, CreatedApiKey, NewApiKey, Team};
pub use egress::{NetworkRule, NetworkRules, NetworkTransform, ProxyConfig, ProxyTlsConfig};
pub use error::{ApiError, ErrorBody};
pub use image::{ConvertImage, ImageCompression, PublishedImage, PushImage, RegistryUser};
pub use logs::{LogLevel, LogsDirection, SandboxLog, SandboxLogEntry, SandboxLogs, SandboxLogsV2};
pub use metrics::{SandboxMetric, SandboxesWithMetrics};
pub use network::{NetworkConfig, NetworkUpdate};
pub use node::{DiskMetrics, MachineInfo, Node, NodeEngine, NodeExport, NodeMemory, NodeMetrics, NodeStatus};
pub use repository::{CheckRepository, CollectRepository, RepositoryUsage, TeamUsage};
pub use sandbox::{
    AttachedDrive, AutoResume, BatchRequest, ColdSandbox, ConnectRequest, ConnectRequestV2, ForkRequest,
    ForkResult, Lifecycle, ListedSandbox, NewSandbox, OnTimeout, PauseMode, PauseRequest, Publication,
    RefreshRequest, ResumeRequest, RollbackRequest, Sandbox, SandboxDetail, SandboxState, SnapshotInfo,
    SnapshotRequest, TimeoutRequest, VolumeMount,
};
pub use secret::{NewSecret, Secret, SecretUpdate};
pub use template::{
    AssignTags, AssignedTags, BuildLogEntry, BuildStatusReason, DeleteTags, RegistryLogin, TagExists,
    TagsCount, Template, TemplateAlias, TemplateBuild, TemplateBuildFileUpload, TemplateBuildInfo,
    TemplateBuildLogs, TemplateBuildRequest, TemplateBuildRequested, TemplateBuildStart, TemplateBuildStatus,
    TemplateStep, TemplateTag, TemplateUpdate, TemplateUpdated, TemplateWithBuilds,
};
pub use volume::{NewVolume, Volume, VolumeAndToken, VolumeEntryStat, VolumeEntryType, VolumeEntryUpdate};

/// `clientID` of every sandbox: the clients require the field and use it for nothing.
pub const CLIENT_ID: &str = "aenv";

/// Header with the token of the next page of a list; absent on the last page.
pub const NEXT_TOKEN_HEADER: &str = "x-next-token";

/// Header with a request's id, on every answer.
pub const REQUEST_ID_HEADER: &str = "x-request-id";

/// Header with the sandbox's id, on answers of the data plane and of create.
pub const SANDBOX_ID_HEADER: &str = "x-agentenv-sandbox-id";
