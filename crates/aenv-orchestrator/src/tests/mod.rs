//! Tests of the state machine against a small world of fakes: guests whose memory and disk are one number each. The world
//! outlives the server, as processes, exports and namespaces do.

mod crash;
mod lives;
mod pressure;
mod property;
mod shared;
mod standby;
mod standing;
mod world;

use crate::sandbox::Record;

/// A record of a sandbox that nobody has.
pub(crate) fn record() -> Record {
    let scene = lives::Scene::new();
    Record::new(&scene.request(lives::LONG))
}
