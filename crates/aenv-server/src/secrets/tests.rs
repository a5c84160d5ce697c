use super::*;

fn secrets() -> (tempfile::TempDir, Home, Secrets) {
    let folder = tempfile::tempdir().unwrap();
    let home = Home::new(folder.path(), folder.path());
    home.create().unwrap();
    let secrets = Secrets::open(&home).unwrap();
    (folder, home, secrets)
}

fn team(name: &str) -> TeamId {
    name.parse().unwrap()
}

fn by(text: &str) -> SecretRef {
    text.parse().unwrap()
}

async fn make(secrets: &Secrets, owner: &str, name: &str, value: &str) -> Result<Secret, ApiError> {
    secrets.create(&team(owner), name.parse()?, value.to_owned(), BTreeMap::new()).await
}

#[tokio::test]
async fn a_secret_has_versions_and_shows_no_value() {
    let (_folder, home, secrets) = secrets();
    let made = make(&secrets, "a", "API-Key", "first-value").await.unwrap();
    assert_eq!((made.name.as_str(), made.current_version), ("api-key", 1));
    assert!(made.secret_id.starts_with("sec_"));
    assert_eq!(make(&secrets, "a", "api-key", "x").await.unwrap_err().status, 409);
    let metadata: BTreeMap<String, String> = [("k".to_owned(), "v".to_owned())].into();
    let updated = secrets
        .update(&team("a"), by(&made.secret_id), "second-value".into(), Some(metadata.clone()))
        .await
        .unwrap();
    assert_eq!((updated.current_version, &updated.metadata), (2, &metadata));
    let kept = secrets.update(&team("a"), by("API-KEY"), "third-value".into(), None).await.unwrap();
    assert_eq!((kept.current_version, kept.metadata), (3, metadata));
    assert_eq!(secrets.value(&team("a"), by("api-key")).await.unwrap().expose(), "third-value");
    for number in 0..20 {
        secrets.update(&team("a"), by("api-key"), format!("value-{number}"), None).await.unwrap();
    }
    let source: &dyn SecretSource = &secrets;
    let shown = source.value(&team("a"), "Api-Key").await.unwrap();
    assert_eq!(shown.expose(), "value-19");
    assert!(!format!("{shown:?}").contains("value"));
    for unknown in ["no", "", "sec_x"] {
        assert!(source.value(&team("a"), unknown).await.is_none(), "{unknown:?}");
    }
    assert_eq!(secrets.value(&team("a"), by("no")).await.unwrap_err().status, 404);
    drop(secrets);
    for file in std::fs::read_dir(home.secrets()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(6).any(|window| window == b"value-"), "a value lies there in the clear");
    }
    let again = Secrets::open(&home).unwrap();
    assert_eq!(again.value(&team("a"), by("api-key")).await.unwrap().expose(), "value-19");
    again.remove(&team("a"), by("api-key")).await.unwrap();
    assert_eq!(again.remove(&team("a"), by("api-key")).await.unwrap_err().status, 404);
}

#[tokio::test]
async fn teams_see_nothing_of_each_other() {
    let (_folder, _home, secrets) = secrets();
    let made = make(&secrets, "a", "one", "x").await.unwrap();
    make(&secrets, "b", "one", "y").await.unwrap();
    for name in ["two", "three"] {
        make(&secrets, "a", name, "x").await.unwrap();
    }
    assert_eq!(secrets.get(&team("b"), by(&made.secret_id)).await.unwrap_err().status, 404);
    assert_eq!(secrets.remove(&team("b"), by(&made.secret_id)).await.unwrap_err().status, 404);
    assert_eq!(secrets.value(&team("b"), by("one")).await.unwrap().expose(), "y");
    let names = |page: Vec<Secret>| page.into_iter().map(|secret| secret.name).collect::<Vec<_>>();
    assert_eq!(names(secrets.list(&team("a"), None, 2).await.unwrap()), ["one", "three"]);
    assert_eq!(names(secrets.list(&team("a"), Some("three".into()), 2).await.unwrap()), ["two"]);
}

#[tokio::test]
async fn a_value_that_was_moved_or_whose_key_is_gone_does_not_open() {
    let (_folder, home, secrets) = secrets();
    let one = make(&secrets, "a", "one", "x").await.unwrap();
    let two = make(&secrets, "a", "two", "y").await.unwrap();
    secrets
        .db
        .with(|c| {
            let swap = "UPDATE secret_values SET (nonce, text) = (SELECT nonce, text FROM secret_values WHERE secret = ?2) WHERE secret = ?1";
            c.execute(swap, [&one.secret_id, &two.secret_id])
        })
        .unwrap();
    assert_eq!(secrets.value(&team("a"), by("one")).await.unwrap_err().status, 500);
    let key = home.secrets().join("secrets.key");
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::remove_file(&key).unwrap();
    assert!(Secrets::open(&home).is_err());
    assert!(!key.exists());
}

#[tokio::test]
async fn limits_hold() {
    let (_folder, _home, secrets) = secrets();
    for bad in ["", "a{b", "a}b", "a\nb", "sec_x", "SEC_x", &"x".repeat(256)] {
        assert_eq!(make(&secrets, "a", bad, "v").await.unwrap_err().status, 400, "{bad:?}");
    }
    for bad in ["", &"x".repeat(MAX_VALUE + 1)] {
        assert_eq!(make(&secrets, "a", "n", bad).await.unwrap_err().status, 400);
    }
    let metadata = |pairs: Vec<(String, String)>| pairs.into_iter().collect::<BTreeMap<_, _>>();
    for bad in [
        metadata((0..33).map(|n| (n.to_string(), "v".into())).collect()),
        metadata(vec![("k".repeat(129), "v".into())]),
        metadata(vec![("k".into(), "v".repeat(1025))]),
        metadata((0..9).map(|n| (n.to_string(), "v".repeat(1000))).collect()),
    ] {
        let made = secrets.create(&team("a"), "n".parse().unwrap(), "v".into(), bad).await;
        assert_eq!(made.unwrap_err().status, 400);
    }
    assert_eq!("a{b".parse::<SecretRef>().unwrap_err().status, 404);
}
