//! Value models (critics) made from a language model: its body with a new scalar head, or a scalar head beside the language model's
//! own.

use super::init::INIT_STREAM;
use super::{Decoder, Store};
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, unit_specs};
use crate::weights::Weights;
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Random stream of a new value head, beyond the indices of all parameters.
const VALUE_HEAD: u64 = 1 << 31;

impl Decoder {
    /// This model with a value head `[1, hidden]` beside its projection, on the device: a critic that shares the trunk. The head is
    /// normal with standard deviation `initializer_range` and depends on the seed alone. A model that has one keeps it.
    #[must_use]
    pub fn with_joint_value_head(mut self, seed: u64) -> Self {
        let arch = self.arch.clone().with_joint_value_head();
        let last = self.units.len() - 1;
        let known = self.units[last].specs.iter().any(|s| s.slot == Slot::Value);
        let specs = unit_specs(&arch, UnitKind::Head);
        let spec = specs.into_iter().find(|s| s.slot == Slot::Value);
        let Some(spec) = spec.filter(|_| !known) else {
            return self;
        };
        let value = self.fresh_value(&spec, seed);
        let head = &mut self.units[last];
        let mut entries: Vec<_> = head.store.fetch(&self.device).into_entries().collect();
        entries.push((spec.slot.into(), value));
        head.store = Store::Device(Weights::new(entries));
        head.specs.push(spec);
        head.range.end += 1;
        self.arch = arch;
        self
    }

    /// Flat index of the value head beside the projection, if there is one.
    #[must_use]
    pub fn value_index(&self) -> Option<usize> {
        let head = &self.units[self.units.len() - 1];
        let place = head.specs.iter().position(|s| s.slot == Slot::Value)?;
        Some(head.range.start + place)
    }

    fn fresh_value(&self, spec: &ParamSpec, seed: u64) -> Tensor<2> {
        let std = self.arch.initializer_range as f32;
        let mut stream = Stream::new(seed, INIT_STREAM + VALUE_HEAD);
        let values = (0..spec.numel()).map(|_| stream.normal() * std).collect();
        let precision = self.arch.precision;
        precision.matrix(values, spec.rows_cols(), &self.device)
    }

    /// A value model with the body of this model, on the device: adapters merged, a scalar head in place of the projection, normal
    /// with standard deviation `initializer_range`, which depends on the seed alone. Weights are shared until one of the two replaces
    /// them. A model that has a scalar head keeps it.
    #[must_use]
    pub fn with_value_head(&self, seed: u64) -> Self {
        let arch = self.arch.clone().with_value_head();
        let own: BTreeMap<&str, usize> = self
            .specs()
            .enumerate()
            .map(|(index, spec)| (spec.name.as_str(), index))
            .collect();
        let value = |_, spec: &ParamSpec| {
            let value = match own.get(spec.name.as_str()) {
                Some(&index) => self.merged_param(index).upload(&self.device),
                None if spec.slot == Slot::Projection => self.fresh_value(spec, seed),
                None => {
                    let zeros = vec![0.0; spec.numel()];
                    let precision = self.arch.precision;
                    precision.matrix(zeros, spec.rows_cols(), &self.device)
                }
            };
            Ok::<_, Infallible>(value)
        };
        match Self::build(arch, &self.device, value) {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
    }
}
