//! What a share of a model is one of, and where its parts lie.

use crate::arch::Arch;
use crate::unit::ParamSpec;
use firebrick_arch::TensorShare;
use std::ops::Range;

/// Which share of which model a decoder is.
#[derive(Clone, Debug)]
pub(super) struct TrainedShare {
    pub share: TensorShare,
    /// The architecture of the whole model.
    pub arch: Arch,
    /// The whole parameters, by unit.
    pub specs: Vec<Vec<ParamSpec>>,
}

/// Where a share's part of a parameter lies in the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Rows and columns of the whole parameter.
    pub whole: [usize; 2],
    /// The rows and columns that are here. Rows of zeros may follow.
    pub part: [Range<usize>; 2],
    /// Whether an earlier rank has the same.
    pub is_copy: bool,
}

impl Block {
    /// How many values there are, without zeros that fill the part up.
    #[must_use]
    pub fn numel(&self) -> usize {
        let [rows, columns] = &self.part;
        rows.len() * columns.len()
    }

    /// What is here of the whole parameter's values, counted in row-major order.
    #[must_use]
    pub fn of(&self, whole: &[f32]) -> Vec<f32> {
        let ([_, width], [rows, columns]) = (self.whole, &self.part);
        let own = rows.clone().flat_map(|row| {
            let first = row * width;
            whole[first + columns.start..first + columns.end].iter()
        });
        own.copied().collect()
    }
}
