//! The same image from a folder, an OCI archive and a `docker save` archive.

use std::{fs, process::Command};

use aenv_image::ImageError;
use serde_json::json;

use crate::support::{Layout, Node, Packing, Tar, run};

#[tokio::test(flavor = "multi_thread")]
async fn folders_and_archives_give_the_same_layers() {
    let node = Node::start();
    let mut layout = Layout::new(node.scratch("layout"));
    let tars = [
        Tar::default().folder("etc/").file("etc/one", b"1").end(),
        Tar::default().file("etc/two", b"2").end(),
    ];
    layout.layer(&tars[0], Packing::Gzip);
    layout.layer(&tars[1], Packing::Plain);
    let (from_folder, _) = node.pull(&layout.finish()).await.unwrap();

    let archive = node.scratch("archives").join("oci.tar");
    run(Command::new("tar").arg("-C").arg(&layout.folder).arg("-cf").arg(&archive).arg("."));
    let (from_archive, _) = node.pull(&format!("oci-archive:{}", archive.display())).await.unwrap();
    assert_eq!(from_archive.layers, from_folder.layers);
    assert_eq!(from_archive.manifest, from_folder.manifest);

    // As older `docker save` wrote it: one layer is a link to another's file.
    let saved = node.scratch("saved");
    fs::create_dir_all(saved.join("aaa")).unwrap();
    fs::create_dir_all(saved.join("bbb")).unwrap();
    fs::write(saved.join("aaa/layer.tar"), &tars[0]).unwrap();
    fs::write(saved.join("second.tar"), &tars[1]).unwrap();
    std::os::unix::fs::symlink("../second.tar", saved.join("bbb/layer.tar")).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.folder.join("index.json")).unwrap()).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap().parse().unwrap();
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.blob_path(&manifest)).unwrap()).unwrap();
    let config: aenv_types::Digest = manifest["config"]["digest"].as_str().unwrap().parse().unwrap();
    let config_name = format!("{}.json", config.hex());
    fs::copy(layout.blob_path(&config), saved.join(&config_name)).unwrap();
    let described = json!([{
        "Config": config_name, "RepoTags": ["example/app:1"], "Layers": ["aaa/layer.tar", "bbb/layer.tar"],
    }]);
    fs::write(saved.join("manifest.json"), described.to_string()).unwrap();
    let docker = node.scratch("archives").join("docker.tar");
    run(Command::new("tar").arg("-C").arg(&saved).arg("-cf").arg(&docker).args([
        "manifest.json",
        "aaa",
        "bbb",
        "second.tar",
        config_name.as_str(),
    ]));
    for tag in ["", ":app:1", ":example/app:1"] {
        let (from_docker, _) = node.pull(&format!("docker-archive:{}{tag}", docker.display())).await.unwrap();
        assert_eq!(from_docker.layers, from_folder.layers);
        assert_eq!(from_docker.manifest, config);
    }
    let result = node.pull(&format!("docker-archive:{}:other", docker.display())).await;
    assert!(
        matches!(&result, Err(ImageError::NotFound { message, .. }) if message.contains("example/app:1")),
        "{result:?}"
    );
    let result = node.pull(&format!("oci:{}:other", layout.folder.display())).await;
    assert!(
        matches!(&result, Err(ImageError::NotFound { message, .. }) if message.contains("test")),
        "{result:?}"
    );

    let bytes = fs::read(&docker).unwrap();
    let cut = node.scratch("archives").join("cut.tar");
    fs::write(&cut, &bytes[..3000]).unwrap();
    for scheme in ["docker-archive", "oci-archive"] {
        let result = node.pull(&format!("{scheme}:{}", cut.display())).await;
        assert!(matches!(result, Err(ImageError::Damaged { .. })), "{result:?}");
    }
    node.assert_clean(2).await;
}
