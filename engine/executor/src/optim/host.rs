//! `AdamW` over slices in host memory, on all cores: the same arithmetic as [`OptimConfig::update`], moments stored as
//! [`MomentKind`] says.
//!
//! One pass over memory: a block of moments is widened into a buffer in the nearest cache, updated and narrowed again.
//! Every element's result depends on its own block only, so it is the same with any number of threads.

#[cfg(test)]
mod tests;

use super::block8::{BLOCK, Codebook, HostBlock8};
use super::config::{OptimConfig, UpdateAt};
use firebrick_plan::MomentKind;
use half::bf16;
use rayon::prelude::*;
use std::ops::{Add, Div, Mul, Sub};

/// Elements a worker takes at a time; whole blocks.
const GRAIN: usize = 128 * BLOCK;

/// A number that [`update`] computes in: f32 or f64.
pub trait Real:
    Copy + Send + Sync + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + sealed::Sealed
{
    /// Zero.
    const ZERO: Self;
    /// The nearest number.
    fn from_f64(x: f64) -> Self;
    /// The value, exactly.
    fn from_f32(x: f32) -> Self;
    /// The value, exactly.
    fn to_f64(self) -> f64;
    /// The nearest number.
    fn to_f32(self) -> f32;
    /// The square root.
    #[must_use]
    fn root(self) -> Self;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

macro_rules! real {
    ($float:ty) => {
        #[allow(
            clippy::cast_lossless,
            trivial_numeric_casts,
            reason = "the casts of one of the two types change nothing"
        )]
        impl Real for $float {
            const ZERO: Self = 0.0;
            #[inline]
            fn from_f64(x: f64) -> Self {
                x as Self
            }
            #[inline]
            fn from_f32(x: f32) -> Self {
                x as Self
            }
            #[inline]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline]
            fn root(self) -> Self {
                self.sqrt()
            }
        }
    };
}

real!(f32);
real!(f64);

/// Moments of a parameter in host memory: running means of the gradient and of its square.
#[derive(Clone, Debug, PartialEq)]
pub enum HostMoments {
    /// f32.
    F32([Vec<f32>; 2]),
    /// f64, in exactness tests.
    F64([Vec<f64>; 2]),
    /// bf16, rounded to nearest even.
    Bf16([Vec<bf16>; 2]),
    /// 8 bits.
    Block8([HostBlock8; 2]),
}

impl HostMoments {
    /// Moments of `n` elements before the first step.
    pub fn zeros(kind: MomentKind, n: usize) -> Self {
        match kind {
            MomentKind::F32 => Self::F32([vec![0.0; n], vec![0.0; n]]),
            MomentKind::Bf16 => Self::Bf16([vec![bf16::ZERO; n], vec![bf16::ZERO; n]]),
            MomentKind::Block8 => Self::Block8([true, false].map(|signed| HostBlock8::zeros(n, signed))),
        }
    }

    /// f64 moments of `n` elements before the first step.
    pub fn zeros_f64(n: usize) -> Self {
        Self::F64([vec![0.0; n], vec![0.0; n]])
    }

    /// Stores moments as `kind` says. What [`to_f32`](Self::to_f32) gave for the same kind is stored exactly.
    pub fn from_f32(kind: MomentKind, [first, second]: [Vec<f32>; 2]) -> Self {
        match kind {
            MomentKind::F32 => Self::F32([first, second]),
            MomentKind::Bf16 => {
                Self::Bf16([first, second].map(|values| values.into_iter().map(bf16::from_f32).collect()))
            }
            MomentKind::Block8 => {
                Self::Block8([HostBlock8::quantise(&first, true), HostBlock8::quantise(&second, false)])
            }
        }
    }

    /// First and second moments as f32: exact for all but f64 ones.
    pub fn to_f32(&self) -> [Vec<f32>; 2] {
        match self {
            Self::F32(moments) => moments.clone(),
            Self::F64(moments) => moments.each_ref().map(|values| values.iter().map(|&v| v.to_f32()).collect()),
            Self::Bf16(moments) => moments.each_ref().map(|values| values.iter().map(|&v| v.to_f32()).collect()),
            Self::Block8(moments) => moments.each_ref().map(HostBlock8::dequantise),
        }
    }

    /// Their number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32([first, _]) => first.len(),
            Self::F64([first, _]) => first.len(),
            Self::Bf16([first, _]) => first.len(),
            Self::Block8([first, _]) => first.len(),
        }
    }

    /// True if they belong to none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(_) => 8 * self.len(),
            Self::F64(_) => 16 * self.len(),
            Self::Bf16(_) => 4 * self.len(),
            Self::Block8([first, second]) => first.bytes() + second.bytes(),
        }
    }
}

/// `AdamW` on one parameter, in place. Gradients are multiplied by `clip` first: see
/// [`clip_coefficient`](OptimConfig::clip_coefficient).
pub fn update<T: Real>(
    config: &OptimConfig,
    at: UpdateAt,
    clip: f64,
    value: &mut [T],
    gradient: &[T],
    moments: &mut HostMoments,
) {
    assert_eq!(value.len(), gradient.len(), "a gradient for every value");
    assert_eq!(value.len(), moments.len(), "moments for every value");
    let rates = Rates::new(config, at, clip);
    match moments {
        HostMoments::F32([first, second]) => sweep(&rates, value, gradient, grains(first), grains(second)),
        HostMoments::F64([first, second]) => sweep(&rates, value, gradient, grains(first), grains(second)),
        HostMoments::Bf16([first, second]) => sweep(&rates, value, gradient, grains(first), grains(second)),
        HostMoments::Block8([first, second]) => {
            sweep(&rates, value, gradient, block8_grains(first), block8_grains(second));
        }
    }
}

