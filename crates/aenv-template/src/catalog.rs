//! From what clients call a template to a committed checkpoint.

use std::{sync::Arc, time::Duration};

use aenv_repository::{Repository, RepositoryError, Versioned};
use aenv_types::{BuildId, Checkpoint, CheckpointId, MachineShape, Origin, SandboxId, TeamId, TemplateId};
use chrono::{DateTime, Utc};
use rand::Rng;

use crate::{
    Build, BuildStatus, Kind, Reference, Tag, TagName, Template, TemplateError, TemplateName,
    document::NameOwner, known::Known,
};

/// What a reference stands for.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Its checkpoint; every blob of it is on this node.
    pub checkpoint: Arc<Checkpoint>,
    /// Shown as `templateID` of the sandbox.
    pub template: TemplateId,
    /// Shown as `alias`.
    pub alias: Option<String>,
}

/// A published snapshot.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// What clients put into `templateID` to create from it: `<team>/<name>:default`, or `<template id>:default`.
    pub id: String,
    /// Names without tags.
    pub names: Vec<String>,
    /// Its checkpoint.
    pub checkpoint: CheckpointId,
    /// The checkpoint before it.
    pub parent: Option<CheckpointId>,
    /// The sandbox that it was taken of.
    pub sandbox: SandboxId,
    /// The machine.
    pub shape: MachineShape,
    /// When.
    pub created_at: DateTime<Utc>,
}

/// A build that is asked for.
#[derive(Clone, Debug)]
pub struct NewBuild {
    /// The template's name.
    pub name: TemplateName,
    /// Tags that the build gets when it is ready; `default` when empty.
    pub tags: Vec<TagName>,
    /// The machine.
    pub shape: MachineShape,
}

/// Writers of one document that meet are told to try again so many times before the caller hears of it.
const CONFLICT_RETRIES: u32 = 20;

/// Names, tags and checkpoints in the repository. Cheap to clone.
#[derive(Clone)]
pub struct Catalog {
    repository: Repository,
    known: Known,
}

impl Catalog {
    /// Over an open repository.
    pub fn new(repository: Repository) -> Self {
        Self { repository, known: Known::default() }
    }

    /// The repository beneath.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// Resolves a template id, `name`, `name:tag`, `namespace/name[:tag]` or snapshot id, and brings its blobs here. While the
    /// repository cannot be reached, a reference is what it was last.
    pub async fn resolve(&self, team: &TeamId, reference: &str) -> Result<Resolved, TemplateError> {
        match self.look_up(team, reference).await {
            Ok(resolved) => {
                self.known.note(team, reference, &resolved);
                Ok(resolved)
            }
            Err(TemplateError::Repository(error @ RepositoryError::Store { .. })) => {
                let Some(known) = self.known.get(team, reference) else { return Err(error.into()) };
                self.repository.fetch(&known.checkpoint).await?;
                tracing::warn!(%error, reference, "a launch goes on with what is known of its template");
                Ok(known)
            }
            Err(other) => {
                self.known.forget(team, reference);
                Err(other)
            }
        }
    }

    async fn look_up(&self, team: &TeamId, reference: &str) -> Result<Resolved, TemplateError> {
        let parsed = self.parse(team, reference)?;
        let template = self.find(team, &parsed, reference).await?;
        let tag = parsed.tag_or_default();
        let Some(build) = template.ready(&tag) else {
            let known = template.tags.contains_key(&tag);
            return Err(if parsed.tag.is_some() && !known {
                TemplateError::NoTag { tag: tag.to_string(), template: parsed.name }
            } else {
                TemplateError::NotReady(reference.to_owned())
            });
        };
        let id = build.checkpoint.as_ref().ok_or_else(|| TemplateError::NotReady(reference.to_owned()))?;
        let checkpoint = self.repository.checkpoint(id).await?;
        self.repository.fetch(&checkpoint).await?;
        let alias = template.alias();
        Ok(Resolved { checkpoint: Arc::new(checkpoint), template: template.id, alias })
    }

    /// Reads a template or snapshot by any reference.
    pub async fn get(&self, team: &TeamId, reference: &str) -> Result<Template, TemplateError> {
        let parsed = self.parse(team, reference)?;
        self.find(team, &parsed, reference).await
    }

