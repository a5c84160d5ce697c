//! `/images`: images in overlaybd format, made once and published for a fleet.

use std::sync::Arc;

use aenv_api::{
    ApiError, ConvertImage, ErrorBody, ImageCompression, PublishedImage, PushImage, RegistryUser,
};
use aenv_image::{
    Compression, Destination, ImageError, ImageReference, PublishAs, PublishProgress, Published,
    PullProgress, RegistryAuth,
};
use aenv_types::Token;
use axum::{Router, extract::State, response::Response, routing::post};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::{cold::reference, lines, repository::operator};
use crate::{
    config::Config,
    extract::Json,
    failure::{Failure, image_error},
    keys::{Caller, Role},
    state::AppState,
    telling::{Teller, telling},
};

/// After so many seconds one that was under way may be done.
const AGAIN: u64 = 30;

/// The routes.
pub fn router() -> Router<AppState> {
    Router::new().route("/images/convert", post(convert)).route("/images/push", post(push))
}

/// Converts an image to overlaybd format and publishes it. Answers with lines of JSON: `{"progress": ...}` while it works, at last
/// `{"result": ...}` or `{"error": ...}`. It goes on to its end, whether or not anybody listens.
#[utoipa::path(
    post, path = "/images/convert", tag = "images", request_body = ConvertImage,
    responses(
        (status = 200, content_type = "application/x-ndjson", body = String), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 429, body = ErrorBody),
        (status = 507, body = ErrorBody),
    )
)]
async fn convert(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ConvertImage>,
) -> Result<Response, Failure> {
    let image = reference(&body.image, &state.config, &caller)?;
    let target = destination(&body.target, body.target_login, &state.config, &caller)?;
    state.orchestrator.disk_room()?;
    let turn = turn(&state)?;
    let (auth, compression) = (body.image_login.map(auth), compression(body.compression));
    Ok(publish(turn, move |teller| async move {
        state
            .images
            .convert(&image, auth, compression, &target, &|step| teller.tell(|| progress(&step)))
            .await
    }))
}

/// Publishes an image of an OCI layout on the server as it is (with the server's first key). Answers in lines, as the conversion does.
#[utoipa::path(
    post, path = "/images/push", tag = "images", request_body = PushImage,
    responses(
        (status = 200, content_type = "application/x-ndjson", body = String), (status = 400, body = ErrorBody),
        (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 429, body = ErrorBody),
    )
)]
async fn push(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<PushImage>,
) -> Result<Response, Failure> {
    operator(&caller)?;
    let image = reference(&body.image, &state.config, &caller)?;
    let target = destination(&body.target, body.target_login, &state.config, &caller)?;
    let turn = turn(&state)?;
    Ok(publish(turn, move |teller| async move {
        state.images.push(&image, &target, &|step| teller.tell(|| progress(&step))).await
    }))
}

/// The target. What the server's own docker credentials may write to is for its operator only.
fn destination(
    text: &str,
    login: Option<RegistryUser>,
    config: &Config,
    caller: &Caller,
) -> Result<Destination, Failure> {
    let reference: ImageReference = reference(text, config, caller)?;
    let identity = match (login, caller.role) {
        (Some(user), _) => PublishAs::Known(auth(user)),
        (None, Role::Operator) => PublishAs::Docker,
        (None, Role::Member) => PublishAs::Nobody,
    };
    Ok(Destination { reference, identity })
}

fn auth(user: RegistryUser) -> RegistryAuth {
    RegistryAuth::Password { username: user.username, password: Token::from(user.password) }
}

fn compression(wanted: ImageCompression) -> Compression {
    match wanted {
        ImageCompression::Lz4 => Compression::Lz4,
        ImageCompression::Zstd => Compression::Zstd,
    }
}

fn turn(state: &AppState) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(&state.publishing).try_acquire_owned().map_err(|_| {
        let message = "as many images are being published on this node as it does at a time; try again later";
        ApiError::too_many(message, AGAIN).with_code("publishing_busy")
    })
}

/// Runs `work` to its end and answers with what it says.
fn publish<F>(turn: OwnedSemaphorePermit, work: impl FnOnce(Teller) -> F + Send + 'static) -> Response
where
    F: Future<Output = Result<Published, ImageError>> + Send + 'static,
{
    use tracing::Instrument;
    let (telling, said) = telling();
    let teller = telling.teller();
    let run = async move {
        let outcome = work(teller).await;
        drop(turn);
        telling.end(outcome.map(|published| shown(&published)).map_err(image_error)).await;
    };
    tokio::spawn(run.in_current_span());
    lines(said)
}

fn shown(published: &Published) -> PublishedImage {
    PublishedImage {
        reference: published.reference.clone(),
        manifest: published.manifest.to_string(),
        layers: published.layers as u64,
        bytes: published.bytes,
        sent_bytes: published.sent,
    }
}

/// What is done, to which layer (from 1), and how many bytes of it.
fn progress(step: &PublishProgress) -> Value {
    let line = |step: &str, index: usize, done: u64, total: u64| json!({ "step": step, "layer": index + 1, "done": done, "total": total });
    match step {
        PublishProgress::Pull(PullProgress::Resolved { layers, bytes }) => {
            json!({ "step": "reading", "layers": layers, "done": 0, "total": bytes })
        }
        PublishProgress::Pull(PullProgress::Applying { index, done, total }) => {
            line("reading", *index, *done, *total)
        }
        PublishProgress::Pull(
            PullProgress::Reused { index } | PullProgress::Sealed { index } | PullProgress::InPlace { index },
        ) => line("read", *index, 0, 0),
        PublishProgress::Packing { index } => line("compressing", *index, 0, 0),
        PublishProgress::Sending { index, done, total } => line("sending", *index, *done, *total),
        PublishProgress::Present { index } => line("there already", *index, 0, 0),
    }
}

/// The part of the API's description that is made here.
#[derive(utoipa::OpenApi)]
#[openapi(paths(convert, push), components(schemas(PublishedImage)))]
pub struct Doc;
