//! Whose certificates the gate believes.

use std::{io, path::Path, sync::Arc};

use aenv_types::ProxyTls;
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};

/// What the gate checks servers with: the system's CAs, and further ones of the operator's.
pub struct Trust {
    /// For hosts of header rules.
    pub(crate) hosts: Arc<ClientConfig>,
    roots: Arc<RootCertStore>,
}

impl Trust {
    /// Loads the system's CAs, and those in `extra` (PEM).
    pub fn load(extra: Option<&Path>) -> io::Result<Self> {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "a CA of the system's cannot be read");
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        if let Some(path) = extra {
            add(&mut roots, &std::fs::read(path)?)?;
        }
        let mut hosts = config(roots.clone())?;
        hosts.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { hosts: Arc::new(hosts), roots: Arc::new(roots) })
    }

    /// For the way to a proxy: its own CAs, or all.
    pub(crate) fn proxy(&self, tls: &ProxyTls) -> io::Result<Arc<ClientConfig>> {
        let roots = match &tls.ca_cert {
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                add(&mut roots, pem.as_bytes())?;
                roots
            }
            None => (*self.roots).clone(),
        };
        config(roots).map(Arc::new)
    }
}

fn config(roots: RootCertStore) -> io::Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn add(roots: &mut RootCertStore, pem: &[u8]) -> io::Result<()> {
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| io::Error::other(error.to_string()))?;
        roots.add(certificate).map_err(io::Error::other)?;
    }
    Ok(())
}
