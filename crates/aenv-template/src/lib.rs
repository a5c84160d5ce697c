//! Templates: names, tags, builds and their steps; and snapshots as named templates.
//!
//! The catalog resolves what clients put into `templateID` (id, name, name:tag, namespace/name:tag, snapshot id) to a
//! committed checkpoint. A build boots an image with the orchestrator, runs the steps through envd, captures, commits.
//!
//! Owns the documents `templates/<id>` and `names/<name>` of each team in the repository, and on the node the folders
//! `builds` (requests and logs of builds) and `cache/{steps,uploads}`. Never touches a VM or a layer by itself.

#![forbid(unsafe_code)]

pub mod build;
pub mod catalog;
pub mod document;
pub mod error;
mod known;
pub mod name;
pub mod retention;
pub mod upkeep;

pub use build::{
    BuildLog, BuildStart, BuildView, Builds, LogLevel, LogOrder, LogQuery, Source, StepKind, TemplateStep,
    Uploads, cached,
};
pub use catalog::{Catalog, NewBuild, Resolved, Snapshot};
pub use document::{Build, BuildStatus, Kind, Tag, Template};
pub use error::TemplateError;
pub use name::{Reference, TagName, TemplateName};
pub use retention::{Expired, MadeFrom, Retention};
pub use upkeep::{Account, Collected, Finding, Owner, TeamUsage};

use std::sync::Arc;

use aenv_image::Images;
use aenv_orchestrator::Orchestrator;
use aenv_repository::Repository;
use aenv_types::Home;

/// Templates of a node: the catalog, its builds and the files that wait for a `COPY`. Cheap to clone.
#[derive(Clone)]
pub struct Templates {
    /// Names, tags, checkpoints.
    pub catalog: Catalog,
    /// Builds that run, and their logs.
    pub builds: Builds,
    /// Files that clients uploaded for `COPY` steps.
    pub uploads: Uploads,
}

impl Templates {
    /// Opens the catalog; builds that a crash interrupted start again.
    pub async fn open(
        home: Home,
        repository: Repository,
        orchestrator: Orchestrator,
        images: Images,
    ) -> Result<Self, TemplateError> {
        let catalog = Catalog::new(repository);
        let uploads = Uploads::open(&home)?;
        let parts = build::BuildParts {
            home,
            catalog: catalog.clone(),
            orchestrator,
            images,
            uploads: uploads.clone(),
        };
        let builds = Builds::open(Arc::new(parts)).await?;
        Ok(Self { catalog, builds, uploads })
    }
}
