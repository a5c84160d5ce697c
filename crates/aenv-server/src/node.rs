//! A node put together: data plane, network, engine, repository, orchestrator, templates.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aenv_blockd::{Export, ExportChoice, Exports};
use aenv_egress::{Authority, GatedSlots, Purpose, SecretSource, Trust};
use aenv_image::{ImageLimits, ImageSettings, Images};
use aenv_net::{Network, NetworkConfig, Slots};
use aenv_orchestrator::{
    Blobs, CacheListing, HomeLock, Orchestrator, Parts, Settings, Sharing, StandbySettings, meminfo,
};
use aenv_remote::{CacheSettings, Remotes};
use aenv_repository::{Backend, Layers, OssConfig, Repository};
use aenv_template::Templates;
use aenv_types::{EngineKind, Home, Token, Virtualization};
use aenv_vmm::{
    Engine, EngineReport, EngineSetting, Firecracker, FirecrackerConfig, JailConfig, Qemu, QemuConfig,
    VirtualizationSetting, choose,
};
use aenv_volume::{Limits, Volumes};
use anyhow::{Context, bail};

use crate::{artifacts, config::Config, secrets::Secrets};

/// The rooms of a node.
pub struct Node {
    /// Sandboxes.
    pub orchestrator: Orchestrator,
    /// Names, builds and snapshots.
    pub templates: Templates,
    /// OCI images.
    pub images: Images,
    /// Volumes.
    pub volumes: Volumes,
    /// Secrets.
    pub secrets: Secrets,
    /// Which engine, and why.
    pub engine: String,
    /// How disks are shown.
    pub export: Export,
}

/// The folders of a configuration.
pub fn home(config: &Config) -> Home {
    Home::new(&config.home_path, &config.runtime_path)
}

/// Puts a node together. Sandboxes of an earlier server are there again when this returns.
pub async fn open(config: &Config, home: &Home) -> anyhow::Result<Node> {
    home.create().with_context(|| format!("the folders of {} cannot be made", home.path().display()))?;
    // First, so that a second server touches neither the network nor the exports of the one that runs.
    let lock = HomeLock::take(home)?;
    let artifacts = artifacts::find(home, config)?;
    let (kind, why) = choose(&reports(config, home).await, engine_setting(config))?;
    tracing::info!(engine = why, "engine chosen");

    let blockd = blockd_binary(config)?;
    let backend = backend(config, home)?;
    write_remotes(config, home, &backend)?;
    let exports = aenv_blockd::launch(home, &blockd, export_choice(config)).await;
    let exports: Arc<dyn Exports> = Arc::new(exports.context("the data plane cannot be started")?);
    let export = exports.export().await?;
    tracing::info!(kind = ?export.kind, why = export.why, "how disks are shown");
    let engine = engine(kind, config, home)?;
    let secrets = Secrets::open(home)?;
    let network = gated_network(config, home, Arc::new(secrets.clone())).await?;
    let settings = image_settings(config);
    let images = Images::with_settings(home.clone(), exports.clone(), settings);
    images.recover().await.context("what an interrupted pull left cannot be removed")?;
    let blobs = blobs(&backend, home);
    let layers = layers(config);
    let traces = block_cache(config, home).join(aenv_blockd::TRACES);
    let repository = Repository::open(backend, home.clone()).await?.with_layers(layers).with_traces(traces);
    let volumes =
        Volumes::open(home, volume_limits(config)).context("the folder of volumes cannot be read")?;
    let orchestrator = Orchestrator::start(Parts {
        home: home.clone(),
        lock,
        exports,
        network,
        engine,
        kernel: artifacts.kernel,
        initramfs: artifacts.initramfs,
        caches: caches(home, &images),
        modules: artifacts.modules,
        volumes: volumes.clone(),
        settings: limits(config, blobs),
        sharing: Some(Sharing {
            repository: repository.clone(),
            node: name(config),
            publish: config.snapshot.publish_paused,
        }),
    })
    .await?;
    let templates = Templates::open(home.clone(), repository, orchestrator.clone(), images.clone()).await?;
    Ok(Node { orchestrator, templates, images, volumes, secrets, engine: why, export })
}

