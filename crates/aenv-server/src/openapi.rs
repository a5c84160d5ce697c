//! The API's own description, from the types and handlers that serve it.

use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
};

use crate::routes::{
    api_keys, cold, create, images, lifecycle, logs, metrics, network, nodes, repository, sandboxes, secrets,
    snapshots, system, teams, templates, volume_content, volumes,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "AgentENV",
        description = "MicroVM sandboxes for AI agents. Compatible with the E2B clients.",
        license(name = "MIT", identifier = "MIT")
    ),
    components(schemas(aenv_api::NetworkConfig, aenv_api::ErrorBody)),
    modifiers(&Key)
)]
struct Root;

struct Key;

impl Modify for Key {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let header = ApiKey::Header(ApiKeyValue::new("X-API-Key"));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("ApiKey", SecurityScheme::ApiKey(header));
        components
            .add_security_scheme("VolumeToken", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
        document.security = Some(vec![SecurityRequirement::new("ApiKey", Vec::<String>::new())]);
    }
}

/// The whole document.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Root::openapi();
    for part in [
        create::Doc::openapi(),
        cold::Doc::openapi(),
        images::Doc::openapi(),
        sandboxes::Doc::openapi(),
        lifecycle::Doc::openapi(),
        snapshots::Doc::openapi(),
        network::Doc::openapi(),
        metrics::Doc::openapi(),
        logs::Doc::openapi(),
        nodes::Doc::openapi(),
        teams::Doc::openapi(),
        api_keys::Doc::openapi(),
        repository::Doc::openapi(),
        system::Doc::openapi(),
        templates::openapi(),
        secrets::Doc::openapi(),
        volumes::Doc::openapi(),
        volume_content::Doc::openapi(),
    ] {
        document.merge(part);
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_resolves() {
        let document = serde_json::to_value(document()).unwrap();
        let mut missing = Vec::new();
        walk(&document, &mut |reference| {
            let pointer = reference.trim_start_matches('#');
            if document.pointer(pointer).is_none() {
                missing.push(reference.to_owned());
            }
        });
        assert_eq!(missing, Vec::<String>::new());
        assert!(document.pointer("/paths/~1v2~1sandboxes/post").is_some());
        assert!(document.pointer("/paths/~1v2~1sandboxes/get").is_some());
    }

    fn walk(value: &serde_json::Value, found: &mut impl FnMut(&str)) {
        match value {
            serde_json::Value::Object(map) => {
                if let Some(reference) = map.get("$ref").and_then(|r| r.as_str()) {
                    found(reference);
                }
                map.values().for_each(|inner| walk(inner, found));
            }
            serde_json::Value::Array(list) => list.iter().for_each(|inner| walk(inner, found)),
            _ => {}
        }
    }
}
