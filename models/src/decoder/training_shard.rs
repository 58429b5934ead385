//! A rank's share of a decoder that is trained on several ranks (Shoeybi et al., 2019, arXiv:1909.08053). It has its
//! parts of the matrices and no group: each half of a layer comes in three pieces, between which whoever runs them sums
//! over the ranks.
//!
//! | piece | gives | on every rank |
//! |---|---|---|
//! | [`tp_norm`](Decoder::tp_norm) | the input after its norm | the same |
//! | [`tp_partial`](Decoder::tp_partial) | the last product of the half | a part of the sum |
//! | [`tp_finish`](Decoder::tp_finish) | bias, norm and residual of the sum | the same |

use super::adapters::check_shared;
use super::sampling_shard::{kept, shard_spec};
use super::shard_slice::{ShardSlice, TrainingShard};
use super::{Decoder, NewParam, Param, Store};
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
    /// This rank's training shard of a whole decoder: on the device, adapters included.
    ///
    /// # Errors
    /// [`Error::Shared`] for a model that the ranks cannot share; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn training_shard(&self, share: TensorShare) -> Result<Self> {
        TensorShare::check_training(&self.arch, share.ranks()).map_err(Error::Shared)?;
        self.lora.as_ref().map_or(Ok(()), check_shared)?;
        let units = self.units.iter().map(|unit| (unit.kind, unit.specs.clone())).collect();
        let value = |index, _: &ParamSpec| Ok::<_, Error>(self.param(index));
        let shard = Self::from_parts(self.arch.clone(), units, share, &self.device, value, |_, _| Ok(()))?;
        Ok(Self { lora: self.lora.clone(), adapters_on: self.adapters_on, ..shard })
    }

    /// A rank's share of a model that is [built](Self::build) a parameter at a time: no more than one of them is whole.
    /// `built` is told of every unit before the next one is built.
    pub(super) fn build_tensor_shard<E: From<Error>, V: Into<NewParam>>(
        arch: Arch,
        share: TensorShare,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
        built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        TensorShare::check_training(&arch, share.ranks()).map_err(Error::Shared)?;
        let dtype = arch.precision.dtype(device);
        let units = chain(&arch).into_iter().map(|kind| (kind, unit_specs(&arch, kind))).collect();
        let value = |index, spec: &ParamSpec| {
            let NewParam { tensor, .. } = value(index, spec)?.into();
            Ok(Param::Device(stored_as(tensor, dtype)))
        };
        Self::from_parts(arch, units, share, device, value, built)
    }

    /// Builds a shard from the whole parameters of a model.
    fn from_parts<E: From<Error>>(
        arch: Arch,
        whole: Vec<(UnitKind, Vec<ParamSpec>)>,
        share: TensorShare,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<Param, E>,
        mut built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let specs = whole.iter().map(|(_, specs)| specs.clone()).collect();
        let mut decoder = Self::empty(share.trained_arch(&arch), device);
        decoder.share = Some(Arc::new(TrainingShard { share, arch, specs }));
        for (index, (kind, specs)) in whole.into_iter().enumerate() {
            let mut parts = Vec::new();
            for (spec, index) in specs.iter().zip(decoder.end()..) {
                let cut = share.trained_cut(decoder.whole_arch(), spec.slot);
                let part = kept(value(index, spec)?, spec, &cut, device)?;
                // the next whole parameter comes when this one is gone
                check_computed([part.clone()]).map_err(Error::from)?;
                parts.push((ParamSpec { trainable: spec.trainable, ..shard_spec(spec, &cut) }, part));
            }
            decoder.push_shard(kind, parts);
            built(&mut decoder, index)?;
        }
        Ok(decoder)
    }

    /// Its share of the model, where it is a [training shard](Self::training_shard).
    pub fn share(&self) -> Option<TensorShare> {
        self.share.as_ref().map(|shard| shard.share)
    }

    /// The architecture of the whole model.
    pub fn whole_arch(&self) -> &Arch {
        self.share.as_ref().map_or(&self.arch, |shard| &shard.arch)
    }

    /// Numbers of parameters of the whole model, and of those that are trained.
    pub fn whole_params(&self) -> [usize; 2] {
        self.whole_model_specs().fold([0, 0], |[count, trained], spec| {
            let trainable = if spec.trainable { spec.numel() } else { 0 };
            [count + spec.numel(), trained + trainable]
        })
    }

    /// The parameters of a unit of the whole model.
    pub(super) fn whole_specs(&self, unit: usize) -> &[ParamSpec] {
        self.share.as_ref().map_or(&self.units[unit].specs, |shard| &shard.specs[unit])
    }

    /// Specs of all parameters of the whole model, in flat order.
    pub fn whole_model_specs(&self) -> impl Iterator<Item = &ParamSpec> {
        (0..self.units.len()).flat_map(|unit| self.whole_specs(unit))
    }

    /// Place of this rank's part of the parameter at a flat index; `None` for a whole decoder.
    pub fn shard_slice(&self, index: usize) -> Option<ShardSlice> {
        let shard = self.share.as_ref()?;
        let (unit, place) = self.place_in_whole(index);
        let spec = &shard.specs[unit][place];
        let whole = spec.rows_cols();
        Some(ShardSlice {
            whole,
            part: shard.share.trained_cut(&shard.arch, spec.slot).block(whole),
            is_copy: shard.share.is_copy(&shard.arch, spec.slot),
        })
    }

    /// Place of a parameter whose gradient on this rank is partial, and is summed over the ranks that share the
    /// matrices; `None` for complete gradients. Where only some of the ranks have the same part, it says which rows of
    /// the whole these are.
    pub fn partial_grad_slice(&self, index: usize) -> Option<ShardSlice> {
        let shard = self.share.as_ref()?;
        let block = self.shard_slice(index)?;
        let slot = self.specs().nth(index)?.slot;
        shard.share.has_part_of_gradient(&shard.arch, slot).then_some(block)
    }

    /// The whole model on the host, adapters included: `parts` gives the parameters of a unit as every rank has them,
    /// by rank.
    ///
    /// # Errors
    /// Those of `parts`.
    pub fn assembled<E>(&self, mut parts: impl FnMut(usize) -> Result<Vec<Vec<HostTensor>>, E>) -> Result<Self, E> {
        let mut whole = Self { arch: self.whole_arch().clone(), units: Vec::new(), share: None, ..self.clone() };
        for (index, unit) in self.units.iter().enumerate() {
            let values = self.joined(index, &parts(index)?);
            let specs = self.whole_specs(index);
            let host = specs.iter().map(|spec| WeightKey::from(spec.slot)).zip(values).collect();
            whole.push_unit(unit.kind, specs.to_vec(), Store::Host(Arc::new(host)));
        }
        Ok(whole)
    }

    /// The whole parameters of a unit, from those of every rank, by rank.
    pub fn joined(&self, unit: usize, parts: &[Vec<HostTensor>]) -> Vec<HostTensor> {
        let range = self.units[unit].range.clone();
        let whole = range.enumerate().map(|(place, index)| {
            let ranks: Vec<&HostTensor> = parts.iter().map(|rank| &rank[place]).collect();
            self.joined_param(index, &ranks)
        });
        whole.collect()
    }

    /// The whole parameter at a flat index, from the parts of every rank, by rank.
    pub fn joined_param(&self, index: usize, parts: &[&HostTensor]) -> HostTensor {
        let dtype = self.arch.precision.dtype(&self.device);
        let (unit, place) = self.place_in_whole(index);
        let spec = &self.whole_specs(unit)[place];
        let cuts =
            (0..parts.len()).map(|rank| TensorShare::new(rank, parts.len()).trained_cut(self.whole_arch(), spec.slot));
        joined(spec.rows_cols(), dtype, cuts.zip(parts.iter().copied()))
    }

    /// This training shard as a sampling shard, in a precision, on the device. `values` gives the parameters of a unit
    /// as this rank has them.
    ///
    /// # Errors
    /// Those of `values`; [`Error::OutOfMemory`], [`Error::Device`].
    pub fn as_sampling_shard<E: From<Error>>(
        &self,
        group: &TensorGroup,
        precision: Precision,
        mut values: impl FnMut(usize) -> Result<Vec<Param>, E>,
    ) -> Result<Self, E> {
        let dtype = precision.dtype(&self.device);
        let mut shard = self.empty_sampling_shard(group, precision);
        for (index, unit) in self.units.iter().enumerate() {
            // a value head does not sample
            let kept = unit.specs.iter().zip(values(index)?).filter(|(spec, _)| spec.slot != Slot::Value);
            let kept = kept.map(|(spec, value)| {
                let value = stored_as(value.upload(&self.device), dtype);
                (ParamSpec { trainable: false, ..spec.clone() }, value)
            });
            let parts: Vec<_> = kept.collect();
            check_computed(parts.iter().map(|(_, part)| part.clone())).map_err(Error::from)?;
            shard.push_shard(unit.kind, parts);
        }
        Ok(shard)
    }

    /// The tokens whose rows of the embedding and of the projection a share has, where it has some of them.
    pub fn local_tokens(&self) -> Option<Range<usize>> {
        let shard = self.share.as_ref()?;
        Some(shard.share.vocabulary(&shard.arch))
    }

    /// The tokens whose rows of the projection a shard has: a head with one value per token is whole.
    pub(super) fn projected_tokens(&self) -> Option<Range<usize>> {
        self.local_tokens().filter(|_| self.arch.head == HeadKind::LanguageModel)
    }

    /// A share's part of the embedding of token ids `[tokens]`, before its scale: `[tokens, hidden]`, zeros for the
    /// tokens of other ranks.
    pub fn embed_shard(&self, weights: &Weights, ids: Tensor<1, Int>) -> Tensor<2> {
        let tokens = self.local_tokens().unwrap_or(0..self.arch.vocab_size);
        masked_rows(tokens, weights.need(Slot::Embedding), ids)
    }

    /// The embedding, given its sum over the ranks, `[tokens, hidden]`.
    pub fn embedded(&self, sum: Tensor<2>) -> Tensor<2> {
        layer::scaled_embedding(&self.arch, sum)
    }

    /// The input of a half after its norm, `[tokens, hidden]`.
    pub fn tp_norm(&self, unit: usize, weights: &Weights, x: Tensor<2>) -> Tensor<2> {
        self.sublayer(unit, weights, None).normed_input(x)
    }

    /// A half between its norm and its last sum: `[tokens, hidden]` of normed rows, a part of the sum over the ranks.
    pub fn tp_partial(&self, unit: usize, weights: &Weights, normed: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let sublayer = self.sublayer(unit, weights, ctx.dropout());
        match self.units[unit].kind {
            UnitKind::Attention(_) => sublayer.attention_part(normed, ctx),
            _ => sublayer.mlp_part(normed),
        }
    }

    /// The first part of [`tp_partial`](Self::tp_partial) of an attention unit: queries, keys and values of this rank's
    /// heads.
    pub fn project_normed(
        &self,
        unit: usize,
        weights: &Weights,
        normed: &Tensor<2>,
        ctx: &ForwardContext,
    ) -> Projected {
        self.sublayer(unit, weights, ctx.dropout()).project_normed(normed, ctx)
    }

    /// The last part of [`tp_partial`](Self::tp_partial) of an attention unit, of what is mixed, `[tokens, heads ·
    /// head_dim]`.
    pub fn output_part(&self, unit: usize, weights: &Weights, mixed: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        weights.linear_part(mixed, Slot::O, self.sublayer(unit, weights, ctx.dropout()).lora)
    }

    /// True if [`tp_finish`](Self::tp_finish) only adds the residual: there is neither a bias nor a norm after the sum.
    pub fn tp_finish_is_add(&self, unit: usize, weights: &Weights) -> bool {
        weights.bias(self.last_matrix(unit)).is_none() && weights.get(Slot::PostNorm).is_none()
    }

    /// The matrix whose products a half sums.
    fn last_matrix(&self, unit: usize) -> Slot {
        match self.units[unit].kind {
            UnitKind::Attention(_) => Slot::O,
            _ => Slot::Down,
        }
    }

    /// A half's result `[tokens, hidden]`: bias, norm and residual of the sum over the ranks.
    pub fn tp_finish(&self, unit: usize, weights: &Weights, residual: Tensor<2>, sum: Tensor<2>) -> Tensor<2> {
        let y = weights.add_bias(sum, self.last_matrix(unit));
        self.sublayer(unit, weights, None).onto_residual(residual, y)
    }

    /// Rows of a share's gradient of the projection with as many zeros below as make it the shape of the parameter.
    pub fn projection_gradient(&self, grad: Tensor<2>) -> Tensor<2> {
        match self.share.as_ref().map(|shard| shard.share.trained_cut(&shard.arch, Slot::Projection)) {
            Some(Cut::Rows(_, rows)) => crate::tensor_group::padded(grad, rows),
            _ => grad,
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
        let [kept, across] = cut.block([rows, columns]);
        let line = across.len() * width;
        for (row, from) in kept.zip(part.as_bytes().chunks_exact(line.max(1))) {
            let first = (row * columns + across.start) * width;
            whole[first..first + line].copy_from_slice(from);
        }
    }
    HostTensor::from_bytes(whole, [rows, columns], dtype)
}
