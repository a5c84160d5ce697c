//! A folder that may stall: nobody waits for it longer than a stated time.
//!
//! A system call on a network filesystem whose server does not answer waits in the kernel until it does, and nothing interrupts it.
//! So each operation is a task of its own, for which its caller waits for a bounded time. What was given up on may still happen
//! later, as a request to an object store may. A bounded number of operations is under way, so that those that are stuck leave
//! the server's other threads alone.

use std::{fmt, future::Future, ops::Range, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, path::Path,
};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, timeout_at},
};

/// As for a request to an object store, with all its attempts.
const BOUND: Duration = Duration::from_secs(15);
/// Whole blobs are given a second more for each of so many bytes.
const BYTES_PER_SECOND: u64 = 1 << 20;
/// Operations that may be under way, or stuck.
const AT_ONCE: usize = 64;
/// Entries of a listing, or parts of a blob, that nobody has read yet.
const LISTED: usize = 256;

/// How long operations on a folder are waited for. Clones share their turns.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    bound: Duration,
    turns: Arc<Semaphore>,
}

impl Default for Patience {
    fn default() -> Self {
        Self::new(BOUND)
    }
}

impl Patience {
    pub(crate) fn new(bound: Duration) -> Self {
        Self { bound, turns: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Does it, or says that the folder does not answer; then it may still happen.
    pub(crate) async fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.wait_until(Instant::now() + self.bound, work).await
    }

    /// The same for work on so many bytes.
    pub(crate) async fn wait_for<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let more = Duration::from_secs(bytes / BYTES_PER_SECOND);
        self.wait_until(Instant::now() + self.bound + more, work).await
    }

    async fn wait_until<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let turns = Arc::clone(&self.turns);
        let turn = timeout_at(deadline, turns.acquire_owned()).await.map_err(|_| self.stalled())?;
        let task = tokio::spawn(async move {
            let _turn = turn;
            work.await
        });
        match timeout_at(deadline, task).await {
            Ok(done) => done.map_err(|source| Error::JoinError { source }),
            Err(_) => Err(self.stalled()),
        }
    }

    fn stalled(&self) -> Error {
        let message = format!("the folder does not answer (waited {:?})", self.bound);
        Error::Generic { store: "posix_fs", source: message.into() }
    }
}

/// A store in a folder, whose operations end within a bound.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    pub(crate) store: Arc<S>,
    pub(crate) patience: Patience,
}

impl<S: ObjectStore> fmt::Display for Patient<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Patient<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let (store, location) = (Arc::clone(&self.store), location.clone());
        self.patience.wait(async move { store.put_opts(&location, payload, opts).await }).await?
    }

    /// Not used with a folder: blobs are linked or copied into it.
    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented {
            operation: "put_multipart_opts".to_owned(),
            implementer: self.to_string(),
        })
    }

    /// The bytes come in parts, each of them within the bound.
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (store, location) = (Arc::clone(&self.store), location.clone());
        let found = self.patience.wait(async move { store.get_opts(&location, options).await }).await??;
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let (attributes, extensions) = (found.attributes.clone(), found.extensions.clone());
        let payload = GetResultPayload::Stream(self.told(found.into_stream()));
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (store, location, ranges) = (Arc::clone(&self.store), location.clone(), ranges.to_vec());
        self.patience.wait(async move { store.get_ranges(&location, &ranges).await }).await?
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.told(self.store.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.told(self.store.list(prefix))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let (store, prefix) = (Arc::clone(&self.store), prefix.cloned());
        self.patience.wait(async move { store.list_with_delimiter(prefix.as_ref()).await }).await?
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (store, from, to) = (Arc::clone(&self.store), from.clone(), to.clone());
        self.patience.wait(async move { store.copy_opts(&from, &to, options).await }).await?
    }
}

impl<S: ObjectStore> Patient<S> {
    /// What a stream of the store gives, each part of it within the bound.
    fn told<T: Send + 'static>(
        &self,
        mut found: BoxStream<'static, Result<T>>,
    ) -> BoxStream<'static, Result<T>> {
        let (sender, receiver) = mpsc::channel(LISTED);
        let patience = self.patience.clone();
        let parts = async move {
            let turn = patience.turns.clone().acquire_owned();
            let Ok(Ok(turn)) = timeout_at(Instant::now() + patience.bound, turn).await else {
                return stream::iter([Err(patience.stalled())]).boxed();
            };
            tokio::spawn(async move {
                let _turn = turn;
                while let Some(part) = found.next().await {
                    if sender.send(part).await.is_err() {
                        return;
                    }
                }
            });
            let parts = stream::unfold(Some(receiver), move |receiver| {
                let patience = patience.clone();
                async move {
                    let mut receiver = receiver?;
                    match timeout_at(Instant::now() + patience.bound, receiver.recv()).await {
                        Ok(part) => part.map(|part| (part, Some(receiver))),
                        Err(_) => Some((Err(patience.stalled()), None)),
                    }
                }
            });
            parts.boxed()
        };
        stream::once(parts).flatten().boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::{StreamExt, TryStreamExt, stream};
    use object_store::{ObjectStore, ObjectStoreExt, PutPayload, memory::InMemory, path::Path};

    use super::*;

    fn patient() -> Patient<InMemory> {
        Patient { store: Arc::default(), patience: Patience::new(Duration::from_millis(50)) }
    }

    #[tokio::test]
    async fn what_answers_is_as_without() {
        let store = patient();
        let path = Path::from("a/b");
        store.put(&path, PutPayload::from_static(b"text")).await.unwrap();
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap().as_ref(), b"text");
        assert_eq!(store.head(&path).await.unwrap().size, 4);
        let large = vec![7; (4 << 20) + 1];
        store.put(&Path::from("large"), PutPayload::from(large.clone())).await.unwrap();
        assert_eq!(store.get(&Path::from("large")).await.unwrap().bytes().await.unwrap(), large);
        store.delete(&Path::from("large")).await.unwrap();
        let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
        assert_eq!(listed.len(), 1);
        store.delete(&path).await.unwrap();
        assert!(matches!(store.get(&path).await, Err(Error::NotFound { .. })));
    }

    #[tokio::test]
    async fn what_does_not_answer_is_given_up_on_but_goes_on() {
        let store = patient();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let stuck = store.patience.wait(async move { receiver.await.unwrap() });
        assert!(stuck.await.unwrap_err().to_string().contains("does not answer"));
        assert_eq!(store.patience.turns.available_permits(), AT_ONCE - 1);
        sender.send(()).unwrap();
        let back = async {
            while store.patience.turns.available_permits() < AT_ONCE {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), back).await.unwrap();
    }

    #[tokio::test]
    async fn those_that_are_stuck_are_bounded() {
        let store = patient();
        let stuck = (0..AT_ONCE).map(|_| store.patience.wait(std::future::pending::<()>()));
        assert!(futures::future::join_all(stuck).await.iter().all(Result::is_err));
        assert!(store.put(&Path::from("a"), PutPayload::new()).await.is_err());
        assert!(store.store.head(&Path::from("a")).await.is_err(), "it was begun");
    }

    #[tokio::test]
    async fn a_listing_that_stops_ends() {
        let store = patient();
        let one = stream::iter([Ok(1)]).chain(stream::pending()).boxed();
        let told: Vec<_> = store.told(one).collect().await;
        assert!(matches!(told[..], [Ok(1), Err(_)]));
    }
}
