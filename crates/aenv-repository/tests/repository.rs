//! The repository on a folder, in memory, and on a real S3 server where `AENV_TEST_S3` names one (such as `http://127.0.0.1:5000`,
//! with a bucket `aenv-test`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its fixtures too")]

use std::{collections::BTreeSet, fs, path::Path, sync::Arc, time::Duration};

use aenv_repository::{
    Backend, Collection, Damage, Depth, DryRun, GcReport, Holder, Layers, Offer, OssConfig, Pace,
    PausedError, PausedSandboxes, PausedState, Progress, Repository, RepositoryError,
};
use aenv_types::{
    Checkpoint, CheckpointId, Digest, DiskImage, GuestContext, Home, LayerName, LayerRef, Lineage,
    MachineShape, Origin, SandboxId, TeamId, VmState,
};

const NO_DAMAGE: [Damage; 0] = [];

struct Node {
    folder: tempfile::TempDir,
    home: Home,
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::new(folder.path().join("home"), folder.path().join("run"));
        home.create().unwrap();
        Self { folder, home }
    }

    /// A layer that was just sealed here.
    fn layer(&self, bytes: &[u8]) -> LayerRef {
        let name = LayerName::new_local();
        fs::write(self.home.layer(&name), bytes).unwrap();
        LayerRef { name, size: bytes.len() as u64 }
    }

    fn checkpoint(&self, layers: Vec<LayerRef>) -> Checkpoint {
        let state = self.layer(CheckpointId::random().as_str().as_bytes());
        Checkpoint {
            format: 1,
            id: CheckpointId::random(),
            created_at: chrono::Utc::now(),
            shape: MachineShape::DEFAULT,
            engine: None,
            vm_state: Some(VmState { name: state.name, size: state.size }),
            memory: None,
            disks: vec![DiskImage { drive: "root".to_owned(), size: 1 << 20, layers }],
            guest: GuestContext::default(),
            lineage: Lineage {
                parent: None,
                origin: Origin::Image { reference: "x".to_owned(), manifest: Digest::of(b"x") },
            },
        }
    }
}

/// A repository of one test, and how to open it again from another node.
struct Store {
    kind: Kind,
    _folder: tempfile::TempDir,
}

#[derive(Clone)]
enum Kind {
    Configured(Backend),
    Memory(Arc<object_store::memory::InMemory>),
}

impl Kind {
    async fn open(&self, home: &Home) -> Result<Repository, RepositoryError> {
        match self {
            Self::Configured(backend) => Repository::open(backend.clone(), home.clone()).await,
            Self::Memory(store) => Repository::open_store(store.clone(), home.clone()).await,
        }
    }
}

async fn collect(
    repository: &Repository,
    grace: Duration,
    dry_run: DryRun,
) -> Result<GcReport, RepositoryError> {
    let pace = Pace { pause: Duration::from_millis(5), ..Pace::default() };
    repository.gc(Collection { grace, dry_run, pace }, &|_| ()).await
}

async fn check(repository: &Repository) -> Vec<Damage> {
    repository.fsck(Depth::Bytes, &|_| ()).await.unwrap()
}

impl Store {
    fn posix() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let backend = Backend::PosixFs { root: folder.path().join("repository") };
        Self { kind: Kind::Configured(backend), _folder: folder }
    }

    fn root(&self) -> &Path {
        match &self.kind {
            Kind::Configured(Backend::PosixFs { root }) => root,
            _ => panic!("an object store has no folder"),
        }
    }

    /// Every backend that can be tested here.
    fn all() -> Vec<Self> {
        let memory = Kind::Memory(Arc::default());
        let mut stores = vec![Self::posix(), Self { kind: memory, _folder: tempfile::tempdir().unwrap() }];
        if let Ok(endpoint) = std::env::var("AENV_TEST_S3") {
            let config = OssConfig {
                endpoint: Some(endpoint),
                bucket: "aenv-test".to_owned(),
                prefix: format!("run/{}", uuid::Uuid::new_v4()),
                region: "us-east-1".to_owned(),
                virtual_hosted: false,
                access_key: Some(("test".to_owned(), "test".to_owned().into())),
            };
            let kind = Kind::Configured(Backend::Oss(config));
            stores.push(Self { kind, _folder: tempfile::tempdir().unwrap() });
        }
        stores
    }

    async fn open(&self, node: &Node) -> Repository {
        self.kind.open(&node.home).await.unwrap()
    }
}

