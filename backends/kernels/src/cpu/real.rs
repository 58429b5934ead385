//! The element types of the kernels, and reductions that compile to vector code.

use burn::tensor::Element;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// f32 or f64.
pub(super) trait Real:
    Element
    + bytemuck::Pod
    + PartialOrd
    + Sum
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;

    fn of(value: f64) -> Self;
    /// The nearest f32; infinite where it is larger than all of them.
    fn as_f32(self) -> f32;
    /// `self · a + b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn ln(self) -> Self;
    /// eˣ within two units in the last place for f32; 0 or a number next to it where it underflows.
    fn exp(self) -> Self;
    /// The larger of two numbers, neither of them NaN; unlike `max` it compiles to vector code.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

/// Methods that call the type's inherent ones.
macro_rules! inherent {
    ($($name:ident),*) => {$(
        #[inline(always)]
        fn $name(self) -> Self {
            self.$name()
        }
    )*};
}

impl Real for f32 {
    inherent!(sqrt, tanh, ln);

    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    #[inline(always)]
    fn of(value: f64) -> Self {
        value as Self
    }

    #[inline(always)]
    fn as_f32(self) -> f32 {
        self
    }

    /// 2ⁿ · eʳ with r in ±ln 2 / 2 and a polynomial for eʳ (Cody & Waite's reduction). Branch-free, so that loops over
    /// it become vector code, which libm's function does not.
    #[inline(always)]
    fn exp(self) -> Self {
        // adding and taking away 1.5 · 2²³ rounds to the nearest integer
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        // NaN stays NaN through both choices
        let x = if self > 88.72 { 88.72 } else { self };
        let x = if x < -87.33 { -87.33 } else { x };
        let rounded = x * std::f32::consts::LOG2_E + ROUND;
        let n = rounded - ROUND;
        let r = (x - n * LN2_HIGH) - n * LN2_LOW;
        let p = 1.987_569_1e-4;
        let p = p * r + 1.398_199_9e-3;
        let p = p * r + 8.333_452e-3;
        let p = p * r + 4.166_579_6e-2;
        let p = p * r + 1.666_666_5e-1;
        let p = p * r + 0.5;
        let e = p * r * r + r + 1.0;
        // in two halves, for 2¹²⁸ is no f32 the last bits of the sum are the integer: a cast, which has to mind NaN and
        // numbers without bounds, would not be vector code
        let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        let half = n >> 1;
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
        e * power(half) * power(n.wrapping_sub(half))
    }
}

impl Real for f64 {
    inherent!(sqrt, tanh, ln, exp);

    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const LOWEST: Self = Self::NEG_INFINITY;

    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        self.mul_add(a, b)
    }

    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn as_f32(self) -> f32 {
        self as f32
    }
}

/// Partial sums of a reduction: the compiler may not reorder a sum by itself.
pub(super) const LANES: usize = 16;

/// Up to sixteen numbers, and zeros behind them.
#[inline(always)]
pub(super) fn lanes<T: Real>(from: &[T]) -> [T; LANES] {
    let mut lanes = [T::ZERO; LANES];
    lanes[..from.len()].copy_from_slice(from);
    lanes
}

/// Dot product of two slices of one length, in sixteen partial sums.
#[inline(always)]
pub(super) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest: T = rest.map(|(&a, &b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    reduce_lanes(lanes) + rest
}

/// The sum of a row, in sixteen partial sums.
#[inline(always)]
pub(super) fn sum<T: Real>(row: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    reduce_lanes(lanes) + rest.sum::<T>()
}

/// A tree reduction: sixteen dependent additions would take longer than a short row's products.
#[inline(always)]
pub(super) fn reduce_lanes<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest of a row; [`Real::LOWEST`] of an empty one.
#[inline(always)]
pub(super) fn largest<T: Real>(row: &[T]) -> T {
    let mut lanes = [T::LOWEST; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = lane.larger(value);
        }
    }
    lanes.iter().chain(rest).fold(T::LOWEST, |a, &b| a.larger(b))
}
