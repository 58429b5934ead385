//! A frozen quantized base (`QLoRA`, arXiv:2305.14314): bytes of codes and scales, and of values that are dequantized
//! at a time.
//!
//! A matrix is its buffer ([`QuantizedLayout`]) wherever weights are: on the device, on the host, on their way. A
//! matmul dequantizes it: on a GPU the whole matrix, in the activations' type, for the duration of the matmul; on the
//! CPU a tile of at most [`CPU_TILE`] elements in f32. The backward pass dequantizes again, and keeps no dequantized
//! values. Experts are dequantized one matrix at a time.
//!
//! [`QuantizedLayout`]: firebrick_spec::QuantizedLayout

use firebrick_arch::Arch;
use firebrick_arch::parameters::ParamSpec;
use firebrick_spec::quantized::CPU_TILE;

/// Kinds of sublayers that layers have: those of `Sublayer`, in its order.
pub(crate) const SUBLAYERS: usize = 4;

/// Elements and bytes of a quantized base, by sublayer. Zeros without such a base.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BaseSizes {
    /// Numbers of a sublayer that are quantized.
    pub numbers: [u64; SUBLAYERS],
    /// Bytes of their buffers.
    pub bytes: [u64; SUBLAYERS],
    /// Numbers of the largest matrix.
    pub largest: u64,
    /// Most numbers that the CPU widens at a time.
    pub tile: u64,
}

impl BaseSizes {
    /// Of the parameters of one sublayer each.
    pub fn new(arch: &Arch, sublayers: [&[ParamSpec]; SUBLAYERS]) -> Self {
        let matrices = |specs: &[ParamSpec]| -> Vec<_> { specs.iter().filter_map(|spec| spec.layout(arch)).collect() };
        let layouts = sublayers.map(matrices);
        let flat = || layouts.iter().flatten();
        let tile = |rows: usize, cols: usize| cols * (CPU_TILE / cols.max(1)).clamp(1, rows.max(1));
        Self {
            numbers: layouts.each_ref().map(|layouts| layouts.iter().map(|l| (l.matrices * l.numbers()) as u64).sum()),
            bytes: layouts.each_ref().map(|layouts| layouts.iter().map(|l| l.bytes() as u64).sum()),
            largest: flat().map(|l| l.numbers() as u64).max().unwrap_or(0),
            tile: flat().map(|l| tile(l.rows, l.cols) as u64).max().unwrap_or(0),
        }
    }
}
