//! Numbers and times, as tar headers and PAX records write them.

use crate::error::LayerError;

/// Seconds and nanoseconds since 1970; the seconds may be negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Time {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds, below 1e9, counted upwards from `seconds`.
    pub nanos: u32,
}

/// Reads a header's number: octal digits, or GNU's base-256 where the first bit is set.
pub(super) fn number(field: &[u8]) -> Result<i64, LayerError> {
    let wrong = || LayerError::Damaged("a tar header holds a number that is none".to_owned());
    let first = *field.first().ok_or_else(wrong)?;
    if first & 0x80 != 0 {
        let negative = first == 0xff;
        let start: i128 = if negative { -1 } else { i128::from(first & 0x7f) };
        let value = field[1..]
            .iter()
            .try_fold(start, |value, byte| value.checked_mul(256).map(|value| value + i128::from(*byte)));
        return value.and_then(|value| i64::try_from(value).ok()).ok_or_else(wrong);
    }
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).map_err(|_| wrong())?.trim_matches(' ');
    if text.is_empty() {
        return Ok(0);
    }
    i64::from_str_radix(text, 8).map_err(|_| wrong())
}

/// Reads a header's number that cannot be negative.
pub(super) fn unsigned(field: &[u8]) -> Result<u64, LayerError> {
    u64::try_from(number(field)?)
        .map_err(|_| LayerError::Damaged("a tar header holds a negative size or id".to_owned()))
}

/// Reads a PAX decimal.
pub(super) fn decimal(text: &[u8]) -> Result<u64, LayerError> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| LayerError::Damaged("a PAX record holds a number that is none".to_owned()))
}

/// Reads a PAX time such as `1700000000.25` or `-1.5`.
pub(super) fn time(text: &[u8]) -> Result<Time, LayerError> {
    let wrong = || LayerError::Damaged("a PAX record holds a time that is none".to_owned());
    let text = std::str::from_utf8(text).map_err(|_| wrong())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| wrong())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: u32 = digits.parse().map_err(|_| wrong())?;
    if whole.starts_with('-') && nanos > 0 {
        let seconds = seconds.checked_sub(1).ok_or_else(wrong)?;
        return Ok(Time { seconds, nanos: 1_000_000_000 - nanos });
    }
    Ok(Time { seconds, nanos })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(number(b"0000644\0").unwrap(), 0o644);
        assert_eq!(number(b"   644 \0").unwrap(), 0o644);
        assert_eq!(number(b"\0\0\0\0").unwrap(), 0);
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0]).unwrap(), 256);
        assert_eq!(number(&[0xff; 12]).unwrap(), -1);
        assert!(unsigned(&[0xff; 12]).is_err());
        assert!(number(b"999").is_err());
        assert!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(number(&[0x8f; 30]).is_err());
    }

    #[test]
    fn times() {
        assert_eq!(time(b"1700000000.25").unwrap(), Time { seconds: 1_700_000_000, nanos: 250_000_000 });
        assert_eq!(time(b"-1.5").unwrap(), Time { seconds: -2, nanos: 500_000_000 });
        assert_eq!(time(b"-0.5").unwrap(), Time { seconds: -1, nanos: 500_000_000 });
        assert_eq!(time(b"7").unwrap(), Time { seconds: 7, nanos: 0 });
        assert!(time(b"x").is_err());
        assert!(time(b"1.-5").is_err());
    }
}
