//! `aenv-server serve`: the node and its API, until SIGTERM or SIGINT. Running sandboxes go on without it.

use std::{sync::Arc, time::Duration};

use aenv_template::Retention;
use aenv_types::Home;
use anyhow::Context;
use chrono::Utc;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    app::App,
    audit::Audit,
    config::Config,
    db::Db,
    deadlines,
    events::Events,
    idempotency::Idempotency,
    keys::Keys,
    limits::Limits,
    listen::{self, own::OwnCertificate, tls::Certificate},
    node,
    proxy::Proxy,
    routes::{nodes::CpuClock, system},
    spawns::Spawns,
    state::{AppState, Counts, Shared},
    upkeep::Upkeep,
};

/// Images that are published at the same time: each keeps a core busy and a disk.
const PUBLISHING: usize = 2;

/// Runs the server to its end.
pub async fn run(config: Config) -> anyhow::Result<()> {
    // Each connection through the proxy holds two descriptors.
    aenv_blockd::raise_open_files();
    let home = node::home(&config);
    let node = node::open(&config, &home).await?;
    let db = Db::open(&home.path().join("server.db"))?;
    let keys =
        Keys::open(&home, db.clone(), std::env::var("AENV_API_KEY").ok().filter(|key| !key.is_empty()))?;
    let listener = TcpListener::bind(&config.api_addr);
    let listener = listener.await.with_context(|| format!("{} cannot be listened on", config.api_addr))?;
    let address = listener.local_addr().context("the listening address")?;

    let tls = match certificate(&config, &home)? {
        Some(certificate) => {
            tokio::spawn(certificate.clone().follow());
            Some(certificate.acceptor()?)
        }
        None => None,
    };

    // Before the first request, so that nothing goes uncounted.
    system::recorder();
    let events = Events::start(db.clone());
    if let Some(expiries) = node.orchestrator.expiries() {
        tokio::spawn(deadlines::note(expiries, events.clone()));
    }
    let proxy = Proxy::new(Arc::new(node.orchestrator.clone()), keys.clone(), &config.sandbox_proxy.domains)
        .with_events(events.clone());
    let retention = Retention {
        max_age: config.retention.max_age_secs.map(Duration::from_secs),
        max_count: config.retention.max_count,
    };
    let upkeep = Upkeep::new(node.templates.catalog.clone(), node.orchestrator.clone(), retention);
    let (interval, grace) = (config.snapshot.gc_interval_secs, config.snapshot.gc_grace_secs);
    tokio::spawn(upkeep.clone().run(Duration::from_secs(interval), Duration::from_secs(grace)));
    let state = AppState(Arc::new(Shared {
        orchestrator: node.orchestrator.clone(),
        templates: node.templates,
        images: node.images,
        publishing: Arc::new(tokio::sync::Semaphore::new(PUBLISHING)),
        upkeep,
        audit: Audit::open(home.path()).context("the audit log cannot be opened")?,
        limits: Limits::default(),
        volumes: node.volumes,
        secrets: node.secrets,
        keys,
        events,
        spawns: Spawns::new(db.clone()),
        idempotency: Idempotency::new(db),
        export: node.export,
        config,
        home,
        started_at: Utc::now(),
        instance: uuid::Uuid::new_v4(),
        counts: Counts::default(),
        cpu: CpuClock::default(),
    }));
    let app = App::new(state, proxy);
    let shutdown = CancellationToken::new();
    tokio::spawn(on_signal(shutdown.clone())?);
    tracing::info!(%address, tls = tls.is_some(), engine = node.engine, "ready");
    listen::serve(listener, tls, listen::IDLE, shutdown, move |request| {
        let app = app.clone();
        async move { app.answer(request).await }
    })
    .await;
    tracing::info!("ending; running sandboxes go on");
    node.orchestrator.shutdown().await;
    Ok(())
}

/// The certificate of the listener: the operator's, or one of the server's own making.
fn certificate(config: &Config, home: &Home) -> anyhow::Result<Option<Certificate>> {
    if let (Some(cert), Some(key)) = (&config.tls.cert_path, &config.tls.key_path) {
        return Ok(Some(Certificate::open(cert, key)?));
    }
    if config.tls.names.is_empty() {
        return Ok(None);
    }
    let own = OwnCertificate::make(home, &config.tls.names)?;
    let (cert, key) = own.files();
    let certificate = Certificate::open(cert, key)?;
    tokio::spawn(own.renew());
    Ok(Some(certificate))
}

/// Cancels, and ends, at the first SIGTERM or SIGINT.
pub(crate) fn on_signal(shutdown: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        shutdown.cancel();
    })
}
