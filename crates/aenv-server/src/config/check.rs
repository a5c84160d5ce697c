//! Whether the values of a configuration fit together.

use std::net::{IpAddr, SocketAddr};

use aenv_egress::HostName;
use aenv_types::{EgressTarget, MachineShape};

use super::{Config, ConfigError};

/// Beyond this a guest is promised what it has next to no chance to get.
const MOST_OVERCOMMIT: f64 = 20.0;

/// Beyond this a sandbox is not paused, but kept.
const MOST_STANDING_SECS: u64 = 86_400;

/// Refuses a configuration that a server could not work with, and says which key is wrong.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    let wrong = |message: String| Err(ConfigError::Meaning(message));
    if config.api_addr.parse::<SocketAddr>().is_err() {
        return wrong(format!(
            "api_addr is {:?}; it takes an address and port such as 127.0.0.1:8000",
            config.api_addr
        ));
    }
    for (name, path) in [("home_path", &config.home_path), ("runtime_path", &config.runtime_path)] {
        if !path.is_absolute() {
            return wrong(format!("{name} is {path:?}; it takes an absolute path"));
        }
    }
    check_tls(config)?;
    let machine = &config.machine;
    let shape = MachineShape {
        vcpus: machine.vcpu_count,
        memory_mib: machine.mem_size_mib,
        disk_mib: machine.disk_size_mib,
    };
    if let Err(error) = shape.checked() {
        return wrong(format!("[machine] does not fit: {error}"));
    }
    if config.pool.low_watermark > config.pool.high_watermark {
        return wrong("pool.low_watermark is above pool.high_watermark".to_owned());
    }
    let times = &config.orchestrator;
    if times.default_sandbox_timeout_secs == 0
        || times.default_sandbox_timeout_secs > times.max_sandbox_timeout_secs
    {
        return wrong(
            "orchestrator.default_sandbox_timeout_secs must be from 1 to orchestrator.max_sandbox_timeout_secs".to_owned(),
        );
    }
    if !(1.0..=MOST_OVERCOMMIT).contains(&times.memory_overcommit) {
        return wrong(format!(
            "orchestrator.memory_overcommit is {}; it takes 1 to {MOST_OVERCOMMIT}",
            times.memory_overcommit
        ));
    }
    if times.stand_after_deadline_secs > MOST_STANDING_SECS {
        return wrong(format!(
            "orchestrator.stand_after_deadline_secs is {}; it takes 0 to {MOST_STANDING_SECS}",
            times.stand_after_deadline_secs
        ));
    }
    check_jail(config)?;
    check_standby(config)?;
    check_ranges(config)?;
    check_backend(config)?;
    check_not_here(config)
}

fn check_tls(config: &Config) -> Result<(), ConfigError> {
    let wrong = |message: String| Err(ConfigError::Meaning(message));
    let tls = &config.tls;
    if tls.cert_path.is_some() != tls.key_path.is_some() {
        return wrong("tls.cert_path and tls.key_path go together; one of them is not set".to_owned());
    }
    if tls.cert_path.is_some() && !tls.names.is_empty() {
        return wrong(
            "tls.names is for a certificate of the server's own making: leave it out, or tls.cert_path"
                .to_owned(),
        );
    }
    let fits = |name: &&String| {
        let host = name.strip_prefix("*.").unwrap_or(name);
        name.parse::<IpAddr>().is_ok() || host.parse::<HostName>().is_ok()
    };
    match tls.names.iter().find(|name| !fits(name)) {
        Some(name) => {
            wrong(format!("tls.names has {name:?}, which is no host name, no *.domain and no address"))
        }
        None => Ok(()),
    }
}

/// Below 65536 are the host's own users, and the last uid is none.
fn check_jail(config: &Config) -> Result<(), ConfigError> {
    let jail = &config.qemu.jail;
    let end = u64::from(jail.first_uid) + u64::from(jail.uids);
    if jail.first_uid < 65_536 || jail.uids == 0 || end > u64::from(u32::MAX) {
        return Err(ConfigError::Meaning(format!(
            "qemu.jail.first_uid is {} and qemu.jail.uids is {}; the range has to lie in 65536 to {}",
            jail.first_uid,
            jail.uids,
            u32::MAX - 1
        )));
    }
    Ok(())
}

/// Each standby is a process, and a demand has to end.
fn check_standby(config: &Config) -> Result<(), ConfigError> {
    let standby = &config.orchestrator.standby;
    for (name, value, range) in [
        ("count", standby.count as u64, 0..=100),
        ("templates", standby.templates as u64, 0..=100),
        ("keep_secs", standby.keep_secs, 1..=86_400),
    ] {
        if !range.contains(&value) {
            let (least, most) = (range.start(), range.end());
            return Err(ConfigError::Meaning(format!(
                "orchestrator.standby.{name} is {value}; it takes {least} to {most}"
            )));
        }
    }
    Ok(())
}