fn blob_path(root: &Path, digest: &Digest) -> std::path::PathBuf {
    root.join("blobs/sha256").join(&digest.hex()[..2]).join(digest.hex())
}

/// Replaces a blob's file by other bytes, without touching who else has the old ones.
fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

fn files_below(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn on_demand_only_the_vm_state_is_fetched() {
    for store in Store::all() {
        let (one, two) = (Node::new(), Node::new());
        let local = one.checkpoint(vec![one.layer(&[1; 70_000]), one.layer(&[2; 5000])]);
        let committed = store.open(&one).await.commit(&local).await.unwrap();
        let elsewhere = store.open(&two).await.with_layers(Layers::OnDemand);
        elsewhere.fetch(&committed).await.unwrap();
        elsewhere.fetch(&committed).await.unwrap();
        assert!(two.home.layer(&committed.vm_state.unwrap().name).exists());
        for layer in &committed.disks[0].layers {
            assert!(!two.home.layer(&layer.name).exists());
            assert!(two.home.has_layer(&layer.name));
            let note = fs::read(two.home.remote_layer(&layer.name)).unwrap();
            let note: aenv_remote::Location = serde_json::from_slice(&note).unwrap();
            assert_eq!((note.size, note.digest), (layer.size, layer.name.to_string()));
        }
        // A child is committed without the layers that only the repository has.
        let mut child = two.checkpoint(committed.disks[0].layers.clone());
        child.disks[0].layers.push(two.layer(b"new"));
        let child = elsewhere.commit(&child).await.unwrap();
        // Where layers are wanted whole, they are fetched in spite of the notes.
        let whole = store.open(&two).await;
        whole.fetch(&child).await.unwrap();
        assert!(child.layers().all(|layer| two.home.layer(&layer.name).exists()));
        let missing =
            one.checkpoint(vec![LayerRef { name: LayerName::Digest(Digest::of(b"nowhere")), size: 7 }]);
        let missing = Checkpoint { vm_state: None, ..missing };
        let error = elsewhere.fetch(&missing).await.unwrap_err();
        assert!(matches!(error, RepositoryError::Corrupt { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_in_a_registry_stay_there_and_files_of_a_node_do_not() {
    use aenv_remote::{BlobName, Location, Login, Place};
    for store in Store::all() {
        let (one, two) = (Node::new(), Node::new());
        let digest = Digest::of(b"bytes that nobody reads").to_string();
        let note = |node: &Node, place: Place, size: u64, digest: &str| {
            let name = LayerName::Digest(Digest::of(place.identity(digest).as_bytes()));
            let location = Location { place, size, digest: digest.to_owned(), disk: Some(4096) };
            fs::write(node.home.remote_layer(&name), serde_json::to_vec(&location).unwrap()).unwrap();
            LayerRef { name, size }
        };
        let place = Place::Registry {
            blob: BlobName { registry: "r.example".into(), repository: "a/b".into(), digest: digest.clone() },
            login: Some(Login { user: "u".into(), password: "secret".into() }),
        };
        let remote = note(&one, place, 7000, &digest);
        let file = one.home.path().join("a-layout's-blob");
        fs::write(&file, b"content").unwrap();
        let content = Digest::of(b"content");
        let local = note(&one, Place::File { path: file.clone() }, 7, &content.to_string());
        let repository = store.open(&one).await;
        let checkpoint = one.checkpoint(vec![remote, local, one.layer(b"upper")]);
        let committed = repository.commit(&checkpoint).await.unwrap();
        let names: Vec<LayerName> = committed.disks[0].layers.iter().map(|layer| layer.name).collect();
        assert_eq!(names[..2], [remote.name, LayerName::Digest(content)]);
        assert_eq!(repository.fsck(Depth::Bytes, &|_| ()).await.unwrap(), []);
        // The same blobs once more, by a node that has nothing.
        let child = Checkpoint { id: CheckpointId::random(), ..committed.clone() };
        store.open(&two).await.commit(&child).await.unwrap();

        for layers in [Layers::OnDemand, Layers::Whole] {
            let fetching = store.open(&two).await.with_layers(layers);
            fetching.fetch(&committed).await.unwrap();
            let note = fs::read_to_string(two.home.remote_layer(&remote.name)).unwrap();
            assert!(note.contains("r.example") && !note.contains("secret"), "{note}");
            assert!(!two.home.layer(&remote.name).exists());
        }
        let fetched = fs::read(two.home.layer(&LayerName::Digest(content))).unwrap();
        assert_eq!(fetched, b"content");

        let LayerName::Digest(name) = remote.name else { panic!("{remote:?}") };
        assert!(repository.knows(&name).await.unwrap() && repository.knows(&content).await.unwrap());
        // It goes with the last manifest that names it.
        let all = Collection::new(Duration::ZERO, DryRun::No);
        assert_eq!(repository.gc(all, &|_| ()).await.unwrap().removed, []);
        repository.remove(&committed.id).await.unwrap();
        repository.remove(&child.id).await.unwrap();
        assert!(repository.gc(all, &|_| ()).await.unwrap().removed.contains(&name));
        assert!(!repository.knows(&name).await.unwrap());

        // A file that is not what its note says is not published.
        fs::write(&file, b"CONTENT").unwrap();
        let error = repository.commit(&one.checkpoint(vec![local])).await.unwrap_err();
        assert!(matches!(error, RepositoryError::Corrupt { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_traces_travel_with_a_checkpoint() {
    for store in Store::all() {
        let nodes = [Node::new(), Node::new(), Node::new()];
        let [one, two, three] = &nodes;
        let local = one.checkpoint(vec![one.layer(b"base"), one.layer(b"upper")]);
        let committed = store.open(one).await.commit(&local).await.unwrap();
        let open = async |node: &Node| {
            let repository = store.open(node).await.with_layers(Layers::OnDemand);
            repository.with_traces(node.home.path().join("traces"))
        };
        // As blockd names it.
        let halves: String = committed.disks[0]
            .layers
            .iter()
            .map(|layer| layer.name.to_string()["sha256:".len()..][..32].to_owned())
            .collect();
        let name = format!("{}.json", Digest::of(halves.as_bytes()).hex());
        let trace = |node: &Node| node.home.path().join("traces").join(&name);
        let repository = open(two).await;
        repository.fetch(&committed).await.unwrap();
        assert!(!trace(two).exists());
        fs::create_dir_all(two.home.path().join("traces")).unwrap();
        fs::write(trace(two), b"what a launch reads").unwrap();
        repository.fetch(&committed).await.unwrap();

        // Given while nobody waits for it; whoever comes too early has to record for itself.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            open(three).await.fetch(&committed).await.unwrap();
            if trace(three).exists() {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "the trace was not published");
            for layer in &committed.disks[0].layers {
                fs::remove_file(three.home.remote_layer(&layer.name)).unwrap();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(fs::read(trace(three)).unwrap(), b"what a launch reads");
        repository.remove(&committed.id).await.unwrap();
        assert!(open(three).await.checkpoint(&committed.id).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_node_commits_another_fetches() {
    for store in Store::all() {
        let (one, two) = (Node::new(), Node::new());
        let repository = store.open(&one).await;
        let (small, large) =
            (vec![1; 70_000], (0..20_000_000_u32).map(|i| (i % 251) as u8).collect::<Vec<_>>());
        let local = one.checkpoint(vec![one.layer(&large), one.layer(&small), one.layer(&small)]);
        let committed = repository.commit(&local).await.unwrap();
        assert_eq!(committed.disks[0].layers[0].name, LayerName::Digest(Digest::of(&large)));
        assert_eq!(
            committed.disks[0].layers[1].name, committed.disks[0].layers[2].name,
            "same bytes, one blob"
        );
        assert_eq!(repository.checkpoint(&local.id).await.unwrap(), committed);
        for layer in committed.layers() {
            assert!(one.home.layer(&layer.name).exists(), "the digest name is on the node too");
        }
        assert_eq!(repository.commit(&local).await.unwrap(), committed, "again is the same");

        let elsewhere = store.open(&two).await;
        elsewhere.fetch(&committed).await.unwrap();
        assert_eq!(fs::read(two.home.layer(&committed.disks[0].layers[0].name)).unwrap(), large);
        assert_eq!(fs::read(two.home.layer(&committed.disks[0].layers[1].name)).unwrap(), small);
        assert!(fs::read_dir(two.home.staging()).unwrap().next().is_none(), "staging is empty");

        // A child shares all but what is new, also when the other node publishes it.
        let mut child = two.checkpoint(committed.disks[0].layers.clone());
        child.disks[0].layers.push(two.layer(b"new"));
        elsewhere.commit(&child).await.unwrap();
        let usage = repository.du().await.unwrap();
        assert_eq!((usage.checkpoints, usage.blobs), (2, 5), "two layers, one new, two vm states");
        assert!(usage.bytes < usage.bytes_unshared);
        assert_eq!(check(&repository).await, NO_DAMAGE);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_writers_one_wins() {
    for store in Store::all() {
        let node = Node::new();
        let team: TeamId = "default".parse().unwrap();
        let (one, two) = (store.open(&node).await, store.open(&node).await);

        let racing = (0..8).map(|i| {
            let (repository, team) = (if i % 2 == 0 { one.clone() } else { two.clone() }, team.clone());
            tokio::spawn(async move { repository.put(&team, "names/new", &i, None).await })
        });
        let mut winners = 0;
        for result in futures::future::join_all(racing).await {
            match result.unwrap() {
                Ok(_) => winners += 1,
                Err(error) => assert!(matches!(error, RepositoryError::Conflict(_)), "{error}"),
            }
        }
        assert_eq!(winners, 1, "one of eight creates");

        // A counter that eight writers raise by read, add, conditional write never loses a step.
        one.put(&team, "counter", &0_u32, None).await.unwrap();
        let raising = (0..8).map(|_| {
            let (kind, team) = (store.kind.clone(), team.clone());
            let home = node.home.clone();
            tokio::spawn(async move {
                let repository = kind.open(&home).await.unwrap();
                for _ in 0..5 {
                    loop {
                        let seen = repository.get::<u32>(&team, "counter").await.unwrap();
                        match repository.put(&team, "counter", &(seen.value + 1), Some(&seen.version)).await {
                            Ok(_) => break,
                            Err(RepositoryError::Conflict(_)) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            })
        });
        for done in futures::future::join_all(raising).await {
            done.unwrap();
        }
        let counter = one.get::<u32>(&team, "counter").await.unwrap();
        assert_eq!(counter.value, 40);

        let after = two.put(&team, "counter", &41, Some(&counter.version)).await.unwrap();
        let stale = one.put(&team, "counter", &0, Some(&counter.version)).await;
        assert!(matches!(stale, Err(RepositoryError::Conflict(_))));
        one.put(&team, "counter", &42, Some(&after)).await.unwrap();

        assert_eq!(one.list(&team, "").await.unwrap(), ["counter", "names/new"]);
        assert_eq!(one.list(&team, "names/").await.unwrap(), ["names/new"]);
        assert!(
            one.list(&"other".parse().unwrap(), "").await.unwrap().is_empty(),
            "teams see nothing of each other"
        );
        one.delete(&team, "counter").await.unwrap();
        assert!(matches!(one.delete(&team, "counter").await, Err(RepositoryError::NotFound(_))));
        assert!(matches!(two.get::<u32>(&team, "counter").await, Err(RepositoryError::NotFound(_))));
        let gone = two.put(&team, "counter", &1, Some(&after)).await;
        assert!(matches!(gone, Err(RepositoryError::Conflict(_))), "an update of what was deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_dies_before_its_manifest_leaves_nothing_visible() {
    let (store, node) = (Store::posix(), Node::new());
    let repository = store.open(&node).await;
    let whole = node.layer(b"whole");
    // The second layer cannot be read: the commit ends after some blobs, as a crash would.
    let lost = LayerRef { name: LayerName::Digest(Digest::of(b"lost")), size: 4 };
    let checkpoint = node.checkpoint(vec![whole, lost]);
    repository.commit(&checkpoint).await.unwrap_err();
    assert!(matches!(repository.checkpoint(&checkpoint.id).await, Err(RepositoryError::NotFound(_))));
    assert!(repository.checkpoints().await.unwrap().is_empty());

    // What it left is collected; nothing is while it is young.
    let young = collect(&repository, Duration::from_secs(3600), DryRun::No).await.unwrap();
    assert!(young.removed.is_empty());
    let planned = collect(&repository, Duration::ZERO, DryRun::Yes).await.unwrap();
    let blobs = files_below(&store.root().join("blobs"));
    assert_eq!(planned.removed.len(), blobs.len());
    let done = collect(&repository, Duration::ZERO, DryRun::No).await.unwrap();
    assert_eq!(done.removed.len(), blobs.len(), "the dry run said the truth");
    assert!(files_below(&store.root().join("blobs")).is_empty());
    assert!(files_below(&store.root().join("collections")).is_empty());
    assert!(files_below(&store.root().join("commits")).is_empty());

    // And the node can commit it after all once the layer is there.
    fs::write(node.home.layer(&lost.name), b"lost").unwrap();
    repository.commit(&checkpoint).await.unwrap();
    assert_eq!(check(&repository).await, NO_DAMAGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_is_found_and_never_fetched() {
    for (kind, bytes) in
        [("truncated", Some(&b"0123"[..])), ("flipped", Some(b"0123456789abcdeX")), ("missing", None)]
    {
        let (store, one, two) = (Store::posix(), Node::new(), Node::new());
        let repository = store.open(&one).await;
        let committed =
            repository.commit(&one.checkpoint(vec![one.layer(b"0123456789abcdef")])).await.unwrap();
        let digest = Digest::of(b"0123456789abcdef");
        let blob = blob_path(store.root(), &digest);
        match bytes {
            Some(bytes) => replace(&blob, bytes),
            None => fs::remove_file(&blob).unwrap(),
        }
        let error = store.open(&two).await.fetch(&committed).await.unwrap_err();
        assert!(matches!(&error, RepositoryError::Corrupt { .. }), "{kind}: {error}");
        assert!(!two.home.layer(&LayerName::Digest(digest)).exists(), "{kind}: nothing damaged is kept");
        assert!(fs::read_dir(two.home.staging()).unwrap().next().is_none(), "{kind}");
        let found = check(&repository).await;
        let shallow = repository.fsck(Depth::Names, &|_| ()).await.unwrap();
        assert_eq!(shallow.len(), usize::from(kind != "flipped"), "{kind}: only reading shows flipped bits");
        let checkpoints = vec![committed.id.clone()];
        let expected = match bytes {
            Some(_) => Damage::Damaged { blob: digest, checkpoints },
            None => Damage::Missing { blob: digest, checkpoints },
        };
        assert_eq!(found, [expected], "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_local_layer_is_not_published() {
    let (store, node) = (Store::posix(), Node::new());
    let repository = store.open(&node).await;
    let lying = LayerRef { name: LayerName::Digest(Digest::of(b"right")), size: 5 };
    fs::write(node.home.layer(&lying.name), b"wrong").unwrap();
    let checkpoint = node.checkpoint(vec![lying]);
    assert!(matches!(repository.commit(&checkpoint).await, Err(RepositoryError::Corrupt { .. })));
    let mut short = node.layer(b"12345");
    short.size = 6;
    let checkpoint = node.checkpoint(vec![short]);
    assert!(matches!(repository.commit(&checkpoint).await, Err(RepositoryError::Corrupt { .. })));
    assert!(repository.checkpoints().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_many_checkpoints_name_is_read_once() {
    let (store, node) = (Store::posix(), Node::new());
    let repository = store.open(&node).await;
    let layer = node.layer(b"first");
    let committed = repository.commit(&node.checkpoint(vec![layer])).await.unwrap();
    // Nobody writes to a layer; here it shows that its bytes are not looked at again.
    let path = node.home.layer(&layer.name);
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"other").unwrap();
    let again = repository.commit(&node.checkpoint(vec![layer, node.layer(b"second")])).await.unwrap();
    assert_eq!(again.disks[0].layers[0], committed.disks[0].layers[0]);
    assert_eq!(again.disks[0].layers[1].name, LayerName::Digest(Digest::of(b"second")));
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_formats_are_refused() {
    let (store, node) = (Store::posix(), Node::new());
    let repository = store.open(&node).await;
    let committed = repository.commit(&node.checkpoint(vec![node.layer(b"x")])).await.unwrap();
    let manifest = store.root().join(format!("checkpoints/{}.json", committed.id));
    replace(&manifest, br#"{"format": 9, "something": "new"}"#);
    let error = repository.checkpoint(&committed.id).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Format { found: 9, known: 1, .. }), "{error}");
    // What a newer manifest names is not known: nothing may be collected.
    assert!(collect(&repository, Duration::ZERO, DryRun::No).await.is_err());
    assert!(!files_below(&store.root().join("blobs")).is_empty());
    replace(&manifest, br#"{"format": 1, "id""#);
    assert!(matches!(repository.checkpoint(&committed.id).await, Err(RepositoryError::Corrupt { .. })));
    replace(&store.root().join("format.json"), br#"{"format": 2}"#);
    let error = store.kind.open(&node.home).await.err().unwrap();
    assert!(matches!(error, RepositoryError::Format { found: 2, known: 1, .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_and_collections_at_once_lose_nothing() {
    for store in Store::all() {
        let node = Arc::new(Node::new());
        let shared = b"shared by all, and by nothing in between";
        let collecting = {
            let (repository, node) = (store.open(&node).await, Arc::clone(&node));
            tokio::spawn(async move {
                for _ in 0..15 {
                    collect(&repository, Duration::ZERO, DryRun::No).await.unwrap();
                }
                drop(node);
            })
        };
        let repository = store.open(&node).await;
        let mut rounds = 0;
        while !collecting.is_finished() || rounds < 3 {
            rounds += 1;
            let committed = repository.commit(&node.checkpoint(vec![node.layer(shared)])).await.unwrap();
            let fresh = Node::new();
            store.open(&fresh).await.fetch(&committed).await.unwrap();
            // From here on nothing names the shared blob, until the next round.
            repository.remove(&committed.id).await.unwrap();
        }
        collecting.await.unwrap();
        assert!(node.folder.path().exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_commit_and_collect_at_once() {
    for store in Store::all() {
        // Each node has a home of its own and opens the repository by itself: all they share is the store.
        let nodes: Vec<_> = (0..2).map(|_| Arc::new(Node::new())).collect();
        let mut work = Vec::new();
        for node in &nodes {
            let (repository, node, kind) = (store.open(node).await, Arc::clone(node), store.kind.clone());
            work.push(tokio::spawn(async move {
                for round in 0..10 {
                    let layers = vec![node.layer(b"the same on both"), node.layer(&[round; 100])];
                    let committed = repository.commit(&node.checkpoint(layers)).await.unwrap();
                    collect(&repository, Duration::ZERO, DryRun::No).await.unwrap();
                    let fresh = Node::new();
                    kind.open(&fresh.home).await.unwrap().fetch(&committed).await.unwrap();
                    if round % 2 == 0 {
                        repository.remove(&committed.id).await.unwrap();
                    }
                }
            }));
        }
        for done in work {
            done.await.unwrap();
        }
        let repository = store.open(&nodes[0]).await;
        collect(&repository, Duration::ZERO, DryRun::No).await.unwrap();
        assert_eq!(check(&repository).await, NO_DAMAGE);
        let usage = repository.du().await.unwrap();
        // Five rounds of each node stay: a state for each, a layer for each round, and one layer for all.
        assert_eq!((usage.checkpoints, usage.blobs, usage.bytes_unreferenced), (10, 16, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_died_holds_nobody_up_for_long() {
    let (store, node) = (Store::posix(), Node::new());
    let repository = store.open(&node).await;
    let committed = repository.commit(&node.checkpoint(vec![node.layer(b"in use")])).await.unwrap();
    repository.commit(&node.checkpoint(vec![node.layer(b"garbage")])).await.unwrap();
    // What is there when a collection dies between its mark and its first removal: the mark.
    let mark = store.root().join("collections/00000000-0000-4000-8000-000000000000.json");
    fs::create_dir_all(mark.parent().unwrap()).unwrap();
    let lapses = chrono::Utc::now() + chrono::TimeDelta::milliseconds(700);
    fs::write(&mark, serde_json::json!({"format": 1, "valid_until": lapses}).to_string()).unwrap();
    let again = node.checkpoint(vec![node.layer(b"new")]);
    let new = repository.commit(&again).await.unwrap();
    assert!(chrono::Utc::now() >= lapses, "the commit went on while a collection might have been removing");
    assert!(!mark.exists(), "who finds a lapsed mark removes it");
    for checkpoint in [&committed, &new] {
        store.open(&Node::new()).await.fetch(checkpoint).await.unwrap();
    }
    assert_eq!(check(&repository).await, NO_DAMAGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_is_cut_off_is_finished_by_the_next() {
    for store in Store::all() {
        let node = Node::new();
        let repository = store.open(&node).await;
        let kept = repository.commit(&node.checkpoint(vec![node.layer(b"kept")])).await.unwrap();
        let garbage = (0..40_u8).map(|i| node.layer(&[i; 50])).collect();
        let removed = repository.commit(&node.checkpoint(garbage)).await.unwrap();
        repository.remove(&removed.id).await.unwrap();
        // It dies after its first batch: the future is dropped where it stands, its mark stays.
        let (told, mut first) = tokio::sync::mpsc::unbounded_channel();
        let pace = Pace {
            round: Duration::ZERO,
            pause: Duration::from_secs(60),
            mark_valid: Duration::from_millis(500),
            ..Pace::default()
        };
        let doomed = {
            let repository = store.open(&node).await;
            let collection = Collection { grace: Duration::ZERO, dry_run: DryRun::No, pace };
            tokio::spawn(async move {
                let watcher = |progress: Progress| {
                    if progress.step == "removing blobs" {
                        told.send(progress).unwrap();
                    }
                };
                repository.gc(collection, &watcher).await
            })
        };
        let progress = first.recv().await.unwrap();
        doomed.abort();
        assert!(progress.done <= progress.total);
        let report = collect(&repository, Duration::ZERO, DryRun::No).await.unwrap();
        assert_eq!(report.kept, 2);
        assert_eq!(check(&repository).await, NO_DAMAGE);
        store.open(&Node::new()).await.fetch(&kept).await.unwrap();
        assert_eq!(repository.du().await.unwrap().bytes_unreferenced, 0);
    }
}

#[tokio::test]
async fn an_object_store_without_region_is_an_error() {
    let node = Node::new();
    let config = OssConfig {
        endpoint: None,
        bucket: "b".to_owned(),
        prefix: String::new(),
        region: String::new(),
        virtual_hosted: true,
        access_key: None,
    };
    let error = Repository::open(Backend::Oss(config), node.home.clone()).await.err().unwrap();
    assert!(matches!(&error, RepositoryError::Config(text) if text.contains("region")), "{error}");
}

fn holder(name: &str) -> Holder {
    Holder { id: uuid::Uuid::new_v4(), name: name.to_owned() }
}

fn lost<T: std::fmt::Debug>(outcome: Result<T, PausedError>) -> (PausedState, String) {
    match outcome {
        Err(PausedError::Lost { state, holder }) => (state, holder.name),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_paused_sandbox_goes_from_node_to_node_and_comes_to_an_end() {
    for store in Store::all() {
        let (node, team, id) = (Node::new(), TeamId::default_team(), SandboxId::random());
        let repository = store.open(&node).await;
        let [a, b] = ["a", "b"].map(|name| PausedSandboxes::new(repository.clone(), holder(name)));
        assert_eq!(b.find(&team, &id).await.unwrap(), None);
        let offer = |generation| Offer {
            generation,
            checkpoint: CheckpointId::random(),
            record: serde_json::json!({"of": generation}),
        };
        a.announce(&team, &id).await.unwrap();
        // After a crash in between it does the same again.
        a.announce(&team, &id).await.unwrap();
        assert_eq!(lost(b.claim(&team, &id, 1).await), (PausedState::Held, "a".to_owned()));
        let first = offer(1);
        a.offer(&team, &id, &first).await.unwrap();
        a.offer(&team, &id, &first).await.unwrap();
        let found = b.find(&team, &id).await.unwrap().unwrap();
        assert_eq!((found.state, found.generation, &found.record), (PausedState::Paused, 1, &first.record));
        b.claim(&team, &id, 1).await.unwrap();
        b.claim(&team, &id, 1).await.unwrap();
        // What it was launched from is still named, what is in it is nobody's business.
        let found = a.find(&team, &id).await.unwrap().unwrap();
        assert_eq!((found.checkpoint, found.record.is_null()), (Some(first.checkpoint), true));
        assert_eq!(lost(a.claim(&team, &id, 1).await), (PausedState::Held, "b".to_owned()));
        assert_eq!(lost(a.offer(&team, &id, &offer(1)).await), (PausedState::Held, "b".to_owned()));
        assert_eq!(lost(a.end(&team, &id).await), (PausedState::Held, "b".to_owned()));
        b.offer(&team, &id, &offer(2)).await.unwrap();
        assert_eq!(lost(a.claim(&team, &id, 1).await), (PausedState::Paused, "b".to_owned()));
        a.claim(&team, &id, 2).await.unwrap();
        a.end(&team, &id).await.unwrap();
        a.end(&team, &id).await.unwrap();
        assert_eq!(lost(b.claim(&team, &id, 2).await), (PausedState::Ended, "a".to_owned()));
        assert!(!b.find(&team, &id).await.unwrap().unwrap().is_over(), "b may hear of it for weeks");
        // Other teams have other sandboxes.
        assert_eq!(b.find(&"other".parse().unwrap(), &id).await.unwrap(), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_nodes_that_claim_a_sandbox_one_has_it() {
    for store in Store::all() {
        let (team, id) = (TeamId::default_team(), SandboxId::random());
        let first = Node::new();
        let owner = PausedSandboxes::new(store.open(&first).await, holder("owner"));
        owner.announce(&team, &id).await.unwrap();
        for generation in 1..=5 {
            let current = owner.find(&team, &id).await.unwrap().unwrap().holder;
            let of_current = PausedSandboxes::new(store.open(&first).await, current);
            let (checkpoint, record) = (CheckpointId::random(), serde_json::Value::Null);
            of_current.offer(&team, &id, &Offer { generation, checkpoint, record }).await.unwrap();
            let mut claims = Vec::new();
            for _ in 0..6 {
                let node = Node::new();
                let seen = PausedSandboxes::new(store.open(&node).await, holder("claims"));
                let (team, id) = (team.clone(), id.clone());
                claims.push(tokio::spawn(async move {
                    let claimed = seen.claim(&team, &id, generation).await;
                    drop(node);
                    claimed.map(|()| seen.own().id)
                }));
            }
            let mut winners = Vec::new();
            for claim in claims {
                match claim.await.unwrap() {
                    Ok(winner) => winners.push(winner),
                    other => assert_eq!(lost(other).0, PausedState::Held),
                }
            }
            assert_eq!(winners, [owner.find(&team, &id).await.unwrap().unwrap().holder.id]);
        }
    }
}

#[tokio::test]
async fn in_a_folder_that_is_not_mounted_no_sandbox_is_missing() {
    let (store, node) = (Store::posix(), Node::new());
    let (team, id) = (TeamId::default_team(), SandboxId::random());
    let a = PausedSandboxes::new(store.open(&node).await, holder("a"));
    assert_eq!(a.find(&team, &id).await.unwrap(), None);
    fs::rename(store.root().join("format.json"), store.root().join("elsewhere.json")).unwrap();
    assert!(matches!(a.find(&team, &id).await, Err(RepositoryError::Store { .. })));
    let claimed = a.claim(&team, &id, 1).await;
    assert!(matches!(claimed, Err(PausedError::Repository(RepositoryError::Store { .. }))), "{claimed:?}");
}
