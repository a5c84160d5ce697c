//! A real registry on the loopback interface, with and without a password, and one that breaks off.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use aenv_image::{ImageError, ImageSettings, RegistryAuth};
use aenv_types::Token;

use crate::support::{Layout, Node, Packing, Tar, names, run};

pub struct RegistryProcess {
    child: Child,
    pub port: u16,
}

impl RegistryProcess {
    pub fn start(folder: &Path, with_password: WithPassword) -> Self {
        let mut config = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '127.0.0.1:0'}}\n",
            folder.join("data").display()
        );
        if matches!(with_password, WithPassword::Yes) {
            let file = folder.join("htpasswd");
            // tester:secret
            fs::write(&file, "tester:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n")
                .unwrap();
            config += &format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", file.display());
        }
        fs::write(folder.join("config.yml"), config).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(folder.join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("docker-registry runs (Debian: apt-get install docker-registry)");
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let port = log.find_map(|line| {
            let (_, rest) = line.split_once("listening on 127.0.0.1:")?;
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        });
        std::thread::spawn(move || log.for_each(drop));
        Self { child, port: port.expect("the registry ended before it listened") }
    }

    fn push(&self, layout: &str, name: &str, credentials: &[&str]) {
        run(Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"])
            .args(credentials)
            .arg(layout)
            .arg(format!("docker://127.0.0.1:{}/{name}", self.port)));
    }
}

#[derive(Clone, Copy)]
pub enum WithPassword {
    Yes,
    No,
}

