//! Value models (critics) made from a language model: its body with a new scalar head, or a scalar head beside the
//! language model's own.

use super::init::INIT_STREAM;
use super::{Decoder, Param, RankShard, Store};
use crate::Error;
use crate::arch::Arch;
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, unit_specs};
use crate::weights::Weights;
use burn::tensor::{Device, Tensor};
use firebrick_backends::PrecisionExt;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

/// Random stream of a new value head, beyond the indices of all parameters.
const VALUE_HEAD: u64 = 1 << 31;

impl Decoder {
    /// This model with a value head `[1, hidden]` beside its projection, on the device: a critic that shares the trunk.
    /// The head is normal with standard deviation `initializer_range` and depends on the seed alone. A model that has
    /// one keeps it. Of a rank's `part` of a model it is what the rank keeps of it; ranks that share matrices each have
    /// all of it.
    #[must_use]
    pub fn with_joint_value_head(mut self, part: RankShard<'_>, seed: u64) -> Self {
        let arch = self.whole_arch().clone().with_joint_value_head();
        let last = self.units.len() - 1;
        let known = self.units[last].specs.iter().any(|s| s.slot == Slot::Value);
        let spec = unit_specs(&arch, UnitKind::Head).into_iter().find(|s| s.slot == Slot::Value);
        let Some(spec) = spec.filter(|_| !known) else {
            return self;
        };
        let mut value = Param::Device(fresh_value(&arch, &self.device, &spec, seed));
        let head = &mut self.units[last];
        if let Some(values) = part.values.filter(|_| head.sharded)
            && let Some((range, shape)) = values(head.kind, spec.numel())
        {
            value = value.part(range, shape);
        }
        let mut entries: Vec<_> = head.store.fetch(&self.device).into_entries().collect();
        entries.push((spec.slot.into(), value.into_device(&self.device)));
        head.store = Store::Device(Weights::new(entries));
        head.specs.push(spec.clone());
        head.range.end += 1;
        if let Some(shard) = &mut self.share {
            let shard = Arc::make_mut(shard);
            shard.arch = arch;
            shard.specs[last].push(spec);
        }
        self.arch = self.arch.with_joint_value_head();
        self
    }

    /// Flat index of the value head beside the projection, if there is one.
    pub fn value_index(&self) -> Option<usize> {
        let head = &self.units[self.units.len() - 1];
        let place = head.specs.iter().position(|s| s.slot == Slot::Value)?;
        Some(head.range.start + place)
    }

    /// A value model with the body of this model, on the device: adapters merged, a scalar head in place of the
    /// projection, normal with standard deviation `initializer_range`, which depends on the seed alone. Weights are
    /// shared until one of the two replaces them. A model that has a scalar head keeps it.
    #[must_use]
    pub fn with_value_head(&self, seed: u64) -> Self {
        let arch = self.arch.clone().with_value_head();
        let rows_of = |index, rows| Ok::<_, Infallible>(self.param_rows(index, rows));
        let Ok(critic) = Self::build(arch, &self.device, self.values_of_critic(seed, rows_of));
        critic
    }

    /// A rank's `part` of [`Self::with_value_head`] of the whole model, of which this may be a part: no more than one
    /// parameter, or one unit, is whole beside it. `rows_of` gives rows of the whole model's parameters by their flat
    /// indices, those of adapters too.
    ///
    /// # Errors
    /// The first that `rows_of` gives, and those of [`Self::build_shard`].
    pub fn shard_with_value_head<E: From<Error>>(
        &self,
        part: RankShard<'_>,
        seed: u64,
        rows_of: impl FnMut(usize, Range<usize>) -> Result<Param, E>,
    ) -> Result<Self, E> {
        let arch = self.whole_arch().clone().with_value_head();
        let device = &self.device;
        Self::build_shard(arch, part, device, self.values_of_critic(seed, rows_of))
    }

    /// Gives the parameters of a critic that starts from the whole model.
    fn values_of_critic<E>(
        &self,
        seed: u64,
        mut rows_of: impl FnMut(usize, Range<usize>) -> Result<Param, E>,
    ) -> impl FnMut(usize, &ParamSpec) -> Result<Tensor<2>, E> {
        let specs = self.whole_model_specs().enumerate();
        let places: BTreeMap<&str, usize> = specs.map(|(index, spec)| (spec.name.as_str(), index)).collect();
        move |_, spec| match places.get(spec.name.as_str()) {
            Some(&index) => Ok(self.merged_whole(index, &mut rows_of)?.upload(&self.device)),
            None => Ok(fresh_head(self.whole_arch(), &self.device, spec, seed)),
        }
    }
}

/// A parameter of a new scalar head: see [`Decoder::with_value_head`].
pub(crate) fn fresh_head(arch: &Arch, device: &Device, spec: &ParamSpec, seed: u64) -> Tensor<2> {
    if spec.slot == Slot::Projection {
        return fresh_value(arch, device, spec, seed);
    }
    let zeros = vec![0.0; spec.numel()];
    arch.precision.matrix(zeros, spec.rows_cols(), device)
}

fn fresh_value(arch: &Arch, device: &Device, spec: &ParamSpec, seed: u64) -> Tensor<2> {
    let std = arch.initializer_range as f32;
    let values = Stream::new(seed, INIT_STREAM + VALUE_HEAD).normals(spec.numel(), std);
    arch.precision.matrix(values, spec.rows_cols(), device)
}
