//! `GET` and `POST /volumes`, `GET` and `DELETE /volumes/{id}`, and the volumes that a create names.

use std::sync::Arc;

use aenv_api::{ApiError, ErrorBody, NewVolume, Volume as Shown, VolumeAndToken, VolumeMount as Asked};
use aenv_types::VolumeId;
use aenv_volume::{MountPoint, StoreError, Volume, VolumeMount, VolumeName};
use axum::{
    Json as Answer, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::get,
};
use http::StatusCode;

use super::detached;
use crate::{
    extract::{Json, PathText},
    failure::Failure,
    keys::Caller,
    state::AppState,
};

/// Volumes of one sandbox.
const MAX_MOUNTS: usize = 8;

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/volumes", get(list).post(create)).route("/volumes/{id}", get(show).delete(remove))
}

/// The team's volumes, by name.
#[utoipa::path(get, path = "/volumes", tag = "volumes", responses((status = 200, body = [Shown]), (status = 401, body = ErrorBody)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Answer<Vec<Shown>> {
    let own = state.volumes.list(&caller.team);
    let shown =
        |volume: &Arc<Volume>| Shown { volume_id: volume.id().to_string(), name: volume.name().to_string() };
    Answer(own.iter().map(shown).collect())
}

/// Makes an empty volume.
#[utoipa::path(
    post, path = "/volumes", tag = "volumes", request_body = NewVolume,
    responses(
        (status = 201, body = VolumeAndToken), (status = 401, body = ErrorBody),
        (status = 400, body = ErrorBody, description = "The name is not valid or taken, or the team has too many volumes"),
    )
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<NewVolume>,
) -> Result<Response, Failure> {
    let name: VolumeName =
        body.name.parse().map_err(|error| ApiError::bad_request(format!("name: {error}")))?;
    let work = async move {
        let volumes = state.volumes.clone();
        let made = tokio::task::spawn_blocking(move || volumes.create(&caller.team, name)).await;
        Ok::<_, Failure>(made.map_err(broke)?.map_err(refused)?)
    };
    let volume = detached(work).await?;
    Ok((StatusCode::CREATED, Answer(with_token(&volume))).into_response())
}

/// One volume, with its token.
#[utoipa::path(
    get, path = "/volumes/{id}", tag = "volumes", params(("id" = String, Path)),
    responses((status = 200, body = VolumeAndToken), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody))
)]
async fn show(
    State(state): State<AppState>,
    caller: Caller,
    PathText(id): PathText,
) -> Result<Answer<VolumeAndToken>, Failure> {
    let volume = id.parse::<VolumeId>().ok().and_then(|id| state.volumes.get(&caller.team, &id));
    let volume = volume.ok_or_else(|| missing(&id))?;
    Ok(Answer(with_token(&volume)))
}

/// Removes a volume and all its files, unless a sandbox has it.
#[utoipa::path(
    delete, path = "/volumes/{id}", tag = "volumes", params(("id" = String, Path)),
    responses(
        (status = 204), (status = 401, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "A running or paused sandbox has it mounted"),
    )
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    PathText(text): PathText,
) -> Result<StatusCode, Failure> {
    let id: VolumeId = text.parse().map_err(|_| missing(&text))?;
    state.volumes.get(&caller.team, &id).ok_or_else(|| missing(&text))?;
    let users = state.orchestrator.list(Some(&caller.team));
    if let Some(user) = users.iter().find(|view| view.volumes.iter().any(|mount| mount.volume == id)) {
        let message = format!("sandbox {} has this volume mounted; delete the sandbox first", user.id);
        return Err(ApiError::conflict(message).with_code("volume_in_use").into());
    }
    detached(async move {
        let volumes = state.volumes.clone();
        let removed = tokio::task::spawn_blocking(move || volumes.remove(&caller.team, &id)).await;
        match removed.map_err(broke)?.map_err(refused)? {
            true => Ok::<_, Failure>(StatusCode::NO_CONTENT),
            false => Err(missing(&text).into()),
        }
    })
    .await
}

