//! A decoder with adapters: adding them, turning them off, removing them and merging them into its matrices.

use super::sampling_shard::{kept, shard_spec};
use super::{Decoder, Param, Store, Unit};
use crate::adapter::{Dropout, LoraConfig, LoraForward, init_stream};
use crate::layer::Sublayer;
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, TargetModule, UnitKind};
use crate::weights::Weights;
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use firebrick_backends::precision::{stored_as, widened};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

impl Decoder {
    /// The settings of its adapters, if it has any.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// A half of a layer with these weights, and its adapters where they are on.
    pub(super) fn sublayer<'a>(
        &'a self,
        unit: usize,
        weights: &'a Weights,
        dropout: Option<&'a Dropout>,
    ) -> Sublayer<'a> {
        let (UnitKind::Attention(layer) | UnitKind::Mlp(layer)) = self.units[unit].kind else {
            unreachable!("embedding and head have separate methods")
        };
        let lora = self.lora.as_ref().filter(|_| self.adapters_on);
        let lora = lora.map(|lora| LoraForward::new(lora, dropout, layer));
        Sublayer { arch: &self.arch, layer, w: weights, lora, exact: self.exact }
    }

    /// This model with adapters, on the device; `value` gives their matrices, in flat order and in the shape of
    /// [`ParamSpec::rows_cols`]. Only they (and a joint value head) are trained. Modules that the architecture lacks
    /// are left out of the settings. A rank's [share](Self::training_shard) of a model gets its share of them; `value`
    /// gives whole ones.
    ///
    /// # Errors
    /// The first that `value` gives. Of a share [`Error::Shared`] with dropout, [`Error::OutOfMemory`] and
    /// [`Error::Device`] too.
    pub fn with_adapters<E: From<Error>>(
        &self,
        lora: LoraConfig,
        mut value: impl FnMut(UnitKind, &ParamSpec) -> Result<Tensor<2>, E>,
    ) -> Result<Self, E> {
        let lora = lora.in_arch(self.whole_arch());
        let mut decoder = self.without_adapters();
        if decoder.share.is_some() {
            check_shared(&lora)?;
        }
        let dtype = self.arch.precision.dtype(&self.device);
        let whole = (0..decoder.units.len()).map(|unit| lora.specs(decoder.whole_specs(unit)));
        let whole: Vec<Vec<ParamSpec>> = whole.collect();
        for (unit, adapters) in decoder.units.iter_mut().zip(&whole) {
            let mut entries: Vec<_> = unit.store.fetch(&self.device).into_entries().collect();
            freeze(&mut unit.specs);
            for spec in adapters {
                let value = stored_as(value(unit.kind, spec)?, dtype);
                let (spec, value) = self.adapter_shard(spec, value)?;
                entries.push((spec.slot.into(), value));
                unit.specs.push(spec);
            }
            unit.store = Store::Device(Weights::new(entries));
        }
        if let Some(shard) = &mut decoder.share {
            for (specs, adapters) in Arc::make_mut(shard).specs.iter_mut().zip(whole) {
                freeze(specs);
                specs.extend(adapters);
            }
        }
        decoder.lora = Some(lora);
        set_ranges(&mut decoder.units);
        Ok(decoder)
    }

    /// This rank's part of an adapter's matrix: all of it in a whole model.
    fn adapter_shard(&self, spec: &ParamSpec, value: Tensor<2>) -> Result<(ParamSpec, Tensor<2>)> {
        let Some(shard) = &self.share else {
            return Ok((spec.clone(), value));
        };
        let cut = shard.share.trained_cut(&shard.arch, spec.slot);
        let value = kept(Param::Device(value), spec, &cut, &self.device)?;
        let spec = ParamSpec { trainable: spec.trainable, ..shard_spec(spec, &cut) };
        Ok((spec, value))
    }

    /// This model with new adapters, initialised as in PEFT, so that the outputs do not change: A uniform within ±1 /
    /// √in (Kaiming uniform with a = √5), B zero. A depends on the seed, the layer and the module alone.
    ///
    /// # Errors
    /// As [`Self::with_adapters`] of a share; none of a whole model.
    pub fn with_fresh_adapters(&self, lora: LoraConfig, seed: u64) -> Result<Self> {
        self.with_adapters(lora, |kind, spec| {
            let values: Vec<f32> = match (spec.slot, kind) {
                (Slot::LoraA(target), UnitKind::Attention(layer) | UnitKind::Mlp(layer)) => {
                    let bound = (spec.rows_cols()[1] as f32).sqrt().recip();
                    let mut stream = Stream::new(seed, init_stream(layer, target));
                    let draw = || (2.0 * stream.uniform() - 1.0) * bound;
                    std::iter::repeat_with(draw).take(spec.numel()).collect()
                }
                _ => vec![0.0; spec.numel()],
            };
            Ok(self.arch.precision.matrix(values, spec.rows_cols(), &self.device))
        })
    }

    /// This model with another dropout rate of adapter inputs.
    #[must_use]
    pub fn with_adapter_dropout(mut self, dropout: f64) -> Self {
        if let Some(lora) = &mut self.lora {
            lora.dropout = dropout;
        }
        self
    }

    /// This model with its adapters off: the reference policy. All weights are shared.
    #[must_use]
    pub fn adapters_off(&self) -> Self {
        let mut decoder = self.clone();
        decoder.adapters_on = false;
        decoder
    }

    /// The base model, without adapters. Weights on the device are shared, those in host memory copied.
    #[must_use]
    pub fn without_adapters(&self) -> Self {
        let mut decoder = self.clone();
        decoder.adapters_on = true;
        if decoder.lora.take().is_none() {
            return decoder;
        }
        for unit in &mut decoder.units {
            unit.store = match &unit.store {
                Store::Device(weights) => {
                    let base = weights.clone().into_entries().filter(|(key, _)| !key.slot.is_adapter());
                    Store::Device(Weights::new(base.collect()))
                }
                Store::Host(host) => {
                    let base = host.iter().filter(|(key, _)| !key.slot.is_adapter());
                    Store::Host(Arc::new(base.cloned().collect()))
                }
            };
            unit.specs.retain(|spec| !spec.slot.is_adapter());
            for (place, spec) in unit.specs.iter_mut().enumerate() {
                spec.trainable = unit.store.layout(place).is_none();
            }
        }
        if let Some(shard) = &mut decoder.share {
            for specs in &mut Arc::make_mut(shard).specs {
                specs.retain(|spec| !spec.slot.is_adapter());
                for spec in specs {
                    spec.trainable = true;
                }
            }
        }
        set_ranges(&mut decoder.units);
        decoder
    }

    /// The parameter at a flat index as the merged model has it: W + s · B A, in f32 or wider, where W has an adapter;
    /// of experts each with its own. Of a frozen quantized base, W is dequantized.
    pub fn merged_param(&self, index: usize) -> Param {
        let rows_of = |index, rows| Ok::<_, Infallible>(self.param_rows(index, rows));
        let Ok(merged) = self.merged_whole(index, rows_of);
        merged
    }

    /// [`Self::merged_param`] of the whole model. `rows_of` gives rows of a parameter by its flat index, those of
    /// adapters too.
    pub(super) fn merged_whole<E>(
        &self,
        index: usize,
        rows_of: impl FnMut(usize, Range<usize>) -> Result<Param, E>,
    ) -> Result<Param, E> {
        let (unit, place) = self.place_in_whole(index);
        let experts = self.whole_specs(unit)[place].experts().unwrap_or(1);
        self.merged_experts(index, 0..experts, rows_of)
    }

    /// Some rows of [`Self::merged_param`] of the whole model, in f32: of experts no others than those that the rows
    /// are of are merged. `rows_of` gives rows of a parameter by its flat index, those of adapters too.
    ///
    /// # Errors
    /// The first that `rows_of` gives; `Error::Device` or `Error::OutOfMemory` where the device fails.
    pub fn merged_rows<E: From<Error>>(
        &self,
        index: usize,
        rows: Range<usize>,
        rows_of: impl FnMut(usize, Range<usize>) -> Result<Param, E>,
    ) -> Result<Vec<f32>, E> {
        let (unit, place) = self.place_in_whole(index);
        let spec = &self.whole_specs(unit)[place];
        let each = spec.rows_cols()[0] / spec.experts().unwrap_or(1);
        let experts = rows.start / each..rows.end.div_ceil(each);
        let first = experts.start * each;
        let merged = self.merged_experts(index, experts, rows_of)?;
        Ok(merged.rows(rows.start - first..rows.end - first)?)
    }

    /// Some rows of the parameter at a flat index. Those of a frozen quantized matrix are widened to f32.
    pub fn param_rows(&self, index: usize, rows: Range<usize>) -> Param {
        let (unit, place) = self.place(index);
        let [row_count, cols] = unit.specs[place].rows_cols();
        let some = |value: Param, rows: Range<usize>, row_count: usize| {
            if rows.len() == row_count {
                return value;
            }
            value.part(rows.start * cols..rows.end * cols, [rows.len(), cols])
        };
        if let Some(layout) = unit.store.layout(place) {
            let each = row_count / layout.matrices;
            let experts = rows.start / each..rows.end.div_ceil(each);
            let (first, there) = (experts.start * each, experts.len() * each);
            let value = self.widened_param(&unit.store, place, layout, experts);
            return some(value, rows.start - first..rows.end - first, there);
        }
        match &unit.store {
            Store::Device(weights) => some(Param::Device(weights.at(place)), rows, row_count),
            // a part is a copy, and all of it as well
            Store::Host(host) => {
                let values = rows.start * cols..rows.end * cols;
                Param::Host(host[place].1.part(values, [rows.len(), cols]))
            }
        }
    }

    /// The unit of a parameter, and its place there.
    pub(super) fn place(&self, index: usize) -> (&Unit, usize) {
        let (unit, place) = self.place_in_whole(index);
        (&self.units[unit], place)
    }

    /// The index of a parameter's unit, and its place there.
    pub(super) fn place_in_whole(&self, index: usize) -> (usize, usize) {
        let unit = self.units.partition_point(|u| u.range.end <= index);
        (unit, index - self.units[unit].range.start)
    }

    /// The rows of some experts in a parameter, merged; a parameter that is not of experts has those of one.
    fn merged_experts<E>(
        &self,
        index: usize,
        experts: Range<usize>,
        mut read_rows: impl FnMut(usize, Range<usize>) -> Result<Param, E>,
    ) -> Result<Param, E> {
        let (unit, place) = self.place_in_whole(index);
        let (first, specs) = (self.units[unit].range.start, self.whole_specs(unit));
        let experts_count = specs[place].experts().unwrap_or(1);
        let mut rows_of = |place: usize| {
            let each = specs[place].rows_cols()[0] / experts_count;
            read_rows(first + place, experts.start * each..experts.end * each)
        };
        let value = rows_of(place)?;
        let Some((lora, target)) = self.lora.as_ref().zip(TargetModule::from_slot(specs[place].slot)) else {
            return Ok(value);
        };
        let find = |slot| specs.iter().position(|spec| spec.slot == slot);
        let places = find(Slot::LoraA(target)).zip(find(Slot::LoraB(target)));
        let Some((a, b)) = places else {
            return Ok(value);
        };
        let [a, b] = [rows_of(a)?, rows_of(b)?].map(|factor| widened(factor.upload(&self.device)));
        let weight = widened(value.upload(&self.device));
        let merged = weight + product(b, a, experts.len()) * lora.scale();
        Ok(Param::Device(merged))
    }

    /// The merged model, on the device: every adapted matrix is W + s · B A, and there are no adapters.
    #[must_use]
    pub fn merged(&self) -> Self {
        let mut decoder = self.without_adapters();
        decoder.arch.base = None;
        let dtype = self.arch.precision.dtype(&self.device);
        for (unit, adapted) in decoder.units.iter_mut().zip(&self.units) {
            let value = |(place, spec): (usize, &ParamSpec)| {
                let value = self.merged_param(adapted.range.start + place);
                let value = stored_as(value.upload(&self.device), dtype);
                (spec.slot, value)
            };
            let entries: Vec<_> = unit.specs.iter().enumerate().map(value).collect();
            unit.store = Store::Device(Weights::new(entries));
            for spec in &mut unit.specs {
                spec.trainable = true;
            }
        }
        decoder
    }
}

/// Leaves nothing of a base model to be trained but a joint value head.
fn freeze(specs: &mut [ParamSpec]) {
    for spec in specs {
        spec.trainable = spec.slot == Slot::Value;
    }
}

/// Refuses adapters that ranks cannot share.
pub(super) fn check_shared(lora: &LoraConfig) -> Result<()> {
    if lora.dropout > 0.0 {
        return Err(Error::Shared("each rank would drop other inputs of adapters; set model.lora.dropout to 0".into()));
    }
    Ok(())
}

/// B A of `experts` adapters that lie one below the other: `[experts · out, in]`.
fn product(b: Tensor<2>, a: Tensor<2>, experts: usize) -> Tensor<2> {
    if experts == 1 {
        return b.matmul(a);
    }
    let ([rows, rank], [_, input]) = (b.dims(), a.dims());
    let b = b.reshape([experts, rows / experts, rank]);
    let a = a.reshape([experts, rank, input]);
    b.matmul(a).reshape([rows, input])
}

/// Sets the flat indices of every unit.
fn set_ranges(units: &mut [Unit]) {
    let mut next = 0;
    for unit in units {
        unit.range = next..next + unit.specs.len();
        next = unit.range.end;
    }
}
