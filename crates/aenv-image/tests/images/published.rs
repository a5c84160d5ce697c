//! Images in overlaybd format: made, published, and used where they are, without fetching them.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use aenv_image::{
    Compression, Destination, ImageError, ImageReference, PublishAs, PublishProgress, Published,
    PullProgress, RegistryAuth,
};
use aenv_types::{LayerName, Token};
use serde_json::{Value, json};

use crate::{
    registry::{RegistryProcess, WithPassword, rude_server},
    support::{Layout, Node, Packing, Tar, listing, names},
};

/// Bytes of a file that nobody asks for.
const BULK: u32 = 24 << 20;

fn image(node: &Node) -> String {
    let mut layout = Layout::new(node.scratch("layout"));
    let noise: Vec<u8> = (0..BULK / 4).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let base = Tar::default().folder("etc/").file("etc/one", b"1").file("etc/noise", &noise);
    layout.layer(&base.end(), Packing::Gzip);
    layout.layer(&Tar::default().file("etc/two", b"2").file("etc/.wh.one", b"").end(), Packing::Plain);
    layout.finish()
}

fn auth() -> RegistryAuth {
    RegistryAuth::Password { username: "tester".into(), password: Token::from("secret".to_owned()) }
}

async fn convert(
    node: &Node,
    from: &str,
    compression: Compression,
    to: &str,
    identity: PublishAs,
) -> Result<(Published, Vec<PublishProgress>), ImageError> {
    let seen = Mutex::new(Vec::new());
    let to = Destination { reference: to.parse().unwrap(), identity };
    let from: ImageReference = from.parse().unwrap();
    let watcher = |step| seen.lock().unwrap().push(step);
    let published = node.images.convert(&from, None, compression, &to, &watcher).await?;
    Ok((published, seen.into_inner().unwrap()))
}

