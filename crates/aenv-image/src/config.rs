//! What an image says about itself: manifests, the platform, and the config that becomes a guest's context.

use aenv_types::{Digest, GuestContext};
use oci_spec::image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os};

use crate::error::LayerError;

/// Largest manifest or config that is read into memory.
pub(crate) const MAX_DOCUMENT: u64 = 8 << 20;

/// What a descriptor of an image leads to.
pub(crate) enum Document {
    /// Several images.
    Index(Box<ImageIndex>),
    /// One image.
    Manifest(Box<ImageManifest>),
}

/// Reads a manifest or an index, whichever it is.
pub(crate) fn parse_document(bytes: &[u8]) -> Result<Document, LayerError> {
    let wrong =
        |error: serde_json::Error| LayerError::Damaged(format!("its manifest cannot be read: {error}"));
    let value: serde_json::Value = serde_json::from_slice(bytes).map_err(wrong)?;
    if value.get("schemaVersion").and_then(serde_json::Value::as_u64) != Some(2) {
        return Err(LayerError::Damaged("its manifest is not of schema version 2".to_owned()));
    }
    if value.get("manifests").is_some() {
        return serde_json::from_value(value).map(|index| Document::Index(Box::new(index))).map_err(wrong);
    }
    serde_json::from_value(value).map(|manifest| Document::Manifest(Box::new(manifest))).map_err(wrong)
}

/// Our digest of a descriptor's.
pub(crate) fn digest_of(descriptor: &Descriptor) -> Result<Digest, LayerError> {
    let digest = descriptor.digest().to_string();
    digest
        .parse()
        .map_err(|_| LayerError::Damaged(format!("the digest {digest:?} is not sha256:<64 hex digits>")))
}

/// The architecture of guests on this node, in OCI's words.
fn wanted_arch() -> Arch {
    if cfg!(target_arch = "aarch64") { Arch::ARM64 } else { Arch::Amd64 }
}

/// Picks the image for this node's guests out of an index.
pub(crate) fn select_platform(manifests: &[Descriptor]) -> Result<Descriptor, LayerError> {
    let fits = |descriptor: &&Descriptor| {
        descriptor
            .platform()
            .as_ref()
            .is_some_and(|platform| *platform.os() == Os::Linux && *platform.architecture() == wanted_arch())
    };
    let plain = |descriptor: &&Descriptor| {
        let variant = descriptor.platform().as_ref().and_then(|platform| platform.variant().as_deref());
        matches!(variant, None | Some("v1" | "v8"))
    };
    if let Some(found) = manifests.iter().filter(fits).find(plain).or_else(|| manifests.iter().find(fits)) {
        return Ok(found.clone());
    }
    if let [only] = manifests
        && only.platform().is_none()
    {
        return Ok(only.clone());
    }
    let offered: Vec<String> = manifests
        .iter()
        .filter_map(|descriptor| descriptor.platform().as_ref())
        .map(|platform| format!("{}/{}", platform.os(), platform.architecture()))
        .collect();
    Err(LayerError::Damaged(format!(
        "it has no image for linux/{}, only for [{}]",
        wanted_arch(),
        offered.join(", ")
    )))
}

/// A layer's media type must be one that can be applied; how it is packed is seen from its bytes.
pub(crate) fn check_layer_type(media_type: &MediaType) -> Result<(), LayerError> {
    match media_type {
        MediaType::ImageLayer
        | MediaType::ImageLayerGzip
        | MediaType::ImageLayerZstd
        | MediaType::ImageLayerNonDistributable
        | MediaType::ImageLayerNonDistributableGzip
        | MediaType::ImageLayerNonDistributableZstd => Ok(()),
        MediaType::Other(name)
            if matches!(
                name.as_str(),
                "application/vnd.docker.image.rootfs.diff.tar"
                    | "application/vnd.docker.image.rootfs.diff.tar.gzip"
                    | "application/vnd.docker.image.rootfs.diff.tar.zstd"
                    | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
            ) =>
        {
            Ok(())
        }
        other => {
            Err(LayerError::Damaged(format!("a layer of the unknown media type {:?}", other.to_string())))
        }
    }
}

/// The config of an image, checked.
pub(crate) struct ParsedConfig {
    /// Digests of the layers' tar streams, base first.
    pub diff_ids: Vec<Digest>,
    /// For processes in the guest.
    pub guest: GuestContext,
    /// The document.
    pub raw: Vec<u8>,
}

/// Reads a config.
pub(crate) fn parse_config(bytes: &[u8]) -> Result<ParsedConfig, LayerError> {
    let config: ImageConfiguration = serde_json::from_slice(bytes)
        .map_err(|error| LayerError::Damaged(format!("its config cannot be read: {error}")))?;
    if *config.os() != Os::Linux || *config.architecture() != wanted_arch() {
        return Err(LayerError::Damaged(format!(
            "it is for {}/{}, and guests here are linux/{}",
            config.os(),
            config.architecture(),
            wanted_arch()
        )));
    }
    let diff_ids = config
        .rootfs()
        .diff_ids()
        .iter()
        .map(|text| {
            text.parse().map_err(|_| LayerError::Damaged(format!("the diff id {text:?} is no sha256 digest")))
        })
        .collect::<Result<_, _>>()?;
    Ok(ParsedConfig { diff_ids, guest: guest_context(&config), raw: bytes.to_vec() })
}