/// The configured id, or the host's name.
pub fn name(config: &Config) -> String {
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
    config.node_identity.id.clone().unwrap_or_else(host)
}

/// The QEMU engine of this configuration.
pub fn qemu(config: &Config, home: &Home) -> Qemu {
    let mut settings = QemuConfig::new(home.runtime());
    if let Some(binary) = &config.qemu.binary_path {
        settings.binary.clone_from(binary);
    }
    if let Some(warm) = config.qemu.warm {
        settings.warm = usize::try_from(warm).unwrap_or(usize::MAX);
    }
    settings.tracker = tracker();
    settings.jail = jail(config, home);
    settings.virtualization = virtualization(config);
    Qemu::new(settings)
}

/// The Firecracker engine of this configuration.
fn firecracker(config: &Config, home: &Home) -> Firecracker {
    let mut settings = FirecrackerConfig::new(home.runtime());
    if let Some(binary) = config.firecracker.binary_path.clone().or_else(|| artifacts::firecracker(home)) {
        settings.binary = binary;
    }
    settings.jail = jail(config, home);
    settings.virtualization = virtualization(config);
    settings.cpu_template.clone_from(&config.firecracker.cpu_template);
    Firecracker::new(settings)
}

/// The setting `virtualization_mode`.
fn virtualization(config: &Config) -> VirtualizationSetting {
    match config.virtualization_mode.as_str() {
        "kvm" => VirtualizationSetting::Only(Virtualization::Kvm),
        "pvm" => VirtualizationSetting::Only(Virtualization::Pvm),
        "tcg" => VirtualizationSetting::Only(Virtualization::Tcg),
        _ => VirtualizationSetting::Auto,
    }
}

/// How VMMs are confined, if they are to be.
pub fn jail(config: &Config, home: &Home) -> Option<JailConfig> {
    let settings = &config.qemu.jail;
    settings.enabled.then(|| JailConfig {
        root: home.jail(),
        first_uid: settings.first_uid,
        uids: settings.uids,
    })
}

/// What each engine says of itself.
pub async fn reports(config: &Config, home: &Home) -> Vec<EngineReport> {
    vec![firecracker(config, home).probe().await, qemu(config, home).probe().await]
}

/// Whether this machine has what Firecracker runs guests by.
pub async fn runs_on_kvm(config: &Config, home: &Home) -> bool {
    firecracker(config, home).probe().await.virtualization.is_some()
}

/// The setting `engine`.
pub fn engine_setting(config: &Config) -> EngineSetting {
    match config.engine.as_str() {
        "qemu" => EngineSetting::Only(EngineKind::Qemu),
        "firecracker" => EngineSetting::Only(EngineKind::Firecracker),
        _ => EngineSetting::Auto,
    }
}

/// The engine, once blockd serves.
fn engine(kind: EngineKind, config: &Config, home: &Home) -> anyhow::Result<Arc<dyn Engine>> {
    match kind {
        EngineKind::Qemu if config.qemu.jail.enabled && !is_mounted(&home.exports()) => {
            tracing::warn!(
                exports = %home.exports().display(),
                "VMMs run as root: the blockd that serves is one of an earlier version and shows its files elsewhere; end it when no \
                 sandbox runs, then restart the server"
            );
            let mut unconfined = config.clone();
            unconfined.qemu.jail.enabled = false;
            Ok(Arc::new(qemu(&unconfined, home)))
        }
        EngineKind::Qemu => Ok(Arc::new(qemu(config, home))),
        EngineKind::Firecracker => Ok(Arc::new(firecracker(config, home))),
    }
}

fn is_mounted(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| std::fs::metadata(path).map(|meta| meta.dev()).ok();
    let beside = folder.parent().and_then(device);
    device(folder).is_some_and(|own| Some(own) != beside)
}

/// The setting `blockd.export`.
pub fn export_choice(config: &Config) -> ExportChoice {
    config.blockd.export.parse().unwrap_or_default()
}