impl Drop for RegistryProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn image(node: &Node) -> Layout {
    let mut layout = Layout::new(node.scratch("layout"));
    let noise: Vec<u8> = (0..600_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    layout.layer(&Tar::default().folder("etc/").file("etc/noise", &noise).end(), Packing::Gzip);
    layout.layer(&Tar::default().file("etc/two", b"2").end(), Packing::Gzip);
    layout
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_by_tag_and_by_digest() {
    let node = Node::start();
    let registry = RegistryProcess::start(&node.scratch("registry"), WithPassword::No);
    registry.push(&image(&node).finish(), "team/app:1", &[]);
    let base = format!("127.0.0.1:{}/team/app", registry.port);

    let (pulled, _) = node.pull(&format!("{base}:1")).await.unwrap();
    let mounted = node.mount(&pulled).await;
    assert_eq!(names(&mounted.point.join("etc")), ["noise", "two"]);
    mounted.unmount().await;
    let (by_digest, _) = node.pull(&format!("{base}@{}", pulled.manifest)).await.unwrap();
    assert_eq!(by_digest.layers, pulled.layers);

    for missing in [format!("{base}:2"), format!("127.0.0.1:{}/nothing:1", registry.port)] {
        let result = node.pull(&missing).await;
        assert!(matches!(result, Err(ImageError::NotFound { .. })), "{result:?}");
    }
    node.assert_clean(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_come_from_the_caller_or_from_docker() {
    let folder = tempfile::tempdir().unwrap();
    let docker_config = folder.path().join("config.json");
    let settings = ImageSettings { docker_config: Some(docker_config.clone()), ..ImageSettings::default() };
    let node = Node::with(settings);
    let registry = RegistryProcess::start(&node.scratch("registry"), WithPassword::Yes);
    registry.push(&image(&node).finish(), "app:1", &["--dest-creds", "tester:secret"]);
    let name = format!("127.0.0.1:{}/app:1", registry.port);

    let result = node.pull(&name).await;
    assert!(matches!(result, Err(ImageError::Denied { .. })), "{result:?}");
    let auth = |password: &str| {
        Some(RegistryAuth::Password { username: "tester".into(), password: Token::from(password.to_owned()) })
    };
    let reference = name.parse().unwrap();
    let result = node.images.pull(&reference, auth("wrong"), &|_| {}).await;
    assert!(matches!(result, Err(ImageError::Denied { .. })), "{result:?}");
    let pulled = node.images.pull(&reference, auth("secret"), &|_| {}).await.unwrap();

    // "tester:secret"
    let stored =
        format!(r#"{{"auths":{{"127.0.0.1:{}":{{"auth":"dGVzdGVyOnNlY3JldA=="}}}}}}"#, registry.port);
    fs::write(docker_config, stored).unwrap();
    assert_eq!(node.pull(&name).await.unwrap().0.layers, pulled.layers);
}

#[tokio::test(flavor = "multi_thread")]
async fn short_names_are_searched_and_foreign_registries_refused() {
    let folder = tempfile::tempdir().unwrap();
    let registry = RegistryProcess::start(folder.path(), WithPassword::No);
    let empty_folder = tempfile::tempdir().unwrap();
    let empty = RegistryProcess::start(empty_folder.path(), WithPassword::No);
    let hosts = [empty.port, registry.port].map(|port| format!("127.0.0.1:{port}"));
    let node = Node::with(ImageSettings {
        search_registries: hosts.to_vec(),
        allowed_registries: hosts.to_vec(),
        ..ImageSettings::default()
    });
    registry.push(&image(&node).finish(), "app:1", &[]);
    let (pulled, _) = node.pull("app:1").await.unwrap();
    assert_eq!(pulled.reference, format!("{}/app:1", hosts[1]));
    let result = node.pull("other:1").await;
    let both = |message: &str| hosts.iter().all(|host| message.contains(host));
    assert!(matches!(&result, Err(ImageError::NotFound { message, .. }) if both(message)), "{result:?}");
    let result = node.pull("registry.example/app:1").await;
    assert!(
        matches!(&result, Err(ImageError::Denied { message, .. }) if message.contains("allowed_registries")),
        "{result:?}"
    );
}

/// Passes requests on to a registry, and cuts each answer off after some bytes.
fn cutting_proxy(target: u16, allowance: usize) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            counted.fetch_add(1, Ordering::Relaxed);
            let mut server = TcpStream::connect(("127.0.0.1", target)).unwrap();
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || {
                let mut buf = vec![0; allowance];
                let mut left = allowance;
                while left > 0 {
                    match server.read(&mut buf[..left]) {
                        Ok(0) | Err(_) => break,
                        Ok(got) if client.write_all(&buf[..got]).is_err() => break,
                        Ok(got) => left -= got,
                    }
                }
                let _ = client.shutdown(std::net::Shutdown::Both);
                let _ = server.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (port, connections)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_is_taken_up_where_it_was() {
    let node = Node::start();
    let registry = RegistryProcess::start(&node.scratch("registry"), WithPassword::No);
    registry.push(&image(&node).finish(), "app:1", &[]);
    let (port, connections) = cutting_proxy(registry.port, 700_000);
    let (broken, _) = node.pull(&format!("127.0.0.1:{port}/app:1")).await.unwrap();
    assert!(connections.load(Ordering::Relaxed) > 2, "the proxy cut nothing off");
    let (whole, _) = node.pull(&format!("127.0.0.1:{}/app:1", registry.port)).await.unwrap();
    assert_eq!(broken.layers, whole.layers);
    node.assert_clean(2).await;
}

/// Answers everything with one status and body.
pub fn rude_server(status: &'static str, body: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let mut request = [0; 4096];
            let _ = client.read(&mut request);
            let length = body.len();
            let _ = write!(
                client,
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_registry_answers_is_a_typed_error() {
    let node = Node::start();
    type Check = fn(&ImageError) -> bool;
    let denied: Check = |error| matches!(error, ImageError::Denied { .. });
    let absent: Check = |error| matches!(error, ImageError::NotFound { .. });
    let unreachable: Check = |error| matches!(error, ImageError::Unreachable { .. });
    let damaged: Check = |error| matches!(error, ImageError::Damaged { .. });
    let answers = [
        ("401 Unauthorized", "", denied),
        ("403 Forbidden", "no", denied),
        ("404 Not Found", "<html>no</html>", absent),
        ("429 Too Many Requests", "slowly", unreachable),
        ("500 Internal Server Error", "oops", unreachable),
        ("200 OK", "<html>a page</html>", damaged),
    ];
    let pulls = answers.map(|(status, body, check)| {
        let name = format!("127.0.0.1:{}/app:1", rude_server(status, body));
        let node = &node;
        async move {
            let error = node.pull(&name).await.unwrap_err();
            assert!(check(&error), "{status}: {error:?}");
        }
    });
    futures::future::join_all(pulls).await;
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = node.pull(&format!("127.0.0.1:{free}/app:1")).await.unwrap_err();
    assert!(unreachable(&error), "{error:?}");
    node.assert_clean(0).await;
}
