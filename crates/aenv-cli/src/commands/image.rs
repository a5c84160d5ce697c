//! `image`: images in overlaybd format.

use std::io::Read;

use serde_json::{Value, json};

use super::repo::follow;
use crate::{
    Outcome,
    args::{Compression, ImageCommand, TargetLogin},
    client::Client,
    error::CliError,
    output::{self, Format},
};

/// The longest password.
const LONGEST_PASSWORD: u64 = 64 << 10;

pub(super) async fn run(command: ImageCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    let (path, mut body, login) = match command {
        ImageCommand::Convert { image, target, compression, login } => {
            let compression = match compression {
                Compression::Lz4 => "lz4",
                Compression::Zstd => "zstd",
            };
            let body = json!({ "image": image, "target": target, "compression": compression });
            ("/images/convert", body, login)
        }
        ImageCommand::Push { image, target, login } => {
            ("/images/push", json!({ "image": image, "target": target }), login)
        }
    };
    if let Some(login) = credentials(login)? {
        body["targetLogin"] = login;
    }
    let result = follow(&client, path, &body, "looking for the image", step).await?;
    if format == Format::Json {
        output::one(format, &result);
        return Ok(0);
    }
    output::one(
        format,
        &json!({
            "image": result["reference"],
            "manifest": result["manifest"],
            "layers": format!("{}, {}", result["layers"], bytes(&result["bytes"])),
            "sent now": bytes(&result["sentBytes"]),
        }),
    );
    Ok(0)
}

fn credentials(login: TargetLogin) -> Result<Option<Value>, CliError> {
    let Some(username) = login.username else { return Ok(None) };
    let mut password = String::new();
    std::io::stdin()
        .take(LONGEST_PASSWORD)
        .read_to_string(&mut password)
        .map_err(|error| CliError::Usage(format!("the password cannot be read from stdin: {error}")))?;
    Ok(Some(json!({ "username": username, "password": password.trim_end_matches(['\r', '\n']) })))
}

/// One line of progress.
fn step(progress: &Value) -> String {
    let step = progress["step"].as_str().unwrap_or("working");
    let layer = progress["layer"].as_u64().map(|layer| format!(" layer {layer}")).unwrap_or_default();
    match progress["total"].as_u64() {
        None | Some(0) => format!("{step}{layer}"),
        Some(_) => format!("{step}{layer}: {} of {}", bytes(&progress["done"]), bytes(&progress["total"])),
    }
}

fn bytes(value: &Value) -> String {
    indicatif::HumanBytes(value.as_u64().unwrap_or(0)).to_string()
}
