//! The one place that turns errors of the rooms below into answers. Detail goes to the log, once, here.

use aenv_api::ApiError;
use aenv_image::ImageError;
use aenv_orchestrator::{SandboxError, TeamResource};
use aenv_repository::RepositoryError;
use aenv_template::TemplateError;
use axum::response::{IntoResponse, Response};
use http::StatusCode;

/// After so many seconds a disk that was full may have room again.
const DISK_AGAIN: u64 = 30;
/// After so many seconds a repository that did not answer may do so again.
const REPOSITORY_AGAIN: u64 = 5;

/// What a handler fails with. Everything that `?` meets in a handler becomes one.
#[derive(Debug)]
pub struct Failure(pub ApiError);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<SandboxError> for Failure {
    fn from(error: SandboxError) -> Self {
        Self(sandbox_error(error))
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        Self(template_error(error))
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self(image_error(error))
    }
}

/// Status, message and stable code of a sandbox error.
pub fn sandbox_error(error: SandboxError) -> ApiError {
    let text = error.to_string();
    match error {
        SandboxError::NotFound(_) => ApiError::not_found(text).with_code("sandbox_not_found"),
        SandboxError::Paused(_) => ApiError::conflict(text).with_code("sandbox_paused"),
        SandboxError::Running(_) => ApiError::conflict(text).with_code("sandbox_running"),
        SandboxError::Deleted(_) => ApiError::not_found(text).with_code("sandbox_deleted"),
        SandboxError::Failed { .. } => {
            ApiError::conflict(format!("{text}; delete it and create another")).with_code("sandbox_failed")
        }
        SandboxError::Elsewhere { .. } => ApiError::not_found(text).with_code("sandbox_on_another_node"),
        SandboxError::RepositoryAway { retry_after, .. } => {
            let away =
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text).with_code("repository_unavailable");
            ApiError { retry_after_secs: Some(retry_after.as_secs().max(1)), ..away }
        }
        SandboxError::Full { retry_after, .. } => {
            let secs = retry_after.as_secs().max(1);
            ApiError::too_many(text, secs).with_code("sandbox_capacity_unavailable")
        }
        SandboxError::TeamFull { what, retry_after, .. } => {
            let code = match what {
                TeamResource::Running => "sandbox_limit_reached",
                TeamResource::Memory => "memory_limit_reached",
            };
            ApiError::too_many(text, retry_after.as_secs().max(1)).with_code(code)
        }
        SandboxError::DiskFull(_) => {
            let message =
                format!("{text}; delete sandboxes, snapshots or templates, or give the server a larger disk");
            let full = ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message).with_code("disk_full");
            // Caches give way meanwhile.
            ApiError { retry_after_secs: Some(DISK_AGAIN), ..full }
        }
        SandboxError::GuestUnresponsive { .. } => {
            ApiError::internal(text).with_code("sandbox_snapshot_guest_agent_unresponsive")
        }
        SandboxError::BadCheckpoint { .. } => ApiError::conflict(text).with_code("checkpoint_unusable"),
        SandboxError::StorageAway { retry_after, .. } => {
            let away = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text).with_code("storage_unavailable");
            ApiError { retry_after_secs: Some(retry_after.as_secs().max(1)), ..away }
        }
        SandboxError::Invalid(_) => ApiError::bad_request(text),
        SandboxError::ShuttingDown => {
            let busy = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, text).with_code("shutting_down");
            ApiError { retry_after_secs: Some(2), ..busy }
        }
        SandboxError::Internal { public, detail } => {
            tracing::error!(%detail, "{public}");
            ApiError::internal(public)
        }
    }
}

