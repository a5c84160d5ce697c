use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::RwLock;

use crate::{BlockSource, SourceError};

/// One way in which a read goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer is late.
    Latency(Duration),
    /// The read is refused with an I/O error.
    Error,
    /// The far end stops in the middle: the first half of the buffer is filled, then the read fails.
    ShortRead,
    /// The read seems to succeed, and one bit of it is wrong.
    WrongByte,
}

/// Which reads go wrong, and how. Reads are counted from zero, over all threads.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// A read suffers `fault` when its number is `first` or `first` plus a multiple of `every`, up to `times` reads.
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    fault: Fault,
    first: u64,
    every: u64,
    times: u64,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::default()
    }

    /// Every read suffers `fault`.
    pub fn always(fault: Fault) -> Self {
        Self::none().and(fault, 0, 1, u64::MAX)
    }

    /// Adds: read number `first`, and each `every`-th read after it, `times` in all, suffers `fault`.
    pub fn and(mut self, fault: Fault, first: u64, every: u64, times: u64) -> Self {
        self.rules.push(Rule { fault, first, every: every.max(1), times });
        self
    }

    fn faults(&self, read: u64) -> impl Iterator<Item = Fault> {
        self.rules.iter().filter_map(move |rule| {
            let since = read.checked_sub(rule.first)?;
            (since % rule.every == 0 && since / rule.every < rule.times).then_some(rule.fault)
        })
    }
}

/// A stage that makes reads of the source beneath it late, failing, short or wrong, as a plan says.
pub struct FaultSource {
    inner: Arc<dyn BlockSource>,
    plan: RwLock<FaultPlan>,
    reads: AtomicU64,
}

impl FaultSource {
    /// Puts the stage over `inner`.
    pub fn new(inner: Arc<dyn BlockSource>, plan: FaultPlan) -> Self {
        Self { inner, plan: RwLock::new(plan), reads: AtomicU64::new(0) }
    }

    /// Replaces the plan and counts reads from zero again.
    pub fn set_plan(&self, plan: FaultPlan) {
        let mut current = self.plan.write();
        *current = plan;
        self.reads.store(0, Ordering::Relaxed);
    }

    /// Reads since the plan was set.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl BlockSource for FaultSource {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), SourceError> {
        let faults: Vec<Fault> = {
            let plan = self.plan.read();
            plan.faults(self.reads.fetch_add(1, Ordering::Relaxed)).collect()
        };
        let mut wrong = false;
        for fault in faults {
            match fault {
                Fault::Latency(delay) => thread::sleep(delay),
                Fault::Error => {
                    return Err(SourceError::io("injected fault", io::Error::from(io::ErrorKind::Other)));
                }
                Fault::ShortRead => {
                    let half = buf.len() / 2;
                    self.inner.read_at(&mut buf[..half], offset)?;
                    let context = "injected fault".to_owned();
                    let message = format!("{half} of {} bytes came", buf.len());
                    return Err(SourceError::Remote { context, message });
                }
                Fault::WrongByte => wrong = true,
            }
        }
        self.inner.read_at(buf, offset)?;
        if wrong && !buf.is_empty() {
            let middle = buf.len() / 2;
            buf[middle] ^= 0x10;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::MemorySource;

    fn source(plan: FaultPlan) -> FaultSource {
        FaultSource::new(Arc::new(MemorySource::new(&b"0123456789"[..])), plan)
    }

    #[test]
    fn without_a_plan_nothing_changes() {
        let mut buf = [0; 10];
        source(FaultPlan::none()).read_at(&mut buf, 0).unwrap();
        assert_eq!(&buf, b"0123456789");
    }

    #[test]
    fn the_plan_says_which_reads() {
        let faulty = source(FaultPlan::none().and(Fault::Error, 1, 2, 2));
        let failed: Vec<bool> = (0..7).map(|_| faulty.read_at(&mut [0; 2], 0).is_err()).collect();
        assert_eq!(failed, [false, true, false, true, false, false, false]);
        assert_eq!(faulty.reads(), 7);
        faulty.set_plan(FaultPlan::always(Fault::Error));
        assert!(faulty.read_at(&mut [0; 2], 0).is_err());
    }

    #[test]
    fn short_and_wrong_reads() {
        let mut buf = [0; 4];
        assert!(matches!(
            source(FaultPlan::always(Fault::ShortRead)).read_at(&mut buf, 0),
            Err(SourceError::Remote { .. })
        ));
        assert_eq!(&buf[..2], b"01");
        source(FaultPlan::always(Fault::WrongByte)).read_at(&mut buf, 0).unwrap();
        assert_eq!(&buf, &[b'0', b'1', b'2' ^ 0x10, b'3']);
    }

    #[test]
    fn latency_is_at_least_what_was_asked() {
        let started = Instant::now();
        source(FaultPlan::always(Fault::Latency(Duration::from_millis(20)))).read_at(&mut [0; 4], 0).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(20));
    }
}
