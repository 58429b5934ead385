//! Values on the host as collectives take them: one row of one type.

use super::{CollectiveError, Result};
use bytemuck::{cast_slice, cast_slice_mut, pod_collect_to_vec, pod_read_unaligned};
use half::{bf16, f16};
use std::ops::Range;

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
    #[must_use]
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
    #[must_use]
    pub fn element(&self) -> Element {
        match self {
            Self::Bytes(_) => Element::Byte,
            Self::F32(_) => Element::F32,
            Self::F64(_) => Element::F64,
            Self::Bf16(_) => Element::Bf16,
            Self::F16(_) => Element::F16,
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_bytes().len() / self.element().bytes()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// Zeros.
    #[must_use]
    pub fn zeros(element: Element, len: usize) -> Self {
        match element {
            Element::Byte => Self::Bytes(vec![0; len]),
            Element::F32 => Self::F32(vec![0.0; len]),
            Element::F64 => Self::F64(vec![0.0; len]),
            Element::Bf16 => Self::Bf16(vec![bf16::ZERO; len]),
            Element::F16 => Self::F16(vec![f16::ZERO; len]),
        }
    }

    /// As they lie in memory.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(values) => values,
            Self::F32(values) => cast_slice(values),
            Self::F64(values) => cast_slice(values),
            Self::Bf16(values) => cast_slice(values),
            Self::F16(values) => cast_slice(values),
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Bytes(values) => values,
            Self::F32(values) => cast_slice_mut(values),
            Self::F64(values) => cast_slice_mut(values),
            Self::Bf16(values) => cast_slice_mut(values),
            Self::F16(values) => cast_slice_mut(values),
        }
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
        match element {
            Element::Byte => Self::Bytes(bytes),
            Element::F32 => Self::F32(pod_collect_to_vec(&bytes)),
            Element::F64 => Self::F64(pod_collect_to_vec(&bytes)),
            Element::Bf16 => Self::Bf16(pod_collect_to_vec(&bytes)),
            Element::F16 => Self::F16(pod_collect_to_vec(&bytes)),
        }
    }

    /// Values of one type one behind the other; no bytes where there are none.
    #[must_use]
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
        let width = self.element().bytes();
        &self.as_bytes()[values.start * width..values.end * width]
    }
}

/// The sum of blocks of one type and length, the first plus the second plus the third. Half precision is summed in f32 and rounded
/// once.
pub(super) fn sum_in_order(element: Element, blocks: &[&[u8]]) -> Result<Flat> {
    macro_rules! sum {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            let width = element.bytes();
            let mut sums: Vec<$wide> = Vec::new();
            for block in blocks {
                let values = block
                    .chunks_exact(width)
                    .map(|v| $widen(pod_read_unaligned::<$type>(v)));
                if sums.is_empty() {
                    sums.extend(values);
                } else {
                    sums.iter_mut()
                        .zip(values)
                        .for_each(|(sum, value)| *sum += value);
                }
            }
            sums.into_iter().map($narrow).collect()
        }};
    }
    Ok(match element {
        Element::F32 => Flat::F32(sum!(f32, f32, |v| v, |v| v)),
        Element::F64 => Flat::F64(sum!(f64, f64, |v| v, |v| v)),
        Element::Bf16 => Flat::Bf16(sum!(bf16, f32, bf16::to_f32, bf16::from_f32)),
        Element::F16 => Flat::F16(sum!(f16, f32, f16::to_f32, f16::from_f32)),
        Element::Byte => return Err(no_sum()),
    })
}

/// The error of a sum of bytes.
pub(super) fn no_sum() -> CollectiveError {
    CollectiveError::Values("bytes have no sum: give numbers, or gather the bytes".into())
}

/// The part of `len` values that a rank of `size` has: equal parts, but for the last ones, which may be shorter or empty.
#[must_use]
pub fn shard(len: usize, size: usize, rank: usize) -> Range<usize> {
    let part = len.div_ceil(size.max(1));
    (rank * part).min(len)..((rank + 1) * part).min(len)
}
