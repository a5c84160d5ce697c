//! `filesystem.Filesystem`: the calls.

use std::{io, path::PathBuf, sync::Arc};

use aenv_envd_api::proto::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, Filesystem as Calls, GetWatcherEventsRequest,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest,
    MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest, RemoveWatcherResponse, StatRequest,
    StatResponse, WatchDirRequest, WatchDirResponse,
};
use connectrpc::{Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream};

use super::{
    FilesystemError,
    inotify::{Depth, Watched},
    operations,
    watch::{self, Entries, NetworkMounts, stream_of},
};
use crate::{access, guest::Guest, pace::Pace, paths, users::User};

/// Serves `filesystem.Filesystem`.
pub struct Service {
    guest: Arc<Guest>,
}

impl Service {
    /// Serves the filesystem of a guest.
    pub fn new(guest: Arc<Guest>) -> Self {
        Self { guest }
    }

    fn user(&self, context: &RequestContext) -> Result<User, FilesystemError> {
        let name = access::basic_user(context.headers()).map_err(FilesystemError::Credentials)?;
        Ok(self.guest.user(name.as_deref())?)
    }

    fn resolve(&self, path: &str, user: &User) -> Result<PathBuf, FilesystemError> {
        Ok(paths::resolve(path, user, self.guest.settings().default_workdir.as_deref())?)
    }

    fn place(&self, context: &RequestContext, path: &str) -> Result<(User, PathBuf), FilesystemError> {
        let user = self.user(context)?;
        let path = self.resolve(path, &user)?;
        Ok((user, path))
    }

    async fn arm(
        &self,
        context: &RequestContext,
        path: &str,
        depth: Depth,
        network: NetworkMounts,
    ) -> Result<Watched, FilesystemError> {
        let (_, path) = self.place(context, path)?;
        blocking(move || watch::arm(&path, depth, network)).await
    }
}

/// Runs what waits for the filesystem beside the thread that serves.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FilesystemError> + Send + 'static,
) -> Result<T, FilesystemError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(FilesystemError::Io { path: PathBuf::new(), source: io::Error::other(error) }),
    }
}

fn depth(is_recursive: bool) -> Depth {
    if is_recursive { Depth::Tree } else { Depth::Folder }
}

fn network(is_allowed: bool) -> NetworkMounts {
    if is_allowed { NetworkMounts::Allowed } else { NetworkMounts::Refused }
}

fn entries(are_included: bool) -> Entries {
    if are_included { Entries::Included } else { Entries::Omitted }
}

impl Calls for Service {
    async fn stat<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<impl Encodable<StatResponse> + Send + use<'a>> {
        let (_, path) = self.place(&context, request.path)?;
        let entry = blocking(move || operations::stat(&path)).await?;
        Response::ok(StatResponse { entry: entry.into(), ..Default::default() })
    }

    async fn make_dir<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let (user, path) = self.place(&context, request.path)?;
        let entry = blocking(move || operations::make_dir(&path, &user)).await?;
        Response::ok(MakeDirResponse { entry: entry.into(), ..Default::default() })
    }

    async fn r#move<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let (user, source) = self.place(&context, request.source)?;
        let destination = self.resolve(request.destination, &user)?;
        let entry = blocking(move || operations::rename(&source, &destination, &user)).await?;
        Response::ok(MoveResponse { entry: entry.into(), ..Default::default() })
    }

    async fn list_dir<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let (_, path) = self.place(&context, request.path)?;
        let depth = request.depth;
        let entries = blocking(move || operations::list_dir(&path, depth)).await?;
        Response::ok(ListDirResponse { entries, ..Default::default() })
    }

    async fn remove<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        let (_, path) = self.place(&context, request.path)?;
        blocking(move || operations::remove(&path)).await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        let (depth, network) = (depth(request.recursive), network(request.allow_network_mounts));
        let watched = self.arm(&context, request.path, depth, network).await?;
        Ok(Response::stream(stream_of(watched, entries(request.include_entry), Pace::of(&context))))
    }

    async fn create_watcher<'a>(
        &'a self,
        context: RequestContext,
        request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<CreateWatcherResponse> + Send + use<'a>> {
        let (depth, network) = (depth(request.recursive), network(request.allow_network_mounts));
        let watched = self.arm(&context, request.path, depth, network).await?;
        let watcher_id = self.guest.watchers.create(watched, entries(request.include_entry))?;
        Response::ok(CreateWatcherResponse { watcher_id, ..Default::default() })
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        let events = self.guest.watchers.take(request.watcher_id)?;
        Response::ok(GetWatcherEventsResponse { events, ..Default::default() })
    }

    async fn remove_watcher<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<RemoveWatcherResponse> + Send + use<'a>> {
        self.guest.watchers.remove(request.watcher_id)?;
        Response::ok(RemoveWatcherResponse::default())
    }
}
