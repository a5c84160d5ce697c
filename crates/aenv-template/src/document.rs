//! The documents that the catalog keeps in the repository.

use std::collections::BTreeMap;

use aenv_types::{BuildId, CheckpointId, MachineShape, SandboxId, TemplateId};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{TagName, TemplateName};

/// `templates/<id>`: a template, or a snapshot (which is a template that was not built but captured).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Template {
    /// Its id.
    pub id: TemplateId,
    /// Its names; the first one is shown as alias. A snapshot without a name has none.
    pub names: Vec<TemplateName>,
    /// Whether other teams may create from it.
    pub public: bool,
    /// Built or captured.
    pub kind: Kind,
    /// When it was first asked for.
    pub created_at: DateTime<Utc>,
    /// When a build last changed it.
    pub updated_at: DateTime<Utc>,
    /// Its builds, oldest first.
    pub builds: Vec<Build>,
    /// Which build each tag stands for, and when it was assigned.
    pub tags: BTreeMap<TagName, Tag>,
}

/// Built or captured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Kind {
    /// Built from an image or another template.
    Template,
    /// Captured of a sandbox.
    Snapshot {
        /// The sandbox.
        sandbox: SandboxId,
    },
}

/// One build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Build {
    /// Its id.
    pub id: BuildId,
    /// How far it is.
    pub status: BuildStatus,
    /// The machine.
    pub shape: MachineShape,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
    /// When its status last changed.
    pub updated_at: DateTime<Utc>,
    /// When it ended.
    pub finished_at: Option<DateTime<Utc>>,
    /// What it made.
    pub checkpoint: Option<CheckpointId>,
    /// Tags that it gets when it is ready.
    pub tags: Vec<TagName>,
}

/// How far a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildStatus {
    /// Asked for, not started.
    Waiting,
    /// Runs.
    Building,
    /// Done.
    Ready,
    /// Failed or cancelled.
    Error,
}

/// What a tag stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// The build.
    pub build: BuildId,
    /// When.
    pub assigned_at: DateTime<Utc>,
}

/// `names/<name>`: whose name it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameOwner {
    /// The template.
    pub template: TemplateId,
}

impl Template {
    /// The build that a tag stands for, if it is ready.
    pub fn ready(&self, tag: &TagName) -> Option<&Build> {
        let tag = self.tags.get(tag)?;
        self.builds.iter().find(|build| build.id == tag.build && build.status == BuildStatus::Ready)
    }

    /// The newest build.
    pub fn latest(&self) -> Option<&Build> {
        self.builds.last()
    }

    /// The name that is shown as alias.
    pub fn alias(&self) -> Option<String> {
        self.names.first().map(ToString::to_string)
    }
}
