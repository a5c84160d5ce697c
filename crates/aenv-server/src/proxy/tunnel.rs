//! Upgraded connections as raw tunnels, and TLS to ports that want it.

use std::{io, sync::Arc};

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, DigitallySignedStruct, Error as TlsError, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        crypto::{CryptoProvider, ring},
        pki_types::{CertificateDer, ServerName, UnixTime},
    },
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Joins the two sides for as long as both live and the sandbox runs. Either side may close its half first.
pub async fn join(client: OnUpgrade, guest: OnUpgrade, ended: CancellationToken, connection: DropGuard) {
    let work = async {
        let (client, guest) = tokio::try_join!(client, guest)?;
        pump(client, guest).await;
        Ok::<_, hyper::Error>(())
    };
    tokio::select! {
        biased;
        () = ended.cancelled() => {}
        outcome = work => {
            if let Err(error) = outcome {
                tracing::debug!(%error, "an upgrade was agreed but not made");
            }
        }
    }
    drop(connection);
}

async fn pump(client: Upgraded, guest: Upgraded) {
    let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
    // A reset by either side is the ordinary end of a tunnel.
    let _ = tokio::io::copy_bidirectional(&mut client, &mut guest).await;
    let _ = client.shutdown().await;
}

/// Speaks TLS over a connection to a guest. Its certificate is not checked: the way there is the host's own, and the guest
/// could present anything.
pub async fn wrap_tls(stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate { provider }))
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

#[derive(Debug)]
struct AnyCertificate {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
