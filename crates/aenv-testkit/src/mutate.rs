//! Inputs for parsers: valid ones, changed in many ways. The same ones in every run, so that what fails in CI fails anywhere.
//!
//! `AENV_FUZZ_SECS` makes a run last so long for each parser, with other inputs each time.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Inputs that a run tries.
const CASES: u64 = 20_000;
/// A run ends after this long, also on a machine that has other things to do.
const LONGEST: Duration = Duration::from_secs(4);
/// No parser needs so long for an input of a few kilobytes.
const HANGING: Duration = Duration::from_secs(20);
/// Numbers that lengths, counts and offsets are replaced by.
const NUMBERS: [u64; 12] =
    [0, 1, 7, 255, 4095, 65_535, 1 << 31, u32::MAX as u64, 1 << 40, (1 << 63) - 1, 1 << 63, u64::MAX];

/// Gives `parse` changed copies of valid inputs. It may refuse them and must not panic; when it does, the input is kept in a file and the
/// test fails.
///
/// Fails as well when `parse` refuses (returns `false` for) one of the valid inputs, or takes or refuses all of the changed ones: then it
/// does not test what it seems to.
pub fn mutate(name: &str, corpus: &[Vec<u8>], mut parse: impl FnMut(&[u8]) -> bool) {
    for (number, valid) in corpus.iter().enumerate() {
        assert!(parse(valid), "{name}: the valid input {number} is refused");
    }
    let wanted = std::env::var("AENV_FUZZ_SECS").ok().and_then(|text| text.parse().ok());
    let (cases, longest, seed) = match wanted {
        Some(seconds) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            (u64::MAX, Duration::from_secs(seconds), now.as_nanos() as u64)
        }
        None => (CASES, LONGEST, 1),
    };
    let (mut random, began) = (Random(seed | 1), Instant::now());
    let (mut tried, mut taken) = (0_u64, 0_u64);
    while tried < cases && began.elapsed() < longest {
        let mut input = corpus[random.below(corpus.len())].clone();
        for _ in 0..=random.below(4) {
            change(&mut input, corpus, &mut random);
        }
        let started = Instant::now();
        match catch_unwind(AssertUnwindSafe(|| parse(&input))) {
            Ok(fits) => taken += u64::from(fits),
            Err(panic) => {
                let file = std::env::temp_dir().join(format!("{name}-{seed}-{tried}"));
                let kept = fs::write(&file, &input);
                eprintln!("{name}: input {tried} of seed {seed} panics; in {} ({kept:?})", file.display());
                resume_unwind(panic);
            }
        }
        assert!(
            started.elapsed() < HANGING,
            "{name}: input {tried} of seed {seed} took {:?}",
            started.elapsed()
        );
        tried += 1;
    }
    eprintln!("{name}: {tried} inputs, {taken} taken, {:?}", began.elapsed());
    assert!(tried < 1000 || (taken > 0 && taken < tried), "{name}: {taken} of {tried} inputs were taken");
}

/// One change, of a kind that parsers are known to stumble over.
fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    if input.is_empty() {
        input.extend_from_slice(&corpus[random.below(corpus.len())]);
        return;
    }
    let at = random.below(input.len());
    match random.below(9) {
        0 => input[at] = random.next() as u8,
        1 => input[at] ^= 1 << random.below(8),
        2 => input.truncate(at),
        3 => {
            let end = (at + 1 + random.below(32)).min(input.len());
            input.drain(at..end);
        }
        4 => {
            let end = (at + 1 + random.below(64)).min(input.len());
            let part = input[at..end].to_vec();
            let to = random.below(input.len());
            input.splice(to..to, part);
        }
        5 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let len = 1 << random.below(4);
            let at = at / len * len;
            if let Some(field) = input.get_mut(at..at + len) {
                field.copy_from_slice(&number[..len]);
            }
        }
        // A number in text.
        6 => {
            if let Some(digit) = (at..input.len()).find(|&at| input[at].is_ascii_digit()) {
                let end = (digit..input.len()).find(|&at| !input[at].is_ascii_digit()).unwrap_or(input.len());
                let number = NUMBERS[random.below(NUMBERS.len())];
                input.splice(digit..end, number.to_string().into_bytes());
            }
        }
        7 => {
            let other = &corpus[random.below(corpus.len())];
            let from = random.below(other.len().max(1)).min(other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        _ => input.resize(input.len() + random.below(600), random.next() as u8),
    }
}

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 11) % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a length and as many bytes, and trusts the length.
    fn trusting(input: &[u8]) -> bool {
        let Some((len, rest)) = input.split_first() else { return false };
        rest[..usize::from(*len)].len() < 4
    }

    #[test]
    fn a_parser_that_trusts_lengths_is_found_out() {
        let corpus = [vec![2, b'a', b'b'], vec![0]];
        let found = catch_unwind(|| mutate("trusting", &corpus, trusting));
        assert!(found.is_err());
        let careful = |input: &[u8]| {
            input.split_first().is_some_and(|(len, rest)| rest.get(..usize::from(*len)).is_some())
        };
        mutate("careful", &corpus, careful);
        assert!(catch_unwind(|| mutate("takes all", &corpus, |_| true)).is_err());
    }
}
