//! Templates, their builds and tags.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::LogLevel;

/// How far a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TemplateBuildStatus {
    /// Asked for, not started.
    Waiting,
    /// Runs.
    Building,
    /// Done.
    Ready,
    /// Failed or cancelled.
    Error,
}

/// A template and its newest build.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its newest build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// vCPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Whether other teams may use it.
    pub public: bool,
    /// Its names without namespace.
    pub aliases: Vec<String>,
    /// Its names with namespace.
    pub names: Vec<String>,
    /// When it was first asked for.
    pub created_at: DateTime<Utc>,
    /// When a build last changed it.
    pub updated_at: DateTime<Utc>,
    /// Always null: keys are of teams, not of people.
    pub created_by: Option<String>,
    /// When a sandbox was last created from it, on this node.
    pub last_spawned_at: Option<DateTime<Utc>>,
    /// Sandboxes that were created from it, on this node.
    pub spawn_count: u64,
    /// Its builds.
    pub build_count: usize,
    /// Version of the envd in it.
    pub envd_version: String,
    /// How far the newest build is.
    pub build_status: TemplateBuildStatus,
}

/// A build of a template.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    /// Its id.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// How far it is.
    pub status: TemplateBuildStatus,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
    /// When its status last changed.
    pub updated_at: DateTime<Utc>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<DateTime<Utc>>,
    /// vCPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Version of the envd in it.
    pub envd_version: String,
}

/// A template and its builds.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateWithBuilds {
    /// The template.
    #[serde(flatten)]
    pub template: Template,
    /// Its builds, newest first.
    pub builds: Vec<TemplateBuild>,
}

/// `GET /templates/aliases/{alias}`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateAlias {
    /// The template's id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Whether other teams may use it.
    pub public: bool,
}

/// `POST /v3/templates`: a new build, of a new or an old template.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TemplateBuildRequest {
    /// Its name, with a tag if wanted.
    pub name: Option<String>,
    /// An older form of `name`.
    pub alias: Option<String>,
    /// Tags that the build gets when it is ready.
    pub tags: Vec<String>,
    /// vCPUs: 1 or an even number.
    pub cpu_count: Option<u32>,
    /// Memory in MiB, even.
    #[serde(rename = "memoryMB")]
    pub memory_mb: Option<u32>,
}

/// A build that waits for its start.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateBuildRequested {
    /// The template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Whether other teams may use it.
    pub public: bool,
    /// Its names with namespace.
    pub names: Vec<String>,
    /// Tags that the build gets when it is ready.
    pub tags: Vec<String>,
    /// Its names without namespace.
    pub aliases: Vec<String>,
}

/// `POST /v2/templates/{id}/builds/{id}`: the start of a build.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TemplateBuildStart {
    /// An OCI image to build on.
    pub from_image: Option<String>,
    /// A template to build on.
    pub from_template: Option<String>,
    /// Credentials for the image's registry.
    #[schema(value_type = Option<Object>)]
    pub from_image_registry: Option<RegistryLogin>,
    /// Uses no cached step.
    pub force: bool,
    /// The steps, in order.
    pub steps: Vec<TemplateStep>,
    /// Started before the checkpoint is taken, and running in it.
    pub start_cmd: Option<String>,
    /// Tried until it exits with 0.
    pub ready_cmd: Option<String>,
}

/// Credentials for a registry.
#[derive(Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum RegistryLogin {
    /// Any registry.
    Registry {
        /// User.
        username: String,
        /// Password or token.
        password: String,
    },
    /// Google's, by a service account's key.
    #[serde(rename_all = "camelCase")]
    Gcp {
        /// The key, as JSON text.
        service_account_json: String,
    },
    /// Amazon's, by an access key.
    #[serde(rename_all = "camelCase")]
    Aws {
        /// Key id.
        aws_access_key_id: String,
        /// Secret.
        aws_secret_access_key: String,
        /// Region.
        aws_region: String,
    },
}

impl std::fmt::Debug for RegistryLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RegistryLogin(..)")
    }
}

/// One step of a build.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct TemplateStep {
    /// `COPY`, `ENV` (or `ARG`), `EXPOSE`, `RUN`, `USER` or `WORKDIR`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Hash of the uploaded files of a `COPY`.
    pub files_hash: Option<String>,
    /// Runs even if its result is cached.
    pub force: bool,
}

/// `GET /templates/{id}/files/{hash}`: where to send the files of a `COPY`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateBuildFileUpload {
    /// They are here already.
    pub present: bool,
    /// Where to `PUT` them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// An entry of a build's log.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct BuildLogEntry {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// The text.
    pub message: String,
    /// How serious.
    pub level: LogLevel,
    /// Its step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Why a build failed.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildStatusReason {
    /// What a user is told.
    pub message: String,
    /// In which step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Always empty: the log itself has them.
    pub log_entries: Vec<BuildLogEntry>,
}

/// `GET /templates/{id}/builds/{id}/status`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuildInfo {
    /// The messages of `logEntries`.
    pub logs: Vec<String>,
    /// Entries from the offset that was asked for.
    pub log_entries: Vec<BuildLogEntry>,
    /// The template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// The build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// How far it is.
    pub status: TemplateBuildStatus,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<BuildStatusReason>,
}

/// `GET /templates/{id}/builds/{id}/logs`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateBuildLogs {
    /// Entries.
    pub logs: Vec<BuildLogEntry>,
}

/// `PATCH /v2/templates/{id}`.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub struct TemplateUpdate {
    /// Whether other teams may use it.
    pub public: Option<bool>,
}

/// Its answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TemplateUpdated {
    /// Its names with namespace.
    pub names: Vec<String>,
}

/// `POST /templates/tags`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct AssignTags {
    /// `name:tag` of the build.
    pub target: String,
    /// Further tags for it.
    pub tags: Vec<String>,
}

/// Its answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct AssignedTags {
    /// The tags.
    pub tags: Vec<String>,
    /// The build.
    #[serde(rename = "buildID")]
    pub build_id: String,
}

/// `DELETE /templates/tags`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct DeleteTags {
    /// The template.
    pub name: String,
    /// Tags to remove.
    pub tags: Vec<String>,
}

/// A tag.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateTag {
    /// The tag.
    pub tag: String,
    /// The build that it stands for.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// When it was assigned.
    pub created_at: DateTime<Utc>,
}

/// `GET /templates/{id}/tags/exists`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TagExists {
    /// Whether there is one.
    pub exists: bool,
    /// As it would be stored.
    pub normalized_tag: String,
}

/// `GET /templates/{id}/tags/count`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct TagsCount {
    /// How many.
    pub total: usize,
}
