//! Crash points: named places between two steps, at which a test can make the process die.
//!
//! They are compiled in always and armed by the environment variable `AENV_CRASH_POINT=<name>` only, so that the program
//! that is tested is the program that is shipped. A process that reaches the armed point aborts: no destructor runs.

/// The variable that arms a point.
pub const CRASH_VARIABLE: &str = "AENV_CRASH_POINT";

/// Every point, in the order in which a sandbox meets them.
pub const CRASH_POINTS: [&str; 40] = [
    "create.noted",
    "launch.slot",
    "launch.exports",
    "launch.vm",
    "launch.noted",
    "launch.ready",
    "create.published",
    "standby.runs",
    "standby.made",
    "standby.claimed",
    "standby.continued",
    "capture.stopped",
    "capture.sealed",
    "capture.resumed",
    "capture.written",
    "capture.recorded",
    "capture.manifest",
    "pause.noted",
    "pause.captured",
    "pause.journaled",
    "pause.ended",
    "resume.noted",
    "resume.launched",
    "snapshot.captured",
    "fork.captured",
    "merge.written",
    "rollback.noted",
    "rollback.ended",
    "rollback.launched",
    "kill.noted",
    "kill.ended",
    "kill.journaled",
    "collect.manifest",
    "collect.layer",
    "share.announced",
    "share.committed",
    "share.noted",
    "share.offered",
    "share.claimed",
    "share.brought",
];

/// The armed point of this process, if any.
#[derive(Clone)]
pub(crate) enum CrashPoints {
    /// None.
    Never,
    /// The process aborts at this one.
    Abort(String),
    /// A task that reaches it stays there for ever; a test then drops the whole runtime.
    #[cfg(test)]
    Hang(std::sync::Arc<HangPoint>),
}

/// A point that a test arms.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct HangPoint {
    pub armed: parking_lot::Mutex<Option<&'static str>>,
    pub reached: tokio::sync::Notify,
}

impl CrashPoints {
    /// What the environment says.
    pub(crate) fn from_env() -> Self {
        match std::env::var(CRASH_VARIABLE) {
            Ok(name) if CRASH_POINTS.contains(&name.as_str()) => {
                tracing::warn!(point = %name, "this process will abort at a crash point");
                Self::Abort(name)
            }
            Ok(name) if !name.is_empty() => {
                tracing::warn!(point = %name, "no crash point has this name; {CRASH_VARIABLE} has no effect");
                Self::Never
            }
            _ => Self::Never,
        }
    }

    /// Passes a point.
    pub(crate) async fn pass(&self, name: &'static str) {
        debug_assert!(CRASH_POINTS.contains(&name), "{name} is not in the list of crash points");
        match self {
            Self::Never => {}
            Self::Abort(armed) => {
                if armed == name {
                    tracing::warn!(point = name, "aborting at a crash point");
                    std::process::abort();
                }
            }
            #[cfg(test)]
            Self::Hang(point) => {
                if *point.armed.lock() == Some(name) {
                    point.reached.notify_one();
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}
