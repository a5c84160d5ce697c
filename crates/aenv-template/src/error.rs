//! Why a template operation failed.

use aenv_image::ImageError;
use aenv_repository::RepositoryError;
use thiserror::Error;

/// Why a template operation failed.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// No template of this name or id.
    #[error("template '{0}' not found")]
    NotFound(String),
    /// The template has no such tag.
    #[error("tag '{tag}' does not exist for template '{template}'")]
    NoTag {
        /// The tag.
        tag: String,
        /// The template.
        template: String,
    },
    /// The template has no such build.
    #[error("build '{build}' of template '{template}' not found")]
    NoBuild {
        /// The build.
        build: String,
        /// The template.
        template: String,
    },
    /// It has not been built (yet).
    #[error("template '{0}' has no finished build; wait for its build, or build it again")]
    NotReady(String),
    /// A name, tag or option that is not allowed.
    #[error("{0}")]
    Invalid(String),
    /// The name is taken, or somebody changed it at the same time.
    #[error("{0}")]
    Conflict(String),
    /// The image cannot be had.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The repository failed.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// The node's own files failed.
    #[error("{context}: {source}")]
    Io {
        /// What was being done.
        context: String,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
}

impl TemplateError {
    pub(crate) fn io(context: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let context = context.into();
        move |source| Self::Io { context, source }
    }
}