/// The configured binary, or the one beside the server.
pub fn blockd_binary(config: &Config) -> anyhow::Result<PathBuf> {
    if let Some(path) = &config.blockd.binary_path {
        return Ok(path.clone());
    }
    let own = std::env::current_exe().context("the server's own path is not known")?;
    let beside = own.parent().unwrap_or(Path::new("/")).join("aenv-blockd");
    if !beside.exists() {
        bail!("{} does not exist; set blockd.binary_path", beside.display());
    }
    Ok(beside)
}

/// The library beside the server that is loaded into VMMs, so that a capture costs what changed since the one before. The dynamic
/// linker takes no path with a space or a colon.
pub fn tracker() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.with_file_name("libaenv_track.so");
    let fits = beside.exists() && !beside.to_string_lossy().contains([' ', ':']);
    fits.then_some(beside)
}

/// Network settings of this configuration.
pub fn network(config: &Config, home: &Home) -> anyhow::Result<NetworkConfig> {
    let tag = aenv_net::InstanceTag::of_home(home.path());
    let mut settings = NetworkConfig::new(tag);
    settings.low_watermark = config.pool.low_watermark;
    settings.high_watermark = config.pool.high_watermark;
    settings.veth_cidr = config.network.internal.veth_cidr.parse().context("network.internal.veth_cidr")?;
    let denied = config.network.egress.always_denied_cidrs.iter().map(|text| text.parse());
    settings.always_denied_cidrs =
        denied.collect::<Result<_, _>>().context("network.egress.always_denied_cidrs")?;
    Ok(settings)
}

fn volume_limits(config: &Config) -> Limits {
    Limits {
        count: usize::try_from(config.volumes.max_per_team).unwrap_or(usize::MAX),
        quota: config.volumes.max_size_mib << 20,
        disk_reserve: config.orchestrator.disk_reserve_mib << 20,
    }
}

/// Slots, with gates for what is judged by more than its address.
async fn gated_network(
    config: &Config,
    home: &Home,
    secrets: Arc<dyn SecretSource>,
) -> anyhow::Result<Arc<dyn Network>> {
    let slots = Slots::open(network(config, home)?).await.context("the network cannot be prepared")?;
    let authority = Authority::open(&home.secrets(), Purpose::Egress)?;
    let trust = Trust::load(config.network.egress.extra_ca.as_deref()).context("network.egress.extra_ca")?;
    Ok(Arc::new(GatedSlots::new(slots, authority, trust, secrets)))
}

fn image_settings(config: &Config) -> ImageSettings {
    ImageSettings {
        disk_size: u64::from(config.machine.disk_size_mib) << 20,
        search_registries: config.image.resolver.search_registries.clone(),
        allowed_registries: config.image.resolver.allowed_registries.clone(),
        limits: ImageLimits { table_bytes: table_bytes(config), ..ImageLimits::default() },
        ..ImageSettings::default()
    }
}

fn table_bytes(config: &Config) -> u64 {
    config.image.max_layer_table_mib.max(1).saturating_mul(1 << 20)
}

/// The repository of this configuration.
pub fn backend(config: &Config, home: &Home) -> anyhow::Result<Backend> {
    if config.snapshot.repository_backend != "oss" {
        let root = config.backend.posix_fs.snapshot_store.clone().unwrap_or_else(|| home.repository());
        return Ok(Backend::PosixFs { root });
    }
    let oss = &config.backend.oss;
    let access_key = oss.access_key_id.clone().zip(oss.access_key_secret.clone().map(Token::from));
    Ok(Backend::Oss(OssConfig {
        endpoint: oss.endpoint.clone(),
        bucket: oss
            .bucket
            .clone()
            .context("backend.oss.bucket is required with repository_backend = \"oss\"")?,
        prefix: oss.prefix.clone().unwrap_or_default(),
        region: oss
            .region
            .clone()
            .context("backend.oss.region is required with repository_backend = \"oss\"")?,
        virtual_hosted: oss.addressing_style.as_deref() == Some("virtual"),
        access_key,
    }))
}