fn guest_context(image: &ImageConfiguration) -> GuestContext {
    let Some(config) = image.config() else { return GuestContext::default() };
    let env = config.env().iter().flatten().filter_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
    });
    let mut ports: Vec<String> = config.exposed_ports().iter().flatten().cloned().collect();
    ports.sort();
    let words: Vec<&str> = config
        .entrypoint()
        .iter()
        .flatten()
        .chain(config.cmd().iter().flatten())
        .map(String::as_str)
        .collect();
    GuestContext {
        env: env.collect(),
        user: config.user().clone().unwrap_or_default(),
        workdir: config.working_dir().clone().unwrap_or_default(),
        start_cmd: (!words.is_empty()).then(|| shell_words(&words)),
        ready_cmd: None,
        exposed_ports: ports,
        labels: config.labels().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect(),
    }
}

/// Writes an argument vector so that a POSIX shell reads the same one.
fn shell_words(words: &[&str]) -> String {
    let quote = |word: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            (*word).to_owned()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_becomes_a_guest_context() {
        let config = format!(
            r#"{{"architecture":"{}","os":"linux","rootfs":{{"type":"layers","diff_ids":["{}"]}},
            "config":{{"Env":["PATH=/bin","A=b=c","broken"],"User":"app","WorkingDir":"/srv","Entrypoint":["/bin/sh","-c"],
            "Cmd":["echo 'hi there'"],"ExposedPorts":{{"8080/tcp":{{}},"53/udp":{{}}}},"Labels":{{"x":"y"}}}}}}"#,
            wanted_arch(),
            Digest::of(b"layer")
        );
        let parsed = parse_config(config.as_bytes()).unwrap();
        assert_eq!(parsed.diff_ids, [Digest::of(b"layer")]);
        let guest = parsed.guest;
        assert_eq!(guest.env.get("A").map(String::as_str), Some("b=c"));
        assert_eq!(guest.env.len(), 2);
        assert_eq!((guest.user.as_str(), guest.workdir.as_str()), ("app", "/srv"));
        assert_eq!(guest.start_cmd.as_deref(), Some(r"/bin/sh -c 'echo '\''hi there'\'''"));
        assert_eq!(guest.exposed_ports, ["53/udp", "8080/tcp"]);
        assert_eq!(guest.labels.get("x").map(String::as_str), Some("y"));
    }

    #[test]
    fn other_platforms_and_nonsense_are_refused() {
        for config in [
            r#"{"architecture":"s390x","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#,
            r#"{"architecture":"amd64","os":"windows","rootfs":{"type":"layers","diff_ids":[]}}"#,
            r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["md5:1"]}}"#,
            "{}",
            "not json",
        ] {
            assert!(
                matches!(parse_config(config.as_bytes()), Err(LayerError::Damaged(_))),
                "{config} was taken"
            );
        }
    }

    #[test]
    fn the_platform_is_selected_out_of_many() {
        let entry = |n: u8, platform: &str| {
            format!(
                r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{}","size":1{platform}}}"#,
                Digest::of(&[n])
            )
        };
        let index = |entries: &[String]| {
            let text = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(","));
            match parse_document(text.as_bytes()).unwrap() {
                Document::Index(index) => index,
                Document::Manifest(_) => panic!("an index was read as a manifest"),
            }
        };
        let wanted = format!(r#","platform":{{"os":"linux","architecture":"{}"}}"#, wanted_arch());
        let many = index(&[
            entry(1, r#","platform":{"os":"unknown","architecture":"unknown"}"#),
            entry(2, r#","platform":{"os":"linux","architecture":"s390x"}"#),
            entry(3, &wanted),
        ]);
        assert_eq!(digest_of(&select_platform(many.manifests()).unwrap()).unwrap(), Digest::of(&[3]));
        let none = index(&[entry(2, r#","platform":{"os":"linux","architecture":"s390x"}"#)]);
        assert!(select_platform(none.manifests()).is_err());
        let bare = index(&[entry(4, "")]);
        assert_eq!(digest_of(&select_platform(bare.manifests()).unwrap()).unwrap(), Digest::of(&[4]));
    }

    /// Documents of images, changed in any way: each is read or refused.
    #[test]
    fn changed_documents_are_read_or_refused() {
        let arch = wanted_arch();
        let digest = Digest::of(b"layer");
        let config = format!(
            r#"{{"architecture":"{arch}","os":"linux","rootfs":{{"type":"layers","diff_ids":["{digest}"]}},
            "config":{{"Env":["PATH=/bin"],"User":"app","Cmd":["echo 'hi'"],"ExposedPorts":{{"80/tcp":{{}}}},"Labels":{{"x":"y"}}}}}}"#
        );
        let layer = format!(
            r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"{digest}","size":7,"annotations":
            {{"containerd.io/snapshot/overlaybd/blob-digest":"{digest}","containerd.io/snapshot/overlaybd/blob-size":"7"}}}}"#
        );
        let about = |media: &str| format!(r#""mediaType":"{media}","digest":"{digest}","size":9"#);
        let manifest = format!(
            r#"{{"schemaVersion":2,"config":{{{}}},"layers":[{layer}]}}"#,
            about("application/vnd.oci.image.config.v1+json")
        );
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{{},"platform":{{"os":"linux","architecture":"{arch}"}}}}]}}"#,
            about("application/vnd.oci.image.manifest.v1+json")
        );
        let documents = [index.into_bytes(), manifest.into_bytes()];
        aenv_testkit::mutate("oci-documents", &documents, |input| match parse_document(input) {
            Ok(Document::Index(index)) => {
                select_platform(index.manifests()).and_then(|d| digest_of(&d)).is_ok()
            }
            Ok(Document::Manifest(manifest)) => manifest.layers().iter().all(|layer| {
                check_layer_type(layer.media_type()).is_ok() && crate::overlaybd::kind(layer).is_ok()
            }),
            Err(_) => false,
        });
        aenv_testkit::mutate("oci-configs", &[config.into_bytes()], |input| parse_config(input).is_ok());
    }
}