fn check_ranges(config: &Config) -> Result<(), ConfigError> {
    let network = &config.network;
    let internal = [
        ("network.internal.host_interaction_cidr", &network.internal.host_interaction_cidr),
        ("network.internal.veth_cidr", &network.internal.veth_cidr),
    ];
    let denied = network.egress.always_denied_cidrs.iter().map(|c| ("network.egress.always_denied_cidrs", c));
    for (name, text) in internal.into_iter().chain(denied) {
        if !matches!(text.parse(), Ok(EgressTarget::Cidr { .. })) {
            return Err(ConfigError::Meaning(format!(
                "{name}: {text:?} is no address range such as 10.0.0.0/8"
            )));
        }
    }
    Ok(())
}

fn check_backend(config: &Config) -> Result<(), ConfigError> {
    if config.snapshot.repository_backend != "oss" {
        return Ok(());
    }
    let oss = &config.backend.oss;
    for (name, value) in [("region", &oss.region), ("bucket", &oss.bucket)] {
        if value.as_deref().is_none_or(str::is_empty) {
            return Err(ConfigError::Meaning(format!(
                "snapshot.repository_backend is \"oss\", but backend.oss.{name} is not set; set it in the file or as AENV_BACKEND_OSS_{}",
                name.to_uppercase()
            )));
        }
    }
    if oss.access_key_id.is_some() != oss.access_key_secret.is_some() {
        return Err(ConfigError::Meaning(
            "backend.oss.access_key_id and backend.oss.access_key_secret go together; one of them is not set"
                .to_owned(),
        ));
    }
    Ok(())
}

/// What this version does not do is refused, not ignored.
fn check_not_here(config: &Config) -> Result<(), ConfigError> {
    if config.p2p.enabled {
        return Err(ConfigError::Meaning(
            "p2p.enabled: this version has no peer-to-peer transport; set it to false".to_owned(),
        ));
    }
    if !config.cluster.etcd_endpoints.is_empty() || config.cluster.scheduler_endpoint.is_some() {
        return Err(ConfigError::Meaning(
            "cluster.*: this version runs on one node only; remove cluster.etcd_endpoints and cluster.scheduler_endpoint".to_owned(),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::{Sources, load::load};

    fn with(flags: &[(&str, &str)]) -> Result<(), String> {
        let flags = flags.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        let sources = Sources { file: Some(file.path().to_owned()), flags, ..Sources::default() };
        load(&sources).map(drop).map_err(|e| e.to_string())
    }

    #[test]
    fn oss_needs_a_region() {
        let error = with(&[("snapshot.repository_backend", "oss"), ("backend.oss.bucket", "b")]).unwrap_err();
        assert!(error.contains("backend.oss.region"), "{error}");
        with(&[
            ("snapshot.repository_backend", "oss"),
            ("backend.oss.bucket", "b"),
            ("backend.oss.region", "r"),
        ])
        .unwrap();
    }

    #[test]
    fn a_certificate_comes_from_one_side() {
        let files = [("tls.cert_path", "/cert.pem"), ("tls.key_path", "/key.pem")];
        with(&files).unwrap();
        with(&[("tls.names", "box.test, *.box.test, 10.0.0.1, ::1")]).unwrap();
        let error = with(&[files[0], files[1], ("tls.names", "box.test")]).unwrap_err();
        assert!(error.contains("tls.names"), "{error}");
    }

    #[test]
    fn a_ratio_is_a_number_with_or_without_a_fraction() {
        for fits in ["1", "1.5", " 20 "] {
            with(&[("orchestrator.memory_overcommit", fits)]).unwrap();
        }
        for wrong in ["-1", "a lot", "NaN", "inf"] {
            let error = with(&[("orchestrator.memory_overcommit", wrong)]).unwrap_err();
            assert!(error.contains("memory_overcommit"), "{error}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        for (key, value) in [
            ("api_addr", "nowhere"),
            ("home_path", "relative"),
            ("tls.cert_path", "/cert.pem"),
            ("tls.names", "a name"),
            ("machine.vcpu_count", "3"),
            ("pool.low_watermark", "100"),
            ("qemu.jail.first_uid", "1000"),
            ("orchestrator.default_sandbox_timeout_secs", "0"),
            ("orchestrator.memory_overcommit", "0.9"),
            ("orchestrator.memory_overcommit", "21"),
            ("orchestrator.stand_after_deadline_secs", "86401"),
            ("orchestrator.standby.count", "101"),
            ("orchestrator.standby.keep_secs", "0"),
            ("network.internal.veth_cidr", "example.com"),
            ("network.egress.always_denied_cidrs", "10.0.0.0/99"),
            ("p2p.enabled", "true"),
            ("cluster.etcd_endpoints", "http://127.0.0.1:2379"),
        ] {
            let error = with(&[(key, value)]).unwrap_err();
            let last = key.rsplit('.').next().unwrap();
            assert!(
                error.contains(last) || error.contains("machine") || error.contains("cluster"),
                "{key}: {error}"
            );
        }
    }
}
