//! Reaching servers that listen on the guest's loopback only.
//!
//! A server bound to `127.0.0.1` refuses what comes over the guest's link. Instead of watching `/proc/net/tcp` in every guest
//! and opening listeners beside (which costs wake-ups in idle guests, is late by its interval, and takes the port away from a server
//! that later binds it on all addresses), the host asks when it is needed: a refused dial is tried again through envd, which
//! connects on loopback and hands the bytes through (`GET /tunnel/{port}` with `Upgrade: tcp`).

use std::{io, sync::Arc, time::Duration};

use aenv_types::{Dial, DialFuture};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::PORT;

/// How long envd may take to answer.
const ANSWER_BOUND: Duration = Duration::from_secs(10);
/// No answer of envd has a longer head.
const MAX_HEAD: usize = 4096;

/// A [`Dial`] that also reaches listeners on the guest's loopback. It costs nothing while dials succeed.
pub struct LoopbackDial<D: ?Sized> {
    direct: Arc<D>,
}

impl<D: ?Sized> LoopbackDial<D> {
    /// Wraps the guest's own dial.
    pub fn new(direct: Arc<D>) -> Self {
        Self { direct }
    }
}

impl<D: Dial + ?Sized> Dial for LoopbackDial<D> {
    fn dial(&self, port: u16) -> DialFuture<'_> {
        Box::pin(async move {
            match self.direct.dial(port).await {
                Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused && port != PORT => {
                    let stream = self.direct.dial(PORT).await?;
                    timeout(ANSWER_BOUND, open(stream, port))
                        .await
                        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                }
                other => other,
            }
        })
    }
}

/// Asks envd at the other end of `stream` to connect it with `port` on loopback.
async fn open(mut stream: TcpStream, port: u16) -> io::Result<TcpStream> {
    let request =
        format!("GET /tunnel/{port} HTTP/1.1\r\nHost: envd\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let head = read_head(&mut stream).await?;
    match head.split(' ').nth(1) {
        Some("101") => Ok(stream),
        Some("502") => Err(io::Error::new(
            io::ErrorKind::ConnectionRefused,
            format!("nothing listens on port {port} in the guest"),
        )),
        _ => {
            let line = head.lines().next().unwrap_or_default();
            Err(io::Error::other(format!("envd refused a tunnel to port {port}: {line}")))
        }
    }
}

/// Reads an HTTP head and not one byte more: what follows belongs to the tunnel.
async fn read_head(stream: &mut TcpStream) -> io::Result<String> {
    let mut head = Vec::new();
    let mut ahead = [0; MAX_HEAD];
    while !head.ends_with(b"\r\n\r\n") {
        let seen = stream.peek(&mut ahead).await?;
        if seen == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let before = head.len();
        head.extend_from_slice(&ahead[..seen]);
        let from = before.saturating_sub(3);
        if let Some(end) = head[from..].windows(4).position(|window| window == b"\r\n\r\n") {
            head.truncate(from + end + 4);
        }
        if head.len() > MAX_HEAD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the head of envd's answer is too long"));
        }
        let taken = head.len() - before;
        stream.read_exact(&mut ahead[..taken]).await?;
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    struct Fixed {
        envd: std::net::SocketAddr,
    }

    impl Dial for Fixed {
        fn dial(&self, port: u16) -> DialFuture<'_> {
            Box::pin(async move {
                if port == PORT {
                    TcpStream::connect(self.envd).await
                } else {
                    Err(io::ErrorKind::ConnectionRefused.into())
                }
            })
        }
    }

    async fn dial_against(answer: &'static str) -> io::Result<TcpStream> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let envd = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_head(&mut stream).await.unwrap();
            assert!(head.starts_with("GET /tunnel/8080 HTTP/1.1\r\n"), "{head}");
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream
        });
        let dialed = LoopbackDial::new(Arc::new(Fixed { envd })).dial(8080).await;
        drop(server.await.unwrap());
        dialed
    }

    #[tokio::test]
    async fn bytes_right_after_the_head_are_the_tunnels() {
        let answer = "HTTP/1.1 101 Switching Protocols\r\nupgrade: tcp\r\n\r\nSSH-2.0-banner";
        let mut stream = dial_against(answer).await.unwrap();
        let mut banner = String::new();
        stream.read_to_string(&mut banner).await.unwrap();
        assert_eq!(banner, "SSH-2.0-banner");
    }

    #[tokio::test]
    async fn closed_port_stays_refused() {
        let error = dial_against("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
