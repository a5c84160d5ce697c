//! Upkeep of the repository, seen from the names: what belongs to whom, what nothing names any more, what damage takes with it.
//!
//! The repository knows blobs and manifests; here are the documents that name manifests. A manifest that no document names (its
//! build or snapshot ended between commit and naming, or its template was deleted half-way) can be reached by nobody.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use aenv_repository::{
    Collection, Damage, Depth, DryRun, GcReport, PausedSandbox, Repository, RepositoryError, Usage, Watcher,
};
use aenv_types::{CheckpointId, Digest, TeamId};
use chrono::{TimeDelta, Utc};
use serde::Serialize;

use crate::{Catalog, Expired, Kind, Template, TemplateError, document::NameOwner};

/// Between the commit of a manifest and the document that names it lies one write; an hour is far beyond it.
const NAMING: Duration = Duration::from_secs(3600);
/// Kind of the owner of a checkpoint that a sandbox is paused in.
const PAUSED: &str = "paused";

/// What a garbage collection found or did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Collected {
    /// Snapshots and builds that were kept for too long, and that were removed (or would be).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expired: Vec<Expired>,
    /// Manifests that no template and no snapshot names, and that were removed (or would be).
    pub manifests: Vec<CheckpointId>,
    /// Blobs. A dry run counts only those that nothing names now, not what the manifests above would set free.
    #[serde(flatten)]
    pub blobs: GcReport,
}

/// Whose a checkpoint is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    /// The team.
    pub team: TeamId,
    /// `template`, `snapshot` or `paused` (a sandbox).
    pub kind: &'static str,
    /// Its id.
    pub id: String,
    /// Its names; a snapshot may have none.
    pub names: Vec<String>,
    /// Tags of the build that it is.
    pub tags: Vec<String>,
}

impl Owner {
    /// Whether it can still be reached: old builds cannot.
    fn is_reached(&self) -> bool {
        self.kind == PAUSED || !self.tags.is_empty()
    }
}

/// One thing that a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// `missing_blob`, `damaged_blob`, `damaged_manifest`, `missing_manifest`, `damaged_document`, `dangling_name`,
    /// `unnamed_manifest` or `unreferenced_blob`.
    pub kind: &'static str,
    /// What: a digest, a checkpoint, a document.
    pub what: String,
    /// More about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Bytes that a garbage collection gives back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Checkpoints that cannot be launched because of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<CheckpointId>,
    /// Templates and snapshots that go with it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub takes: Vec<Owner>,
}

impl Finding {
    /// Whether something is lost; what the next garbage collection takes is none.
    pub fn is_damage(&self) -> bool {
        !matches!(self.kind, "unreferenced_blob" | "unnamed_manifest")
    }

    fn new(kind: &'static str, what: impl ToString) -> Self {
        Self {
            kind,
            what: what.to_string(),
            message: None,
            bytes: None,
            checkpoints: Vec::new(),
            takes: Vec::new(),
        }
    }
}

/// What a team has in the repository.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TeamUsage {
    /// Templates.
    pub templates: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Paused sandboxes that were published.
    pub paused: u64,
    /// Their checkpoints.
    pub checkpoints: u64,
    /// Bytes of the blobs of its checkpoints, each counted once. Blobs that teams share count for each of them.
    pub bytes: u64,
}

/// What the repository holds, and for whom.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Account {
    /// All of it.
    #[serde(flatten)]
    pub total: Usage,
    /// By team.
    pub teams: BTreeMap<TeamId, TeamUsage>,
}

/// The documents of all teams.
#[derive(Default)]
struct Documents {
    templates: Vec<(TeamId, Template)>,
    paused: Vec<(TeamId, PausedSandbox)>,
    owners: HashMap<CheckpointId, Vec<Owner>>,
    findings: Vec<Finding>,
}

impl Catalog {
    /// Removes manifests that no document names, then blobs that no manifest names. Fails, and removes nothing, when a document or
    /// a manifest cannot be read.
    pub async fn collect(
        &self,
        collection: Collection,
        watcher: Watcher<'_>,
    ) -> Result<Collected, TemplateError> {
        self.collect_unnamed(collection, NAMING, watcher).await
    }

