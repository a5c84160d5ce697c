//! TLS with a certificate of the operator's own, read again when its files change.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::RwLock;
use thiserror::Error;
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::{ClientHello, ResolvesServerCert},
        sign::CertifiedKey,
    },
};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read as what it should be.
    #[error("{} cannot be used: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        message: String,
    },
    /// The two files are not of one certificate.
    #[error("{} and {} do not belong together: {message}", cert.display(), key.display())]
    Pair {
        /// The chain.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
        /// Why.
        message: String,
    },
    /// The library refused.
    #[error("TLS cannot be set up: {0}")]
    Setup(String),
}

/// The certificate of a listener, as it is now. Cheap to clone.
#[derive(Clone)]
pub struct Certificate {
    files: Arc<Files>,
    current: Arc<RwLock<Arc<CertifiedKey>>>,
}

struct Files {
    cert: PathBuf,
    key: PathBuf,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificate({})", self.files.cert.display())
    }
}

impl Certificate {
    /// Reads a chain (PEM, the server's own certificate first) and its private key (PEM).
    pub fn open(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let files = Files { cert: cert.to_owned(), key: key.to_owned() };
        let current = read(&files)?;
        Ok(Self { files: Arc::new(files), current: Arc::new(RwLock::new(Arc::new(current))) })
    }

    /// An acceptor that offers HTTP/2 and HTTP/1.1, and takes TLS 1.2 and 1.3.
    pub fn acceptor(&self) -> Result<TlsAcceptor, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = versions.map_err(|error| TlsError::Setup(error.to_string()))?;
        let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(self.clone()));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// Reads the files again whenever they change. What cannot be used is said in the log, and the certificate of before stays.
    pub async fn follow(self) {
        let mut seen = self.stamp();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = self.stamp();
            if now != seen {
                seen = now;
                self.reload();
            }
        }
    }

    fn reload(&self) {
        match read(&self.files) {
            Ok(fresh) => {
                *self.current.write() = Arc::new(fresh);
                tracing::info!(cert = %self.files.cert.display(), "the TLS certificate was read again");
            }
            Err(error) => {
                tracing::error!(%error, "the new TLS certificate is not used; the one before stays")
            }
        }
    }

    /// What changes when a file is written or replaced.
    fn stamp(&self) -> [Option<(u64, i64, i64, u64)>; 2] {
        let of = |path: &Path| {
            let meta = std::fs::metadata(path).ok()?;
            Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
        };
        [of(&self.files.cert), of(&self.files.key)]
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().clone())
    }
}

fn read(files: &Files) -> Result<CertifiedKey, TlsError> {
    let unusable = |path: &Path, message: String| TlsError::File { path: path.to_owned(), message };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unusable(&files.cert, error.to_string()))?;
    if chain.is_empty() {
        return Err(unusable(&files.cert, "it has no certificate in PEM form".to_owned()));
    }
    let key =
        PrivateKeyDer::from_pem_file(&files.key).map_err(|error| unusable(&files.key, error.to_string()))?;
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| TlsError::Pair {
        cert: files.cert.clone(),
        key: files.key.clone(),
        message: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::Response;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tokio::net::TcpListener;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::listen;

    struct Authority {
        issuer: CertifiedIssuer<'static, KeyPair>,
    }

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
        }

        /// Writes a certificate for 127.0.0.1 and its key.
        fn issue(&self, cert: &Path, key: &Path) {
            let pair = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
            std::fs::write(cert, params.signed_by(&pair, &self.issuer).unwrap().pem()).unwrap();
            std::fs::write(key, pair.serialize_pem()).unwrap();
        }

        fn client(&self) -> reqwest::ClientBuilder {
            let root = reqwest::Certificate::from_pem(self.issuer.pem().as_bytes()).unwrap();
            reqwest::Client::builder().use_rustls_tls().add_root_certificate(root).no_proxy()
        }
    }

    #[tokio::test]
    async fn both_protocols_and_a_new_certificate_without_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let (first, second) = (Authority::new(), Authority::new());
        first.issue(&cert, &key);
        let certificate = Certificate::open(&cert, &key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}/", listener.local_addr().unwrap());
        let shutdown = CancellationToken::new();
        let answer = |request: http::Request<Body>| async move {
            Response::new(Body::from(format!("{:?}", request.version())))
        };
        let acceptor = Some(certificate.acceptor().unwrap());
        let server = tokio::spawn(listen::serve(listener, acceptor, listen::IDLE, shutdown.clone(), answer));

        let ask = async |client: reqwest::ClientBuilder| {
            client.build().unwrap().get(&url).send().await?.text().await
        };
        assert_eq!(ask(first.client()).await.unwrap(), "HTTP/2.0", "ALPN chooses HTTP/2");
        assert_eq!(ask(first.client().http1_only()).await.unwrap(), "HTTP/1.1");
        assert!(ask(second.client()).await.is_err(), "another authority's client takes no such certificate");
        let plain = reqwest::get(url.replace("https", "http")).await;
        assert!(plain.is_err(), "plain HTTP is not answered");

        // What cannot be used changes nothing.
        let before = std::fs::read(&key).unwrap();
        std::fs::write(&key, "no key").unwrap();
        certificate.reload();
        assert!(ask(first.client()).await.is_ok());
        std::fs::write(&key, before).unwrap();
        let stamp = certificate.stamp();
        second.issue(&cert, &key);
        assert_ne!(certificate.stamp(), stamp, "the change is seen");
        certificate.reload();
        assert!(ask(second.client()).await.is_ok());
        assert!(ask(first.client()).await.is_err());
        shutdown.cancel();
        server.await.unwrap();
    }

    #[test]
    fn wrong_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        Authority::new().issue(&path("a.pem"), &path("a.key"));
        Authority::new().issue(&path("b.pem"), &path("b.key"));
        std::fs::write(path("empty"), "").unwrap();
        let error =
            |cert: &str, key: &str| Certificate::open(&path(cert), &path(key)).unwrap_err().to_string();
        assert!(error("none", "a.key").contains("none"));
        assert!(error("empty", "a.key").contains("no certificate"));
        assert!(error("a.pem", "empty").contains("empty"));
        assert!(error("a.pem", "b.key").contains("do not belong together"));
    }
}
