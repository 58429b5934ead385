//! What a rank has sent.

use super::Kind;

/// Operations and bytes that a rank has sent to others, headers apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Operations by [`Kind`].
    pub operations: [u64; Kind::COUNT],
    /// Bytes by [`Kind`].
    pub bytes: [u64; Kind::COUNT],
}

impl Traffic {
    pub(super) fn count(&mut self, kind: Kind) {
        self.operations[kind as usize] += 1;
    }
}
