//! Messages and bytes that a rank has sent.

use super::OperationKind;

/// Operations and bytes that a rank has sent to others, headers apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Operations by [`OperationKind`].
    pub operations: [u64; OperationKind::COUNT],
    /// Bytes by [`OperationKind`].
    pub bytes: [u64; OperationKind::COUNT],
}

impl Traffic {
    pub(super) fn count(&mut self, kind: OperationKind) {
        self.operations[kind as usize] += 1;
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            operations: std::array::from_fn(|kind| self.operations[kind] + other.operations[kind]),
            bytes: std::array::from_fn(|kind| self.bytes[kind] + other.bytes[kind]),
        }
    }
}
