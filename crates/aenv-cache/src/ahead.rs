//! Sees sequential reads, and says what to fetch before it is asked for.

use std::ops::Range;

use parking_lot::Mutex;

/// Sequences of one source that are followed at the same time: several guests read one layer.
const STREAMS: usize = 8;

/// Blocks that are fetched ahead at most.
const MOST: u64 = 8;

/// The sequences of a source.
#[derive(Default)]
pub(crate) struct Ahead(Mutex<Vec<Stream>>);

struct Stream {
    /// The block that the sequence reads next.
    next: u64,
    /// Blocks up to here were asked for ahead.
    until: u64,
    /// Blocks to be ahead by; doubles as the sequence goes on.
    window: u64,
}

impl Ahead {
    /// Takes note of a read of blocks, and returns those that should be fetched now.
    pub fn read(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        let mut streams = self.0.lock();
        // A read within the block that was read last goes on with the sequence too, and changes nothing.
        let follows = |stream: &Stream| blocks.start == stream.next || blocks.start + 1 == stream.next;
        let Some(place) = streams.iter().position(follows) else {
            if streams.len() == STREAMS {
                streams.remove(0);
            }
            streams.push(Stream { next: blocks.end, until: blocks.end, window: 0 });
            return None;
        };
        // The one that was used last is at the end.
        let mut stream = streams.remove(place);
        if blocks.end > stream.next {
            stream.next = blocks.end;
            stream.window = (stream.window * 2).clamp(1, MOST);
        }
        let wanted = stream.next.max(stream.until)..stream.next + stream.window;
        // Not block by block: half a window at once is one request to the source.
        let due = !wanted.is_empty()
            && (stream.until <= stream.next || wanted.end - wanted.start >= stream.window.div_ceil(2));
        if due {
            stream.until = wanted.end;
        }
        streams.push(stream);
        due.then_some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_reads_fetch_nothing_ahead() {
        let ahead = Ahead::default();
        for block in [5, 90, 17, 3, 1000, 44] {
            assert_eq!(ahead.read(block..block + 1), None);
        }
    }

    #[test]
    fn a_sequence_is_fetched_ahead_more_and_more_and_nothing_twice() {
        let ahead = Ahead::default();
        let mut fetched = Vec::new();
        for block in 0..40 {
            for _ in 0..4 {
                fetched.extend(ahead.read(block..block + 1).into_iter().flatten());
            }
            assert!(fetched.last().is_none_or(|&last| last <= block + MOST));
            assert!(block < 2 || fetched.last().is_some_and(|&last| last > block), "{block}: {fetched:?}");
        }
        assert!(fetched.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{fetched:?}");
    }

    #[test]
    fn several_sequences_at_once() {
        let ahead = Ahead::default();
        let mut ranges = 0;
        for step in 0..20 {
            for start in [0, 1000, 2000, 3000] {
                ranges += usize::from(ahead.read(start + step..start + step + 1).is_some());
            }
        }
        assert!(ranges >= 4 * 4, "{ranges}");
    }
}
