//! A rank's share of a decoder that samples on several ranks: see [`crate::tensor_group`].

use super::{Decoder, Param, Store};
use crate::tensor_group::{TensorGroup, padded};
use crate::unit::{ParamSpec, UnitKind};
use crate::weights::{WeightKey, Weights};
use crate::{Error, Result};
use burn::tensor::{Device, Tensor};
use firebrick_arch::TensorShare;
use firebrick_arch::tensor_parallel::Cut;
use firebrick_backends::kernels::{in_thread_pool, with_team};
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::{HostTensor, check_computed};
use firebrick_backends::{Precision, PrecisionExt};

impl Decoder {
    /// This rank's sampling shard of the model in a precision, on the device, adapters included. `whole` gives the
    /// parameters of a unit in their order, whole: one unit at a time, so that a whole model need not be anywhere. For
    /// a training shard see [`as_sampling_shard`](Self::as_sampling_shard).
    ///
    /// # Errors
    /// Those of `whole`; [`Error::Sampling`] for a model that the ranks cannot share; [`Error::OutOfMemory`],
    /// [`Error::Device`].
    pub fn sampling_shard<E: From<Error>>(
        &self,
        group: &TensorGroup,
        precision: Precision,
        mut whole: impl FnMut(usize) -> Result<Vec<Param>, E>,
    ) -> Result<Self, E> {
        let share = group.share();
        let arch = self.whole_arch();
        TensorShare::check(arch, share.ranks()).map_err(Error::Sampling)?;
        let mut shard = self.empty_sampling_shard(group, precision);
        let dtype = precision.dtype(&self.device);
        for (index, unit) in self.units.iter().enumerate() {
            let mut parts = Vec::new();
            for (spec, value) in self.whole_specs(index).iter().zip(whole(index)?) {
                if let Some(cut) = share.cut(arch, spec.slot) {
                    let part = kept(value, spec, &cut, &self.device)?;
                    parts.push((shard_spec(spec, &cut), stored_as(part, dtype)));
                }
            }
            check_computed(parts.iter().map(|(_, part)| part.clone())).map_err(Error::from)?;
            shard.push_shard(unit.kind, parts);
        }
        Ok(shard)
    }

    /// A rank's shard for sampling, without units.
    pub(super) fn empty_sampling_shard(&self, group: &TensorGroup, precision: Precision) -> Self {
        let arch = group.share().arch(self.whole_arch()).in_precision(precision);
        Self {
            lora: self.lora.clone(),
            adapters_on: self.adapters_on,
            tensor: Some(group.clone()),
            ..Self::empty(arch, &self.device)
        }
    }

    /// Adds a unit of a shard, with its values on the device.
    pub(super) fn push_shard(&mut self, kind: UnitKind, parts: Vec<(ParamSpec, Tensor<2>)>) {
        let (specs, values): (Vec<ParamSpec>, Vec<Tensor<2>>) = parts.into_iter().unzip();
        let entries = specs.iter().map(|spec| WeightKey::from(spec.slot)).zip(values).collect();
        self.push_unit(kind, specs, Store::Device(Weights::new(entries)));
    }

    /// The ranks that share its matrices, where it is a share.
    pub fn tensor_group(&self) -> Option<&TensorGroup> {
        self.tensor.as_ref()
    }

    /// The error of a message between ranks since the last call; none of a model that is no share.
    ///
    /// # Errors
    /// Those of [`TensorGroup::check`].
    pub fn check_ranks(&self) -> Result<()> {
        self.tensor.as_ref().map_or(Ok(()), TensorGroup::check)
    }

    /// Runs a decoding step, whose kernels are short, with a team of threads that waits for them; ranks that exchange
    /// messages on the way may be threads of one process, and have none.
    pub fn with_team<R>(&self, work: impl FnOnce() -> R) -> R {
        match self.tensor {
            Some(_) => work(),
            None => with_team(&self.device, work),
        }
    }

    /// Runs work of the forward pass where its kernels start fastest: in the thread pool, but for ranks that exchange
    /// messages on the way, which may be threads of one process and would wait for each other inside of it.
    pub fn in_thread_pool<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self.tensor {
            Some(_) => work(),
            None => in_thread_pool(&self.device, work),
        }
    }

    /// Logits of hidden rows `[rows, hidden]`, `[rows, vocab]`; on ranks that share matrices each computes its part,
    /// and compares the fingerprint of the tokens so far.
    pub fn logits(&self, hidden: Tensor<2>, fingerprint: u64) -> Tensor<2> {
        let logits = self.head().logits(hidden);
        match &self.tensor {
            Some(group) => group.gather_logits(&logits, self.arch.vocab_size, fingerprint),
            None => logits,
        }
    }

    /// Ends a run of sampling: compares the fingerprint of all its tokens.
    ///
    /// # Errors
    /// `Error::Device` if a rank has other tokens.
    pub fn same_tokens(&self, fingerprint: u64) -> Result<()> {
        let group = self.tensor.as_ref();
        group.map_or(Ok(()), |group| group.same_tokens(fingerprint))
    }
}

/// The kept part of a parameter, on the device. Parts are copies, so that none holds on to the whole.
pub(super) fn kept(value: Param, spec: &ParamSpec, cut: &Cut, device: &Device) -> Result<Tensor<2>> {
    let [_, columns] = spec.rows_cols();
    let part = match (cut, value) {
        (Cut::Whole, value) => return Ok(value.upload(device)),
        (Cut::Rows(rows, of), value) if rows.is_empty() => {
            let dtype = value.precision().dtype(device);
            return Ok(Tensor::zeros([*of, columns], (device, dtype)));
        }
        (Cut::Rows(rows, _), Param::Host(host)) => {
            let values = rows.start * columns..rows.end * columns;
            host.part(values, [rows.len(), columns])
        }
        (Cut::Rows(rows, _), Param::Device(whole)) => HostTensor::download(whole.narrow(0, rows.start, rows.len()))?,
        (Cut::Columns(kept), Param::Host(host)) => host.columns(kept.clone()),
        (Cut::Columns(kept), Param::Device(whole)) => HostTensor::download(whole.narrow(1, kept.start, kept.len()))?,
    };
    let part = part.into_device(device);
    Ok(match cut {
        Cut::Rows(_, of) => padded(part, *of),
        _ => part,
    })
}

/// The parameter as this rank has it.
pub(super) fn shard_spec(whole: &ParamSpec, cut: &Cut) -> ParamSpec {
    let [rows, columns] = cut.shape(whole.rows_cols());
    let shape = match whole.shape.len() {
        1 => vec![columns],
        _ => vec![rows, columns],
    };
    ParamSpec { shape, trainable: false, ..whole.clone() }
}
