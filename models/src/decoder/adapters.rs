//! A decoder with low-rank bypasses, with them off, without them, and with them folded into its matrices.

use super::{Decoder, Param, Store, Unit};
use crate::adapter::{Bypass, LoraConfig, Target, init_stream};
use crate::layer::Context;
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, Weights};
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use firebrick_backends::precision::{stored_as, widened};
use std::convert::Infallible;
use std::sync::Arc;

impl Decoder {
    /// What its bypasses look like, if it has any.
    #[must_use]
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// How the bypasses of a layer run, where they do.
    pub(super) fn bypass<'a>(&self, layer: usize, ctx: &'a Context) -> Option<Bypass<'a>> {
        let lora = self.lora.as_ref().filter(|_| self.adapters_on)?;
        Some(Bypass::new(lora, ctx, layer))
    }

    /// The same by unit.
    pub(super) fn unit_bypass<'a>(&self, unit: usize, ctx: &'a Context) -> Option<Bypass<'a>> {
        match self.units[unit].kind {
            UnitKind::Attention(layer) | UnitKind::Mlp(layer) => self.bypass(layer, ctx),
            UnitKind::Embedding | UnitKind::Head => None,
        }
    }

    /// The same model with bypasses, on the device, asking `value` for every matrix of theirs in flat order. They alone train
    /// from then on.
    pub fn with_adapters<E>(
        &self,
        lora: LoraConfig,
        mut value: impl FnMut(UnitKind, &ParamSpec) -> Result<Tensor<2>, E>,
    ) -> Result<Self, E> {
        let mut decoder = self.without_adapters();
        let dtype = self.arch.precision.dtype(&self.device);
        for unit in &mut decoder.units {
            let mut entries: Vec<_> = unit.store.fetch(&self.device).into_entries().collect();
            let own = lora.specs(&unit.specs);
            for spec in &mut unit.specs {
                // a value head is no part of the model that the bypasses stand beside
                spec.trainable = spec.slot == Slot::Value;
            }
            for spec in own {
                let value = stored_as(value(unit.kind, &spec)?, dtype);
                entries.push((spec.slot, value));
                unit.specs.push(spec);
            }
            unit.store = Store::Device(Weights::new(entries));
        }
        decoder.lora = Some(lora);
        number(&mut decoder.units);
        Ok(decoder)
    }

    /// The same model with bypasses that change nothing yet, started as PEFT starts them: A uniform within 1 / √inputs
    /// (Kaiming with a = √5), B zero. The numbers depend on the seed, the layer and the module alone.
    #[must_use]
    pub fn with_fresh_adapters(&self, lora: LoraConfig, seed: u64) -> Self {
        let built = self.with_adapters(lora, |kind, spec| {
            let values: Vec<f32> = match (spec.slot, kind) {
                (Slot::LoraA(target), UnitKind::Attention(layer) | UnitKind::Mlp(layer)) => {
                    let bound = (spec.rows_cols()[1] as f32).sqrt().recip();
                    let mut stream = Stream::new(seed, init_stream(layer, target));
                    let draw = || (2.0 * stream.uniform() - 1.0) * bound;
                    std::iter::repeat_with(draw).take(spec.numel()).collect()
                }
                _ => vec![0.0; spec.numel()],
            };
            let precision = self.arch.precision;
            Ok::<_, Infallible>(precision.matrix(values, spec.rows_cols(), &self.device))
        });
        match built {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
    }

    /// The same model with another share dropped in training.
    #[must_use]
    pub fn with_adapter_dropout(mut self, dropout: f64) -> Self {
        if let Some(lora) = &mut self.lora {
            lora.dropout = dropout;
        }
        self
    }

    /// The same model with its bypasses off: the reference policy. All weights are shared, wherever they are.
    #[must_use]
    pub fn adapters_off(&self) -> Self {
        let mut decoder = self.clone();
        decoder.adapters_on = false;
        decoder
    }

    /// The model that the bypasses stand beside. Weights on the device are shared, those on the host copied.
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
                    let base = weights.clone().into_entries();
                    let base = base.filter(|(slot, _)| !slot.is_adapter());
                    Store::Device(Weights::new(base.collect()))
                }
                Store::Host(host) => {
                    let base = host.iter().filter(|(slot, _)| !slot.is_adapter());
                    Store::Host(Arc::new(base.cloned().collect()))
                }
            };
            unit.specs.retain(|spec| !spec.slot.is_adapter());
            for spec in &mut unit.specs {
                spec.trainable = true;
            }
        }
        number(&mut decoder.units);
        decoder
    }

    /// One parameter, by its place in the flat order, as the merged model has it: W + s · B A, at least in f32, where a bypass
    /// stands beside it.
    #[must_use]
    pub fn merged_param(&self, index: usize) -> Param {
        let value = self.param(index);
        let unit = self.units.partition_point(|u| u.range.end <= index);
        let unit = &self.units[unit];
        let target = Target::of(unit.specs[index - unit.range.start].slot);
        let Some((lora, target)) = self.lora.as_ref().zip(target) else {
            return value;
        };
        let place = |slot| unit.specs.iter().position(|spec| spec.slot == slot);
        let places = place(Slot::LoraA(target)).zip(place(Slot::LoraB(target)));
        let Some((a, b)) = places else {
            return value;
        };
        let fetch = |place: usize| self.param(unit.range.start + place).upload(&self.device);
        let weight = widened(value.upload(&self.device));
        let bypass = widened(fetch(b)).matmul(widened(fetch(a)));
        Param::Device(weight + bypass * lora.scale())
    }

    /// A plain model, on the device, that computes the same: every adapted matrix is W + s · B A.
    #[must_use]
    pub fn merged(&self) -> Self {
        let mut decoder = self.without_adapters();
        let dtype = self.arch.precision.dtype(&self.device);
        for (unit, adapted) in decoder.units.iter_mut().zip(&self.units) {
            let value = |(place, spec): (usize, &ParamSpec)| {
                let value = self.merged_param(adapted.range.start + place);
                let value = stored_as(value.upload(&self.device), dtype);
                (spec.slot, value)
            };
            let entries = unit.specs.iter().enumerate().map(value).collect();
            unit.store = Store::Device(Weights::new(entries));
        }
        decoder
    }
}

/// Gives every unit its place in the flat order.
fn number(units: &mut [Unit]) {
    let mut next = 0;
    for unit in units {
        unit.range = next..next + unit.specs.len();
        next = unit.range.end;
    }
}
