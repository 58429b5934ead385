//! A rank's share of a decoder that is trained on several ranks (Shoeybi et al., 2019, arXiv:1909.08053). It has its
//! parts of the matrices and no group: each half of a layer comes in three pieces, between which whoever runs them sums
//! over the ranks.
//!
//! | piece | gives | on every rank |
//! |---|---|---|
//! | [`enter`](Decoder::enter) | the input after its norm | the same |
//! | [`partial`](Decoder::partial) | the last product of the half | a part of the sum |
//! | [`leave`](Decoder::leave) | bias, norm and residual of the sum | the same |

use super::adapters::check_shared;
use super::block::{Block, TrainedShare};
use super::tensor_shard::{kept, shard_spec};
use super::{Decoder, NewParam, Param, Store, Unit};
use crate::arch::{Arch, HeadKind};
use crate::forward_context::ForwardContext;
use crate::layer::{self, Projected};
use crate::tensor_group::{TensorGroup, masked_rows};
use crate::unit::{ParamSpec, Slot, UnitKind, chain, unit_specs};
use crate::weights::{WeightKey, Weights};
use crate::{Error, Result};
use burn::tensor::{DType, Device, Int, Tensor};
use firebrick_arch::TensorShare;
use firebrick_arch::tensor_parallel::Cut;
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::{HostTensor, check_computed};
use firebrick_backends::{Precision, PrecisionExt};
use std::ops::Range;
use std::sync::Arc;

