//! One fetch for all that want a block at the same time.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use aenv_store::SourceError;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::slots::Key;

/// Fetches under way.
#[derive(Default)]
pub(crate) struct Flights {
    under_way: Mutex<HashMap<Key, Arc<Flight>>>,
}

/// One fetch that others may wait for.
#[derive(Default)]
pub(crate) struct Flight {
    outcome: Mutex<Option<Result<Bytes, SourceError>>>,
    landed: Condvar,
}

/// What came of wanting to fetch a block.
pub(crate) enum Claim<'a> {
    /// Nobody else fetches it: the caller must.
    Lead(Lead<'a>),
    /// Somebody does.
    Join(Arc<Flight>),
}

/// The right and duty to fetch a block. When it is dropped, whoever waits is told of a failure.
pub(crate) struct Lead<'a> {
    flights: &'a Flights,
    flight: Arc<Flight>,
    pub key: Key,
}

impl Flights {
    /// Asks for the right to fetch a block. Whoever gets it looks into the cache once more: another fetch may just have ended.
    pub fn claim(&self, key: Key) -> Claim<'_> {
        match self.under_way.lock().entry(key) {
            Entry::Occupied(entry) => Claim::Join(Arc::clone(entry.get())),
            Entry::Vacant(entry) => {
                let flight = Arc::clone(entry.insert(Arc::default()));
                Claim::Lead(Lead { flights: self, flight, key })
            }
        }
    }
}

impl Lead<'_> {
    /// Tells those who wait. Those who come later still join, until the lead is dropped.
    pub fn land(&self, outcome: Result<Bytes, SourceError>) {
        *self.flight.outcome.lock() = Some(outcome);
        self.flight.landed.notify_all();
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.flights.under_way.lock().remove(&self.key);
        let mut outcome = self.flight.outcome.lock();
        if outcome.is_none() {
            let message = "the fetch was given up".to_owned();
            *outcome = Some(Err(SourceError::Remote { context: "waiting for a block".to_owned(), message }));
            self.flight.landed.notify_all();
        }
    }
}

impl Flight {
    /// Waits for the block. The fetch bounds itself; `bound` is for one that does not.
    pub fn wait(&self, bound: Duration) -> Result<Bytes, SourceError> {
        let deadline = Instant::now() + bound;
        let mut outcome = self.outcome.lock();
        while outcome.is_none() {
            if self.landed.wait_until(&mut outcome, deadline).timed_out() {
                break;
            }
        }
        match &*outcome {
            Some(Ok(bytes)) => Ok(bytes.clone()),
            Some(Err(error)) => Err(same(error)),
            None => Err(SourceError::TimedOut { context: "waiting for a block".to_owned(), after: bound }),
        }
    }
}

/// The same error once more, for another who waits.
pub(crate) fn same(error: &SourceError) -> SourceError {
    match error {
        SourceError::OutOfRange { offset, len, size } => {
            SourceError::OutOfRange { offset: *offset, len: *len, size: *size }
        }
        SourceError::Io { context, source } => {
            SourceError::io(context, io::Error::new(source.kind(), source.to_string()))
        }
        SourceError::Remote { context, message } => {
            SourceError::Remote { context: context.clone(), message: message.clone() }
        }
        SourceError::Away { context, message } => {
            SourceError::Away { context: context.clone(), message: message.clone() }
        }
        SourceError::Denied { context, message } => {
            SourceError::Denied { context: context.clone(), message: message.clone() }
        }
        SourceError::TimedOut { context, after } => {
            SourceError::TimedOut { context: context.clone(), after: *after }
        }
        SourceError::Corrupt { context, message } => SourceError::corrupt(context, message),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::slots::SourceId;

    const BOUND: Duration = Duration::from_secs(60);

    fn key(block: u64) -> Key {
        Key { source: SourceId([1; 16]), block }
    }

    #[test]
    fn one_leads_and_the_others_get_the_same() {
        let flights = Flights::default();
        let Claim::Lead(lead) = flights.claim(key(1)) else { panic!("nobody else is there") };
        assert!(matches!(flights.claim(key(2)), Claim::Lead(_)));
        thread::scope(|scope| {
            let joined: Vec<_> = (0..3)
                .map(|_| {
                    let Claim::Join(flight) = flights.claim(key(1)) else { panic!("it is under way") };
                    scope.spawn(move || flight.wait(BOUND))
                })
                .collect();
            lead.land(Ok(Bytes::from_static(b"abc")));
            for thread in joined {
                assert_eq!(thread.join().unwrap().unwrap(), &b"abc"[..]);
            }
        });
        drop(lead);
        assert!(matches!(flights.claim(key(1)), Claim::Lead(_)));
    }

    #[test]
    fn a_lead_that_is_dropped_fails_those_who_wait() {
        let flights = Flights::default();
        let Claim::Lead(lead) = flights.claim(key(1)) else { panic!("nobody else is there") };
        let Claim::Join(flight) = flights.claim(key(1)) else { panic!("it is under way") };
        drop(lead);
        assert!(matches!(flight.wait(BOUND), Err(SourceError::Remote { .. })));
    }

    #[test]
    fn waiting_ends() {
        let flights = Flights::default();
        let Claim::Lead(_lead) = flights.claim(key(1)) else { panic!("nobody else is there") };
        let Claim::Join(flight) = flights.claim(key(1)) else { panic!("it is under way") };
        assert!(matches!(flight.wait(Duration::from_millis(5)), Err(SourceError::TimedOut { .. })));
    }
}
