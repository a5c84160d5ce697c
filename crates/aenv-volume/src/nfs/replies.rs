//! Answers to calls that must not be done twice. A client that lost its connection sends a call again with the same id.

use std::collections::VecDeque;

use super::rpc::Call;

/// Answers that are kept. A client has at most some dozens of calls under way.
const KEPT: usize = 256;

/// The last answers.
#[derive(Debug, Default)]
pub(super) struct Replies(VecDeque<(Key, Vec<u8>)>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    id: u32,
    procedure: u32,
    /// Ids come round; arguments that differ belong to another call.
    arguments: [u8; 32],
}

impl Key {
    fn of(call: &Call, arguments: &[u8]) -> Self {
        use sha2::Digest;
        Self { id: call.id, procedure: call.procedure, arguments: sha2::Sha256::digest(arguments).into() }
    }
}

impl Replies {
    /// The answer that this call had.
    pub(super) fn find(&self, call: &Call, arguments: &[u8]) -> Option<Vec<u8>> {
        let key = Key::of(call, arguments);
        self.0.iter().find(|(known, _)| *known == key).map(|(_, answer)| answer.clone())
    }

    /// Keeps an answer.
    pub(super) fn keep(&mut self, call: &Call, arguments: &[u8], answer: &[u8]) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back((Key::of(call, arguments), answer.to_vec()));
    }
}
