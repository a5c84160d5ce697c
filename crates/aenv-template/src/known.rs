//! What references stood for when they were last resolved, so that launches of what is on the node go on while the repository cannot be
//! reached.

use std::{collections::HashMap, sync::Arc};

use aenv_types::{TeamId, TemplateId};
use parking_lot::Mutex;

use crate::Resolved;

/// References that are remembered at most.
const MOST: usize = 1024;

/// By team and reference. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Known(Arc<Mutex<HashMap<(TeamId, String), Resolved>>>);

impl Known {
    pub fn get(&self, team: &TeamId, reference: &str) -> Option<Resolved> {
        self.0.lock().get(&(team.clone(), reference.to_owned())).cloned()
    }

    pub fn note(&self, team: &TeamId, reference: &str, resolved: &Resolved) {
        let mut known = self.0.lock();
        let key = (team.clone(), reference.to_owned());
        if known.len() >= MOST && !known.contains_key(&key) {
            // Any other will do: it is remembered again when it is used again.
            if let Some(other) = known.keys().next().cloned() {
                known.remove(&other);
            }
        }
        known.insert(key, resolved.clone());
    }

    pub fn forget(&self, team: &TeamId, reference: &str) {
        self.0.lock().remove(&(team.clone(), reference.to_owned()));
    }

    /// Whatever names it.
    pub fn forget_template(&self, template: &TemplateId) {
        self.0.lock().retain(|_, resolved| resolved.template != *template);
    }
}
