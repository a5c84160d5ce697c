//! `volume`.

use serde_json::{Value, json};

use crate::{
    Outcome,
    args::VolumeCommand,
    client::{Client, segment},
    error::CliError,
    output::{self, Format},
};

pub(super) async fn run(command: VolumeCommand, format: Format) -> Outcome {
    let client = Client::load()?;
    match command {
        VolumeCommand::Create { name } => {
            output::one(format, &client.post("/volumes", &json!({ "name": name })).await?);
        }
        VolumeCommand::List => {
            let volumes = client.all("/volumes").await?;
            output::rows(format, &volumes, &[("ID", "volumeID"), ("NAME", "name")]);
        }
        VolumeCommand::Show { volume } => {
            let id = id_of(&client, &volume).await?;
            output::one(format, &client.get(&format!("/volumes/{}", segment(&id))).await?);
        }
        VolumeCommand::Delete { volumes } => {
            for volume in volumes {
                let id = id_of(&client, &volume).await?;
                client.delete(&format!("/volumes/{}", segment(&id))).await?;
            }
        }
    }
    Ok(0)
}

/// The id of a volume that is named by either. What is neither is left to the server to refuse.
async fn id_of(client: &Client, volume: &str) -> Result<String, CliError> {
    let all = client.all("/volumes").await?;
    let named = |field: &str| all.iter().find(|found| found[field] == volume);
    let found = named("volumeID").or_else(|| named("name"));
    let id = found.and_then(|found| found["volumeID"].as_str()).unwrap_or(volume);
    Ok(id.to_owned())
}

/// `NAME:PATH` arguments as a create takes them.
pub(super) fn mounts(given: &[String]) -> Result<Value, CliError> {
    let split = |text: &String| match text.split_once(':') {
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => {
            Ok(json!({ "name": name, "path": path }))
        }
        _ => Err(CliError::Usage(format!("{text:?} is not NAME:/PATH"))),
    };
    given.iter().map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_a_name_and_a_path() {
        let given = |text: &str| mounts(&[text.to_owned()]);
        assert_eq!(given("data:/mnt/x").unwrap(), json!([{ "name": "data", "path": "/mnt/x" }]));
        for bad in ["data", "data:", ":/x", "data:x"] {
            assert!(given(bad).is_err(), "{bad:?} was taken");
        }
    }
}