fn with_token(volume: &Volume) -> VolumeAndToken {
    VolumeAndToken {
        volume_id: volume.id().to_string(),
        name: volume.name().to_string(),
        token: volume.token().expose().to_owned(),
    }
}

/// There is none.
pub(super) fn missing(id: &str) -> ApiError {
    let shown: String = id.chars().take(64).collect();
    ApiError::not_found(format!("volume {shown:?} not found")).with_code("volume_not_found")
}

pub(super) fn broke(error: tokio::task::JoinError) -> ApiError {
    tracing::error!(%error, "work on a volume broke off");
    ApiError::internal("the operation broke off inside the server; its log says why")
}

fn refused(error: StoreError) -> ApiError {
    let text = error.to_string();
    match error {
        StoreError::Exists(_) => ApiError::bad_request(text).with_code("volume_exists"),
        StoreError::TooMany(_) => ApiError::bad_request(text).with_code("volume_limit_reached"),
        StoreError::NoHandles { .. } => ApiError::internal(text).with_code("volumes_unsupported"),
        StoreError::Io { .. } => {
            tracing::error!(detail = %text, "a volume could not be changed");
            ApiError::internal("the volume could not be written; the server's log says why")
        }
    }
}

/// Names and places of the volumes that a create asks for, checked without looking for them.
pub fn parse(asked: &[Asked]) -> Result<Vec<(VolumeName, MountPoint)>, ApiError> {
    if asked.len() > MAX_MOUNTS {
        return Err(ApiError::bad_request(format!("a sandbox has at most {MAX_MOUNTS} volumes")));
    }
    let mut mounts: Vec<(VolumeName, MountPoint)> = Vec::new();
    for mount in asked {
        let name = mount.name.parse().map_err(|_| unknown(&mount.name))?;
        let path: MountPoint = mount.path.parse().map_err(|error| {
            ApiError::bad_request(format!("volumeMounts: {:?}: {error}", shortened(&mount.path)))
        })?;
        let inside = |a: &MountPoint, b: &MountPoint| {
            a.as_str().strip_prefix(b.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if mounts.iter().any(|(_, other)| inside(&path, other) || inside(other, &path)) {
            return Err(ApiError::bad_request(format!("volumeMounts: {path} lies in another volume's path")));
        }
        mounts.push((name, path));
    }
    Ok(mounts)
}

/// Finds the volumes that a create asks for.
pub fn find(
    state: &AppState,
    caller: &Caller,
    asked: &[(VolumeName, MountPoint)],
) -> Result<Vec<VolumeMount>, ApiError> {
    let find = |(name, path): &(VolumeName, MountPoint)| {
        let volume = state.volumes.named(&caller.team, name).ok_or_else(|| unknown(name.as_str()))?;
        Ok(VolumeMount { volume: volume.id().clone(), name: name.clone(), path: path.clone() })
    };
    asked.iter().map(find).collect()
}

fn unknown(name: &str) -> ApiError {
    ApiError::bad_request(format!("there is no volume {:?}", shortened(name))).with_code("volume_not_found")
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(list, create, show, remove))]
pub struct Doc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_checked() {
        let check = |asked: &[(&str, &str)]| {
            let asked: Vec<_> = asked
                .iter()
                .map(|(name, path)| Asked { name: (*name).into(), path: (*path).into() })
                .collect();
            parse(&asked)
        };
        assert_eq!(check(&[("a", "/mnt/a"), ("b", "/mnt/ab")]).unwrap().len(), 2);
        for bad in [
            &[("a", "mnt")][..],
            &[("a", "/")],
            &[("a", "/proc")],
            &[("a", "/x/../y")],
            &[("a/b", "/x")],
            &[("a", "/x"), ("b", "/x/")],
            &[("a", "/x/y"), ("b", "/x")],
            &[("a", "/x"); 9],
        ] {
            assert_eq!(check(bad).unwrap_err().status, 400, "{bad:?}");
        }
        assert_eq!(check(&[("../x", "/x")]).unwrap_err().error_code, Some("volume_not_found"));
    }
}
