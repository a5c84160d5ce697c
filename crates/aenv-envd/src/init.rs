//! `POST /init`: the host tells a guest that was just launched who it is now.

use std::sync::{Arc, atomic::Ordering};

use aenv_envd_api::{InitRequest, MOUNTED_HEADER};
use axum::{
    body::Bytes,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};

use crate::{
    access::error_response,
    guest::{Guest, Settings},
    system::{self, SystemError},
};

/// Answers `POST /init`. When it answers, everything has been taken over.
pub async fn serve(State(guest): State<Arc<Guest>>, body: Bytes) -> Response {
    // The clock first: each step before it makes it late.
    let request: InitRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return error_response(StatusCode::BAD_REQUEST, format!("the body of /init: {error}")),
    };
    let _one_at_a_time = guest.init.lock().await;
    let known = guest.settings().lifecycle_id.clone();
    if known.is_some() && known == request.lifecycle_id {
        return (StatusCode::NO_CONTENT, [(MOUNTED_HEADER, "1")]).into_response();
    }
    let mounts = !request.volume_mounts.is_empty();
    if mounts && !system::kernel_is_ready() {
        let message = "the kernel has no modules for volumes yet; send them to /modules";
        return error_response(StatusCode::FAILED_DEPENDENCY, message);
    }
    match take_over(&guest, request).await {
        Ok(()) if mounts => (StatusCode::NO_CONTENT, [(MOUNTED_HEADER, "1")]).into_response(),
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => {
            tracing::error!(%error, "/init failed");
            error_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
        }
    }
}

async fn take_over(guest: &Guest, request: InitRequest) -> Result<(), SystemError> {
    let identity = system::Identity::parse(&request)?;
    if guest.config.touches_system() {
        // A few small files and system calls; the thread that serves would have nothing else to do.
        identity.apply()?;
    }
    if request.lifecycle_id.is_some() {
        // Whoever was listening before the launch listened through connections that the launch has cut off.
        guest.processes.drop_subscribers();
    }
    mount_volumes(guest, &request).await?;
    guest.set_settings(Settings::from(request));
    Ok(())
}

/// Most guests never have a volume: they are not even asked for their mounts.
async fn mount_volumes(guest: &Guest, request: &InitRequest) -> Result<(), SystemError> {
    let had = guest.had_volumes.swap(!request.volume_mounts.is_empty(), Ordering::Relaxed);
    if !guest.config.touches_system() || (request.volume_mounts.is_empty() && !had) {
        return Ok(());
    }
    let owner = guest.user(request.default_user.as_deref()).ok();
    let (mounts, config) = (request.volume_mounts.clone(), guest.config.clone());
    let work = tokio::task::spawn_blocking(move || {
        system::mount_all(&mounts, owner.as_ref(), |address| config.is_host(address))
    });
    work.await.unwrap_or_else(|error| {
        Err(SystemError::Invalid { field: "volumeMounts", message: error.to_string() })
    })
}

/// Answers `POST /modules`.
pub async fn load_modules(body: Bytes) -> Response {
    let work = tokio::task::spawn_blocking(move || system::load_modules(&body));
    match work.await {
        Ok(Ok(())) => StatusCode::NO_CONTENT.into_response(),
        Ok(Err(error)) => error_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        Err(error) => error_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}
