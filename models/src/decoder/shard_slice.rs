//! A shard of a model, and the place of its parts in the whole.

use crate::arch::Arch;
use crate::unit::ParamSpec;
use firebrick_arch::TensorShare;
use std::ops::Range;

/// Which share of which model a decoder is.
#[derive(Clone, Debug)]
pub(super) struct TrainingShard {
    pub share: TensorShare,
    /// The architecture of the whole model.
    pub arch: Arch,
    /// The whole parameters, by unit.
    pub specs: Vec<Vec<ParamSpec>>,
}

/// Place of a shard's part of a parameter in the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSlice {
    /// Rows and columns of the whole parameter.
    pub whole: [usize; 2],
    /// The rows and columns that are here. Rows of zeros may follow.
    pub part: [Range<usize>; 2],
    /// True if an earlier rank has the same part.
    pub is_copy: bool,
}

impl ShardSlice {
    /// Number of values, without zero padding.
    pub fn numel(&self) -> usize {
        let [rows, columns] = &self.part;
        rows.len() * columns.len()
    }

    /// This part of the whole parameter's values, counted in row-major order.
    pub fn slice_of(&self, whole: &[f32]) -> Vec<f32> {
        let ([_, width], [rows, columns]) = (self.whole, &self.part);
        let values = rows.clone().flat_map(|row| {
            let first = row * width;
            whole[first + columns.start..first + columns.end].iter()
        });
        values.copied().collect()
    }
}
