//! Values on the host as collectives take them: one row of one type.

use super::{CollectiveError, Result};
use bytemuck::{
    AnyBitPattern, cast_slice, cast_slice_mut, pod_collect_to_vec, pod_read_unaligned, try_cast_slice, zeroed_vec,
};
use half::{bf16, f16};
use std::ops::{Add, AddAssign, Range};

/// The type of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Bytes without a meaning here: they are moved, not summed.
    Byte,
    /// f32.
    F32,
    /// f64.
    F64,
    /// bf16.
    Bf16,
    /// f16.
    F16,
}

impl Element {
    const ALL: [Self; 5] = [Self::Byte, Self::F32, Self::F64, Self::Bf16, Self::F16];

    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Byte => "bytes",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    pub(super) fn of_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// Runs code on the vector of a [`Flat`], whatever its type.
macro_rules! with_values {
    ($flat:expr, $values:ident => $body:expr) => {
        match $flat {
            Flat::Bytes($values) => $body,
            Flat::F32($values) => $body,
            Flat::F64($values) => $body,
            Flat::Bf16($values) => $body,
            Flat::F16($values) => $body,
        }
    };
}

/// A [`Flat`] of a type from code that makes its vector.
macro_rules! flat_of {
    ($element:expr, $values:expr) => {
        match $element {
            Element::Byte => Flat::Bytes($values),
            Element::F32 => Flat::F32($values),
            Element::F64 => Flat::F64($values),
            Element::Bf16 => Flat::Bf16($values),
            Element::F16 => Flat::F16($values),
        }
    };
}

/// Values of one type.
#[derive(Clone, Debug, PartialEq)]
pub enum Flat {
    /// Bytes.
    Bytes(Vec<u8>),
    /// f32.
    F32(Vec<f32>),
    /// f64.
    F64(Vec<f64>),
    /// bf16.
    Bf16(Vec<bf16>),
    /// f16.
    F16(Vec<f16>),
}

impl Flat {
    /// Their type.
    pub fn element(&self) -> Element {
        match self {
            Self::Bytes(_) => Element::Byte,
            Self::F32(_) => Element::F32,
            Self::F64(_) => Element::F64,
            Self::Bf16(_) => Element::Bf16,
            Self::F16(_) => Element::F16,
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.as_bytes().len() / self.element().bytes()
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// Zeros.
    pub fn zeros(element: Element, len: usize) -> Self {
        flat_of!(element, zeroed_vec(len))
    }

    /// As they lie in memory.
    pub fn as_bytes(&self) -> &[u8] {
        with_values!(self, values => cast_slice(values))
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        with_values!(self, values => cast_slice_mut(values))
    }

    /// Writes some of the values of another row, which is of the same type, from the place `at` on.
    ///
    /// # Panics
    /// If the types differ, or there is no such place.
    pub fn write(&mut self, at: usize, other: &Self, values: Range<usize>) {
        assert_eq!(self.element(), other.element(), "values of one type");
        let start = at * self.element().bytes();
        let part = other.part(values);
        self.as_bytes_mut()[start..start + part.len()].copy_from_slice(part);
    }

    /// A copy of some of the values.
    #[must_use]
    pub fn slice(&self, values: Range<usize>) -> Self {
        Self::from_bytes(self.element(), self.part(values).to_vec())
    }

    /// Values of a type from their bytes, of which there is a whole number.
    pub(super) fn from_bytes(element: Element, bytes: Vec<u8>) -> Self {
        if element == Element::Byte { Self::Bytes(bytes) } else { flat_of!(element, pod_collect_to_vec(&bytes)) }
    }

    /// Values of one type one behind the other; no bytes where there are none.
    pub fn concat(parts: Vec<Self>) -> Self {
        let element = parts.first().map_or(Element::Byte, Self::element);
        match <[Self; 1]>::try_from(parts) {
            Ok([one]) => one,
            Err(parts) => {
                let bytes: Vec<&[u8]> = parts.iter().map(Self::as_bytes).collect();
                Self::from_bytes(element, bytes.concat())
            }
        }
    }

    /// Parts of these lengths, which add up to all.
    pub fn split(&self, lengths: &[usize]) -> impl Iterator<Item = Self> {
        let mut start = 0;
        lengths.iter().map(move |len| {
            let part = self.part(start..start + len).to_vec();
            start += len;
            Self::from_bytes(self.element(), part)
        })
    }

    /// The bytes of some of the values.
    pub(super) fn part(&self, values: Range<usize>) -> &[u8] {
        &self.as_bytes()[self.place(values)]
    }

    /// Byte range of some of the values.
    pub(super) fn place(&self, values: Range<usize>) -> Range<usize> {
        let width = self.element().bytes();
        values.start * width..values.end * width
    }

    /// None yet, with room for so many.
    pub(super) fn with_capacity(element: Element, len: usize) -> Self {
        flat_of!(element, Vec::with_capacity(len))
    }

    /// Adds the values of these bytes, of which there is a whole number, behind those that are there.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        with_values!(self, values => extend(values, bytes));
    }
}

fn extend<T: AnyBitPattern>(values: &mut Vec<T>, bytes: &[u8]) {
    match try_cast_slice(bytes) {
        Ok(more) => values.extend_from_slice(more),
        // they may lie anywhere
        Err(_) => values.extend(bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned::<T>)),
    }
}

/// The sum of blocks of one type and length, the first plus the second plus the third. Half precision is summed in f32
/// and rounded once.
pub(super) fn sum_in_order(element: Element, blocks: &[&[u8]]) -> Result<Flat> {
    Ok(match element {
        Element::F32 => Flat::F32(sums(blocks, |v: f32| v)),
        Element::F64 => Flat::F64(sums(blocks, |v: f64| v)),
        Element::Bf16 => {
            let wide = sums(blocks, bf16::to_f32);
            Flat::Bf16(wide.into_iter().map(bf16::from_f32).collect())
        }
        Element::F16 => {
            let wide = sums(blocks, f16::to_f32);
            Flat::F16(wide.into_iter().map(f16::from_f32).collect())
        }
        Element::Byte => return Err(no_sum()),
    })
}

/// The sum of blocks, whose values are widened.
fn sums<T: AnyBitPattern, W: Copy + Add<Output = W> + AddAssign>(
    blocks: &[&[u8]],
    widen: impl Fn(T) -> W + Copy,
) -> Vec<W> {
    fn values<T: AnyBitPattern, W>(block: &[u8], widen: impl Fn(T) -> W) -> impl Iterator<Item = W> {
        let each = block.chunks_exact(size_of::<T>());
        each.map(move |value| widen(pod_read_unaligned(value)))
    }
    // the first two in one pass over memory
    let (first, others) = blocks.split_at(blocks.len().min(2));
    let mut sums: Vec<W> = match first {
        [one, two] => {
            let pairs = values(one, widen).zip(values(two, widen));
            pairs.map(|(a, b)| a + b).collect()
        }
        [one] => values(one, widen).collect(),
        _ => Vec::new(),
    };
    for block in others {
        let pairs = sums.iter_mut().zip(values(block, widen));
        pairs.for_each(|(sum, value)| *sum += value);
    }
    sums
}

/// The error of a sum of bytes.
pub(super) fn no_sum() -> CollectiveError {
    CollectiveError::Values("bytes have no sum: pass floats, or gather the bytes".into())
}

/// The part of `len` values that a rank of `size` has: equal parts, but for the last ones, which may be shorter or
/// empty.
pub fn shard(len: usize, size: usize, rank: usize) -> Range<usize> {
    let part = len.div_ceil(size.max(1));
    (rank * part).min(len)..((rank + 1) * part).min(len)
}