/// Passes requests on and counts the bytes of the answers.
fn counting_proxy(target: u16) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let mut server = TcpStream::connect(("127.0.0.1", target)).unwrap();
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let count = counted.clone();
            std::thread::spawn(move || {
                let mut buf = vec![0; 64 << 10];
                while let Ok(got @ 1..) = server.read(&mut buf) {
                    count.fetch_add(got as u64, Ordering::SeqCst);
                    if client.write_all(&buf[..got]).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (port, count)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_converted_once_and_read_in_place_elsewhere() {
    let maker = Node::start();
    let registry = RegistryProcess::start(&maker.scratch("registry"), WithPassword::Yes);
    let source = image(&maker);
    let name = |repository: &str| format!("127.0.0.1:{}/{repository}:1", registry.port);
    let known = || PublishAs::Known(auth());

    let denied = convert(&maker, &source, Compression::Lz4, &name("app"), PublishAs::Nobody).await;
    assert!(matches!(denied, Err(ImageError::Denied { .. })), "{denied:?}");
    assert!(names(&maker.home.layers()).is_empty(), "work was done for somebody who may not publish");

    let (first, steps) = convert(&maker, &source, Compression::Lz4, &name("app"), known()).await.unwrap();
    assert_eq!((first.layers, first.sent), (2, first.bytes));
    assert!(steps.contains(&PublishProgress::Packing { index: 1 }), "{steps:?}");
    // What is there is not sent again, and what the registry has under another name neither.
    for repository in ["app", "other"] {
        let (again, steps) =
            convert(&maker, &source, Compression::Lz4, &name(repository), known()).await.unwrap();
        assert_eq!((again.manifest, again.sent), (first.manifest, 0), "{repository}");
        assert!(!steps.iter().any(|step| matches!(step, PublishProgress::Packing { .. })), "{steps:?}");
    }
    let refused = convert(&maker, &name("app"), Compression::Lz4, &name("twice"), known()).await;
    assert!(refused.is_err(), "{refused:?}");

    let (port, count) = counting_proxy(registry.port);
    let user = Node::start();
    let reference: ImageReference = format!("127.0.0.1:{port}/app:1").parse().unwrap();
    let seen = Mutex::new(Vec::new());
    let pulled =
        user.images.pull(&reference, Some(auth()), &|step| seen.lock().unwrap().push(step)).await.unwrap();
    assert_eq!((pulled.manifest, pulled.layers.len()), (first.manifest, 2));
    assert_eq!(pulled.disk_size, 10 << 30);
    assert_eq!(pulled.guest.env.get("PATH").map(String::as_str), Some("/bin"));
    assert!(seen.lock().unwrap().contains(&PullProgress::InPlace { index: 1 }));
    assert!(names(&user.home.layers()).iter().all(|name| name.ends_with(".remote")));
    let looked = count.load(Ordering::SeqCst);
    let mounted = user.mount(&pulled).await;
    assert_eq!(fs::read(mounted.point.join("etc/two")).unwrap(), b"2");
    assert_eq!(names(&mounted.point.join("etc")), ["noise", "two"]);
    let read = count.load(Ordering::SeqCst);
    println!(
        "{} bytes of layers; {looked} read to look at them, {read} with mount, check and a file",
        first.bytes
    );
    assert!(read < first.bytes / 4, "{read} of {} bytes were read", first.bytes);

    // File by file what an ordinary pull makes.
    let (ordinary, _) = maker.pull(&source).await.unwrap();
    let beside = maker.mount(&ordinary).await;
    assert!(listing(&mounted.point) == listing(&beside.point));
    assert!(count.load(Ordering::SeqCst) > u64::from(BULK));
    mounted.unmount().await;
    beside.unmount().await;
    let before = count.load(Ordering::SeqCst);
    assert_eq!(user.images.pull(&reference, Some(auth()), &|_| {}).await.unwrap().layers, pulled.layers);
    assert!(count.load(Ordering::SeqCst) - before < 10_000, "the second pull reads manifest and config only");
    user.assert_clean(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_are_written_pushed_and_used_in_place() {
    let node = Node::start();
    let folder = node.scratch("converted");
    let to = format!("oci:{}:app", folder.display());
    let source = image(&node);
    let (made, _) = convert(&node, &source, Compression::Zstd, &to, PublishAs::Nobody).await.unwrap();
    let (again, _) = convert(&node, &source, Compression::Zstd, &to, PublishAs::Nobody).await.unwrap();
    assert_eq!((again.manifest, again.sent), (made.manifest, 0));

    let user = Node::start();
    let (pulled, _) = user.pull(&to).await.unwrap();
    let mounted = user.mount(&pulled).await;
    assert_eq!(fs::read(mounted.point.join("etc/two")).unwrap(), b"2");
    mounted.unmount().await;

    let registry = RegistryProcess::start(&node.scratch("registry"), WithPassword::No);
    let name = format!("127.0.0.1:{}/app:1", registry.port);
    let target = Destination { reference: name.parse().unwrap(), identity: PublishAs::Nobody };
    let from: ImageReference = to.parse().unwrap();
    let pushed = user.images.push(&from, &target, &|_| {}).await.unwrap();
    assert_eq!((pushed.manifest, pushed.sent), (made.manifest, made.bytes));
    assert_eq!(user.images.push(&from, &target, &|_| {}).await.unwrap().sent, 0);
    let (from_registry, _) = user.pull(&name).await.unwrap();
    assert_eq!(from_registry.manifest, made.manifest);
    // Of another place they are other layers, whatever digests it claims.
    assert_ne!(from_registry.layers, pulled.layers);

    let digests: Vec<LayerName> = pulled.layers.iter().map(|layer| layer.name).collect();
    assert!(digests.iter().all(|name| matches!(name, LayerName::Digest(_))));
    for (what, hurt) in damages() {
        let hurt_folder = node.scratch(&format!("hurt-{what}"));
        let reference = hurt(&folder, &hurt_folder);
        let result = user.pull(&reference).await;
        assert!(matches!(result, Err(ImageError::Damaged { .. })), "{what}: {result:?}");
    }
}

type Damage = fn(&PathBuf, &PathBuf) -> String;

/// Images that are not what they say.
fn damages() -> Vec<(&'static str, Damage)> {
    /// The layout once more, its manifest changed, and perhaps the bytes of its first layer.
    fn copy(from: &Path, to: &Path, change: impl Fn(&mut Value, &mut Vec<u8>)) -> String {
        let read = |digest: &str| fs::read(from.join("blobs/sha256").join(&digest[7..])).unwrap();
        let index: Value = serde_json::from_slice(&fs::read(from.join("index.json")).unwrap()).unwrap();
        let mut manifest: Value =
            serde_json::from_slice(&read(index["manifests"][0]["digest"].as_str().unwrap())).unwrap();
        let layout = Layout::new(to.to_owned());
        let mut first = read(manifest["layers"][0]["digest"].as_str().unwrap());
        layout.blob(&read(manifest["layers"][1]["digest"].as_str().unwrap()));
        layout.blob(&read(manifest["config"]["digest"].as_str().unwrap()));
        change(&mut manifest, &mut first);
        let name = manifest["layers"][0]["digest"].as_str().unwrap()[7..].to_owned();
        fs::write(to.join("blobs/sha256").join(name), &first).unwrap();
        let (digest, size) = layout.blob(manifest.to_string().as_bytes());
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest.to_string(), "size": size,
        }]});
        fs::write(to.join("index.json"), index.to_string()).unwrap();
        format!("oci:{}", to.display())
    }
    fn resized(manifest: &mut Value, bytes: &[u8]) {
        let layer = &mut manifest["layers"][0];
        layer["size"] = bytes.len().into();
        layer["annotations"]["containerd.io/snapshot/overlaybd/blob-size"] = bytes.len().to_string().into();
    }
    vec![
        ("shorter-than-said", |from, to| copy(from, to, |_, bytes| bytes.truncate(bytes.len() - 512))),
        ("cut-off", |from, to| {
            copy(from, to, |manifest, bytes| {
                bytes.truncate(bytes.len() / 2);
                resized(manifest, bytes);
            })
        }),
        ("no-layer", |from, to| copy(from, to, |_, bytes| bytes.fill(7))),
        ("lying-table", |from, to| {
            copy(from, to, |_, bytes| {
                // The jump table lies before the trailer, and the tar's two blocks of zeros follow that.
                let at = bytes.len() - 1024 - 512 - 2048;
                bytes[at..at + 64].fill(0xee);
            })
        }),
        ("mixed", |from, to| {
            copy(from, to, |manifest, _| {
                manifest["layers"][1].as_object_mut().unwrap().remove("annotations");
            })
        }),
        ("other-size", |from, to| {
            copy(from, to, |manifest, _| {
                manifest["layers"][1]["annotations"]["containerd.io/snapshot/overlaybd/blob-size"] =
                    "1".into();
            })
        }),
        ("too-few", |from, to| {
            copy(from, to, |manifest, _| {
                manifest["layers"].as_array_mut().unwrap().pop();
            })
        }),
    ]
}

/// A registry with the image of a layout, whose layers are answered as `layer` says: the range that was asked for, and the file.
fn registry_of(
    folder: PathBuf,
    layer: impl Fn(usize, usize, &[u8]) -> (String, Vec<u8>) + Send + Sync + 'static,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let index: Value = serde_json::from_slice(&fs::read(folder.join("index.json")).unwrap()).unwrap();
    let blob = move |digest: &str| fs::read(folder.join("blobs/sha256").join(&digest[7..])).unwrap();
    let manifest = blob(index["manifests"][0]["digest"].as_str().unwrap());
    let layer = Arc::new(layer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let Some(first) = lines.next() else { continue };
            let headers: Vec<String> =
                lines.take_while(|line| !line.is_empty()).map(|line| line.to_lowercase()).collect();
            let range = headers.iter().find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-'));
            let path = first.split(' ').nth(1).unwrap_or_default();
            let (head, body) = match (path, range) {
                ("/v2/", _) => ("HTTP/1.1 200 OK\r\n".to_owned(), Vec::new()),
                (path, _) if path.contains("/manifests/") => (
                    "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\n"
                        .to_owned(),
                    manifest.clone(),
                ),
                (path, Some((from, to))) => {
                    layer(from.parse().unwrap(), to.parse().unwrap(), &blob(path.rsplit('/').next().unwrap()))
                }
                (path, None) => ("HTTP/1.1 200 OK\r\n".to_owned(), blob(path.rsplit('/').next().unwrap())),
            };
            let rest = format!("Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(&[head.as_bytes(), rest.as_bytes(), &body].concat());
        }
    });
    port
}