impl Decoder {
    /// This rank's share of a whole decoder, to be trained: on the device, adapters included.
    ///
    /// # Errors
    /// [`Error::Shared`] for a model that the ranks cannot share; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn trained_share(&self, share: TensorShare) -> Result<Self> {
        TensorShare::check_training(&self.arch, share.ranks()).map_err(Error::Shared)?;
        self.lora.as_ref().map_or(Ok(()), check_shared)?;
        let units = self.units.iter();
        let units = units.map(|unit| (unit.kind, unit.specs.clone())).collect();
        let arch = self.arch.clone();
        let value = |index, _: &ParamSpec| Ok::<_, Error>(self.param(index));
        let own = Self::of_parts(arch, units, share, &self.device, value, |_, _| Ok(()))?;
        Ok(Self { lora: self.lora.clone(), adapters_on: self.adapters_on, ..own })
    }

    /// A rank's share of a model that is [built](Self::build) a parameter at a time: no more than one of them is whole.
    /// `built` is told of every unit before the next one is built.
    pub(super) fn build_share<E: From<Error>, V: Into<NewParam>>(
        arch: Arch,
        share: TensorShare,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
        built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        TensorShare::check_training(&arch, share.ranks()).map_err(Error::Shared)?;
        let dtype = arch.precision.dtype(device);
        let units = chain(&arch).into_iter();
        let units = units.map(|kind| (kind, unit_specs(&arch, kind))).collect();
        let value = |index, spec: &ParamSpec| {
            let NewParam { tensor, .. } = value(index, spec)?.into();
            Ok(Param::Device(stored_as(tensor, dtype)))
        };
        Self::of_parts(arch, units, share, device, value, built)
    }

    /// What is kept of the parameters of a model.
    fn of_parts<E: From<Error>>(
        arch: Arch,
        whole: Vec<(UnitKind, Vec<ParamSpec>)>,
        share: TensorShare,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<Param, E>,
        mut built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let specs = whole.iter().map(|(_, specs)| specs.clone()).collect();
        let mut decoder = Self {
            arch: share.trained_arch(&arch),
            units: Vec::with_capacity(whole.len()),
            device: device.clone(),
            lora: None,
            adapters_on: true,
            tensor: None,
            stage: None,
            share: Some(Arc::new(TrainedShare { share, arch, specs })),
        };
        for (index, (kind, all)) in whole.into_iter().enumerate() {
            let first = decoder.units.last().map_or(0, |unit| unit.range.end);
            let mut parts = Vec::new();
            for (spec, index) in all.iter().zip(first..) {
                let cut = share.trained_cut(decoder.whole_arch(), spec.slot);
                let part = kept(value(index, spec)?, spec, &cut, device)?;
                // the next whole parameter comes when this one is gone
                check_computed([part.clone()]).map_err(Error::from)?;
                parts.push((ParamSpec { trainable: spec.trainable, ..shard_spec(spec, &cut) }, part));
            }
            decoder.push_unit(kind, parts);
            built(&mut decoder, index)?;
        }
        Ok(decoder)
    }

    /// Which share it is, where it is one that is [trained](Self::trained_share).
    #[must_use]
    pub fn share(&self) -> Option<TensorShare> {
        self.share.as_ref().map(|own| own.share)
    }

    /// The architecture of the whole model.
    #[must_use]
    pub fn whole_arch(&self) -> &Arch {
        self.share.as_ref().map_or(&self.arch, |own| &own.arch)
    }

    /// Numbers of parameters of the whole model, and of those that are trained.
    #[must_use]
    pub fn whole_params(&self) -> [usize; 2] {
        let all = (0..self.units.len()).flat_map(|unit| self.whole_specs(unit));
        all.fold([0, 0], |[count, trained], spec| {
            let own = if spec.trainable { spec.numel() } else { 0 };
            [count + spec.numel(), trained + own]
        })
    }

    /// The parameters of a unit of the whole model.
    pub(super) fn whole_specs(&self, unit: usize) -> &[ParamSpec] {
        let own = self.share.as_ref();
        own.map_or(&self.units[unit].specs, |own| &own.specs[unit])
    }

    /// Specs of all parameters of the whole model, in flat order.
    pub fn specs_of_whole(&self) -> impl Iterator<Item = &ParamSpec> {
        (0..self.units.len()).flat_map(|unit| self.whole_specs(unit))
    }

    fn cut_of(&self, slot: Slot) -> Option<Cut> {
        let own = self.share.as_ref()?;
        Some(own.share.trained_cut(&own.arch, slot))
    }

    /// Where the part of the parameter at a flat index lies in the whole one; `None` of a decoder that is no share.
    #[must_use]
    pub fn block(&self, index: usize) -> Option<Block> {
        let own = self.share.as_ref()?;
        let unit = self.units.partition_point(|u| u.range.end <= index);
        let spec = &own.specs[unit][index - self.units[unit].range.start];
        let whole = spec.rows_cols();
        Some(Block {
            whole,
            part: own.share.trained_cut(&own.arch, spec.slot).block(whole),
            is_copy: own.share.is_copy(&own.arch, spec.slot),
        })
    }

    /// Whether this rank's gradient of a parameter is a part, which has to be summed over the ranks that share the
    /// matrices; with where the rows of its part belong among those of all, where only some of the ranks have the same
    /// part.
    #[must_use]
    pub fn part_of_gradient(&self, index: usize) -> Option<Block> {
        let own = self.share.as_ref()?;
        let block = self.block(index)?;
        let slot = self.specs().nth(index)?.slot;
        own.share.has_part_of_gradient(&own.arch, slot).then_some(block)
    }

    /// The whole model on the host, adapters included: `parts` gives the parameters of a unit as every rank has them,
    /// by rank.
    ///
    /// # Errors
    /// Those of `parts`.
    pub fn assembled<E>(&self, mut parts: impl FnMut(usize) -> Result<Vec<Vec<HostTensor>>, E>) -> Result<Self, E> {
        let mut whole = Self {
            arch: self.whole_arch().clone(),
            units: Vec::with_capacity(self.units.len()),
            share: None,
            ..self.clone()
        };
        whole.units.clear();
        for (index, unit) in self.units.iter().enumerate() {
            let values = self.joined(index, &parts(index)?);
            let specs = self.whole_specs(index);
            let host = specs.iter().zip(values);
            let host = host.map(|(spec, value)| (WeightKey::from(spec.slot), value));
            whole.units.push(Unit {
                specs: specs.to_vec(),
                store: Store::Host(Arc::new(host.collect())),
                sharded: false,
                ..unit.clone()
            });
        }
        Ok(whole)
    }

    /// The whole parameters of a unit, from those of every rank, by rank.
    #[must_use]
    pub fn joined(&self, unit: usize, parts: &[Vec<HostTensor>]) -> Vec<HostTensor> {
        let range = self.units[unit].range.clone();
        let whole = range.enumerate().map(|(place, index)| {
            let own: Vec<&HostTensor> = parts.iter().map(|rank| &rank[place]).collect();
            self.joined_param(index, &own)
        });
        whole.collect()
    }

    /// The whole parameter at a flat index, from the parts of every rank, by rank.
    #[must_use]
    pub fn joined_param(&self, index: usize, parts: &[&HostTensor]) -> HostTensor {
        let dtype = self.arch.precision.dtype(&self.device);
        let unit = self.units.partition_point(|u| u.range.end <= index);
        let spec = &self.whole_specs(unit)[index - self.units[unit].range.start];
        let cuts = (0..parts.len()).map(|rank| {
            let share = TensorShare::new(rank, parts.len());
            share.trained_cut(self.whole_arch(), spec.slot)
        });
        joined(spec.rows_cols(), dtype, cuts.zip(parts.iter().copied()))
    }

    /// This share as it samples with the ranks that have the others, in a precision, on the device. `own` gives the
    /// parameters of a unit as this rank has them.
    ///
    /// # Errors
    /// Those of `own`; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn sampling_share<E: From<Error>>(
        &self,
        group: &TensorGroup,
        precision: Precision,
        mut own: impl FnMut(usize) -> Result<Vec<Param>, E>,
    ) -> Result<Self, E> {
        let dtype = precision.dtype(&self.device);
        let mut shard = Self {
            arch: group.share().arch(self.whole_arch()).in_precision(precision),
            units: Vec::with_capacity(self.units.len()),
            tensor: Some(group.clone()),
            share: None,
            ..self.clone()
        };
        shard.units.clear();
        for (index, unit) in self.units.iter().enumerate() {
            // a value head does not sample
            let kept = unit.specs.iter().zip(own(index)?).filter(|(spec, _)| spec.slot != Slot::Value);
            let kept = kept.map(|(spec, value)| {
                let value = stored_as(value.upload(&self.device), dtype);
                (ParamSpec { trainable: false, ..spec.clone() }, value)
            });
            let parts: Vec<_> = kept.collect();
            check_computed(parts.iter().map(|(_, part)| part.clone())).map_err(Error::from)?;
            shard.push_unit(unit.kind, parts);
        }
        Ok(shard)
    }

    /// The tokens whose rows of the embedding and of the projection a share has, where it has some of them.
    #[must_use]
    pub fn own_tokens(&self) -> Option<Range<usize>> {
        let own = self.share.as_ref()?;
        Some(own.share.vocabulary(&own.arch))
    }

    /// The same of the projection, which a head that gives one number a token has whole.
    pub(super) fn projected_tokens(&self) -> Option<Range<usize>> {
        self.own_tokens().filter(|_| self.arch.head == HeadKind::LanguageModel)
    }

    /// A share's part of the embedding of token ids `[tokens]`, before its scale: `[tokens, hidden]`, zeros for the
    /// tokens of other ranks.
    #[must_use]
    pub fn embed_part(&self, weights: &Weights, ids: Tensor<1, Int>) -> Tensor<2> {
        let own = self.own_tokens().unwrap_or(0..self.arch.vocab_size);
        masked_rows(own, weights.need(Slot::Embedding), ids)
    }

    /// The embedding, given its sum over the ranks, `[tokens, hidden]`.
    #[must_use]
    pub fn embedded(&self, sum: Tensor<2>) -> Tensor<2> {
        layer::scaled_embedding(&self.arch, sum)
    }

    /// The input of a half after its norm, `[tokens, hidden]`.
    #[must_use]
    pub fn enter(&self, weights: &Weights, x: Tensor<2>) -> Tensor<2> {
        layer::normed_input(&self.arch, weights, x)
    }

    /// A half between its norm and its last sum: `[tokens, hidden]` of normed rows, a part of the sum over the ranks.
    #[must_use]
    pub fn partial(&self, unit: usize, weights: &Weights, normed: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let lora = self.unit_lora_forward(unit, ctx);
        match self.units[unit].kind {
            UnitKind::Attention(layer) => layer::attention_part(&self.arch, layer, weights, normed, ctx, lora),
            _ => layer::mlp_part(&self.arch, weights, normed, lora),
        }
    }

    /// The first part of [`partial`](Self::partial) of an attention unit: queries, keys and values of this rank's
    /// heads.
    #[must_use]
    pub fn project_normed(
        &self,
        unit: usize,
        weights: &Weights,
        normed: &Tensor<2>,
        ctx: &ForwardContext,
    ) -> Projected {
        let UnitKind::Attention(layer) = self.units[unit].kind else {
            unreachable!("queries are asked of an attention unit")
        };
        let lora = self.unit_lora_forward(unit, ctx);
        layer::project_normed(&self.arch, layer, weights, normed, ctx, lora)
    }

    /// The last part of [`partial`](Self::partial) of an attention unit, of what is mixed, `[tokens, heads ·
    /// head_dim]`.
    #[must_use]
    pub fn output_part(&self, unit: usize, weights: &Weights, mixed: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        weights.linear_part(mixed, Slot::O, self.unit_lora_forward(unit, ctx))
    }

    /// Whether a half's result is its residual plus the sum: there is neither a bias nor a norm behind it.
    #[must_use]
    pub fn leaves_plainly(&self, unit: usize, weights: &Weights) -> bool {
        let bias = weights.bias(self.last_matrix(unit));
        bias.is_none() && weights.get(Slot::PostNorm).is_none()
    }

    /// The matrix whose products a half sums.
    fn last_matrix(&self, unit: usize) -> Slot {
        match self.units[unit].kind {
            UnitKind::Attention(_) => Slot::O,
            _ => Slot::Down,
        }
    }

    /// A half's result `[tokens, hidden]`: bias, norm and residual of the sum over the ranks.
    #[must_use]
    pub fn leave(&self, unit: usize, weights: &Weights, residual: Tensor<2>, sum: Tensor<2>) -> Tensor<2> {
        let y = weights.add_bias(sum, self.last_matrix(unit));
        layer::onto_residual(&self.arch, weights, residual, y)
    }

    /// Rows of a share's gradient of the projection with as many zeros below as make it the shape of the parameter.
    #[must_use]
    pub fn projection_gradient(&self, own: Tensor<2>) -> Tensor<2> {
        match self.cut_of(Slot::Projection) {
            Some(Cut::Rows(_, rows)) => crate::tensor_group::padded(own, rows),
            _ => own,
        }
    }
}

/// A parameter of these rows and columns from its parts, each with its cut, by their bytes. Parts that several ranks
/// have are the same.
fn joined<'p>(
    [rows, columns]: [usize; 2],
    dtype: DType,
    parts: impl Iterator<Item = (Cut, &'p HostTensor)>,
) -> HostTensor {
    let width = dtype.size();
    let mut whole = vec![0; rows * columns * width];
    for (cut, part) in parts {
        let [own, across] = cut.block([rows, columns]);
        let line = across.len() * width;
        for (row, from) in own.zip(part.as_bytes().chunks_exact(line.max(1))) {
            let first = (row * columns + across.start) * width;
            whole[first..first + line].copy_from_slice(from);
        }
    }
    HostTensor::from_bytes(whole, [rows, columns], dtype)
}
