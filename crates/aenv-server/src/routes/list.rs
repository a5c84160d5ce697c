//! Filters, order and pages of sandbox lists. Pure: views in, a page out.

use std::cmp::Ordering;

use aenv_api::ApiError;
use aenv_orchestrator::{SandboxState, SandboxView};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use chrono::{DateTime, Utc};
use percent_encoding::percent_decode_str;

use crate::{convert::shown_time, extract::Query};

/// In which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Newest first.
    Descending,
    /// Oldest first.
    Ascending,
}

/// What a list is to show.
#[derive(Clone, Debug)]
pub struct ListQuery {
    metadata: Vec<(String, String)>,
    states: Vec<SandboxState>,
    order: Order,
    started_after: Option<DateTime<Utc>>,
    template: Option<String>,
    after: Option<Cursor>,
    limit: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Cursor {
    started_at: DateTime<Utc>,
    id: String,
}

/// A page and what follows it.
#[derive(Debug)]
pub struct Page {
    /// The sandboxes.
    pub views: Vec<SandboxView>,
    /// Token of the next page; `None` on the last one.
    pub next: Option<String>,
    /// Running ones that the filters let through, on all pages.
    pub running: usize,
}

/// Reads the query of `GET /v2/sandboxes`.
pub fn parse(query: &Query) -> Result<ListQuery, ApiError> {
    let order = [("desc", Order::Descending), ("asc", Order::Ascending)];
    let order = query.choice("order", &order)?.unwrap_or(Order::Descending);
    let mut states = Vec::new();
    for text in query.list("state") {
        states.push(match text {
            "running" => SandboxState::Running,
            "paused" => SandboxState::Paused,
            other => {
                let shown: String = other.chars().take(40).collect();
                return Err(ApiError::bad_request(format!(
                    "state is {shown:?}; it takes running, paused or both"
                )));
            }
        });
    }
    let started_after = query.get("startedAfter").map(time).transpose()?;
    let template = query.get("template").map(str::to_owned);
    if template.as_ref().is_some_and(|template| template.contains(':')) {
        return Err(ApiError::bad_request("template takes an id or a name without a tag"));
    }
    let limit = query.integer_in("limit", 1..=100)?.unwrap_or(100);
    Ok(ListQuery {
        metadata: query.get("metadata").map(metadata).transpose()?.unwrap_or_default(),
        states,
        order,
        started_after,
        template,
        after: query.get("nextToken").map(|token| Cursor::parse(token, order)).transpose()?,
        limit: usize::try_from(limit).unwrap_or(100),
    })
}

impl ListQuery {
    /// The same without pages: everything in one answer.
    pub fn unpaged(self) -> Self {
        Self { after: None, limit: usize::MAX, ..self }
    }
}

fn time(text: &str) -> Result<DateTime<Utc>, ApiError> {
    // A `+` of the offset that was not percent-encoded arrives as a space.
    let repaired = text.replace(' ', "+");
    DateTime::parse_from_rfc3339(&repaired).map(|at| at.to_utc()).map_err(|_| {
        let shown: String = text.chars().take(40).collect();
        ApiError::bad_request(format!(
            "startedAfter is {shown:?}; it takes a time such as 2026-01-31T12:00:00Z"
        ))
    })
}

/// Pairs of a metadata filter. `text` was decoded once already; the clients encode each key and value once more.
pub fn metadata(text: &str) -> Result<Vec<(String, String)>, ApiError> {
    let decode = |text: &str| {
        percent_decode_str(text)
            .decode_utf8()
            .map(|text| text.into_owned())
            .map_err(|_| ApiError::bad_request("metadata is not valid UTF-8 after decoding"))
    };
    form_urlencoded::parse(text.as_bytes()).map(|(k, v)| Ok((decode(&k)?, decode(&v)?))).collect()
}

impl Cursor {
    fn parse(token: &str, order: Order) -> Result<Self, ApiError> {
        let wrong = || ApiError::bad_request("Invalid next token");
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token.trim_end_matches('=')).map_err(|_| wrong())?;
        let text = String::from_utf8(bytes).map_err(|_| wrong())?;
        let mut parts = text.split("__");
        let (at, id, suffix) = (parts.next(), parts.next(), parts.next());
        let made_for = match suffix {
            None => Order::Descending,
            Some("asc") => Order::Ascending,
            Some(_) => return Err(wrong()),
        };
        if made_for != order || parts.next().is_some() {
            return Err(wrong());
        }
        let started_at = DateTime::parse_from_rfc3339(at.unwrap_or_default()).map_err(|_| wrong())?.to_utc();
        let id = id.filter(|id| !id.is_empty()).ok_or_else(wrong)?.to_owned();
        Ok(Self { started_at, id })
    }

    fn token(view: &SandboxView, order: Order) -> String {
        let suffix = if order == Order::Ascending { "__asc" } else { "" };
        let at = view.started_at.to_rfc3339_opts(chrono::SecondsFormat::Nanos, true);
        BASE64_URL_SAFE_NO_PAD.encode(format!("{at}__{}{suffix}", view.id))
    }
}

/// Filters, sorts and cuts.
pub fn page(mut views: Vec<SandboxView>, query: &ListQuery) -> Page {
    views.retain(|view| matches(view, query));
    let running = views.iter().filter(|view| view.state == SandboxState::Running).count();
    let compare = |a: (DateTime<Utc>, &str), b: (DateTime<Utc>, &str)| match query.order {
        Order::Ascending => a.cmp(&b),
        Order::Descending => b.0.cmp(&a.0).then(a.1.cmp(b.1)),
    };
    views.sort_by(|a, b| compare((a.started_at, a.id.as_str()), (b.started_at, b.id.as_str())));
    if let Some(after) = &query.after {
        let place = (after.started_at, after.id.as_str());
        views.retain(|view| compare((view.started_at, view.id.as_str()), place) == Ordering::Greater);
    }
    let next = (views.len() > query.limit).then(|| Cursor::token(&views[query.limit - 1], query.order));
    views.truncate(query.limit);
    Page { views, next, running }
}

