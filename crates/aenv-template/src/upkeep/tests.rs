use std::{fs, sync::Arc};

use aenv_repository::{Holder, Offer, Pace, PausedSandboxes};
use aenv_types::{
    Checkpoint, DiskImage, GuestContext, Home, LayerName, LayerRef, Lineage, MachineShape, Origin, SandboxId,
    TemplateId, checkpoint::CHECKPOINT_FORMAT,
};
use object_store::{ObjectStoreExt, memory::InMemory, path::Path};

use super::*;
use crate::NewBuild;

struct Scene {
    store: Arc<InMemory>,
    catalog: Catalog,
    home: Home,
    _folder: tempfile::TempDir,
}

impl Scene {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        home.create().unwrap();
        let store = Arc::new(InMemory::new());
        let repository = Repository::open_store(store.clone(), home.clone()).await.unwrap();
        Self { store, catalog: Catalog::new(repository), home, _folder: folder }
    }

    fn checkpoint(&self, bytes: &[u8]) -> Checkpoint {
        let layer = LayerRef { name: LayerName::new_local(), size: bytes.len() as u64 };
        fs::write(self.home.layer(&layer.name), bytes).unwrap();
        Checkpoint {
            format: CHECKPOINT_FORMAT,
            id: CheckpointId::random(),
            created_at: Utc::now(),
            shape: MachineShape::DEFAULT,
            engine: None,
            vm_state: None,
            memory: None,
            disks: vec![DiskImage { drive: "root".into(), size: 1 << 20, layers: vec![layer] }],
            guest: GuestContext::default(),
            lineage: Lineage {
                parent: None,
                origin: Origin::Sandbox { sandbox: SandboxId::random(), template: TemplateId::random() },
            },
        }
    }

    async fn collect(&self, dry_run: DryRun) -> Collected {
        let pace = Pace { pause: Duration::ZERO, ..Pace::default() };
        let collection = Collection { grace: Duration::ZERO, dry_run, pace };
        self.catalog.collect_unnamed(collection, Duration::ZERO, &|_| ()).await.unwrap()
    }

    async fn check(&self) -> Vec<Finding> {
        self.catalog.check(Depth::Bytes, &|_| ()).await.unwrap()
    }
}

fn team(name: &str) -> TeamId {
    name.parse().unwrap()
}

#[tokio::test]
async fn what_no_document_names_is_collected_and_nothing_else() {
    let scene = Scene::new().await;
    let (red, blue) = (team("red"), team("blue"));
    let kept = scene.catalog.publish_snapshot(&red, scene.checkpoint(b"kept"), Some("kept")).await.unwrap();
    let removed = scene.catalog.publish_snapshot(&blue, scene.checkpoint(b"removed"), None).await.unwrap();
    // Committed, and the server died before it was named.
    let lost = scene.catalog.repository().commit(&scene.checkpoint(b"lost!")).await.unwrap();
    scene.catalog.delete(&blue, &removed.id).await.unwrap();

    let usage = scene.catalog.account().await.unwrap();
    assert_eq!((usage.total.blobs, usage.total.bytes, usage.total.bytes_unreferenced), (3, 16, 7));
    let expected = TeamUsage { snapshots: 1, checkpoints: 1, bytes: 4, ..TeamUsage::default() };
    assert_eq!(usage.teams, BTreeMap::from([(red.clone(), expected)]));
    let kinds: Vec<_> = scene.check().await.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, ["unreferenced_blob", "unnamed_manifest"]);

    let recent = scene.catalog.collect(Collection::new(Duration::ZERO, DryRun::No), &|_| ()).await.unwrap();
    assert!(recent.manifests.is_empty(), "its document may be about to be written");
    assert_eq!(recent.blobs.removed, [Digest::of(b"removed")]);
    let planned = scene.collect(DryRun::Yes).await;
    assert_eq!(planned.manifests, std::slice::from_ref(&lost.id));
    let done = scene.collect(DryRun::No).await;
    assert_eq!((done.manifests, done.blobs.removed), (vec![lost.id], vec![Digest::of(b"lost!")]));
    assert_eq!(scene.check().await, []);
    assert!(scene.catalog.resolve(&red, &kept.id).await.is_ok());
}