fn grains<S: Send>(moments: &mut [S]) -> impl IndexedParallelIterator<Item = &mut [S]> {
    moments.par_chunks_mut(GRAIN)
}

fn block8_grains(moments: &mut HostBlock8) -> impl IndexedParallelIterator<Item = Block8Grain<'_>> {
    let (codes, scales, book) = moments.parts_mut();
    codes.par_chunks_mut(GRAIN).zip(scales.par_chunks_mut(GRAIN / BLOCK)).map(move |(codes, scales)| Block8Grain {
        codes,
        scales,
        book,
    })
}

/// Updates all values, grain by grain and block by block.
fn sweep<T: Real, S: Stored>(
    rates: &Rates<T>,
    value: &mut [T],
    gradient: &[T],
    first: impl IndexedParallelIterator<Item = S>,
    second: impl IndexedParallelIterator<Item = S>,
) {
    value.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN)).zip(first.zip(second)).for_each(
        |((value, gradient), (mut first, mut second))| {
            let (mut m, mut v) = ([T::ZERO; BLOCK], [T::ZERO; BLOCK]);
            let blocks = value.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
            for (block, (value, gradient)) in blocks.enumerate() {
                let (m, v) = (&mut m[..value.len()], &mut v[..value.len()]);
                first.load(block, m);
                second.load(block, v);
                rates.apply(value, gradient, m, v);
                first.store(block, m);
                second.store(block, v);
            }
        },
    );
}

/// Factors of an update, rounded to the type it computes in.
#[derive(Clone, Copy, Debug)]
struct Rates<T> {
    clip: T,
    keep: [T; 2],
    take: [T; 2],
    correction: T,
    eps: T,
    rate: T,
    decay: T,
}

impl<T: Real> Rates<T> {
    fn new(config: &OptimConfig, at: UpdateAt, clip: f64) -> Self {
        let UpdateAt { step, lr, decays } = at;
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        let [c1, c2] = config.betas.map(|b| 1.0 - b.powi(step));
        let decay = if decays { config.weight_decay } else { 0.0 };
        Self {
            clip: T::from_f64(clip),
            keep: config.betas.map(T::from_f64),
            take: config.betas.map(|b| T::from_f64(1.0 - b)),
            correction: T::from_f64(c2.sqrt()),
            eps: T::from_f64(config.eps),
            rate: T::from_f64(lr / c1),
            decay: T::from_f64(1.0 - lr * decay),
        }
    }

    /// One block. In the order of [`OptimConfig::update`], so that f32 results are those of flex.
    fn apply(&self, value: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T]) {
        let moments = first.iter_mut().zip(second);
        for ((value, &gradient), (first, second)) in value.iter_mut().zip(gradient).zip(moments) {
            let g = gradient * self.clip;
            *first = *first * self.keep[0] + g * self.take[0];
            *second = *second * self.keep[1] + g * g * self.take[1];
            let denominator = second.root() / self.correction + self.eps;
            *value = *value * self.decay - *first / denominator * self.rate;
        }
    }
}

/// A grain of stored moments, which are read and written a block at a time.
trait Stored: Send {
    fn load<T: Real>(&self, block: usize, values: &mut [T]);
    fn store<T: Real>(&mut self, block: usize, values: &[T]);
}

/// A float type that moments are stored in.
trait Narrow: Copy + Send {
    fn widen<T: Real>(self) -> T;
    fn narrow<T: Real>(value: T) -> Self;
}

impl Narrow for f32 {
    fn widen<T: Real>(self) -> T {
        T::from_f32(self)
    }
    fn narrow<T: Real>(value: T) -> Self {
        value.to_f32()
    }
}

impl Narrow for f64 {
    fn widen<T: Real>(self) -> T {
        T::from_f64(self)
    }
    fn narrow<T: Real>(value: T) -> Self {
        value.to_f64()
    }
}

impl Narrow for bf16 {
    fn widen<T: Real>(self) -> T {
        T::from_f32(self.to_f32())
    }
    fn narrow<T: Real>(value: T) -> Self {
        Self::from_f32(value.to_f32())
    }
}

impl<S: Narrow> Stored for &mut [S] {
    fn load<T: Real>(&self, block: usize, values: &mut [T]) {
        for (value, stored) in values.iter_mut().zip(&self[block * BLOCK..]) {
            *value = stored.widen();
        }
    }

    fn store<T: Real>(&mut self, block: usize, values: &[T]) {
        for (stored, &value) in self[block * BLOCK..].iter_mut().zip(values) {
            *stored = S::narrow(value);
        }
    }
}

struct Block8Grain<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    book: &'static Codebook,
}

impl Stored for Block8Grain<'_> {
    fn load<T: Real>(&self, block: usize, values: &mut [T]) {
        let mut floats = [0.0; BLOCK];
        let floats = &mut floats[..values.len()];
        let codes = &self.codes[block * BLOCK..];
        self.book.dequantise(codes, self.scales[block], floats);
        for (value, &float) in values.iter_mut().zip(floats.iter()) {
            *value = T::from_f32(float);
        }
    }

    fn store<T: Real>(&mut self, block: usize, values: &[T]) {
        let mut floats = [0.0; BLOCK];
        let floats = &mut floats[..values.len()];
        for (float, value) in floats.iter_mut().zip(values) {
            *float = value.to_f32();
        }
        let codes = &mut self.codes[block * BLOCK..][..values.len()];
        self.scales[block] = self.book.quantise(floats, codes);
    }
}
