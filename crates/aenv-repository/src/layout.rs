//! Where things lie in a repository. One place decides each path.

use aenv_types::{CheckpointId, Digest, TeamId};
use object_store::path::Path;

use crate::RepositoryError;

/// Version of the repository's form.
pub(crate) const FORMAT: u32 = 1;

/// The format marker.
pub(crate) fn marker() -> Path {
    Path::from("format.json")
}

/// There while one garbage collection deletes.
pub(crate) fn collection(number: uuid::Uuid) -> Path {
    Path::from_iter(["collections", &format!("{number}.json")])
}

/// Folder of the marks of collections.
pub(crate) fn collections() -> Path {
    Path::from("collections")
}

/// A blob.
pub(crate) fn blob(digest: &Digest) -> Path {
    let hex = digest.hex();
    Path::from_iter(["blobs", "sha256", &hex[..2], &hex])
}

/// Folder of blobs.
pub(crate) fn blobs() -> Path {
    Path::from("blobs/sha256")
}

/// Says where a layer is that is no blob of this repository.
pub(crate) fn elsewhere(name: &Digest) -> Path {
    Path::from_iter(["elsewhere", "sha256", &name.hex()])
}

/// Folder of what is elsewhere.
pub(crate) fn all_elsewhere() -> Path {
    Path::from("elsewhere/sha256")
}

/// Folder of the boot traces of a checkpoint.
pub(crate) fn traces(id: &CheckpointId) -> Path {
    Path::from_iter(["traces", id.as_str()])
}

/// A boot trace of a checkpoint.
pub(crate) fn trace(id: &CheckpointId, key: &str) -> Path {
    Path::from_iter(["traces", id.as_str(), &format!("{key}.json")])
}

/// The digest that a blob's path says.
pub(crate) fn digest_of(path: &Path) -> Option<Digest> {
    format!("sha256:{}", path.filename()?).parse().ok()
}

/// A manifest.
pub(crate) fn checkpoint(id: &CheckpointId) -> Path {
    Path::from_iter(["checkpoints", &format!("{id}.json")])
}

/// Folder of manifests.
pub(crate) fn checkpoints() -> Path {
    Path::from("checkpoints")
}

/// The intent of a commit.
pub(crate) fn commit(number: uuid::Uuid) -> Path {
    Path::from_iter(["commits", &format!("{number}.json")])
}

/// Folder of intents.
pub(crate) fn commits() -> Path {
    Path::from("commits")
}

/// Folder of the teams' folders.
pub(crate) fn teams() -> Path {
    Path::from("teams")
}

/// Folder of a team's documents.
pub(crate) fn team(team: &TeamId) -> Path {
    Path::from_iter(["teams", team.as_str()])
}

/// A document of a team.
pub(crate) fn document(team: &TeamId, key: &str) -> Result<Path, RepositoryError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._:@+-".contains(c);
    let segment = |s: &str| (1..=200).contains(&s.len()) && !s.starts_with('.') && s.chars().all(fits);
    if key.len() > 800 || !key.split('/').all(segment) {
        let shown: String = key.chars().take(100).collect();
        return Err(RepositoryError::Config(format!("{shown:?} is not a key of a document")));
    }
    let file = format!("{key}.json");
    Ok(Path::from_iter(["teams", team.as_str()].into_iter().chain(file.split('/'))))
}

/// The key of a team's document.
pub(crate) fn key_of(team_id: &TeamId, path: &Path) -> Option<String> {
    let folder = team(team_id);
    let parts = path.prefix_match(&folder)?;
    let key = parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/");
    key.strip_suffix(".json").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_cannot_leave_their_team() {
        let team: TeamId = "default".parse().unwrap();
        let path = document(&team, "names/prepared:v1").unwrap();
        assert_eq!(path.as_ref(), "teams/default/names/prepared:v1.json");
        assert_eq!(key_of(&team, &path).unwrap(), "names/prepared:v1");
        for bad in ["", "/", "../other/names/x", "names/../../x", "a//b", ".lock", "a#1", "a b", "a%2fb", "é"]
        {
            assert!(document(&team, bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn blobs_are_found_by_digest() {
        let digest = Digest::of(b"x");
        assert_eq!(digest_of(&blob(&digest)), Some(digest));
        assert!(blob(&digest).as_ref().starts_with(&format!("blobs/sha256/{}/", &digest.hex()[..2])));
    }
}
