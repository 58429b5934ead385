//! Frozen matrices in few bits (`QLoRA`: Dettmers et al., 2023, arXiv:2305.14314): their formats, and where the codes
//! and scales of a matrix lie in its buffer.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Numbers of a block of `nf4`, which share a scale.
pub const NF4_BLOCK: usize = 64;

/// Blocks of `nf4` whose scales are quantised together.
pub const NF4_GROUP: usize = 256;

/// Entries of the map of quantised scales.
pub const SCALE_MAP: usize = 256;

/// Entries of the map of 4-bit codes.
pub const CODE_MAP: usize = 16;

/// Most numbers of a matrix that the CPU widens at a time for a product of many rows: 4 MiB in f32.
pub const CPU_TILE: usize = 1 << 20;

/// Bytes of a word of a buffer.
const WORD: usize = 4;

/// The format of a frozen base model under adapters, if it has fewer bits than the model's precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BaseFormat {
    /// 8 bits, one scale per row (bitsandbytes' `load_in_8bit`, arXiv:2208.07339).
    Int8,
    /// 4-bit `NormalFloat` in blocks of 64, double quantization (bitsandbytes' `load_in_4bit`).
    Nf4,
}

impl BaseFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Nf4];

    /// How configurations spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Nf4 => "nf4",
        }
    }
}

impl fmt::Display for BaseFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A matrix in few bits: its shape, and what lies where in its buffer of 32-bit words. The matrices of a layer's
/// experts have a buffer each, one behind the other.
///
/// | format | the buffer, one part after the other, each in whole words |
/// |---|---|
/// | `int8` | a byte a number in row-major order; every row's absmax, f32 |
/// | `nf4` | half a byte a number in row-major order, the first of two in the upper half; a byte a block; every group's absmax, f32; the offset of scales, f32; the map of scales, 256 × f32; the map of codes, 16 × f32 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedLayout {
    /// The format.
    pub format: BaseFormat,
    /// Rows of a matrix: outputs.
    pub rows: usize,
    /// Its columns: inputs.
    pub cols: usize,
    /// Matrices of this shape: as many as a layer has experts, else one.
    pub matrices: usize,
}

impl QuantizedLayout {
    /// The layout of a matrix `[rows, columns]`.
    pub fn new(format: BaseFormat, [rows, cols]: [usize; 2]) -> Self {
        Self::stacked(format, 1, [rows, cols])
    }

    /// The layout of so many matrices `[rows, columns]`.
    pub fn stacked(format: BaseFormat, matrices: usize, [rows, cols]: [usize; 2]) -> Self {
        Self { format, rows, cols, matrices }
    }

    /// The layout of one of the matrices.
    #[must_use]
    pub fn one(self) -> Self {
        Self { matrices: 1, ..self }
    }

    /// All matrices one below the other: `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.matrices * self.rows, self.cols]
    }

    /// Numbers of one matrix.
    pub fn numbers(&self) -> usize {
        self.rows * self.cols
    }

    /// Words of the codes, which come first.
    pub fn code_words(&self) -> usize {
        self.numbers().div_ceil(match self.format {
            BaseFormat::Int8 => WORD,
            BaseFormat::Nf4 => 2 * WORD,
        })
    }

    /// Blocks of `nf4`. The last may be shorter, and a block may reach from one row into the next.
    pub fn blocks(&self) -> usize {
        self.numbers().div_ceil(NF4_BLOCK)
    }

    /// The word at which the absmax of every group begins, after the codes of the blocks' scales.
    pub fn groups_at(&self) -> usize {
        self.code_words() + self.blocks().div_ceil(WORD)
    }

    /// Groups of `nf4`.
    pub fn groups(&self) -> usize {
        self.blocks().div_ceil(NF4_GROUP)
    }

    /// The word of the offset of scales.
    pub fn offset_at(&self) -> usize {
        self.groups_at() + self.groups()
    }

    /// The word at which the map of scales begins.
    pub fn scale_map_at(&self) -> usize {
        self.offset_at() + 1
    }

    /// The word at which the map of codes begins.
    pub fn code_map_at(&self) -> usize {
        self.scale_map_at() + SCALE_MAP
    }

    /// Words of one matrix's buffer.
    pub fn words(&self) -> usize {
        match self.format {
            BaseFormat::Int8 => self.code_words() + self.rows,
            BaseFormat::Nf4 => self.code_map_at() + CODE_MAP,
        }
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        WORD * self.matrices * self.words()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(format: BaseFormat, shape: [usize; 2]) -> f64 {
        let layout = QuantizedLayout::new(format, shape);
        layout.bytes() as f64 / layout.numbers() as f64
    }

    #[test]
    fn a_number_takes_at_most_1_02_bytes_in_int8_and_0_52_in_nf4() {
        // the matrices of public models: 0.5 B parameters and up
        for shape in [[896, 896], [4864, 896], [896, 4864], [3584, 18944]] {
            assert!(share(BaseFormat::Int8, shape) <= 1.02, "{shape:?}");
            assert!(share(BaseFormat::Nf4, shape) <= 0.52, "{shape:?}");
        }
        assert!((share(BaseFormat::Nf4, [4096, 4096]) - 0.515_93).abs() < 1e-4);
        // a row's scale is shared by as many numbers as the row has, and the maps by the matrix's
        assert!(share(BaseFormat::Int8, [64, 196]) > 1.02);
        assert!(share(BaseFormat::Nf4, [256, 256]) > 0.52);
    }

    #[test]
    fn parts_lie_one_after_the_other() {
        let odd = QuantizedLayout::new(BaseFormat::Nf4, [3, 43]);
        assert_eq!((odd.numbers(), odd.blocks(), odd.groups()), (129, 3, 1));
        assert_eq!([odd.code_words(), odd.groups_at(), odd.offset_at()], [17, 18, 19]);
        assert_eq!(odd.words(), 20 + 256 + 16);
        let bytes = QuantizedLayout::new(BaseFormat::Int8, [3, 43]);
        assert_eq!(bytes.words(), 33 + 3);
    }

    #[test]
    fn names_are_those_of_configurations() {
        for format in BaseFormat::ALL {
            let name = serde_json::to_string(&format).unwrap();
            assert_eq!(name, format!("\"{format}\""));
        }
    }
}
