//! A certificate of the server's own making: signed by an authority of this node, made anew at each start and long before it ends.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use aenv_egress::{Authority, Purpose};
use aenv_types::Home;

/// How long a certificate is good for; clients refuse those of more than 398 days.
const LIFE: Duration = Duration::from_secs(90 * 24 * 3600);
/// How long it is used.
const USED: Duration = Duration::from_secs(30 * 24 * 3600);
/// Whoever is on the node needs no name.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Makes the files that [`super::tls::Certificate`] reads.
pub struct OwnCertificate {
    authority: Authority,
    names: Vec<String>,
    cert: PathBuf,
    key: PathBuf,
}

impl OwnCertificate {
    /// Makes one for these names. Clients trust it by `<home>/secrets/tls-ca.crt`, which stays.
    pub fn make(home: &Home, names: &[String]) -> anyhow::Result<Self> {
        let folder = home.secrets();
        let local = LOCAL.iter().map(|&name| name.to_owned());
        let own = Self {
            authority: Authority::open(&folder, Purpose::Api)?,
            names: names.iter().cloned().chain(local).collect(),
            cert: folder.join("tls.crt"),
            key: folder.join("tls.key"),
        };
        own.write()?;
        Ok(own)
    }

    /// Certificate and key.
    pub fn files(&self) -> (&Path, &Path) {
        (&self.cert, &self.key)
    }

    /// Makes another one again and again, for as long as the server runs.
    pub async fn renew(self) {
        loop {
            tokio::time::sleep(USED).await;
            if let Err(error) = self.write() {
                tracing::error!(%error, "the API's certificate could not be made anew");
            }
        }
    }

    fn write(&self) -> anyhow::Result<()> {
        let issued = self.authority.issue(&self.names, LIFE)?;
        aenv_durable::write_private(&self.key, issued.key.as_bytes())?;
        aenv_durable::write_private(&self.cert, issued.certificate.as_bytes())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::Response;
    use tokio::net::TcpListener;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::listen::{self, tls::Certificate};

    #[tokio::test]
    async fn who_trusts_the_authority_trusts_every_sandbox() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path(), folder.path());
        std::fs::create_dir_all(home.secrets()).unwrap();
        let names = ["box.test".to_owned(), "*.box.test".to_owned()];
        let first = OwnCertificate::make(&home, &names).unwrap();
        let authority = std::fs::read(home.secrets().join("tls-ca.crt")).unwrap();
        // After a restart the certificate is another one, and its authority the same.
        let own = OwnCertificate::make(&home, &names).unwrap();
        drop(first);
        let (cert, key) = own.files();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let acceptor = Some(Certificate::open(cert, key).unwrap().acceptor().unwrap());
        let answer = |_: http::Request<Body>| async { Response::new(Body::from("here")) };
        let server = tokio::spawn(listen::serve(listener, acceptor, listen::IDLE, shutdown.clone(), answer));

        let root = reqwest::Certificate::from_pem(&authority).unwrap();
        let ask = async |host: &str| {
            let client = reqwest::Client::builder().use_rustls_tls().tls_built_in_root_certs(false);
            let client = client.add_root_certificate(root.clone()).no_proxy().resolve(host, address);
            let url = format!("https://{host}:{}/", address.port());
            client.build().unwrap().get(url).send().await?.text().await
        };
        for host in ["box.test", "8000-iabc.box.test", "localhost", "127.0.0.1"] {
            assert_eq!(ask(host).await.unwrap(), "here", "{host}");
        }
        assert!(ask("elsewhere.test").await.is_err());
        shutdown.cancel();
        server.await.unwrap();
    }
}