#[tokio::test]
async fn damage_says_what_it_takes_with_it() {
    let scene = Scene::new().await;
    let red = team("red");
    let good = scene.catalog.publish_snapshot(&red, scene.checkpoint(b"good"), Some("good")).await.unwrap();
    let bad = scene.catalog.publish_snapshot(&red, scene.checkpoint(b"bad"), Some("bad")).await.unwrap();
    let gone = scene.catalog.publish_snapshot(&red, scene.checkpoint(b"gone"), None).await.unwrap();
    let blob = |bytes: &[u8]| {
        let hex = Digest::of(bytes).hex();
        Path::from(format!("blobs/sha256/{}/{hex}", &hex[..2]))
    };
    scene.store.put(&blob(b"bad"), b"BAD".to_vec().into()).await.unwrap();
    scene.store.delete(&blob(b"gone")).await.unwrap();
    scene.store.delete(&Path::from(format!("checkpoints/{}.json", good.checkpoint))).await.unwrap();
    let new = NewBuild { name: "half".parse().unwrap(), tags: vec![], shape: MachineShape::DEFAULT };
    let (half, _) = scene.catalog.new_build(&red, new).await.unwrap();
    scene.store.delete(&Path::from(format!("teams/red/templates/{}.json", half.id))).await.unwrap();

    let found = scene.check().await;
    let takes = |kind: &str| {
        let finding = found.iter().find(|finding| finding.kind == kind).unwrap();
        finding.takes.iter().flat_map(|owner| owner.names.clone()).collect::<Vec<_>>()
    };
    assert_eq!(takes("damaged_blob"), ["bad"]);
    assert_eq!(takes("missing_blob"), Vec::<String>::new());
    let missing = found.iter().find(|finding| finding.kind == "missing_blob").unwrap();
    assert_eq!(missing.checkpoints, [gone.checkpoint]);
    assert_eq!(missing.takes[0].id.to_string(), gone.id.split(':').next().unwrap());
    assert_eq!(takes("missing_manifest"), ["good"]);
    let dangling = found.iter().find(|finding| finding.kind == "dangling_name").unwrap();
    assert_eq!(dangling.what, "red/half");
    assert!(found.iter().any(|finding| finding.kind == "unreferenced_blob" && !finding.is_damage()));
    assert!(bad.names == ["red/bad"]);

    // What a document names that cannot be read is not known: nothing goes.
    let document = Path::from(format!("teams/red/templates/{}.json", half.id));
    scene.store.put(&document, b"{".to_vec().into()).await.unwrap();
    let refused = scene.catalog.collect(Collection::new(Duration::ZERO, DryRun::No), &|_| ()).await;
    assert!(matches!(refused, Err(TemplateError::Repository(RepositoryError::Corrupt { .. }))));
    assert!(scene.store.head(&blob(b"good")).await.is_ok());
}

#[tokio::test]
async fn what_a_paused_sandbox_is_in_stays_until_it_ends() {
    let scene = Scene::new().await;
    let red = team("red");
    let repository = scene.catalog.repository();
    let node = |name: &str| {
        let holder = Holder { id: uuid::Uuid::new_v4(), name: name.to_owned() };
        PausedSandboxes::new(repository.clone(), holder)
    };
    let (a, b, id) = (node("a"), node("b"), SandboxId::random());
    let offer = |generation, checkpoint: &Checkpoint| Offer {
        generation,
        checkpoint: checkpoint.id.clone(),
        record: serde_json::Value::Null,
    };
    let first = repository.commit(&scene.checkpoint(b"first")).await.unwrap();
    a.announce(&red, &id).await.unwrap();
    a.offer(&red, &id, &offer(1, &first)).await.unwrap();
    assert!(scene.collect(DryRun::No).await.manifests.is_empty());
    // Who resumed it may read from there for as long as it runs.
    b.claim(&red, &id, 1).await.unwrap();
    assert!(scene.collect(DryRun::No).await.manifests.is_empty());
    assert_eq!(scene.check().await, []);
    let usage = scene.catalog.account().await.unwrap();
    let expected = TeamUsage { paused: 1, checkpoints: 1, bytes: 5, ..TeamUsage::default() };
    assert_eq!(usage.teams, BTreeMap::from([(red.clone(), expected)]));
    assert_eq!(scene.catalog.team_bytes(&red).await.unwrap(), 5);

    let second = repository.commit(&scene.checkpoint(b"second")).await.unwrap();
    b.offer(&red, &id, &offer(2, &second)).await.unwrap();
    assert_eq!(scene.collect(DryRun::No).await.manifests, [first.id]);
    let hex = Digest::of(b"second").hex();
    scene.store.delete(&Path::from(format!("blobs/sha256/{}/{hex}", &hex[..2]))).await.unwrap();
    let found = scene.check().await;
    assert_eq!(
        (found[0].kind, found[0].takes[0].kind, &found[0].takes[0].id),
        ("missing_blob", "paused", &id.to_string())
    );

    a.claim(&red, &id, 2).await.unwrap();
    a.end(&red, &id).await.unwrap();
    assert_eq!(scene.collect(DryRun::No).await.manifests, [second.id]);
    assert!(b.find(&red, &id).await.unwrap().is_some(), "who was away may have to hear of its end");
    // A month later nobody has.
    let key = format!("paused/{id}");
    let mut old = repository.get::<PausedSandbox>(&red, &key).await.unwrap();
    old.value.at = Utc::now() - TimeDelta::days(31);
    repository.put(&red, &key, &old.value, Some(&old.version)).await.unwrap();
    scene.collect(DryRun::No).await;
    assert_eq!(b.find(&red, &id).await.unwrap(), None);

    // A document that cannot be read may name anything.
    scene.store.put(&Path::from("teams/red/paused/iabc.json"), b"{".to_vec().into()).await.unwrap();
    let refused = scene.catalog.collect(Collection::new(Duration::ZERO, DryRun::No), &|_| ()).await;
    assert!(matches!(refused, Err(TemplateError::Repository(RepositoryError::Corrupt { .. }))));
}