    async fn collect_unnamed(
        &self,
        collection: Collection,
        naming: Duration,
        watcher: Watcher<'_>,
    ) -> Result<Collected, TemplateError> {
        let repository = self.repository();
        // Listed before the documents are read: what is committed later is not looked at.
        let ids = repository.checkpoints().await?;
        let documents = documents(repository).await?;
        if let Some(unread) = documents.findings.iter().find(|finding| finding.kind == "damaged_document") {
            return Err(TemplateError::Repository(RepositoryError::Corrupt {
                what: unread.what.clone(),
                message: format!(
                    "{}; nothing is collected, because what it names is not known",
                    unread.message.as_deref().unwrap_or("it cannot be read")
                ),
            }));
        }
        let oldest = TimeDelta::from_std(naming.max(collection.grace)).unwrap_or(TimeDelta::MAX);
        let mut manifests = Vec::new();
        for id in ids {
            if documents.owners.contains_key(&id) {
                continue;
            }
            let Some(committed) = repository.committed_at(&id).await? else { continue };
            if Utc::now().signed_duration_since(committed) >= oldest {
                manifests.push(id);
            }
        }
        if collection.dry_run == DryRun::No {
            for (team, paused) in documents.paused.iter().filter(|(_, paused)| paused.is_over()) {
                self.repository().forget_paused(team, &paused.sandbox).await?;
            }
            for id in &manifests {
                match repository.remove(id).await {
                    Ok(()) | Err(RepositoryError::NotFound(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(Collected { expired: Vec::new(), manifests, blobs: repository.gc(collection, watcher).await? })
    }

    /// Says what is wrong in the repository, worst first, and which templates and snapshots each takes with it.
    pub async fn check(&self, depth: Depth, watcher: Watcher<'_>) -> Result<Vec<Finding>, TemplateError> {
        let repository = self.repository();
        let ids: HashSet<CheckpointId> = repository.checkpoints().await?.into_iter().collect();
        let documents = documents(repository).await?;
        let takes = |checkpoints: &[CheckpointId]| -> Vec<Owner> {
            let owners = checkpoints.iter().filter_map(|id| documents.owners.get(id)).flatten();
            let mut found: Vec<Owner> = Vec::new();
            for owner in owners.filter(|owner| owner.is_reached()) {
                if !found.contains(owner) {
                    found.push(owner.clone());
                }
            }
            found
        };
        let (mut findings, mut garbage) = (Vec::new(), Vec::new());
        for damage in repository.fsck(depth, watcher).await? {
            match damage {
                Damage::Missing { blob, checkpoints } => findings.push(Finding {
                    takes: takes(&checkpoints),
                    checkpoints,
                    ..Finding::new("missing_blob", blob)
                }),
                Damage::Damaged { blob, checkpoints } => findings.push(Finding {
                    takes: takes(&checkpoints),
                    checkpoints,
                    ..Finding::new("damaged_blob", blob)
                }),
                Damage::Manifest { checkpoint, message } => findings.push(Finding {
                    takes: takes(std::slice::from_ref(&checkpoint)),
                    message: Some(message),
                    ..Finding::new("damaged_manifest", checkpoint)
                }),
                Damage::Unreferenced { blob, size } => {
                    garbage.push(Finding { bytes: Some(size), ..Finding::new("unreferenced_blob", blob) });
                }
            }
        }
        for (id, owners) in &documents.owners {
            if !ids.contains(id) && repository.committed_at(id).await?.is_none() {
                let takes = owners.iter().filter(|owner| owner.is_reached()).cloned().collect();
                findings.push(Finding { takes, ..Finding::new("missing_manifest", id) });
            }
        }
        for id in ids.iter().filter(|id| !documents.owners.contains_key(id)) {
            garbage.push(Finding::new("unnamed_manifest", id));
        }
        findings.extend(documents.findings);
        findings.append(&mut garbage);
        Ok(findings)
    }

    /// What the repository holds, and for whom.
    pub async fn account(&self) -> Result<Account, TemplateError> {
        let repository = self.repository();
        let total = repository.du().await?;
        let documents = documents(repository).await?;
        let mut teams: BTreeMap<TeamId, TeamUsage> = BTreeMap::new();
        let mut blobs: HashMap<TeamId, HashMap<Digest, u64>> = HashMap::new();
        for (team, template) in &documents.templates {
            let usage = teams.entry(team.clone()).or_default();
            match template.kind {
                Kind::Template => usage.templates += 1,
                Kind::Snapshot { .. } => usage.snapshots += 1,
            }
            for id in template.builds.iter().filter_map(|build| build.checkpoint.as_ref()) {
                usage.checkpoints += 1;
                blobs.entry(team.clone()).or_default().extend(blobs_of(repository, id).await?);
            }
        }
        for (team, paused) in &documents.paused {
            let Some(id) = &paused.checkpoint else { continue };
            let usage = teams.entry(team.clone()).or_default();
            usage.paused += 1;
            usage.checkpoints += 1;
            blobs.entry(team.clone()).or_default().extend(blobs_of(repository, id).await?);
        }
        for (team, blobs) in blobs {
            teams.entry(team).or_default().bytes = blobs.into_values().sum();
        }
        Ok(Account { total, teams })
    }

    /// Bytes of the blobs of a team's templates, snapshots and published paused sandboxes, each counted once.
    pub async fn team_bytes(&self, team: &TeamId) -> Result<u64, TemplateError> {
        let mut blobs: HashMap<Digest, u64> = HashMap::new();
        for template in self.list(team).await? {
            for id in template.builds.iter().filter_map(|build| build.checkpoint.as_ref()) {
                blobs.extend(blobs_of(self.repository(), id).await?);
            }
        }
        for key in self.repository().paused_keys(team).await? {
            match self.repository().get::<PausedSandbox>(team, &key).await {
                Ok(found) => {
                    if let Some(id) = &found.value.checkpoint {
                        blobs.extend(blobs_of(self.repository(), id).await?);
                    }
                }
                Err(RepositoryError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(blobs.into_values().sum())
    }
}

/// What a checkpoint takes; nothing when it cannot be read, which a check tells.
async fn blobs_of(repository: &Repository, id: &CheckpointId) -> Result<HashMap<Digest, u64>, TemplateError> {
    match repository.blobs(id).await {
        Err(RepositoryError::NotFound(_) | RepositoryError::Corrupt { .. }) => Ok(HashMap::new()),
        found => Ok(found?),
    }
}

/// Reads every team's documents.
async fn documents(repository: &Repository) -> Result<Documents, TemplateError> {
    let mut all = Documents::default();
    for team in repository.teams().await? {
        for key in repository.list(&team, "templates/").await? {
            match repository.get::<Template>(&team, &key).await {
                Ok(found) => {
                    for build in &found.value.builds {
                        let Some(id) = build.checkpoint.clone() else { continue };
                        all.owners.entry(id).or_default().push(owner(&team, &found.value, build.id));
                    }
                    all.templates.push((team.clone(), found.value));
                }
                Err(error) => unread(&mut all, &team, &key, error)?,
            }
        }
        for key in repository.paused_keys(&team).await? {
            match repository.get::<PausedSandbox>(&team, &key).await {
                Ok(found) => {
                    if let Some(id) = found.value.checkpoint.clone() {
                        all.owners.entry(id).or_default().push(Owner {
                            team: team.clone(),
                            kind: PAUSED,
                            id: found.value.sandbox.to_string(),
                            names: Vec::new(),
                            tags: Vec::new(),
                        });
                    }
                    all.paused.push((team.clone(), found.value));
                }
                Err(error) => unread(&mut all, &team, &key, error)?,
            }
        }
        for key in repository.list(&team, "names/").await? {
            match repository.get::<NameOwner>(&team, &key).await {
                Ok(found) => {
                    let owner = found.value.template;
                    let known =
                        all.templates.iter().any(|(of, template)| *of == team && template.id == owner);
                    let gone = || async {
                        let document = repository.get::<Template>(&team, &format!("templates/{owner}")).await;
                        matches!(document, Err(RepositoryError::NotFound(_)))
                    };
                    if !known && gone().await {
                        let message = Some(format!("there is no template {owner}"));
                        let what = format!("{team}/{}", key.trim_start_matches("names/"));
                        all.findings.push(Finding { message, ..Finding::new("dangling_name", what) });
                    }
                }
                Err(error) => unread(&mut all, &team, &key, error)?,
            }
        }
    }
    Ok(all)
}

fn unread(
    all: &mut Documents,
    team: &TeamId,
    key: &str,
    error: RepositoryError,
) -> Result<(), TemplateError> {
    match error {
        // Deleted between the listing and the read.
        RepositoryError::NotFound(_) => Ok(()),
        RepositoryError::Store { .. } => Err(error.into()),
        damaged => {
            let message = Some(damaged.to_string());
            let what = format!("{team}/{key}");
            all.findings.push(Finding { message, ..Finding::new("damaged_document", what) });
            Ok(())
        }
    }
}

fn owner(team: &TeamId, template: &Template, build: aenv_types::BuildId) -> Owner {
    Owner {
        team: team.clone(),
        kind: match template.kind {
            Kind::Template => "template",
            Kind::Snapshot { .. } => "snapshot",
        },
        id: template.id.to_string(),
        names: template.names.iter().map(ToString::to_string).collect(),
        tags: template
            .tags
            .iter()
            .filter(|(_, tag)| tag.build == build)
            .map(|(name, _)| name.to_string())
            .collect(),
    }
}

#[cfg(test)]
mod tests;
