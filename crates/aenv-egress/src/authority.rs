//! Certificate authorities of the node's own. One is what guests with header rules trust, so that the gate can speak for the hosts of
//! those rules; another one may stand behind the API's own certificate.
//!
//! Their keys never leave the node. A guest is given the egress one's certificate only while its policy has header rules.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use thiserror::Error;
use time::OffsetDateTime;
use tokio_rustls::rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};

use crate::HostName;

const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);
const LEAF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Hosts whose certificates are kept.
const MAX_LEAVES: usize = 1024;

/// Why there is no authority.
#[derive(Debug, Error)]
pub enum AuthorityError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The key cannot be used.
    #[error(
        "{whose} cannot be used ({message}); remove its files from <home>/secrets to have a new one made"
    )]
    Unusable {
        /// Its name.
        whose: &'static str,
        /// Why.
        message: String,
    },
}

/// A certificate for a server, and its key, PEM.
pub struct Issued {
    /// The server's own certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// Which authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Header rules.
    Egress,
    /// The API and the data plane.
    Api,
}

impl Purpose {
    /// Key and certificate in the folder of secrets.
    fn files(self) -> [&'static str; 2] {
        match self {
            Self::Egress => ["egress-ca.key", "egress-ca.crt"],
            Self::Api => ["tls-ca.key", "tls-ca.crt"],
        }
    }

    /// The authority's common name, and that of what it signs.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Egress => ["AgentENV egress CA", "AgentENV egress"],
            Self::Api => ["AgentENV API CA", "AgentENV API"],
        }
    }

    fn unusable(self, error: impl std::fmt::Display) -> AuthorityError {
        AuthorityError::Unusable { whose: self.names()[0], message: error.to_string() }
    }
}

/// A certificate authority, and certificates that it has made.
pub struct Authority {
    purpose: Purpose,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
    leaf_key: KeyPair,
    leaves: Mutex<HashMap<HostName, (Instant, Arc<ServerConfig>)>>,
}

impl Authority {
    /// The authority for this purpose whose files are in this folder; makes it if there is none.
    pub fn open(folder: &Path, purpose: Purpose) -> Result<Self, AuthorityError> {
        let unusable = |error: rcgen::Error| purpose.unusable(error);
        let [key_file, certificate_file] = purpose.files().map(|name| folder.join(name));
        let (key, certificate) = match read(&key_file)? {
            Some(pem) => (KeyPair::from_pem(&pem).map_err(unusable)?, read(&certificate_file)?),
            None => {
                let key = KeyPair::generate().map_err(unusable)?;
                let written = aenv_durable::write_private(&key_file, key.serialize_pem().as_bytes());
                written.map_err(|source| AuthorityError::File { path: key_file, source })?;
                // Whatever certificate lies there is another key's.
                (key, None)
            }
        };
        let params = ca_params(purpose);
        let pem = match certificate {
            Some(pem) => pem,
            None => {
                let pem = params.self_signed(&key).map_err(unusable)?.pem();
                let written = aenv_durable::write_private(&certificate_file, pem.as_bytes());
                written.map_err(|source| AuthorityError::File { path: certificate_file, source })?;
                pem
            }
        };
        let leaf_key = KeyPair::generate().map_err(unusable)?;
        Ok(Self { purpose, pem, issuer: Issuer::new(params, key), leaf_key, leaves: Mutex::default() })
    }

    /// Its certificate, PEM.
    pub fn certificate(&self) -> &str {
        &self.pem
    }

    /// What the gate needs to speak for a host.
    pub(crate) fn server_config(&self, host: &HostName) -> Result<Arc<ServerConfig>, AuthorityError> {
        let mut leaves = self.leaves.lock();
        if let Some((made, config)) = leaves.get(host)
            && made.elapsed() < DAY
        {
            return Ok(Arc::clone(config));
        }
        if leaves.len() >= MAX_LEAVES {
            leaves.clear();
        }
        let config = Arc::new(self.config_for(host)?);
        leaves.insert(host.clone(), (Instant::now(), Arc::clone(&config)));
        Ok(config)
    }

