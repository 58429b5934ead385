//! A frozen base in few bits (`QLoRA`, arXiv:2305.14314): bytes of codes and scales, and what is wide at a time.
//!
//! A matrix is its buffer ([`QuantizedLayout`]) wherever weights are: on the device, on the host, on their way. A
//! product widens it: on a GPU the whole matrix, in the activations' type, for as long as the product takes; on the CPU
//! a tile of at most [`CPU_TILE`] numbers in f32. The backward pass widens again, and keeps nothing wide. Of experts
//! the matrix of one is wide at a time.
//!
//! [`QuantizedLayout`]: firebrick_spec::QuantizedLayout

use firebrick_arch::Arch;
use firebrick_arch::parameters::ParamSpec;
use firebrick_spec::quantized::CPU_TILE;

/// Kinds of sublayers that layers have: those of `Sublayer`, in its order.
pub(crate) const SUBLAYERS: usize = 4;

/// What the matrices of a base in few bits take, by sublayer. Zeros where there is no such base.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BaseSizes {
    /// Numbers of a sublayer that are in few bits.
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
    pub fn of(arch: &Arch, sublayers: [&[ParamSpec]; SUBLAYERS]) -> Self {
        let matrices = |specs: &[ParamSpec]| -> Vec<_> {
            let layouts = specs.iter().filter_map(|spec| spec.layout(arch));
            layouts.collect()
        };
        let own = sublayers.map(matrices);
        let all = || own.iter().flatten();
        let tile = |rows: usize, cols: usize| cols * (CPU_TILE / cols.max(1)).clamp(1, rows.max(1));
        Self {
            numbers: own.each_ref().map(|own| own.iter().map(|l| (l.matrices * l.numbers()) as u64).sum()),
            bytes: own.each_ref().map(|own| own.iter().map(|l| l.bytes() as u64).sum()),
            largest: all().map(|l| l.numbers() as u64).max().unwrap_or(0),
            tile: all().map(|l| tile(l.rows, l.cols) as u64).max().unwrap_or(0),
        }
    }
}