    /// Every template and snapshot of a team, newest first.
    pub async fn list(&self, team: &TeamId) -> Result<Vec<Template>, TemplateError> {
        let mut all = Vec::new();
        for key in self.repository.list(team, "templates/").await? {
            match self.repository.get::<Template>(team, &key).await {
                Ok(found) => all.push(found.value),
                // Deleted between the listing and the read.
                Err(RepositoryError::NotFound(_)) => {}
                Err(other) => return Err(other.into()),
            }
        }
        all.sort_by(|a, b| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
        Ok(all)
    }

    /// Adds a build (status `waiting`) to the template of that name, which is made when it does not exist.
    pub async fn new_build(
        &self,
        team: &TeamId,
        new: NewBuild,
    ) -> Result<(Template, BuildId), TemplateError> {
        let now = Utc::now();
        let mut tags = new.tags;
        if tags.is_empty() {
            tags.push(TagName::default_tag());
        }
        let build = Build {
            id: BuildId::new_v4(),
            status: BuildStatus::Waiting,
            shape: new.shape,
            created_at: now,
            updated_at: now,
            finished_at: None,
            checkpoint: None,
            tags,
        };
        let id = build.id;
        let owner = self.claim(team, &new.name).await?;
        let template = self
            .upsert(
                team,
                &owner,
                || blank(owner.clone(), vec![new.name.clone()], Kind::Template, now),
                |template| {
                    if template.kind != Kind::Template {
                        return Err(TemplateError::Conflict(format!(
                            "'{}' is the name of a snapshot; choose another name for the template",
                            new.name
                        )));
                    }
                    template.builds.push(build.clone());
                    template.updated_at = now;
                    Ok(())
                },
            )
            .await?;
        Ok((template, id))
    }

    /// Changes a build's status.
    pub async fn set_build(
        &self,
        team: &TeamId,
        template: &TemplateId,
        build: BuildId,
        status: BuildStatus,
        checkpoint: Option<CheckpointId>,
    ) -> Result<(), TemplateError> {
        let now = Utc::now();
        self.update(team, template, |document| {
            let found = document.builds.iter_mut().find(|b| b.id == build).ok_or_else(|| {
                TemplateError::NoBuild { build: build.to_string(), template: template.to_string() }
            })?;
            found.status = status;
            found.updated_at = now;
            if matches!(status, BuildStatus::Ready | BuildStatus::Error) {
                found.finished_at = Some(now);
            }
            found.checkpoint.clone_from(&checkpoint);
            if status == BuildStatus::Ready {
                for tag in found.tags.clone() {
                    document.tags.insert(tag, Tag { build, assigned_at: now });
                }
            }
            document.updated_at = now;
            Ok(())
        })
        .await
        .map(drop)
    }

    /// Lets further tags stand for the build that `target` (name:tag) stands for.
    pub async fn assign_tags(
        &self,
        team: &TeamId,
        target: &str,
        tags: &[TagName],
    ) -> Result<BuildId, TemplateError> {
        let parsed = self.parse(team, target)?;
        let from = parsed.tag_or_default();
        let id = self.find(team, &parsed, target).await?.id;
        let now = Utc::now();
        let document = self
            .update(team, &id, |document| {
                let build = document
                    .tags
                    .get(&from)
                    .ok_or_else(|| TemplateError::NoTag {
                        tag: from.to_string(),
                        template: parsed.name.clone(),
                    })?
                    .build;
                for tag in tags {
                    document.tags.insert(tag.clone(), Tag { build, assigned_at: now });
                }
                Ok(())
            })
            .await?;
        Ok(document.tags[&from].build)
    }

    /// Removes tags. `default` stays.
    pub async fn remove_tags(
        &self,
        team: &TeamId,
        name: &str,
        tags: &[TagName],
    ) -> Result<(), TemplateError> {
        if let Some(kept) = tags.iter().find(|t| matches!(t.as_str(), crate::name::DEFAULT_TAG | "latest")) {
            return Err(TemplateError::Invalid(format!("the tag '{kept}' cannot be deleted")));
        }
        let parsed = self.parse(team, name)?;
        let id = self.find(team, &parsed, name).await?.id;
        self.update(team, &id, |document| {
            for tag in tags {
                document.tags.remove(tag).ok_or_else(|| TemplateError::NoTag {
                    tag: tag.to_string(),
                    template: parsed.name.clone(),
                })?;
            }
            Ok(())
        })
        .await
        .map(drop)
    }

    /// Shows or hides a template to other teams.
    pub async fn set_public(
        &self,
        team: &TeamId,
        reference: &str,
        visibility: Visibility,
    ) -> Result<Template, TemplateError> {
        let id = self.get(team, reference).await?.id;
        self.update(team, &id, |document| {
            document.public = visibility == Visibility::Public;
            Ok(())
        })
        .await
    }

    /// Removes a template or snapshot, its names and its manifests. Blobs go with the next garbage collection.
    pub async fn delete(&self, team: &TeamId, reference: &str) -> Result<(), TemplateError> {
        let template = self.get(team, reference).await?;
        self.known.forget_template(&template.id);
        for name in &template.names {
            ignore_missing(self.repository.delete(team, &name_key(name)).await)?;
        }
        ignore_missing(self.repository.delete(team, &template_key(&template.id)).await)?;
        for checkpoint in template.builds.iter().filter_map(|build| build.checkpoint.as_ref()) {
            ignore_missing(self.repository.remove(checkpoint).await)?;
        }
        Ok(())
    }

    /// Commits a checkpoint that was captured of a sandbox and gives it a name. The same name again moves the name.
    pub async fn publish_snapshot(
        &self,
        team: &TeamId,
        checkpoint: Checkpoint,
        name: Option<&str>,
    ) -> Result<Snapshot, TemplateError> {
        let Origin::Sandbox { sandbox, .. } = checkpoint.lineage.origin.clone() else {
            return Err(TemplateError::Invalid(
                "only a checkpoint of a sandbox can become a snapshot".to_owned(),
            ));
        };
        let name = name.map(|text| self.parse(team, text)).transpose()?;
        let name: Option<TemplateName> = name.map(|reference| reference.name.parse()).transpose()?;
        let committed = self.repository.commit(&checkpoint).await?;
        let now = Utc::now();
        let build = Build {
            id: BuildId::new_v4(),
            status: BuildStatus::Ready,
            shape: committed.shape,
            created_at: now,
            updated_at: now,
            finished_at: Some(now),
            checkpoint: Some(committed.id.clone()),
            tags: vec![TagName::default_tag()],
        };
        let owner = match &name {
            Some(name) => self.claim(team, name).await?,
            None => TemplateId::random(),
        };
        let kind = Kind::Snapshot { sandbox };
        let template = self
            .upsert(
                team,
                &owner,
                || blank(owner.clone(), name.iter().cloned().collect(), kind.clone(), now),
                |document| {
                    if document.kind == Kind::Template {
                        return Err(TemplateError::Conflict(format!(
                            "'{}' is the name of a template; choose another name for the snapshot",
                            document.alias().unwrap_or_default()
                        )));
                    }
                    document.kind = kind.clone();
                    document.builds.push(build.clone());
                    document.tags.insert(TagName::default_tag(), Tag { build: build.id, assigned_at: now });
                    document.updated_at = now;
                    Ok(())
                },
            )
            .await?;
        self.snapshot_of(team, &template).await
    }

    /// Snapshots, newest first.
    pub async fn snapshots(
        &self,
        team: &TeamId,
        sandbox: Option<&SandboxId>,
        name: Option<&str>,
    ) -> Result<Vec<Snapshot>, TemplateError> {
        let wanted = match name.map(|text| self.parse(team, text)).transpose() {
            Ok(wanted) => wanted.map(|reference| reference.name),
            // A name that cannot exist names nothing.
            Err(_) => return Ok(Vec::new()),
        };
        let mut found = Vec::new();
        for template in self.list(team).await? {
            let Kind::Snapshot { sandbox: of } = &template.kind else { continue };
            let fits = sandbox.is_none_or(|id| id == of)
                && wanted.as_ref().is_none_or(|name| {
                    template.id.as_str() == name || template.names.iter().any(|own| own.as_str() == name)
                });
            if fits {
                found.push(self.snapshot_of(team, &template).await?);
            }
        }
        Ok(found)
    }

    /// One snapshot, by id or name.
    pub async fn snapshot(&self, team: &TeamId, reference: &str) -> Result<Snapshot, TemplateError> {
        let template = self.get(team, reference).await?;
        match template.kind {
            Kind::Snapshot { .. } => self.snapshot_of(team, &template).await,
            Kind::Template => Err(TemplateError::NotFound(reference.to_owned())),
        }
    }

    async fn snapshot_of(&self, team: &TeamId, template: &Template) -> Result<Snapshot, TemplateError> {
        let Kind::Snapshot { sandbox } = &template.kind else {
            return Err(TemplateError::NotFound(template.id.to_string()));
        };
        let missing = || TemplateError::NotReady(template.id.to_string());
        let build = template.ready(&TagName::default_tag()).ok_or_else(missing)?;
        let checkpoint = build.checkpoint.clone().ok_or_else(missing)?;
        let parent = self.repository.checkpoint(&checkpoint).await?.lineage.parent;
        let name = template.names.first();
        Ok(Snapshot {
            id: match name {
                Some(name) => format!("{team}/{name}:{}", crate::name::DEFAULT_TAG),
                None => format!("{}:{}", template.id, crate::name::DEFAULT_TAG),
            },
            names: template.names.iter().map(|name| format!("{team}/{name}")).collect(),
            checkpoint,
            parent,
            sandbox: sandbox.clone(),
            shape: build.shape,
            created_at: build.created_at,
        })
    }

    fn parse(&self, team: &TeamId, text: &str) -> Result<Reference, TemplateError> {
        let reference: Reference = text.parse()?;
        match &reference.namespace {
            Some(namespace) if namespace != team.as_str() => Err(TemplateError::NotFound(text.to_owned())),
            _ => Ok(reference),
        }
    }

    async fn find(
        &self,
        team: &TeamId,
        reference: &Reference,
        text: &str,
    ) -> Result<Template, TemplateError> {
        let id = match self.repository.get::<NameOwner>(team, &format!("names/{}", reference.name)).await {
            Ok(owner) => owner.value.template,
            Err(RepositoryError::NotFound(_)) => {
                reference.name.parse().map_err(|_| TemplateError::NotFound(text.to_owned()))?
            }
            Err(other) => return Err(other.into()),
        };
        match self.repository.get::<Template>(team, &template_key(&id)).await {
            Ok(found) => Ok(found.value),
            Err(RepositoryError::NotFound(_)) => Err(TemplateError::NotFound(text.to_owned())),
            Err(other) => Err(other.into()),
        }
    }

    /// The template that owns a name; a fresh id when nobody does, claimed so that no other writer can.
    async fn claim(&self, team: &TeamId, name: &TemplateName) -> Result<TemplateId, TemplateError> {
        let key = name_key(name);
        for _ in 0..CONFLICT_RETRIES {
            match self.repository.get::<NameOwner>(team, &key).await {
                Ok(owner) => return Ok(owner.value.template),
                Err(RepositoryError::NotFound(_)) => {}
                Err(other) => return Err(other.into()),
            }
            let owner = NameOwner { template: TemplateId::random() };
            match self.repository.put(team, &key, &owner, None).await {
                Ok(_) => return Ok(owner.template),
                Err(RepositoryError::Conflict(_)) => {}
                Err(other) => return Err(other.into()),
            }
        }
        Err(TemplateError::Conflict(format!("'{name}' is being changed by others; try again")))
    }

    pub(crate) async fn update(
        &self,
        team: &TeamId,
        id: &TemplateId,
        change: impl Fn(&mut Template) -> Result<(), TemplateError>,
    ) -> Result<Template, TemplateError> {
        self.change(team, id, None::<fn() -> Template>, change).await
    }

    async fn upsert(
        &self,
        team: &TeamId,
        id: &TemplateId,
        blank: impl Fn() -> Template,
        change: impl Fn(&mut Template) -> Result<(), TemplateError>,
    ) -> Result<Template, TemplateError> {
        self.change(team, id, Some(blank), change).await
    }

    async fn change(
        &self,
        team: &TeamId,
        id: &TemplateId,
        blank: Option<impl Fn() -> Template>,
        change: impl Fn(&mut Template) -> Result<(), TemplateError>,
    ) -> Result<Template, TemplateError> {
        let key = template_key(id);
        for _ in 0..CONFLICT_RETRIES {
            let (mut document, version) = match self.repository.get::<Template>(team, &key).await {
                Ok(Versioned { value, version }) => (value, Some(version)),
                Err(RepositoryError::NotFound(_)) => match &blank {
                    Some(blank) => (blank(), None),
                    None => return Err(TemplateError::NotFound(id.to_string())),
                },
                Err(other) => return Err(other.into()),
            };
            change(&mut document)?;
            match self.repository.put(team, &key, &document, version.as_ref()).await {
                Ok(_) => return Ok(document),
                Err(RepositoryError::Conflict(_)) => {
                    let jitter = rand::rng().random_range(1..20);
                    tokio::time::sleep(Duration::from_millis(jitter)).await;
                }
                Err(other) => return Err(other.into()),
            }
        }
        Err(TemplateError::Conflict(format!("template '{id}' is being changed by others; try again")))
    }
}

/// Whether other teams may create from a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// They may.
    Public,
    /// They may not.
    Private,
}

fn blank(id: TemplateId, names: Vec<TemplateName>, kind: Kind, now: DateTime<Utc>) -> Template {
    Template {
        id,
        names,
        public: false,
        kind,
        created_at: now,
        updated_at: now,
        builds: Vec::new(),
        tags: std::collections::BTreeMap::new(),
    }
}

pub(crate) fn template_key(id: &TemplateId) -> String {
    format!("templates/{id}")
}

fn name_key(name: &TemplateName) -> String {
    format!("names/{name}")
}

fn ignore_missing(result: Result<(), RepositoryError>) -> Result<(), TemplateError> {
    match result {
        Ok(()) | Err(RepositoryError::NotFound(_)) => Ok(()),
        Err(other) => Err(other.into()),
    }
}
