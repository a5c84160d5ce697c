//! Remote procedure calls (RFC 5531): who calls what, and the frame of an answer.

use super::xdr::{Garbage, Reader, Writer};
use crate::sys::Credentials;

const CALL: u32 = 0;
const REPLY: u32 = 1;
const VERSION: u32 = 2;
const AUTH_UNIX: u32 = 1;
/// Who nobody is.
const NOBODY: u32 = 65_534;
/// Groups that a call may name (RFC 5531, 14).
const MAX_GROUPS: u32 = 16;

/// How a call was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    NoProgram,
    /// The program's only version.
    NoVersion(u32),
    NoProcedure,
    Garbage,
}

/// The head of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub id: u32,
    pub program: u32,
    pub version: u32,
    pub procedure: u32,
    pub who: Credentials,
}

/// Reads the head; the arguments are what is left. `Ok(Err(id))`: a version of RPC that is not spoken.
pub(super) fn head(arguments: &mut Reader<'_>) -> Result<Result<Call, u32>, Garbage> {
    let id = arguments.u32()?;
    if arguments.u32()? != CALL {
        return Err(Garbage);
    }
    if arguments.u32()? != VERSION {
        return Ok(Err(id));
    }
    let (program, version, procedure) = (arguments.u32()?, arguments.u32()?, arguments.u32()?);
    let flavor = arguments.u32()?;
    let body = arguments.opaque(400)?;
    let who = if flavor == AUTH_UNIX {
        unix(&mut Reader(body))?
    } else {
        Credentials { uid: NOBODY, gid: NOBODY, groups: Vec::new() }
    };
    arguments.u32()?;
    arguments.opaque(400)?;
    Ok(Ok(Call { id, program, version, procedure, who }))
}

fn unix(body: &mut Reader<'_>) -> Result<Credentials, Garbage> {
    body.u32()?;
    body.opaque(255)?;
    let (uid, gid, count) = (body.u32()?, body.u32()?, body.u32()?);
    // The kernel takes this number for "leave it as it is".
    if count > MAX_GROUPS || uid == u32::MAX || gid == u32::MAX {
        return Err(Garbage);
    }
    let groups = (0..count).map(|_| body.u32()).collect::<Result<_, _>>()?;
    Ok(Credentials { uid, gid, groups })
}

/// An answer whose results follow. Room for the record's mark is left in front.
pub(super) fn success(id: u32) -> Writer {
    let mut out = frame(id);
    out.u32(0);
    out
}

fn frame(id: u32) -> Writer {
    let mut out = Writer::default();
    // The mark, the id, a reply, accepted, no verifier.
    for word in [0, id, REPLY, 0, 0, 0] {
        out.u32(word);
    }
    out
}

/// An answer that says that there are no results.
pub(super) fn refusal(id: u32, why: Accepted) -> Writer {
    let mut out = frame(id);
    match why {
        Accepted::NoProgram => out.u32(1),
        Accepted::NoVersion(version) => {
            out.u32(2);
            out.u32(version);
            out.u32(version);
        }
        Accepted::NoProcedure => out.u32(3),
        Accepted::Garbage => out.u32(4),
    }
    out
}

/// The answer to a version of RPC that is not spoken.
pub(super) fn wrong_version(id: u32) -> Writer {
    let mut out = Writer::default();
    for word in [0, id, REPLY, 1, 0, VERSION, VERSION] {
        out.u32(word);
    }
    out
}

/// The record, with its mark.
pub(super) fn record(out: Writer) -> Vec<u8> {
    let mut bytes = out.0;
    let length = u32::try_from(bytes.len() - 4).unwrap_or(0);
    bytes[..4].copy_from_slice(&(length | 1 << 31).to_be_bytes());
    bytes
}