/// Status, message and stable code of a template error.
pub fn template_error(error: TemplateError) -> ApiError {
    let text = error.to_string();
    match error {
        TemplateError::NotFound(_) => ApiError::not_found(text).with_code("template_not_found"),
        TemplateError::NoTag { .. } => ApiError::not_found(text).with_code("tag_not_found"),
        TemplateError::NoBuild { .. } => ApiError::not_found(text).with_code("build_not_found"),
        TemplateError::Image(error) => image_error(error),
        TemplateError::NotReady(_) => ApiError::bad_request(text).with_code("template_not_ready"),
        TemplateError::Invalid(_) => ApiError::bad_request(text),
        TemplateError::Conflict(_) => ApiError::conflict(text),
        TemplateError::Repository(RepositoryError::Store { .. }) => {
            tracing::error!(detail = %text, "the repository did not do it");
            let message = "the repository of templates and snapshots cannot be reached, or refused; the server's log says why";
            let away =
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("repository_unavailable");
            ApiError { retry_after_secs: Some(REPOSITORY_AGAIN), ..away }
        }
        TemplateError::Repository(RepositoryError::Corrupt { .. }) => {
            tracing::error!(detail = %text, "the repository is damaged");
            let message = "what was published under this name is missing or damaged in the repository; \
                           the server's log says what";
            ApiError::conflict(message).with_code("checkpoint_unusable")
        }
        broken => {
            tracing::error!(detail = %broken, "a template operation failed");
            ApiError::internal("the template catalog could not be read or written; the server's log says why")
        }
    }
}

/// Status, message and stable code of an image error.
pub fn image_error(error: ImageError) -> ApiError {
    let text = error.to_string();
    match error {
        ImageError::Reference(_) => ApiError::bad_request(text).with_code("image_reference_invalid"),
        ImageError::NotFound { .. } => ApiError::not_found(text).with_code("image_not_found"),
        ImageError::Denied { .. } => ApiError::forbidden(text).with_code("image_access_denied"),
        ImageError::Damaged { .. } => ApiError::bad_request(text).with_code("image_damaged"),
        ImageError::Hostile { .. } => ApiError::bad_request(text).with_code("image_refused"),
        ImageError::NoSpace { .. } => {
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, text).with_code("disk_full")
        }
        ImageError::Unreachable { .. } => {
            ApiError::new(StatusCode::FAILED_DEPENDENCY, text).with_code("image_unreachable")
        }
        ImageError::NotPublished { .. } => {
            ApiError::new(StatusCode::FAILED_DEPENDENCY, text).with_code("image_not_published")
        }
        broken => {
            tracing::error!(detail = %broken, "an image could not be made");
            ApiError::internal("the image could not be made; the server's log says why")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_full_node_is_429_with_a_time() {
        let full = SandboxError::Full { reason: "memory".into(), retry_after: Duration::from_millis(200) };
        let error = sandbox_error(full);
        assert_eq!(error.status, 429);
        assert_eq!(error.retry_after_secs, Some(1));
        assert_eq!(error.error_code, Some("sandbox_capacity_unavailable"));
    }

    #[test]
    fn a_repository_that_is_away_is_503_with_a_time() {
        let away = RepositoryError::Store { context: "reading a".into(), message: "/secret/path".into() };
        let error = template_error(away.into());
        assert_eq!((error.status.as_u16(), error.error_code), (503, Some("repository_unavailable")));
        assert!(error.retry_after_secs.is_some() && !error.message.contains("secret"));
    }

    #[test]
    fn storage_that_is_away_is_503_with_a_time() {
        let away = SandboxError::StorageAway {
            id: aenv_types::CheckpointId::random(),
            reason: "slow".into(),
            retry_after: Duration::from_secs(5),
        };
        let error = sandbox_error(away);
        assert_eq!((error.status.as_u16(), error.error_code), (503, Some("storage_unavailable")));
        assert_eq!(error.retry_after_secs, Some(5));
    }

    #[test]
    fn detail_stays_inside() {
        let broken = SandboxError::Internal { public: "it broke".into(), detail: "/secret/path".into() };
        let error = sandbox_error(broken);
        assert_eq!((error.status.as_u16(), error.message.as_str()), (500, "it broke"));
    }

    #[test]
    fn a_missing_sandbox_reads_as_the_clients_expect() {
        let id: aenv_types::SandboxId = "iabc".parse().unwrap();
        let error = sandbox_error(SandboxError::NotFound(id));
        assert_eq!(error.status, 404);
        assert_eq!(error.message, "Sandbox \"iabc\" doesn't exist or you don't have access to it");
    }
}