/// How layers of committed checkpoints come here.
fn layers(config: &Config) -> Layers {
    match (config.snapshot.on_demand.as_str(), config.snapshot.repository_backend.as_str()) {
        ("always", _) | ("auto", "oss") => Layers::OnDemand,
        _ => Layers::Whole,
    }
}

/// The folder of the cache of what is elsewhere.
fn block_cache(config: &Config, home: &Home) -> PathBuf {
    config.image.cache.root_dir.clone().unwrap_or_else(|| home.cache().join("blocks"))
}

/// Tells blockd how layers that are elsewhere are reached, also those that an earlier configuration noted.
fn write_remotes(config: &Config, home: &Home, backend: &Backend) -> anyhow::Result<()> {
    let folder = block_cache(config, home);
    let remotes = Remotes {
        repository: backend.reached(),
        cache: CacheSettings {
            folder,
            capacity: config.image.cache.capacity_gb << 30,
            reserve: config.orchestrator.disk_reserve_mib << 20,
        },
        read_ms: config.snapshot.remote_read_timeout_secs.max(1) * 1000,
        fill: config.snapshot.background_fill,
        table_bytes: table_bytes(config),
    };
    let text = serde_json::to_vec(&remotes)?;
    let path = home.blockd_remotes();
    aenv_durable::write_private(&path, &text).with_context(|| format!("{} cannot be written", path.display()))
}

/// Share of the host's memory that guests may be promised, in percent, when the configuration does not say.
const MEMORY_SHARE: u64 = 80;
/// One part in so many of the host's memory that is kept available, unless configured.
const RESERVE_PART: u64 = 20;

/// Whether committed blobs lie on the home's own filesystem.
fn blobs(backend: &Backend, home: &Home) -> Blobs {
    use std::os::unix::fs::MetadataExt;
    let Backend::PosixFs { root } = backend else { return Blobs::Elsewhere };
    let device =
        |path: &Path| path.ancestors().find_map(|path| std::fs::metadata(path).ok()).map(|m| m.dev());
    if device(root).is_some_and(|own| device(&home.layers()) == Some(own)) {
        Blobs::Beside
    } else {
        Blobs::Elsewhere
    }
}

/// What keeps layers on this node beside sandboxes: pulled images and cached steps of builds.
fn caches(home: &Home, images: &Images) -> Vec<CacheListing> {
    let (home, images) = (home.clone(), images.clone());
    vec![Arc::new(move || images.cached()), Arc::new(move || aenv_template::cached(&home))]
}

fn limits(config: &Config, blobs: Blobs) -> Settings {
    let total_kib = meminfo().into_iter().find(|(name, _)| name == "MemTotal").map_or(0, |(_, kib)| kib);
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    Settings {
        max_running: config.orchestrator.max_running,
        memory_mib: config.orchestrator.memory_mib.unwrap_or((total_kib >> 10) * MEMORY_SHARE / 100),
        memory_overcommit: config.orchestrator.memory_overcommit,
        memory_reserve_mib: config
            .orchestrator
            .memory_reserve_mib
            .unwrap_or((total_kib >> 10) / RESERVE_PART),
        stand_after_deadline: Duration::from_secs(config.orchestrator.stand_after_deadline_secs),
        memory_idle: Duration::from_secs(config.orchestrator.memory_idle_secs),
        share_memory_across_teams: config.orchestrator.share_memory_across_teams,
        auto_resume_min_timeout: Duration::from_secs(
            config.orchestrator.auto_resume_min_sandbox_timeout_secs,
        ),
        disk_reserve_bytes: config.orchestrator.disk_reserve_mib << 20,
        parallel_launches: config.orchestrator.parallel_launches.unwrap_or(cores * 2),
        cache_bytes: config.image.cache.capacity_gb.saturating_mul(1 << 30),
        blobs,
        standby: StandbySettings {
            count: config.orchestrator.standby.count,
            templates: config.orchestrator.standby.templates,
            keep: Duration::from_secs(config.orchestrator.standby.keep_secs),
        },
    }
}