fn partial(from: usize, to: usize, whole: &[u8]) -> (String, Vec<u8>) {
    let head =
        format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{to}/{}\r\n", whole.len());
    (head, whole[from..=to].to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn registries_that_refuse_or_lie_are_typed_errors() {
    let node = Node::start();
    let folder = node.scratch("converted");
    let to = format!("oci:{}", folder.display());
    convert(&node, &image(&node), Compression::Lz4, &to, PublishAs::Nobody).await.unwrap();
    let user = Node::start();

    let honest = registry_of(folder.clone(), partial);
    user.pull(&format!("127.0.0.1:{honest}/app:1")).await.unwrap();
    let layers = names(&user.home.layers()).len();

    type Layer = fn(usize, usize, &[u8]) -> (String, Vec<u8>);
    type Check = fn(&ImageError) -> bool;
    let denied: Check = |error| matches!(error, ImageError::Denied { .. });
    let unreachable: Check = |error| matches!(error, ImageError::Unreachable { .. });
    let damaged: Check = |error| matches!(error, ImageError::Damaged { .. });
    let answers: Vec<(&str, Layer, Check)> = vec![
        ("401", |_, _, _| ("HTTP/1.1 401 Unauthorized\r\n".into(), vec![]), denied),
        ("403", |_, _, _| ("HTTP/1.1 403 Forbidden\r\n".into(), vec![]), denied),
        ("404", |_, _, _| ("HTTP/1.1 404 Not Found\r\n".into(), vec![]), unreachable),
        ("429", |_, _, _| ("HTTP/1.1 429 Too Many Requests\r\n".into(), vec![]), unreachable),
        ("503", |_, _, _| ("HTTP/1.1 503 Service Unavailable\r\n".into(), vec![]), unreachable),
        (
            "a page",
            |_, _, _| ("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n".into(), b"<html>".to_vec()),
            damaged,
        ),
        ("whole blobs", |_, _, whole| ("HTTP/1.1 200 OK\r\n".into(), whole.to_vec()), unreachable),
        (
            "another range",
            |from, to, whole| {
                let (_, body) = partial(from, to, whole);
                (format!("HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-{}/9\r\n", to - from), body)
            },
            damaged,
        ),
        (
            "other bytes",
            |from, to, whole| {
                let (head, body) = partial(from, to, whole);
                (head, body.into_iter().map(|byte| byte ^ 0x55).collect())
            },
            damaged,
        ),
    ];
    let pulls = answers.into_iter().map(|(what, layer, check)| {
        let name = format!("127.0.0.1:{}/app:1", registry_of(folder.clone(), layer));
        let user = &user;
        async move {
            let error = user.pull(&name).await.unwrap_err();
            assert!(check(&error), "{what}: {error:?}");
        }
    });
    futures::future::join_all(pulls).await;
    user.assert_clean(layers).await;

    let refusals: Vec<(&str, Check)> = vec![
        ("401 Unauthorized", denied),
        ("403 Forbidden", denied),
        ("429 Too Many Requests", |error| matches!(error, ImageError::NotPublished { .. })),
        ("500 Internal Server Error", |error| matches!(error, ImageError::NotPublished { .. })),
    ];
    let pushes = refusals.into_iter().map(|(status, check)| {
        let name = format!("127.0.0.1:{}/app:1", rude_server(status, "<html>no</html>"));
        let target = Destination { reference: name.parse().unwrap(), identity: PublishAs::Nobody };
        let (node, from) = (&node, to.parse::<ImageReference>().unwrap());
        async move {
            let error = node.images.push(&from, &target, &|_| {}).await.unwrap_err();
            assert!(check(&error), "{status}: {error:?}");
        }
    });
    futures::future::join_all(pushes).await;
    for name in ["app:1", "docker-archive:x.tar"] {
        let target = Destination { reference: name.parse().unwrap(), identity: PublishAs::Nobody };
        let result = node.images.push(&to.parse().unwrap(), &target, &|_| {}).await;
        assert!(matches!(result, Err(ImageError::NotPublished { .. })), "{result:?}");
    }
    assert!(names(&node.home.staging()).is_empty());
}
