//! A rank's part of a model while it is built, so that no rank ever has all of it.

use super::{Decoder, NewParam, Param, Store};
use crate::arch::Arch;
use crate::unit::{ParamSpec, UnitKind};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_arch::TensorShare;
use std::ops::Range;

/// Some values of a parameter, counted in row-major order, as a matrix of this shape.
pub type ValueRange = (Range<usize>, [usize; 2]);

/// Part of a model that a rank keeps while it is built. The default is the whole model.
#[derive(Clone, Copy, Default)]
pub struct RankShard<'a> {
    /// Its share of every matrix, where ranks share them in training.
    pub share: Option<TensorShare>,
    /// The values that it keeps of a parameter, by the kind of its unit and its number of values; `None` for all. See
    /// [`Decoder::shard_unit`].
    pub values: Option<&'a dyn Fn(UnitKind, usize) -> Option<ValueRange>>,
}

impl std::fmt::Debug for RankShard<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RankShard({:?}, {})", self.share, self.values.is_some())
    }
}

impl Decoder {
    /// A model that is [built](Self::build) a parameter at a time, or a rank's part of it: then no more than one
    /// parameter is whole beside it where ranks share matrices, and no more than one unit where each keeps some values
    /// of every parameter. `value` gives every parameter of the whole model.
    ///
    /// # Errors
    /// Those of [`training_shard`](Self::training_shard) and [`shard_unit`](Self::shard_unit), and the first that
    /// `value` gives.
    pub fn build_shard<E: From<Error>, V: Into<NewParam>>(
        arch: Arch,
        part: RankShard<'_>,
        device: &Device,
        value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
    ) -> Result<Self, E> {
        let built = |decoder: &mut Self, unit| Ok(decoder.keep_values(unit, part)?);
        match part.share {
            None => Self::build_units(arch, device, value, built),
            Some(share) => Self::build_tensor_shard(arch, share, device, value, built),
        }
    }

    /// Keeps a rank's values of the parameters of a whole unit.
    fn keep_values(&mut self, unit: usize, part: RankShard<'_>) -> Result<()> {
        let kind = self.units[unit].kind;
        let Some(values) = part.values.filter(|values| values(kind, 0).is_some()) else {
            return Ok(());
        };
        self.shard_unit(unit, |numel| {
            values(kind, numel).unwrap_or_else(|| unreachable!("a unit is kept whole, or in parts"))
        })
    }

    /// Some of the values that are here of the parameter at a flat index, counted in row-major order, as a row. No
    /// others are copied. The parameter is not quantized.
    pub fn param_values(&self, index: usize, values: Range<usize>) -> Param {
        let ((unit, place), shape) = (self.place(index), [1, values.len()]);
        match &unit.store {
            Store::Device(weights) => Param::Device(weights.at(place)).part(values, shape),
            Store::Host(host) => Param::Host(host[place].1.part(values, shape)),
        }
    }

    /// Keeps a rank's values of the adapters of units of which it has parts: new ones are whole.
    ///
    /// # Errors
    /// If memory runs out, or the device fails.
    pub fn keep_values_of_adapters(&mut self, part: RankShard<'_>) -> Result<()> {
        let Some(values) = part.values else {
            return Ok(());
        };
        for unit in 0..self.units.len() {
            let current = &self.units[unit];
            if !current.sharded {
                continue;
            }
            let kept = current.specs.iter().zip(current.range.clone());
            let kept = kept.map(|(spec, index)| {
                let value = self.param(index);
                match values(current.kind, spec.numel()) {
                    Some((range, shape)) if spec.slot.is_adapter() => value.part(range, shape).detached(),
                    _ => Ok(value),
                }
            });
            let kept: Vec<Param> = kept.collect::<Result<_>>()?;
            self.put_unit(unit, kept)?;
        }
        Ok(())
    }
}
