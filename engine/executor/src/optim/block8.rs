//! Block-wise 8-bit quantisation of moments (arXiv:2110.02861), with bitsandbytes' dynamic map.
//!
//! Values are cut into blocks of [`BLOCK`] in flat row-major order. A block has one f32 scale, its value of largest
//! magnitude, and each value `x` the code whose map entry is nearest to `x / scale`; a tie goes to the lower code.
//!
//! While bitsandbytes takes the magnitude as scale, ours keeps the sign: its signed map contains 1 but not -1, so it
//! loses 0.7 % of a largest value that is negative, and again each time. With the sign, the largest value is always
//! exact, and quantising what was dequantised gives the same codes and scales, so f32 checkpoints of the moments lose
//! nothing.
//!
//! In the unsigned map nothing above 0 gets the code of 0. A second moment that became 0 beside a first moment that did
//! not would leave `eps` alone as divisor: measured, updates of 1,600 times the rate once gradients stop.

mod device;
#[cfg(test)]
mod tests;

pub use device::DeviceBlock8;

use firebrick_backends::quantized::dynamic_map;
use rayon::prelude::*;
use std::sync::LazyLock;

/// Values that share a scale.
pub const BLOCK: usize = 256;

/// Blocks a worker takes at a time.
const GRAIN: usize = 128;

/// Blocks whose values are all smaller than this (2⁻¹⁰⁴) are stored as zeros: their products with the smallest map
/// entry would be subnormal, which f32 cannot give back and GPUs flush.
const SMALLEST: f32 = 4.930_380_7e-32;

/// Exponent and 8 bits of the mantissa tell cells apart: each contains at most one midpoint.
const CELL_SHIFT: u32 = 15;
/// The cell of 2⁻²³, below the smallest midpoint of both maps.
const FIRST_CELL: u32 = (127 - 23) << 8;
/// The cell of 1.
const LAST_CELL: u32 = 127 << 8;
/// Cells of one sign, rounded up to a power of two.
const CELLS: usize = 1 << 13;

const MAGNITUDE: u32 = 0x7fff_ffff;

/// A dynamic map, and what is needed to find the nearest entry.
#[derive(Debug)]
pub(super) struct Codebook {
    /// Sorted entries.
    values: [f32; 256],
    /// Between an entry and the next; infinity after the last, 0 after an unsigned 0.
    midpoints: [f32; 256],
    /// The code of the smallest number of each cell: positive numbers' cells, then negative ones'.
    cells: [u8; 2 * CELLS],
    /// The code of 0.
    zero: u8,
    signed: bool,
}

impl Codebook {
    /// The map of first moments (signed) or of second moments.
    pub(super) fn get(signed: bool) -> &'static Self {
        static SIGNED: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(true));
        static UNSIGNED: LazyLock<Codebook> = LazyLock::new(|| Codebook::new(false));
        if signed { &SIGNED } else { &UNSIGNED }
    }

    fn new(signed: bool) -> Self {
        let values = dynamic_map(signed);
        let mut midpoints = [f32::INFINITY; 256];
        for (midpoint, pair) in midpoints.iter_mut().zip(values.windows(2)) {
            *midpoint = f32::midpoint(pair[0], pair[1]);
        }
        if !signed {
            midpoints[0] = 0.0;
        }
        let search = |x: f32| midpoints.partition_point(|&m| m < x) as u8;
        let mut cells = [0; 2 * CELLS];
        for cell in FIRST_CELL..=LAST_CELL {
            let at = (cell - FIRST_CELL) as usize;
            let (near, far) = (cell << CELL_SHIFT, ((cell + 1) << CELL_SHIFT) - 1);
            // the first cell also stands for everything nearer to zero
            let near = if cell == FIRST_CELL { 0 } else { near };
            cells[at] = search(f32::from_bits(near));
            cells[CELLS + at] = search(-f32::from_bits(far));
        }
        Self { values, midpoints, cells, zero: search(0.0), signed }
    }

    /// The nearest code to a number between -1 and 1.
    fn nearest(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = ((bits & MAGNITUDE) >> CELL_SHIFT).clamp(FIRST_CELL, LAST_CELL) - FIRST_CELL;
        let cell = cell as usize + (bits >> 31) as usize * CELLS;
        let code = self.cells[cell];
        code + u8::from(x > self.midpoints[usize::from(code)])
    }

    /// Codes of at most a block of values; returns its scale. NaN, if a value is not finite.
    pub(super) fn quantise(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let top = values.iter().fold(0, |top, v| top.max((v.to_bits() & MAGNITUDE) as i32));
        let top = f32::from_bits(top as u32);
        if !top.is_finite() {
            codes.fill(0);
            return f32::NAN;
        }
        if top < SMALLEST {
            codes.fill(self.zero);
            return 0.0;
        }
        // counted, not searched: that is vectorised
        let positive: u32 = values.iter().map(|&v| u32::from(v >= top)).sum();
        let scale = if positive > 0 || !self.signed { top } else { -top };
        let mut scaled = [0.0; BLOCK];
        for (scaled, value) in scaled.iter_mut().zip(values) {
            *scaled = value / scale;
        }
        for (code, &x) in codes.iter_mut().zip(&scaled) {
            *code = self.nearest(x);
        }
        scale
    }

    /// Values of a block's codes.
    pub(super) fn dequantise(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = self.values[usize::from(code)] * scale;
        }
    }
}

/// Quantised numbers in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostBlock8 {
    codes: Vec<u8>,
    scales: Vec<f32>,
    signed: bool,
}

impl HostBlock8 {
    /// `n` zeros. Signed numbers are first moments; second moments are never negative.
    pub fn zeros(n: usize, signed: bool) -> Self {
        Self { codes: vec![Codebook::get(signed).zero; n], scales: vec![0.0; n.div_ceil(BLOCK)], signed }
    }

    /// Quantises on all cores. A block with a number that is not finite becomes NaN; where `signed` is false, negative
    /// numbers become 0.
    pub fn quantise(values: &[f32], signed: bool) -> Self {
        let book = Codebook::get(signed);
        let mut this = Self::zeros(values.len(), signed);
        this.codes
            .par_chunks_mut(BLOCK)
            .zip(values.par_chunks(BLOCK))
            .zip(&mut this.scales)
            .with_min_len(GRAIN)
            .for_each(|((codes, values), scale)| *scale = book.quantise(values, codes));
        this
    }

    /// Writes the numbers to a slice of the same length, on all cores.
    pub fn dequantise_into(&self, values: &mut [f32]) {
        assert_eq!(values.len(), self.len(), "as many values as codes");
        let book = Codebook::get(self.signed);
        values
            .par_chunks_mut(BLOCK)
            .zip(self.codes.par_chunks(BLOCK))
            .zip(&self.scales)
            .with_min_len(GRAIN)
            .for_each(|((values, codes), &scale)| book.dequantise(codes, scale, values));
    }

    /// The numbers.
    pub fn dequantise(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        self.dequantise_into(&mut values);
        values
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.codes.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.codes.is_empty()
    }

    /// One code a number.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// One scale a block; its sign is that of the block's largest value.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.codes.len() + size_of_val(self.scales.as_slice())
    }

    /// Codes, scales and map, to update in place.
    pub(super) fn parts_mut(&mut self) -> (&mut [u8], &mut [f32], &'static Codebook) {
        let book = Codebook::get(self.signed);
        (&mut self.codes, &mut self.scales, book)
    }
}
