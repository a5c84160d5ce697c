use super::*;
use crate::tests::volume;

fn at(text: &str) -> VolumePath {
    text.parse().unwrap()
}

fn put(volume: &Volume, path: &str, text: &[u8], force: bool) -> Result<Entry, ContentError> {
    let mut upload = Upload::begin(volume, at(path), force)?;
    upload.write(text)?;
    upload.finish(Attributes::default(), force)
}

#[test]
fn files_and_folders() {
    let (_home, volume) = volume();
    assert!(matches!(put(&volume, "/a/b.txt", b"x", false), Err(ContentError::NotFound(_))));
    let folder = make_folder(&volume, &at("/a"), Attributes::default(), false).unwrap();
    assert_eq!((folder.kind, folder.mode), (Kind::Directory, 0o755));
    assert!(matches!(
        make_folder(&volume, &at("/a"), Attributes::default(), false),
        Err(ContentError::Exists(_))
    ));
    assert!(matches!(
        make_folder(&volume, &at("/x/y"), Attributes::default(), false),
        Err(ContentError::NotFound(_))
    ));
    make_folder(&volume, &at("/x/y/z"), Attributes::default(), true).unwrap();
    make_folder(&volume, &at("/x/y/z"), Attributes::default(), true).unwrap();
    let file = put(&volume, "/a/b.txt", b"text", false).unwrap();
    assert_eq!((file.kind, file.size, file.mode), (Kind::File, 4, 0o644));
    assert!(matches!(put(&volume, "/a/b.txt", b"x", false), Err(ContentError::Exists(_))));
    assert_eq!(put(&volume, "/a/b.txt", b"longer", true).unwrap().size, 6);
    assert!(matches!(put(&volume, "/a", b"x", true), Err(ContentError::Exists(_))));
    assert!(matches!(put(&volume, "/", b"x", true), Err(ContentError::Exists(_))));
    let (mut read, size) = read(&volume, &at("/a/b.txt")).unwrap();
    let mut text = String::new();
    io::Read::read_to_string(&mut read, &mut text).unwrap();
    assert_eq!((text.as_str(), size), ("longer", 6));
    let changed = Attributes { mode: Some(0o600), ..Attributes::default() };
    assert_eq!(update(&volume, &at("/a/b.txt"), changed).unwrap().mode, 0o600);
    let names = |depth| {
        let found = list(&volume, &at("/"), depth).unwrap();
        found.iter().map(|entry| entry.path.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(1), ["/a", "/x"]);
    assert_eq!(names(2), ["/a", "/a/b.txt", "/x", "/x/y"]);
    assert!(matches!(list(&volume, &at("/a/b.txt"), 1), Err(ContentError::Kind { .. })));
    assert!(matches!(list(&volume, &at("/none"), 1), Err(ContentError::NotFound(_))));
    let full = volume.used();
    remove(&volume, &at("/x")).unwrap();
    remove(&volume, &at("/a")).unwrap();
    assert!(volume.used() < full);
    assert!(matches!(remove(&volume, &at("/a")), Err(ContentError::NotFound(_))));
    assert!(matches!(remove(&volume, &at("/")), Err(ContentError::NotFound(_))));
    assert!(tree::entries(volume.staging(), 9).unwrap().is_empty());
}

#[test]
fn links_of_a_hostile_guest_lead_nowhere() {
    let (home, volume) = volume();
    let data = home.path().join("volumes").join(volume.id().as_str()).join("data");
    let outside = home.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), "s").unwrap();
    std::os::unix::fs::symlink(&outside, data.join("out")).unwrap();
    std::os::unix::fs::symlink("../../../outside/secret", data.join("file")).unwrap();
    for path in ["/out/secret", "/file"] {
        assert!(matches!(read(&volume, &at(path)), Err(ContentError::NotFound(_))), "{path}");
    }
    assert!(list(&volume, &at("/out"), 1).is_err());
    assert!(put(&volume, "/out/new", b"x", true).is_err());
    assert!(make_folder(&volume, &at("/out/new"), Attributes::default(), true).is_err());
    let link = stat(&volume, &at("/file")).unwrap();
    assert_eq!((link.kind, link.target.as_deref()), (Kind::Symlink, Some("../../../outside/secret")));
    update(&volume, &at("/file"), Attributes { mode: Some(0o777), ..Attributes::default() }).unwrap();
    // A forced write replaces the link and not what it names.
    put(&volume, "/file", b"mine", true).unwrap();
    remove(&volume, &at("/out")).unwrap();
    assert_eq!(std::fs::read_to_string(outside.join("secret")).unwrap(), "s");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
}

#[test]
fn a_full_volume_takes_no_more() {
    let (_home, volume) = volume();
    let mut upload = Upload::begin(&volume, at("/big"), false).unwrap();
    let block = vec![1; 256 << 10];
    let outcome = (0..8).try_for_each(|_| upload.write(&block));
    assert!(matches!(outcome, Err(ContentError::Full(_))), "{outcome:?}");
    drop(upload);
    assert!(tree::entries(volume.staging(), 9).unwrap().is_empty());
    put(&volume, "/small", b"x", false).unwrap();
}