fn matches(view: &SandboxView, query: &ListQuery) -> bool {
    let states = query.states.is_empty() || query.states.contains(&view.state);
    let metadata = query.metadata.iter().all(|(key, value)| view.metadata.get(key) == Some(value));
    let started = query.started_after.is_none_or(|after| shown_time(view.started_at) >= shown_time(after));
    let template = query.template.as_ref().is_none_or(|template| is_of(view, template));
    states && metadata && started && template
}

fn is_of(view: &SandboxView, template: &str) -> bool {
    let name =
        template.strip_prefix(view.team.as_str()).and_then(|rest| rest.strip_prefix('/')).unwrap_or(template);
    let bare = |alias: &str| {
        let alias = alias.split(':').next().unwrap_or_default();
        let own = alias.strip_prefix(view.team.as_str()).and_then(|rest| rest.strip_prefix('/'));
        own.unwrap_or(alias).to_owned()
    };
    view.template.as_str() == template || view.alias.as_deref().is_some_and(|alias| bare(alias) == name)
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;
    use crate::convert::sample_view;

    fn query(text: &str) -> Result<ListQuery, ApiError> {
        parse(&Query::parse(text))
    }

    fn views(count: i64) -> Vec<SandboxView> {
        let start = Utc::now();
        let view = |n: i64| SandboxView {
            started_at: start + TimeDelta::seconds(n),
            ..sample_view(&format!("i{n}"))
        };
        (0..count).map(view).collect()
    }

    fn ids(page: &Page) -> Vec<&str> {
        page.views.iter().map(|view| view.id.as_str()).collect()
    }

    #[test]
    fn metadata_is_decoded_twice() {
        // As the Python client puts it on the wire.
        let query = Query::parse("metadata=a%252520b%3Dc%252526d");
        assert_eq!(metadata(query.get("metadata").unwrap()).unwrap(), [("a b".to_owned(), "c&d".to_owned())]);
        let plain = Query::parse("metadata=user%3Dme%26app%3Dx");
        assert_eq!(metadata(plain.get("metadata").unwrap()).unwrap().len(), 2);
    }

    #[test]
    fn newest_first_and_pages() {
        let first = page(views(3), &query("limit=2").unwrap());
        assert_eq!(ids(&first), ["i2", "i1"]);
        let all = views(3);
        let first = page(all.clone(), &query("limit=2").unwrap());
        let token = first.next.unwrap();
        let second = page(all.clone(), &query(&format!("limit=2&nextToken={token}")).unwrap());
        assert_eq!((ids(&second), &second.next), (vec!["i0"], &None));
        let oldest = page(all, &query("order=asc&limit=3").unwrap());
        assert_eq!(
            (ids(&oldest), oldest.next.is_none()),
            (vec!["i0", "i1", "i2"], true),
            "a full page that is the last has no token"
        );
    }

    #[test]
    fn equal_times_are_paged_by_id() {
        let at = Utc::now();
        let all: Vec<_> =
            (0..5).map(|n| SandboxView { started_at: at, ..sample_view(&format!("i{n}")) }).collect();
        for order in ["asc", "desc"] {
            let (mut seen, mut token) = (Vec::new(), String::new());
            loop {
                let next =
                    page(all.clone(), &query(&format!("order={order}&limit=2&nextToken={token}")).unwrap());
                seen.extend(next.views.into_iter().map(|view| view.id));
                let Some(next) = next.next else { break };
                token = next;
            }
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), 5);
        }
    }

    #[test]
    fn filters() {
        let mut all = views(2);
        all[0].metadata.insert("a".into(), "1".into());
        all[0].state = SandboxState::Paused;
        all[1].alias = Some("other".into());
        let found = |text: &str| page(all.clone(), &query(text).unwrap()).views.len();
        assert_eq!(found("metadata=a%3D1"), 1);
        assert_eq!(found("metadata=a%3D1%26b%3D2"), 0);
        assert_eq!(found("state=paused"), 1);
        assert_eq!(found("state=running%2Cpaused"), 2);
        assert_eq!(found("template=base"), 1);
        assert_eq!(found("template=default/base"), 1);
        assert_eq!(found("template=nothing"), 0);
        assert_eq!(found(&format!("template={}", all[1].template)), 1);
        assert_eq!(page(all.clone(), &query("").unwrap()).running, 1);
    }

    #[test]
    fn started_after_is_inclusive() {
        let all = views(1);
        let shown = shown_time(all[0].started_at);
        let found = |at: DateTime<Utc>| {
            let text = at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
            page(all.clone(), &query(&format!("startedAfter={text}")).unwrap()).views.len()
        };
        assert_eq!(found(shown), 1);
        assert_eq!(found(shown + TimeDelta::seconds(1)), 0);
        assert!(query("startedAfter=2026-01-01T00:00:00+00:00").is_ok());
    }

    #[test]
    fn nonsense_is_refused() {
        let all = views(3);
        let token = page(all, &query("limit=1").unwrap()).next.unwrap();
        for text in [
            "limit=0",
            "limit=101",
            "limit=x",
            "order=up",
            "state=dead",
            "startedAfter=yesterday",
            "template=a:b",
            "nextToken=!!!",
            "nextToken=YWJj",
            &format!("order=asc&nextToken={token}"),
        ] {
            assert_eq!(query(text).expect_err(text).status, 400);
        }
    }
}
