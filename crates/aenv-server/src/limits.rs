//! What a team may have, and how often it may ask. A key's own limits hold, else the configured ones; the server's first key has none.
//!
//! Running sandboxes and their memory are counted where they are admitted, in the orchestrator. Here are the limits of what is only
//! known to the API: requests, starts under way, templates and snapshots.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_api::{ApiError, ApiKeyLimits};
use aenv_orchestrator::TeamLimits;
use aenv_template::{Kind, TemplateError};
use aenv_types::TeamId;
use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::{
    config,
    failure::Failure,
    keys::{Caller, Role},
    state::AppState,
};

/// When somebody whose starts are all under way may ask again, in seconds.
const START_AGAIN: u64 = 1;
/// How long one publication waits for another of its team, where there is a limit to keep.
const PUBLISH_WAIT: Duration = Duration::from_secs(120);

/// What teams use of their limits now. Cheap to clone.
#[derive(Clone, Default)]
pub struct Limits {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    buckets: Mutex<HashMap<TeamId, Bucket>>,
    starting: Mutex<HashMap<TeamId, u32>>,
    publishing: Mutex<HashMap<TeamId, Arc<AsyncMutex<()>>>>,
}

/// Requests that a team may make at once; fills up with time.
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// Starts that are under way, until it is dropped.
pub struct Starting {
    limits: Limits,
    team: TeamId,
    count: u32,
}

/// What holds for a key: its own limits, and the configured ones where it has none.
pub fn effective(role: Role, own: ApiKeyLimits, defaults: &config::Limits) -> ApiKeyLimits {
    if role == Role::Operator {
        return own;
    }
    ApiKeyLimits {
        max_running_sandboxes: own.max_running_sandboxes.or(defaults.max_running_sandboxes),
        max_timeout_secs: own.max_timeout_secs,
        max_memory_mib: own.max_memory_mib.or(defaults.max_memory_mib),
        max_starting_sandboxes: own.max_starting_sandboxes.or(defaults.max_starting_sandboxes),
        max_requests_per_second: own.max_requests_per_second.or(defaults.max_requests_per_second),
        max_templates: own.max_templates.or(defaults.max_templates),
        max_snapshots: own.max_snapshots.or(defaults.max_snapshots),
        max_repository_mib: own.max_repository_mib.or(defaults.max_repository_mib),
    }
}

/// Whether none of `asked` is wider than `own`.
pub fn within(own: &ApiKeyLimits, asked: &ApiKeyLimits) -> bool {
    let fits =
        |own: Option<u32>, asked: Option<u32>| own.is_none_or(|own| asked.is_some_and(|asked| asked <= own));
    fits(own.max_running_sandboxes, asked.max_running_sandboxes)
        && fits(own.max_timeout_secs, asked.max_timeout_secs)
        && fits(own.max_memory_mib, asked.max_memory_mib)
        && fits(own.max_starting_sandboxes, asked.max_starting_sandboxes)
        && fits(own.max_requests_per_second, asked.max_requests_per_second)
        && fits(own.max_templates, asked.max_templates)
        && fits(own.max_snapshots, asked.max_snapshots)
        && fits(own.max_repository_mib, asked.max_repository_mib)
}

/// What the orchestrator keeps of a caller's limits.
pub fn of_team(caller: &Caller) -> TeamLimits {
    TeamLimits {
        running: caller.limits.max_running_sandboxes,
        memory_mib: caller.limits.max_memory_mib.map(u64::from),
    }
}

/// Puts the limits that hold into the caller, and refuses requests beyond the team's rate.
pub async fn within_rate(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    if let Some(caller) = request.extensions_mut().get_mut::<Caller>() {
        caller.limits = effective(caller.role, caller.limits, &state.config.limits);
        if let Some(rate) = caller.limits.max_requests_per_second
            && let Err(error) = state.limits.take(&caller.team, rate, Instant::now())
        {
            return error.into_response();
        }
    }
    next.run(request).await
}

impl Limits {
    /// Takes one request of a team's rate: `rate` for each second, and as many at once.
    fn take(&self, team: &TeamId, rate: u32, now: Instant) -> Result<(), ApiError> {
        let rate_per_second = f64::from(rate);
        let mut buckets = self.inner.buckets.lock();
        let bucket = buckets.entry(team.clone()).or_insert(Bucket { tokens: rate_per_second, at: now });
        let filled = now.saturating_duration_since(bucket.at).as_secs_f64() * rate_per_second;
        bucket.tokens = (bucket.tokens + filled).min(rate_per_second);
        bucket.at = now;
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        metrics::counter!("aenv_rate_limited_total").increment(1);
        Err(ApiError::too_many(format!("this team may make {rate} requests in a second; ask again later"), 1))
    }

    /// Counts `more` starts of a caller's team, or refuses.
    pub fn start(&self, caller: &Caller, more: u32) -> Result<Starting, ApiError> {
        let mut starting = self.inner.starting.lock();
        let now = starting.entry(caller.team.clone()).or_default();
        if let Some(limit) = caller.limits.max_starting_sandboxes
            && now.saturating_add(more) > limit
        {
            let message =
                format!("this API key may start {limit} sandboxes at a time, and {now} are starting");
            return Err(ApiError::too_many(message, START_AGAIN).with_code("starting_limit_reached"));
        }
        *now += more;
        Ok(Starting { limits: self.clone(), team: caller.team.clone(), count: more })
    }

