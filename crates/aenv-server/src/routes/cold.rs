//! `POST /sandboxes-cold`: a sandbox straight from an OCI image.

use std::{collections::BTreeSet, sync::Arc};

use aenv_api::{ApiError, AttachedDrive, ColdSandbox, ErrorBody, NewSandbox, Sandbox};
use aenv_image::{ImageReference, PulledImage};
use aenv_template::Resolved;
use aenv_types::{
    Checkpoint, CheckpointId, DiskImage, Lineage, MachineShape, Origin, TemplateId,
    checkpoint::CHECKPOINT_FORMAT,
};
use axum::{Router, extract::State, response::Response, routing::post};

use super::{create, detached};
use crate::{
    config, convert,
    extract::Json,
    failure::Failure,
    keys::{Caller, Role},
    state::AppState,
};

/// Drives beside the root disk.
const MAX_DRIVES: usize = 8;

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/sandboxes-cold", post(start))
}

/// Pulls an image (or finds it), boots it and returns when it answers.
#[utoipa::path(
    post, path = "/sandboxes-cold", tag = "sandboxes", request_body = ColdSandbox,
    responses(
        (status = 201, body = Sandbox), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody),
        (status = 403, body = ErrorBody), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody),
        (status = 507, body = ErrorBody),
    )
)]
async fn start(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ColdSandbox>,
) -> Result<Response, Failure> {
    let options = create::options(&as_new(&body), &state.config.orchestrator, &caller)?;
    let mut shape = shape(&body, &state.config.machine)?;
    check_drives(&body.attached_drives)?;
    let image = reference(&body.image, &state.config, &caller)?;
    let mut drives = Vec::new();
    for drive in &body.attached_drives {
        let image = drive.image.as_deref().map(|text| reference(text, &state.config, &caller)).transpose()?;
        drives.push((drive.clone(), image));
    }
    detached(async move {
        let _starting = create::check_running(&state, &caller, 1)?;
        state.orchestrator.disk_room()?;
        let pulled = state.images.pull(&image, None, &|_| ()).await?;
        if body.disk_size_mb.is_none() {
            // The filesystem of an image in overlaybd format has the size that its maker gave it.
            let needed = u32::try_from(mib(pulled.disk_size)).unwrap_or(u32::MAX);
            shape.disk_mib = shape.disk_mib.max(needed);
        }
        let mut disks = vec![root_disk(&pulled, shape)?];
        for (drive, image) in drives {
            let pulled = match image {
                Some(image) => Some(state.images.pull(&image, None, &|_| ()).await?),
                None => None,
            };
            disks.push(attached_disk(&drive, pulled)?);
        }
        let resolved = resolved(&pulled, shape, disks);
        let view = create::launch(&state, create::request(&state, &caller, &resolved, options)?).await?;
        let sandbox = convert::sandbox(&view);
        Ok::<_, Failure>(create::created(&sandbox.sandbox_id, &sandbox))
    })
    .await
}

fn as_new(body: &ColdSandbox) -> NewSandbox {
    NewSandbox {
        timeout: body.timeout,
        auto_pause: body.auto_pause,
        auto_resume: body.auto_resume,
        secure: body.secure,
        allow_internet_access: body.allow_internet_access,
        network: body.network.clone(),
        metadata: body.metadata.clone(),
        env_vars: body.env_vars.clone(),
        ..NewSandbox::default()
    }
}

fn shape(body: &ColdSandbox, defaults: &config::Machine) -> Result<MachineShape, ApiError> {
    let shape = MachineShape {
        vcpus: body.cpu_count.unwrap_or(defaults.vcpu_count),
        memory_mib: body.memory_mb.unwrap_or(defaults.mem_size_mib),
        disk_mib: body.disk_size_mb.unwrap_or(defaults.disk_size_mib),
    };
    shape.checked().map_err(|error| ApiError::bad_request(error.to_string()))
}

fn check_drives(drives: &[AttachedDrive]) -> Result<(), ApiError> {
    if drives.len() > MAX_DRIVES {
        return Err(ApiError::bad_request(format!(
            "attachedDrives has {} entries; at most {MAX_DRIVES} are allowed",
            drives.len()
        )));
    }
    let mut seen = BTreeSet::from(["root"]);
    for drive in drives {
        let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if drive.name.is_empty() || drive.name.len() > 32 || !drive.name.bytes().all(fits) {
            return Err(ApiError::bad_request(
                "the name of a drive has 1 to 32 lowercase letters, digits or -",
            ));
        }
        if !seen.insert(&drive.name) {
            return Err(ApiError::bad_request(format!("attachedDrives: the name {:?} is taken", drive.name)));
        }
        if drive.image.is_none() && drive.disk_size_mb.is_none() {
            return Err(ApiError::bad_request(format!(
                "drive {:?} needs an image, a diskSizeMB, or both",
                drive.name
            )));
        }
    }
    Ok(())
}

