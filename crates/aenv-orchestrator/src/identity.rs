//! What makes a launched guest itself: names, tokens, environment, randomness. Sent once after each launch.

use std::net::IpAddr;

use aenv_envd_api::{self as envd, InitRequest};
use aenv_types::{GuestContext, SandboxId, Token};
use aenv_volume::{Serving, VolumeMount};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use rand::{TryRngCore, rngs::OsRng};

use crate::{SandboxError, node::Node, sandbox::Record};

/// Bytes of the host's randomness that a guest is given.
const ENTROPY: usize = 64;

/// Where images keep the bundle of CAs that they trust; programs that have one of their own are pointed to it.
const CA_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// What Python's requests, Python's ssl and curl, and Node.js read.
const CA_VARIABLES: [&str; 3] = ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"];

/// The body of `/init` for the record's present generation, but for the time, which the client sets when it sends it.
pub(crate) fn init_request(
    node: &Node,
    record: &Record,
    guest: &GuestContext,
) -> Result<InitRequest, SandboxError> {
    let own = record.egress.dns_servers.as_slice();
    let dns = if own.is_empty() { &node.resolvers } else { own };
    let ca_bundle = (!record.egress.rules.is_empty()).then(|| node.network.ca_bundle()).flatten();
    let mut init = InitRequest {
        access_token: record.envd_token.as_ref().map(|token| token.expose().to_owned()),
        machine_id: Some(record.machine_id.clone()),
        ca_bundle: ca_bundle.map(str::to_owned),
        volume_mounts: record.volumes.iter().map(mount).collect(),
        lifecycle_id: Some(record.lifecycle_id.clone()),
        ..common(&record.id, guest, dns)?
    };
    init.env_vars.extend(record.env.clone());
    init.env_vars.insert("E2B_SANDBOX".into(), "true".into());
    init.env_vars.insert("E2B_SANDBOX_ID".into(), record.id.to_string());
    init.env_vars.insert("E2B_TEMPLATE_ID".into(), record.template.to_string());
    if init.ca_bundle.is_some() {
        for name in CA_VARIABLES {
            init.env_vars.entry(name.to_owned()).or_insert_with(|| CA_BUNDLE.to_owned());
        }
    }
    Ok(init)
}

/// The body of `/init` for a guest that is nobody's yet: randomness of its own, so that siblings part ways as soon as they run, and a
/// token that nobody is told. Whatever it says, the claim says anew.
pub(crate) fn init_of_nobody(
    node: &Node,
    id: &SandboxId,
    guest: &GuestContext,
) -> Result<InitRequest, SandboxError> {
    Ok(InitRequest {
        access_token: Some(Token::random().expose().to_owned()),
        machine_id: Some(uuid::Uuid::new_v4().simple().to_string()),
        lifecycle_id: Some(uuid::Uuid::new_v4().to_string()),
        ..common(id, guest, &node.resolvers)?
    })
}

/// What every guest is told.
fn common(id: &SandboxId, guest: &GuestContext, dns: &[IpAddr]) -> Result<InitRequest, SandboxError> {
    Ok(InitRequest {
        env_vars: guest.env.clone(),
        default_user: text(&guest.user),
        default_workdir: text(&guest.workdir),
        hostname: Some(id.to_string()),
        entropy: Some(entropy()?),
        dns_servers: (!dns.is_empty()).then(|| dns.iter().map(ToString::to_string).collect()),
        ..InitRequest::default()
    })
}

fn entropy() -> Result<String, SandboxError> {
    let mut entropy = [0; ENTROPY];
    OsRng
        .try_fill_bytes(&mut entropy)
        .map_err(|error| SandboxError::internal("the host has no randomness", error))?;
    Ok(BASE64_STANDARD.encode(entropy))
}

/// How a guest mounts one of its volumes: for good (`hard`: it waits for a server that is away), without a lock manager, and with
/// caches that are short enough to see what others write.
fn mount(volume: &VolumeMount) -> envd::VolumeMount {
    let (gateway, port) = (aenv_net::guest::GATEWAY, aenv_volume::PORT);
    envd::VolumeMount {
        source: format!("{gateway}:{}", Serving::export(&volume.volume)),
        path: volume.path.to_string(),
        options: format!(
            "vers=3,proto=tcp,port={port},mountproto=tcp,mountport={port},mountvers=3,addr={gateway},mountaddr={gateway},\
             sec=sys,nolock,hard,timeo=100,retrans=3,actimeo=1,lookupcache=positive"
        ),
    }
}

fn text(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_owned())
}
