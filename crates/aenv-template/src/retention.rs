//! What a team has too long or too much of: snapshots without a name, and builds that no tag stands for.
//!
//! A name or a tag is a promise: what has one stays. So does what a sandbox was made from that the caller knows of. A published paused
//! sandbox has a checkpoint of its own and needs none of these.

use std::{collections::BTreeMap, time::Duration};

use aenv_repository::{DryRun, RepositoryError};
use aenv_types::{BuildId, TeamId, TemplateId};
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use crate::{Build, BuildStatus, Catalog, Kind, TagName, Template, TemplateError};

/// How long, and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// What is older goes; `None`: nothing for that.
    pub max_age: Option<Duration>,
    /// Unnamed snapshots of a team, and untagged builds of a template, beyond which the oldest go; `None`: nothing for that.
    pub max_count: Option<usize>,
}

/// A sandbox that may need what it was made from.
#[derive(Clone, Debug)]
pub struct MadeFrom {
    /// The template or snapshot.
    pub template: TemplateId,
    /// When.
    pub at: DateTime<Utc>,
}

/// Something that went, or would go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Expired {
    /// Whose.
    pub team: TeamId,
    /// The snapshot or template.
    pub id: TemplateId,
    /// Its build; none: all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub build: Option<BuildId>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
}

impl Retention {
    /// Which of these go. They come newest first.
    fn beyond<T>(self, of: Vec<T>, now: DateTime<Utc>, made: impl Fn(&T) -> DateTime<Utc>) -> Vec<T> {
        let oldest = self.max_age.and_then(|age| now.checked_sub_signed(TimeDelta::from_std(age).ok()?));
        let kept = self.max_count.unwrap_or(usize::MAX);
        let numbered = of.into_iter().enumerate();
        numbered
            .filter(|(number, item)| *number >= kept || oldest.is_some_and(|oldest| made(item) < oldest))
            .map(|(_, item)| item)
            .collect()
    }

    fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl Catalog {
    /// Removes what `retention` does not keep, of each team for itself. What its checkpoints held goes with the next collection.
    pub async fn expire(
        &self,
        retention: Retention,
        used: &[MadeFrom],
        dry_run: DryRun,
    ) -> Result<Vec<Expired>, TemplateError> {
        if retention.is_none() {
            return Ok(Vec::new());
        }
        let mut expired = Vec::new();
        for team in self.repository().teams().await? {
            let all = self.list(&team).await?;
            let is_used = |template: &Template| used.iter().any(|by| by.template == template.id);
            let (unnamed, named): (Vec<_>, Vec<_>) = all.into_iter().partition(is_unnamed);
            let snapshots = retention.beyond(unnamed, Utc::now(), |snapshot| snapshot.created_at);
            for snapshot in snapshots.into_iter().filter(|snapshot| !is_used(snapshot)) {
                if dry_run == DryRun::No {
                    match self.delete(&team, snapshot.id.as_str()).await {
                        Ok(()) | Err(TemplateError::NotFound(_)) => {}
                        Err(error) => return Err(error),
                    }
                }
                let (id, created_at) = (snapshot.id, snapshot.created_at);
                expired.push(Expired { team: team.clone(), id, build: None, created_at });
            }
            for template in named {
                let old = old_builds(&template, retention, used);
                if old.is_empty() {
                    continue;
                }
                if dry_run == DryRun::No {
                    self.remove_builds(&team, &template.id, &old).await?;
                }
                expired.extend(old.into_iter().map(|(build, created_at)| Expired {
                    team: team.clone(),
                    id: template.id.clone(),
                    build: Some(build),
                    created_at,
                }));
            }
        }
        Ok(expired)
    }

    /// Removes builds of a template, but those that a tag stands for by now.
    async fn remove_builds(
        &self,
        team: &TeamId,
        id: &TemplateId,
        builds: &BTreeMap<BuildId, DateTime<Utc>>,
    ) -> Result<(), TemplateError> {
        let goes = |template: &Template, build: &Build| {
            builds.contains_key(&build.id) && !is_tagged(template, build)
        };
        let before = match self.get(team, id.as_str()).await {
            Err(TemplateError::NotFound(_)) => return Ok(()),
            found => found?,
        };
        let after = match self
            .update(team, id, |template| {
                let kept = template.builds.iter().filter(|build| !goes(template, build)).cloned();
                template.builds = kept.collect();
                Ok(())
            })
            .await
        {
            Err(TemplateError::NotFound(_)) => return Ok(()),
            changed => changed?,
        };
        for build in before.builds.iter().filter(|build| after.builds.iter().all(|kept| kept.id != build.id))
        {
            let Some(checkpoint) = &build.checkpoint else { continue };
            // Another build may be of the same checkpoint.
            if after.builds.iter().any(|kept| kept.checkpoint.as_ref() == Some(checkpoint)) {
                continue;
            }
            match self.repository().remove(checkpoint).await {
                Ok(()) | Err(RepositoryError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// A snapshot that only its id leads to.
fn is_unnamed(template: &Template) -> bool {
    matches!(template.kind, Kind::Snapshot { .. })
        && template.names.is_empty()
        && template.tags.keys().all(|tag| *tag == TagName::default_tag())
}

fn is_tagged(template: &Template, build: &Build) -> bool {
    template.tags.values().any(|tag| tag.build == build.id)
}

/// Builds of a template that nothing leads to any more, with the times of their making.
fn old_builds(
    template: &Template,
    retention: Retention,
    used: &[MadeFrom],
) -> BTreeMap<BuildId, DateTime<Utc>> {
    let ended = |build: &&Build| matches!(build.status, BuildStatus::Ready | BuildStatus::Error);
    let mut old: Vec<&Build> =
        template.builds.iter().filter(ended).filter(|build| !is_tagged(template, build)).collect();
    old.sort_by_key(|build| std::cmp::Reverse(build.created_at));
    // A sandbox was made from a build that a tag stood for then: from none that was replaced before it.
    let oldest_user = used.iter().filter(|by| by.template == template.id).map(|by| by.at).min();
    let replaced = |build: &Build| {
        let later = template
            .builds
            .iter()
            .filter(|other| other.status == BuildStatus::Ready && other.created_at > build.created_at);
        later.filter_map(|other| other.finished_at).min()
    };
    let beyond = retention.beyond(old, Utc::now(), |build| build.created_at);
    beyond
        .into_iter()
        .filter(|build| match (oldest_user, replaced(build)) {
            (None, _) => true,
            (Some(user), Some(replaced)) => replaced < user,
            (Some(_), None) => build.checkpoint.is_none(),
        })
        .map(|build| (build.id, build.created_at))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aenv_repository::Repository;
    use aenv_types::{CheckpointId, Home, MachineShape, SandboxId};
    use object_store::memory::InMemory;

    use super::*;
    use crate::{NewBuild, Tag, catalog::template_key};

    const HOUR: Duration = Duration::from_secs(3600);

    struct Scene {
        catalog: Catalog,
        team: TeamId,
        _folder: tempfile::TempDir,
    }

    impl Scene {
        async fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let home = Home::new(folder.path().join("home"), folder.path().join("run"));
            home.create().unwrap();
            let repository = Repository::open_store(Arc::new(InMemory::new()), home).await.unwrap();
            Self { catalog: Catalog::new(repository), team: "red".parse().unwrap(), _folder: folder }
        }

        async fn put(&self, template: Template) -> TemplateId {
            let key = template_key(&template.id);
            self.catalog.repository().put(&self.team, &key, &template, None).await.unwrap();
            template.id
        }

        async fn snapshot(&self, hours: i64) -> Template {
            let build = build(hours);
            let id = TemplateId::random();
            Template {
                id,
                names: Vec::new(),
                public: false,
                kind: Kind::Snapshot { sandbox: SandboxId::random() },
                created_at: build.created_at,
                updated_at: build.created_at,
                tags: [(TagName::default_tag(), tag(&build))].into(),
                builds: vec![build],
            }
        }

        async fn expire(&self, retention: Retention, used: &[MadeFrom], dry_run: DryRun) -> Vec<Expired> {
            self.catalog.expire(retention, used, dry_run).await.unwrap()
        }

        async fn left(&self) -> Vec<TemplateId> {
            let mut left: Vec<_> = self
                .catalog
                .list(&self.team)
                .await
                .unwrap()
                .into_iter()
                .map(|template| template.id)
                .collect();
            left.sort();
            left
        }
    }

    fn ago(hours: i64) -> DateTime<Utc> {
        Utc::now() - TimeDelta::hours(hours)
    }

    fn build(hours: i64) -> Build {
        Build {
            id: BuildId::new_v4(),
            status: BuildStatus::Ready,
            shape: MachineShape::DEFAULT,
            created_at: ago(hours),
            updated_at: ago(hours),
            finished_at: Some(ago(hours)),
            checkpoint: Some(CheckpointId::random()),
            tags: Vec::new(),
        }
    }

    fn tag(build: &Build) -> Tag {
        Tag { build: build.id, assigned_at: build.created_at }
    }

    fn sorted(mut ids: Vec<TemplateId>) -> Vec<TemplateId> {
        ids.sort();
        ids
    }

    #[tokio::test]
    async fn unnamed_snapshots_go_by_age_and_count_and_pinned_ones_stay() {
        let scene = Scene::new().await;
        let named = Template { names: vec!["kept".parse().unwrap()], ..scene.snapshot(90).await };
        let mut tagged = scene.snapshot(80).await;
        tagged.tags.insert("v1".parse().unwrap(), tag(&tagged.builds[0]));
        let (named, tagged) = (scene.put(named).await, scene.put(tagged).await);
        let mut unnamed = Vec::new();
        for hours in [1, 10, 20, 30, 40] {
            unnamed.push(scene.put(scene.snapshot(hours).await).await);
        }
        let used = [MadeFrom { template: unnamed[4].clone(), at: ago(5) }];
        let by_age = Retention { max_age: Some(HOUR * 25), max_count: None };
        let planned = scene.expire(by_age, &used, DryRun::Yes).await;
        assert_eq!(planned.iter().map(|gone| &gone.id).collect::<Vec<_>>(), [&unnamed[3]]);
        assert_eq!(scene.left().await.len(), 7, "a dry run removes nothing");
        assert_eq!(scene.expire(by_age, &used, DryRun::No).await, planned);
        let by_count = Retention { max_age: None, max_count: Some(2) };
        scene.expire(by_count, &used, DryRun::No).await;
        let [first, second, _, _, last] = unnamed.try_into().unwrap();
        assert_eq!(scene.left().await, sorted(vec![named, tagged, first, second, last]));
        assert_eq!(scene.expire(Retention::default(), &[], DryRun::No).await, []);
        assert_eq!(scene.left().await.len(), 5);
    }

    #[tokio::test]
    async fn builds_that_no_tag_stands_for_go_unless_a_sandbox_may_be_of_them() {
        let scene = Scene::new().await;
        let (template, _) = {
            let name = "built".parse().unwrap();
            let new = NewBuild { name, tags: vec![], shape: MachineShape::DEFAULT };
            scene.catalog.new_build(&scene.team, new).await.unwrap()
        };
        let builds = [50, 40, 30, 20, 10].map(build);
        let ids = builds.clone().map(|build| build.id);
        let own = builds.clone();
        let changed = scene.catalog.update(&scene.team, &template.id, move |template| {
            template.builds.splice(0..0, own.clone());
            template.tags.insert("old".parse().unwrap(), tag(&own[1]));
            template.tags.insert(TagName::default_tag(), tag(&own[4]));
            Ok(())
        });
        let waiting = changed.await.unwrap().builds[5].id;
        let none = Retention { max_age: None, max_count: Some(0) };
        let gone = |expired: Vec<Expired>| {
            let mut gone: Vec<_> = expired.into_iter().filter_map(|expired| expired.build).collect();
            gone.sort();
            gone
        };
        let of = |numbers: &[usize]| {
            let mut found: Vec<_> = numbers.iter().map(|number| ids[*number]).collect();
            found.sort();
            found
        };
        let user = |hours| [MadeFrom { template: template.id.clone(), at: ago(hours) }];
        // The one of 30 hours ago was replaced 20 hours ago: who was made 25 hours ago may be of it.
        assert_eq!(gone(scene.expire(none, &user(25), DryRun::Yes).await), of(&[0]));
        assert_eq!(gone(scene.expire(none, &user(5), DryRun::Yes).await), of(&[0, 2, 3]));
        let one = Retention { max_age: None, max_count: Some(1) };
        assert_eq!(gone(scene.expire(one, &[], DryRun::No).await), of(&[0, 2]));
        let left = scene.catalog.get(&scene.team, "built").await.unwrap();
        let left: Vec<_> = left.builds.iter().map(|build| build.id).collect();
        assert_eq!(left, [ids[1], ids[3], ids[4], waiting], "in their order");
    }
}