/// Parses a reference. Files of the server's own machine are for its operator only.
pub fn reference(text: &str, config: &config::Config, caller: &Caller) -> Result<ImageReference, Failure> {
    let image: ImageReference = text.parse()?;
    match &image {
        ImageReference::Registry(name) => check_registry(name, &config.image.resolver.allowed_registries)?,
        _ if caller.role == Role::Operator => {}
        _ => {
            return Err(ApiError::forbidden(
                "only the server's first API key may use images from files on the server; push the image to a registry",
            )
            .into());
        }
    }
    Ok(image)
}

fn check_registry(name: &str, allowed: &[String]) -> Result<(), ApiError> {
    let first = name.split('/').next().unwrap_or_default();
    let registry = if name.contains('/') && (first.contains(['.', ':']) || first == "localhost") {
        first
    } else {
        "docker.io"
    };
    if allowed.is_empty() || allowed.iter().any(|a| a == registry) {
        return Ok(());
    }
    Err(ApiError::forbidden(format!(
        "registry {registry:?} is not among image.resolver.allowed_registries ({})",
        allowed.join(", ")
    ))
    .with_code("registry_not_allowed"))
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

fn root_disk(pulled: &PulledImage, shape: MachineShape) -> Result<DiskImage, ApiError> {
    let needed = mib(pulled.disk_size);
    if u64::from(shape.disk_mib) < needed {
        return Err(ApiError::bad_request(format!(
            "diskSizeMB is {}; the filesystem of {} needs {needed}",
            shape.disk_mib, pulled.reference
        )));
    }
    Ok(DiskImage { drive: "root".to_owned(), size: shape.disk_bytes(), layers: pulled.layers.clone() })
}

fn attached_disk(drive: &AttachedDrive, pulled: Option<PulledImage>) -> Result<DiskImage, ApiError> {
    let needed = pulled.as_ref().map_or(1, |image| mib(image.disk_size));
    let size = drive.disk_size_mb.map_or(needed, u64::from);
    if size < needed || size > 1 << 20 {
        return Err(ApiError::bad_request(format!(
            "drive {:?}: diskSizeMB is {size}; it takes {needed} to {}",
            drive.name,
            1 << 20
        )));
    }
    let layers = pulled.map(|image| image.layers).unwrap_or_default();
    Ok(DiskImage { drive: drive.name.clone(), size: size << 20, layers })
}

fn resolved(pulled: &PulledImage, shape: MachineShape, disks: Vec<DiskImage>) -> Resolved {
    let digits: String =
        pulled.manifest.to_string().chars().rev().filter(char::is_ascii_hexdigit).take(19).collect();
    let template: TemplateId = format!("t{digits}").parse().unwrap_or_else(|_| TemplateId::random());
    let checkpoint = Checkpoint {
        format: CHECKPOINT_FORMAT,
        id: CheckpointId::random(),
        created_at: chrono::Utc::now(),
        shape,
        engine: None,
        vm_state: None,
        memory: None,
        disks,
        guest: pulled.guest.clone(),
        lineage: Lineage {
            parent: None,
            origin: Origin::Image { reference: pulled.reference.clone(), manifest: pulled.manifest },
        },
    };
    Resolved { checkpoint: Arc::new(checkpoint), template, alias: Some(pulled.reference.clone()) }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(start))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(name: &str, mb: Option<u32>) -> AttachedDrive {
        AttachedDrive { name: name.into(), image: None, disk_size_mb: mb }
    }

    #[test]
    fn drives_are_checked() {
        assert!(check_drives(&[drive("data", Some(64)), drive("more", Some(64))]).is_ok());
        for bad in [
            vec![drive("root", Some(64))],
            vec![drive("a", Some(1)), drive("a", Some(1))],
            vec![drive("../x", Some(1))],
            vec![drive("a", None)],
            (0..9).map(|n| drive(&format!("d{n}"), Some(1))).collect(),
        ] {
            assert_eq!(check_drives(&bad).unwrap_err().status, 400, "{bad:?}");
        }
        assert!(attached_disk(&drive("a", Some(0)), None).is_err());
        assert_eq!(attached_disk(&drive("a", Some(2)), None).unwrap().size, 2 << 20);
    }

    #[test]
    fn registries_are_checked() {
        let allowed = ["docker.io".to_owned(), "localhost:5000".to_owned()];
        assert!(check_registry("debian:12", &allowed).is_ok());
        assert!(check_registry("library/debian:12", &allowed).is_ok());
        assert!(check_registry("localhost:5000/x:1", &allowed).is_ok());
        assert_eq!(check_registry("ghcr.io/a/b", &allowed).unwrap_err().status, 403);
        assert!(check_registry("ghcr.io/a/b", &[]).is_ok());
    }
}
