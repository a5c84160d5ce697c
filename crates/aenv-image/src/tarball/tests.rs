//! The reader against archives that GNU tar and the `tar` crate write, and against broken ones.

use std::process::Command;

use super::*;

fn entries(bytes: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>, LayerError> {
    let mut reader = TarReader::new(bytes);
    let mut all = Vec::new();
    while let Some(entry) = reader.next_entry()? {
        let (mut data, mut buf) = (Vec::new(), [0; 1000]);
        loop {
            match reader.read_data(&mut buf)? {
                0 => break,
                got => data.extend_from_slice(&buf[..got]),
            }
        }
        all.push((entry, data));
    }
    Ok(all)
}

#[test]
fn sparse_files_in_every_form_have_the_same_map() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("sparse")).unwrap();
    for (offset, byte) in [(0, b'a'), (1 << 20, b'b'), (5 << 20, b'c')] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[byte; 4096], offset).unwrap();
    }
    file.set_len(8 << 20).unwrap();
    file.sync_all().unwrap();
    for form in [
        &["--format=gnu"][..],
        &["--sparse-version=0.0"],
        &["--sparse-version=0.1"],
        &["--sparse-version=1.0"],
    ] {
        let format = if form[0] == "--format=gnu" { &[][..] } else { &["--format=posix"][..] };
        let output = Command::new("tar")
            .arg("-S")
            .args(form)
            .args(format)
            .arg("-C")
            .arg(dir.path())
            .args(["-cf", "-", "sparse"])
            .output()
            .unwrap();
        assert!(output.status.success());
        let all = entries(&output.stdout).unwrap();
        let (entry, data) = &all[0];
        assert_eq!((entry.path.as_slice(), entry.size), (&b"sparse"[..], 8 << 20), "{form:?}");
        let map: Vec<Extent> =
            entry.extents.clone().unwrap().into_iter().filter(|extent| extent.len > 0).collect();
        let wanted = [0, 1 << 20, 5 << 20].map(|offset| Extent { offset, len: 4096 });
        assert_eq!(map, wanted, "{form:?}");
        assert_eq!(data.len(), 3 * 4096, "{form:?}");
        assert_eq!(data[4096], b'b', "{form:?}");
    }
}

#[test]
fn long_names_are_read_in_both_forms() {
    let dir = tempfile::tempdir().unwrap();
    let long = ["d".repeat(120), "e".repeat(120), "f".repeat(120)].join("/");
    std::fs::create_dir_all(dir.path().join(&long)).unwrap();
    std::fs::write(dir.path().join(&long).join("file"), b"x").unwrap();
    std::os::unix::fs::symlink(&long, dir.path().join("link")).unwrap();
    for format in ["--format=gnu", "--format=posix"] {
        let output = Command::new("tar")
            .arg(format)
            .arg("-C")
            .arg(dir.path())
            .args(["-cf", "-", "."])
            .output()
            .unwrap();
        let all = entries(&output.stdout).unwrap();
        let wanted = format!("./{long}/file");
        assert!(all.iter().any(|(entry, data)| entry.path == wanted.as_bytes() && data == b"x"), "{format}");
        assert!(
            all.iter().any(|(entry, _)| entry.kind == Kind::Symlink && entry.link == long.as_bytes()),
            "{format}"
        );
    }
}

/// Any truncation, and any flipped bit, ends in an error or in other entries, never in a panic.
#[test]
fn broken_archives_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a"), vec![7; 3000]).unwrap();
    std::os::unix::fs::symlink("a", dir.path().join("b")).unwrap();
    let output = Command::new("tar")
        .args(["--format=posix", "-C"])
        .arg(dir.path())
        .args(["-cf", "-", "."])
        .output()
        .unwrap();
    let whole = output.stdout;
    let used = whole.len() - whole.iter().rev().take_while(|byte| **byte == 0).count();
    for cut in (1..used).step_by(37) {
        let result = entries(&whole[..cut]);
        assert!(cut % 512 == 0 || result.is_err(), "a cut at {cut} went unseen");
    }
    for at in 0..used {
        for bit in [0, 3, 7] {
            let mut broken = whole.clone();
            broken[at] ^= 1 << bit;
            let _ = entries(&broken);
        }
    }
}

#[test]
fn unknown_types_and_huge_extensions_are_refused() {
    let header = |kind: u8, size: u64| {
        let mut header = tar::Header::new_ustar();
        header.set_path("x").unwrap();
        header.set_size(size);
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    assert!(matches!(entries(&header(b'V', 0)), Err(LayerError::Damaged(_))));
    assert!(matches!(entries(&header(b'x', 8 << 30)), Err(LayerError::Hostile(_))));
    assert!(matches!(entries(&header(b'L', 8 << 30)), Err(LayerError::Hostile(_))));
    assert!(matches!(
        entries(b"this is not a tar archive, although it is more than long enough to be read as one ..."),
        Err(LayerError::Damaged(_))
    ));
}

/// Archives of every form that layers come in, changed in any way: each is read or refused.
#[test]
fn changed_archives_are_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a-file"), b"content").unwrap();
    std::fs::write(dir.path().join("n".repeat(150)), b"content").unwrap();
    std::fs::hard_link(dir.path().join("a-file"), dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("a-file", dir.path().join("symlink")).unwrap();
    let sparse = std::fs::File::create(dir.path().join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[7; 512], 1 << 16).unwrap();
    let archive = |form: &[&str]| {
        let output =
            Command::new("tar").args(form).arg("-C").arg(dir.path()).args(["-b1", "-cf", "-", "."]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let corpus =
        [&["--format=gnu"][..], &["--format=gnu", "-S"], &["--format=posix"], &["--format=posix", "-S"]];
    let corpus: Vec<_> = corpus.into_iter().map(archive).collect();
    aenv_testkit::mutate("tar-layers", &corpus, |input| entries(input).is_ok());
}