    /// One publication of a team at a time, so that what is counted is what is there.
    async fn publish(&self, team: &TeamId) -> Result<OwnedMutexGuard<()>, ApiError> {
        let turn = Arc::clone(self.inner.publishing.lock().entry(team.clone()).or_default());
        tokio::time::timeout(PUBLISH_WAIT, turn.lock_owned()).await.map_err(|_| {
            ApiError::too_many("other snapshots and builds of this team are being published; ask again", 5)
        })
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut starting = self.limits.inner.starting.lock();
        if let Some(now) = starting.get_mut(&self.team) {
            *now = now.saturating_sub(self.count);
            if *now == 0 {
                starting.remove(&self.team);
            }
        }
    }
}

/// What is to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// A build of a template.
    Template,
    /// A snapshot.
    Snapshot,
}

/// Makes sure that a caller's team may publish one more under this name (which may exist: then it is one more build of it). Hold
/// what this returns until it is published.
pub async fn publish(
    state: &AppState,
    caller: &Caller,
    what: Published,
    name: Option<&str>,
) -> Result<Option<OwnedMutexGuard<()>>, Failure> {
    let (limit, word, code) = match what {
        Published::Template => (caller.limits.max_templates, "templates", "template_limit_reached"),
        Published::Snapshot => (caller.limits.max_snapshots, "snapshots", "snapshot_limit_reached"),
    };
    if limit.is_none() && caller.limits.max_repository_mib.is_none() {
        return Ok(None);
    }
    let turn = state.limits.publish(&caller.team).await?;
    let catalog = &state.templates.catalog;
    if let Some(limit) = limit {
        let there = match name {
            Some(name) => match catalog.get(&caller.team, name).await {
                Ok(_) => true,
                Err(TemplateError::NotFound(_)) => false,
                Err(error) => return Err(error.into()),
            },
            None => false,
        };
        let of_kind = |kind: &Kind| matches!(kind, Kind::Snapshot { .. }) == (what == Published::Snapshot);
        let list = catalog.list(&caller.team).await?;
        let count = list.iter().filter(|template| of_kind(&template.kind)).count();
        if !there && count >= limit as usize {
            let message =
                format!("this API key may have {limit} {word}, and there are {count}; delete some first");
            return Err(ApiError::quota(message).with_code(code).into());
        }
    }
    if let Some(limit) = caller.limits.max_repository_mib {
        let used = catalog.team_bytes(&caller.team).await? >> 20;
        if used >= u64::from(limit) {
            let message = format!(
                "this API key may have {limit} MiB of templates and snapshots, and they take {used}; delete some first"
            );
            return Err(ApiError::quota(message).with_code("repository_limit_reached").into());
        }
    }
    Ok(Some(turn))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(limits: ApiKeyLimits) -> Caller {
        Caller { team: "red".parse().unwrap(), key_id: "k".into(), role: Role::Member, limits }
    }

    #[test]
    fn a_rate_is_a_rate_and_a_burst() {
        let (limits, begin) = (Limits::default(), Instant::now());
        let (red, blue): (TeamId, TeamId) = ("red".parse().unwrap(), "blue".parse().unwrap());
        for _ in 0..10 {
            limits.take(&red, 10, begin).unwrap();
        }
        let refused = limits.take(&red, 10, begin).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.error_code), (429, Some("rate_limited")));
        assert!(refused.retry_after_secs.is_some());
        limits.take(&blue, 10, begin).unwrap();
        let later = begin + Duration::from_millis(250);
        assert_eq!((0..9).filter(|_| limits.take(&red, 10, later).is_ok()).count(), 2);
        let much_later = begin + Duration::from_secs(3600);
        assert_eq!((0..99).filter(|_| limits.take(&red, 10, much_later).is_ok()).count(), 10);
    }

    #[test]
    fn starts_come_back() {
        let limits = Limits::default();
        let caller = caller(ApiKeyLimits { max_starting_sandboxes: Some(3), ..ApiKeyLimits::default() });
        let first = limits.start(&caller, 2).unwrap();
        assert_eq!(limits.start(&caller, 2).err().unwrap().error_code, Some("starting_limit_reached"));
        let second = limits.start(&caller, 1).unwrap();
        drop(first);
        let third = limits.start(&caller, 2).unwrap();
        drop((second, third));
        assert!(limits.inner.starting.lock().is_empty());
    }

    #[test]
    fn a_keys_own_limits_win_and_none_is_wider_than_its_makers() {
        let defaults = config::Limits { max_snapshots: Some(5), ..config::Limits::default() };
        let own = ApiKeyLimits { max_running_sandboxes: Some(3), ..ApiKeyLimits::default() };
        let member = effective(Role::Member, own, &defaults);
        assert_eq!((member.max_running_sandboxes, member.max_snapshots), (Some(3), Some(5)));
        assert_eq!(effective(Role::Operator, own, &defaults).max_snapshots, None);
        let wider = effective(Role::Member, ApiKeyLimits { max_snapshots: Some(6), ..own }, &defaults);
        assert!(within(&member, &member) && !within(&member, &wider));
        assert!(!within(&member, &ApiKeyLimits::default()), "no limit is wider than one");
        assert!(within(&ApiKeyLimits::default(), &wider));
    }
}
