//! gzip of contents on their way, a bounded piece at a time, and what a client accepts.

use std::io::{self, Write as _};

use bytes::Bytes;
use flate2::{
    Compression,
    write::{GzEncoder, MultiGzDecoder},
};
use futures::{Stream, StreamExt as _, stream};

/// What is decoded at once: it can grow a thousandfold.
const STEP: usize = 4 << 10;

/// The form that contents are sent in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    Identity,
    /// Compressed.
    Gzip,
}

/// The form that a client gets; `None` when it accepts none that there is.
///
/// HTTP libraries ask for `gzip, deflate` by themselves; compressing each download for them would cost the guest's CPU and the
/// answer its length. Only a client that asks for gzip and nothing else means it.
pub fn accepted(header: Option<&str>) -> Option<Encoding> {
    let Some(header) = header else {
        return Some(Encoding::Identity);
    };
    let choices: Vec<(&str, bool)> =
        header.split(',').map(choice).filter(|(name, _)| !name.is_empty()).collect();
    let allows = |wanted: &str| {
        choices.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, allowed)| *allowed)
    };
    let gzip = allows("gzip").or(allows("x-gzip")).or(allows("*")).unwrap_or(false);
    let identity = allows("identity").or(allows("*").filter(|allowed| !allowed)).unwrap_or(true);
    let only_gzip = matches!(choices.as_slice(), [(name, true)] if name.eq_ignore_ascii_case("gzip"));
    match (identity, gzip) {
        (_, true) if only_gzip => Some(Encoding::Gzip),
        (true, _) => Some(Encoding::Identity),
        (false, true) => Some(Encoding::Gzip),
        (false, false) => None,
    }
}

/// A name, and whether it is allowed at all (`q=0` forbids).
fn choice(text: &str) -> (&str, bool) {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let weight = parts.find_map(|part| part.strip_prefix("q=")).and_then(|weight| weight.parse::<f32>().ok());
    (name, weight.is_none_or(|weight| weight > 0.0))
}

/// Compresses a stream.
pub fn deflate<S>(contents: S) -> impl Stream<Item = io::Result<Bytes>> + Send
where
    S: Stream<Item = io::Result<Bytes>> + Send + Unpin,
{
    let encoder = Some(GzEncoder::new(Vec::new(), Compression::fast()));
    stream::unfold((contents, encoder), |(mut contents, mut encoder)| async move {
        loop {
            let mut open = encoder.take()?;
            let output = match contents.next().await {
                Some(Ok(piece)) => match open.write_all(&piece) {
                    Ok(()) => {
                        let output = std::mem::take(open.get_mut());
                        encoder = Some(open);
                        Ok(output)
                    }
                    Err(error) => Err(error),
                },
                Some(Err(error)) => Err(error),
                None => open.finish(),
            };
            match output {
                Ok(output) if output.is_empty() && encoder.is_some() => {}
                output => return Some((output.map(Bytes::from), (contents, encoder))),
            }
        }
    })
}

/// Decompresses a stream; fails when it is no gzip or ends early.
pub fn inflate<S>(compressed: S) -> impl Stream<Item = io::Result<Bytes>> + Send
where
    S: Stream<Item = io::Result<Bytes>> + Send + Unpin,
{
    let state = Inflating { compressed, rest: Bytes::new(), decoder: Some(MultiGzDecoder::new(Vec::new())) };
    stream::unfold(state, |mut state| async move {
        loop {
            let mut decoder = state.decoder.take()?;
            if state.rest.is_empty() {
                match state.compressed.next().await {
                    Some(Ok(piece)) => {
                        state.rest = piece;
                        state.decoder = Some(decoder);
                        continue;
                    }
                    Some(Err(error)) => return Some((Err(error), state)),
                    None => return Some((decoder.finish().map(Bytes::from), state)),
                }
            }
            let step = state.rest.split_to(STEP.min(state.rest.len()));
            if let Err(error) = decoder.write_all(&step) {
                return Some((Err(error), state));
            }
            let output = std::mem::take(decoder.get_mut());
            state.decoder = Some(decoder);
            if !output.is_empty() {
                return Some((Ok(Bytes::from(output)), state));
            }
        }
    })
}

struct Inflating<S> {
    compressed: S,
    rest: Bytes,
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt as _;

    #[test]
    fn what_clients_get() {
        assert_eq!(accepted(None), Some(Encoding::Identity));
        assert_eq!(accepted(Some("gzip, deflate")), Some(Encoding::Identity));
        assert_eq!(accepted(Some("gzip")), Some(Encoding::Gzip));
        assert_eq!(accepted(Some("identity")), Some(Encoding::Identity));
        assert_eq!(accepted(Some("br")), Some(Encoding::Identity));
        assert_eq!(accepted(Some("gzip, identity;q=0")), Some(Encoding::Gzip));
        assert_eq!(accepted(Some("br, identity;q=0")), None);
        assert_eq!(accepted(Some("*;q=0")), None);
        assert_eq!(accepted(Some("gzip;q=0")), Some(Encoding::Identity));
    }

    fn pieces(bytes: &[u8], size: usize) -> impl Stream<Item = io::Result<Bytes>> + Send + Unpin {
        stream::iter(bytes.chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect::<Vec<_>>())
    }

    async fn all(contents: impl Stream<Item = io::Result<Bytes>>) -> io::Result<Vec<u8>> {
        contents
            .try_fold(Vec::new(), async |mut all, piece| {
                all.extend_from_slice(&piece);
                Ok(all)
            })
            .await
    }

    #[tokio::test]
    async fn there_and_back() {
        let bytes: Vec<u8> = (0..300_000u32).flat_map(|number| number.to_le_bytes()).collect();
        let compressed = all(Box::pin(deflate(pieces(&bytes, 10_000)))).await.unwrap();
        assert!(compressed.len() < bytes.len());
        assert_eq!(all(Box::pin(inflate(pieces(&compressed, 1000)))).await.unwrap(), bytes);
        assert!(all(Box::pin(inflate(pieces(&compressed[..compressed.len() / 2], 1000)))).await.is_err());
        assert!(all(Box::pin(inflate(pieces(b"no gzip at all", 5)))).await.is_err());
        let empty = all(Box::pin(deflate(pieces(b"", 1)))).await.unwrap();
        assert_eq!(all(Box::pin(inflate(pieces(&empty, 7)))).await.unwrap(), b"");
    }
}
