//! Trusting one more CA, whatever distribution the image is.
//!
//! The bundle that programs read is changed directly, because `update-ca-certificates` and its kin may not be installed and take
//! seconds; the certificate is also put where those tools look, so that their next run keeps it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{SystemError, files::replace};

const BEGIN: &str = "# BEGIN sandbox egress CA";
const END: &str = "# END sandbox egress CA";

/// Bundles that TLS libraries read: Debian, Alpine; Fedora; SUSE; OpenSSL's own default.
const BUNDLES: [&str; 4] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];
/// Folders that the distributions' tools make their bundles from.
const ANCHORS: [&str; 3] =
    ["usr/local/share/ca-certificates", "etc/pki/ca-trust/source/anchors", "etc/pki/trust/anchors"];

/// Makes the image below `root` trust the CA; one that was trusted before for the same purpose no longer is.
pub fn trust(root: &Path, pem: &str) -> Result<(), SystemError> {
    let mut bundles: Vec<PathBuf> = Vec::new();
    for bundle in BUNDLES {
        // Distributions link these to each other; each real file is changed once.
        if let Ok(real) = root.join(bundle).canonicalize()
            && !bundles.contains(&real)
        {
            bundles.push(real);
        }
    }
    if bundles.is_empty() {
        bundles.push(root.join(BUNDLES[0]));
    }
    for bundle in bundles {
        let present = fs::read_to_string(&bundle).unwrap_or_default();
        replace(&bundle, &with_ca(&present, pem))?;
    }
    for anchors in ANCHORS {
        let folder = root.join(anchors);
        if folder.is_dir() {
            replace(&folder.join("sandbox-egress.crt"), &with_newline(pem))?;
        }
    }
    Ok(())
}

fn with_ca(bundle: &str, pem: &str) -> String {
    let mut changed = String::with_capacity(bundle.len() + pem.len() + 128);
    let mut ours = false;
    for line in bundle.lines() {
        match line {
            BEGIN => ours = true,
            END => ours = false,
            _ if !ours => {
                changed.push_str(line);
                changed.push('\n');
            }
            _ => {}
        }
    }
    changed + BEGIN + "\n" + &with_newline(pem) + END + "\n"
}

fn with_newline(pem: &str) -> String {
    format!("{}\n", pem.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_bundles_are_changed_once_and_replaced_later() {
        let root = tempfile::tempdir().unwrap();
        let certs = root.path().join("etc/ssl/certs");
        fs::create_dir_all(&certs).unwrap();
        fs::create_dir_all(root.path().join("usr/local/share/ca-certificates")).unwrap();
        fs::write(certs.join("ca-certificates.crt"), "ROOTS\n").unwrap();
        std::os::unix::fs::symlink("certs/ca-certificates.crt", root.path().join("etc/ssl/cert.pem"))
            .unwrap();
        trust(root.path(), "ONE").unwrap();
        trust(root.path(), "TWO\n").unwrap();
        let bundle = fs::read_to_string(root.path().join("etc/ssl/cert.pem")).unwrap();
        assert_eq!(bundle, format!("ROOTS\n{BEGIN}\nTWO\n{END}\n"));
        assert!(root.path().join("etc/ssl/cert.pem").symlink_metadata().unwrap().is_symlink());
        let anchor = root.path().join("usr/local/share/ca-certificates/sandbox-egress.crt");
        assert_eq!(fs::read_to_string(anchor).unwrap(), "TWO\n");
    }

    #[test]
    fn an_image_without_bundles_gets_one() {
        let root = tempfile::tempdir().unwrap();
        trust(root.path(), "ONE").unwrap();
        let bundle = fs::read_to_string(root.path().join(BUNDLES[0])).unwrap();
        assert_eq!(bundle, format!("{BEGIN}\nONE\n{END}\n"));
    }
}
