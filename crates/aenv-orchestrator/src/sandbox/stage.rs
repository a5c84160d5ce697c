//! The states of the state machine and the transitions that it knows.

use crate::SandboxState;

/// Where a sandbox is. See the diagram at the top of [`crate::sandbox`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Creating,
    Running,
    Pausing,
    Paused,
    Resuming,
    Snapshotting,
    Forking,
    RollingBack,
    Killing,
    /// Ended by itself; only a kill leads out.
    Failed(String),
    /// Removed; nobody finds it any more.
    Gone,
}

impl Stage {
    /// Whether the state machine has this transition.
    pub(crate) fn may_become(&self, next: &Self) -> bool {
        use Stage::{
            Creating, Failed, Forking, Gone, Killing, Paused, Pausing, Resuming, RollingBack, Running,
            Snapshotting,
        };
        match (self, next) {
            (Gone, _) => false,
            (Killing, next) => *next == Gone,
            (_, Killing) => true,
            (Creating, next) => matches!(next, Running | Gone),
            (Running, next) => {
                matches!(next, Pausing | Snapshotting | Forking | RollingBack | Failed(_))
            }
            (Pausing, next) => matches!(next, Paused | Running | Failed(_)),
            (Paused, next) => matches!(next, Resuming | RollingBack),
            (Resuming, next) => matches!(next, Running | Paused),
            (Snapshotting | Forking, next) => matches!(next, Running | Failed(_)),
            (RollingBack, next) => matches!(next, Running | Paused | Failed(_)),
            (Failed(_), next) => *next == Gone,
        }
    }

    /// What a client is told; `None` where there is nothing that it may know of.
    pub(crate) fn shown(&self) -> Option<SandboxState> {
        match self {
            Self::Running | Self::Resuming | Self::Snapshotting | Self::Forking | Self::RollingBack => {
                Some(SandboxState::Running)
            }
            Self::Pausing | Self::Paused => Some(SandboxState::Paused),
            Self::Creating | Self::Killing | Self::Failed(_) | Self::Gone => None,
        }
    }

    /// Whether traffic may flow: the vCPUs run, but for the moment of a capture.
    pub(crate) fn carries_traffic(&self) -> bool {
        matches!(self, Self::Running | Self::Snapshotting | Self::Forking)
    }

    /// Whether it is on the way to another state by itself.
    pub(crate) fn is_transition(&self) -> bool {
        !matches!(self, Self::Running | Self::Paused | Self::Failed(_) | Self::Gone)
    }
}

#[cfg(test)]
mod tests {
    use super::Stage::{self, *};

    fn all() -> Vec<Stage> {
        let failed = Failed("x".into());
        vec![
            Creating,
            Running,
            Pausing,
            Paused,
            Resuming,
            Snapshotting,
            Forking,
            RollingBack,
            Killing,
            failed,
            Gone,
        ]
    }

    #[test]
    fn every_state_but_gone_can_be_killed() {
        for stage in all() {
            let expected = stage != Gone && stage != Killing;
            assert_eq!(stage.may_become(&Killing), expected, "{stage:?}");
        }
    }

    #[test]
    fn nothing_comes_back() {
        for next in all() {
            assert!(!Gone.may_become(&next));
            assert!(!Failed("y".into()).may_become(&Running));
            assert_eq!(Killing.may_become(&next), next == Gone);
        }
    }

    #[test]
    fn every_transition_leads_somewhere() {
        for stage in all().into_iter().filter(Stage::is_transition) {
            assert!(all().iter().any(|next| stage.may_become(next) && !next.is_transition()), "{stage:?}");
        }
    }
}