    /// A certificate for these names and addresses (`*.` stands for one label), with a key of its own.
    pub fn issue(&self, names: &[String], life: Duration) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate().map_err(|error| self.purpose.unusable(error))?;
        let certificate = self.sign(names, life, &key)?.pem();
        Ok(Issued { certificate, key: key.serialize_pem() })
    }

    fn config_for(&self, host: &HostName) -> Result<ServerConfig, AuthorityError> {
        let leaf = self.sign(&[host.as_str().to_owned()], LEAF_LIFE, &self.leaf_key)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let chain: Vec<CertificateDer<'static>> = vec![leaf.der().clone()];
        let mut config = ServerConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|error| self.purpose.unusable(error))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn sign(&self, names: &[String], life: Duration, key: &KeyPair) -> Result<Certificate, AuthorityError> {
        let unusable = |error: rcgen::Error| self.purpose.unusable(error);
        let mut params = CertificateParams::new(names).map_err(unusable)?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        // A common name has 64 characters at most; clients look at the alternative names only.
        params.distinguished_name.push(DnType::CommonName, self.purpose.names()[1]);
        params.not_before = OffsetDateTime::from(SystemTime::now() - DAY);
        params.not_after = OffsetDateTime::from(SystemTime::now() + life);
        params.serial_number = Some(SerialNumber::from_slice(&serial()));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.signed_by(key, &self.issuer).map_err(unusable)
    }
}

fn ca_params(purpose: Purpose) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, purpose.names()[0]);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = OffsetDateTime::from(SystemTime::now() - DAY);
    params.not_after = OffsetDateTime::from(SystemTime::now() + CA_LIFE);
    params
}

/// A positive number of 16 bytes.
fn serial() -> [u8; 16] {
    let mut serial: [u8; 16] = rand::random();
    serial[0] = (serial[0] & 0x7f) | 0x40;
    serial
}

fn read(path: &Path) -> Result<Option<String>, AuthorityError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(AuthorityError::File { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tokio_rustls::rustls::{
        ClientConfig, ClientConnection, RootCertStore, ServerConnection, pki_types::pem::PemObject,
    };

    use super::*;

    /// Whether a client that trusts `pem` accepts what the authority says for `host`.
    fn is_accepted(pem: &str, authority: &Authority, host: &str, asked: &'static str) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client = ClientConnection::new(Arc::new(config), asked.try_into().unwrap()).unwrap();
        let mut server =
            ServerConnection::new(authority.server_config(&host.parse().unwrap()).unwrap()).unwrap();
        for _ in 0..4 {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut bytes.as_slice()).unwrap();
            if client.process_new_packets().is_err() {
                return false;
            }
        }
        !client.is_handshaking()
    }

    #[test]
    fn it_is_the_same_after_a_restart_and_speaks_for_one_host_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let pem = Authority::open(folder.path(), Purpose::Egress).unwrap().certificate().to_owned();
        let again = Authority::open(folder.path(), Purpose::Egress).unwrap();
        assert_eq!(again.certificate(), pem);
        assert!(is_accepted(&pem, &again, "api.example.com", "api.example.com"));
        assert!(!is_accepted(&pem, &again, "api.example.com", "www.example.com"));
        let other = Authority::open(tempfile::tempdir().unwrap().path(), Purpose::Egress).unwrap();
        assert!(!is_accepted(other.certificate(), &again, "api.example.com", "api.example.com"));
        let mode = std::fs::metadata(folder.path().join("egress-ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn damage_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("egress-ca.key"), "no key").unwrap();
        assert!(matches!(
            Authority::open(folder.path(), Purpose::Egress),
            Err(AuthorityError::Unusable { .. })
        ));
    }
}
