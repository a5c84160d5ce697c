//! Notes of layers that are elsewhere (`<layer>.remote`): which of them nothing on this node needs.
//!
//! A note is small, but it may hold a password that was given for a registry, and the repository does not have that. So this room only says
//! which notes the node has no use for; whoever can ask the repository removes those of layers that it does not know either.

use std::{
    fs::{self, Metadata},
    io,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use aenv_types::{Digest, LayerName};

use crate::{files, node::Node};

const ENDING: &str = ".remote";

/// Notes that no sandbox, no checkpoint, no cache and no export of this node needs and that were not used for so long.
pub(crate) async fn unneeded(node: &Arc<Node>, unused: Duration) -> io::Result<Vec<Digest>> {
    let Some(in_use) = super::shown(node).await else { return Ok(Vec::new()) };
    let owner = Arc::clone(node);
    files::blocking(move || {
        // The files first, for the reason that the module above has.
        let mut found = Vec::new();
        for entry in fs::read_dir(owner.home.layers())? {
            let entry = entry?;
            let Some(digest) = entry.file_name().to_str().and_then(noted) else { continue };
            match entry.metadata() {
                Ok(meta) if is_old(&meta, unused) => found.push(digest),
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let cached = super::trim::records(&owner)?;
        let (mut needed, _) = super::survey(&owner)?;
        needed.extend(cached.iter().flat_map(|record| &record.layers).map(|layer| layer.name));
        found.retain(|digest| {
            let name = LayerName::Digest(*digest);
            !needed.contains(&name) && !in_use.contains(&owner.home.layer(&name))
        });
        Ok(found)
    })
    .await
}

/// Removes notes that are still not needed and were still not used. Returns how many went.
pub(crate) async fn remove(node: &Arc<Node>, notes: Vec<Digest>, unused: Duration) -> io::Result<usize> {
    let unneeded = unneeded(node, unused).await?;
    let home = node.home.clone();
    files::blocking(move || {
        let mut removed = 0;
        for digest in notes.into_iter().filter(|digest| unneeded.contains(digest)) {
            let aside = home.staging().join(format!("note-{}", uuid::Uuid::new_v4()));
            removed +=
                usize::from(take_away(&home.remote_layer(&LayerName::Digest(digest)), &aside, unused)?);
        }
        Ok(removed)
    })
    .await
}

/// The layer that a file of the `layers` folder is the note of.
fn noted(file: &str) -> Option<Digest> {
    match super::layer_name(file.strip_suffix(ENDING)?)? {
        LayerName::Digest(digest) => Some(digest),
        LayerName::Local(_) => None,
    }
}

fn is_old(meta: &Metadata, unused: Duration) -> bool {
    let age = meta.modified().ok().and_then(|then| SystemTime::now().duration_since(then).ok());
    age.is_some_and(|age| age >= unused)
}

/// Removes a note unless somebody uses it now: whoever does notes the use before reading it, and here it is taken away before looking
/// whether that was noted.
fn take_away(note: &Path, aside: &Path, unused: Duration) -> io::Result<bool> {
    match fs::rename(note, aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        renamed => renamed?,
    }
    let old = is_old(&fs::metadata(aside)?, unused);
    if !old {
        // Whoever found none meanwhile has written one, which is as good or better.
        match fs::hard_link(aside, note) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    files::remove_file(aside)?;
    Ok(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_that_was_used_meanwhile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (note, aside) = (folder.path().join("note"), folder.path().join("aside"));
        fs::write(&note, b"x").unwrap();
        assert!(!take_away(&note, &aside, Duration::from_secs(3600)).unwrap());
        assert!(note.exists() && !aside.exists());
        assert!(take_away(&note, &aside, Duration::ZERO).unwrap());
        assert!(!note.exists() && !aside.exists());
        assert!(!take_away(&note, &aside, Duration::ZERO).unwrap(), "gone before");
    }

    #[test]
    fn only_notes_of_layers_are_notes() {
        let digest = Digest::of(b"x");
        let file = LayerName::Digest(digest).file_name();
        assert_eq!(noted(&format!("{file}.remote")), Some(digest));
        for other in [file.as_str(), "x.remote", ".remote", &format!("{file}.remote.tmp")] {
            assert_eq!(noted(other), None, "{other}");
        }
    }
}
