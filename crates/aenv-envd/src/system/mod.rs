//! The parts of the machine that a launch changes: clock, randomness, names, resolvers, trusted CAs.
//!
//! The only room, besides starting processes, that talks to the kernel below the standard library. Files that it writes are
//! replaced whole (written beside, renamed) but not synced: each launch writes them again.

mod certificates;
mod files;
mod kernel;
mod names;
mod volumes;

use aenv_envd_api::InitRequest;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use thiserror::Error;

pub use kernel::{protect_self, tune_connection};
pub use volumes::{kernel_is_ready, load_modules, mount_all};

/// Largest amount of randomness that a launch brings.
const MAX_ENTROPY: usize = 512;

/// Why a launch's identity could not be taken over.
#[derive(Debug, Error)]
pub enum SystemError {
    /// A field of the request has no valid form.
    #[error("{field} of /init is invalid: {message}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The kernel refused.
    #[error("{step}: {source}")]
    Kernel {
        /// What was being done.
        step: &'static str,
        /// The refusal.
        source: nix::Error,
    },
    /// A file could not be written.
    #[error("cannot write {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

/// What of an `/init` concerns the machine, checked.
#[derive(Debug)]
pub struct Identity {
    clock: Option<DateTime<Utc>>,
    entropy: Option<Vec<u8>>,
    hostname: Option<String>,
    machine_id: Option<String>,
    dns_servers: Option<Vec<std::net::IpAddr>>,
    ca_bundle: Option<String>,
}

impl Identity {
    /// Checks the request's fields; nothing is changed when one is invalid.
    pub fn parse(request: &InitRequest) -> Result<Self, SystemError> {
        let invalid = |field, message: &dyn std::fmt::Display| SystemError::Invalid {
            field,
            message: message.to_string(),
        };
        let clock = match &request.timestamp {
            Some(text) => Some(text.parse().map_err(|error| invalid("timestamp", &error))?),
            None => None,
        };
        let entropy = match &request.entropy {
            Some(text) => Some(STANDARD.decode(text).map_err(|error| invalid("entropy", &error))?),
            None => None,
        };
        if entropy.as_ref().is_some_and(|bytes| bytes.is_empty() || bytes.len() > MAX_ENTROPY) {
            return Err(invalid("entropy", &"it must be 1 to 512 bytes"));
        }
        if let Some(hostname) = &request.hostname
            && !names::is_hostname(hostname)
        {
            return Err(invalid("hostname", &"it must be 1 to 63 letters, digits and hyphens"));
        }
        if let Some(id) = &request.machine_id
            && !(id.len() == 32 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
        {
            return Err(invalid("machineId", &"it must be 32 lowercase hex digits"));
        }
        let dns_servers = match &request.dns_servers {
            Some(servers) => {
                let parsed: Result<Vec<_>, _> = servers.iter().map(|server| server.parse()).collect();
                Some(parsed.map_err(|error| invalid("dnsServers", &error))?)
            }
            None => None,
        };
        if request
            .ca_bundle
            .as_ref()
            .is_some_and(|pem| !pem.is_empty() && !pem.contains("-----BEGIN CERTIFICATE-----"))
        {
            return Err(invalid("caBundle", &"it holds no PEM certificate"));
        }
        Ok(Self {
            clock,
            entropy,
            hostname: request.hostname.clone(),
            machine_id: request.machine_id.clone(),
            dns_servers,
            ca_bundle: request.ca_bundle.clone().filter(|pem| !pem.is_empty()),
        })
    }

    /// Makes the machine so.
    pub fn apply(&self) -> Result<(), SystemError> {
        if let Some(now) = self.clock {
            kernel::set_clock(now)?;
        }
        if let Some(entropy) = &self.entropy {
            kernel::reseed(entropy)?;
        }
        if let Some(hostname) = &self.hostname {
            kernel::set_hostname(hostname)?;
            names::write_hostname("/".as_ref(), hostname)?;
        }
        if let Some(id) = &self.machine_id {
            names::write_machine_id("/".as_ref(), id)?;
        }
        if let Some(servers) = &self.dns_servers {
            names::write_resolvers("/".as_ref(), servers)?;
        }
        if let Some(pem) = &self.ca_bundle {
            certificates::trust("/".as_ref(), pem)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused_field(request: InitRequest) -> &'static str {
        match Identity::parse(&request) {
            Err(SystemError::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn malformed_fields_are_named() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            refused_field(InitRequest { timestamp: some("yesterday"), ..Default::default() }),
            "timestamp"
        );
        assert_eq!(refused_field(InitRequest { entropy: some("%"), ..Default::default() }), "entropy");
        assert_eq!(refused_field(InitRequest { entropy: some(""), ..Default::default() }), "entropy");
        assert_eq!(refused_field(InitRequest { hostname: some("a b"), ..Default::default() }), "hostname");
        assert_eq!(
            refused_field(InitRequest { machine_id: some("../x"), ..Default::default() }),
            "machineId"
        );
        let servers = Some(vec!["8.8.8.8\nsearch x".to_owned()]);
        assert_eq!(refused_field(InitRequest { dns_servers: servers, ..Default::default() }), "dnsServers");
        assert_eq!(refused_field(InitRequest { ca_bundle: some("x"), ..Default::default() }), "caBundle");
        assert!(
            Identity::parse(&InitRequest {
                timestamp: some("2026-01-02T03:04:05.123456789Z"),
                ..Default::default()
            })
            .is_ok()
        );
    }
}
