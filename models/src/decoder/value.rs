//! A critic made from a language model: its body, and a fresh head that gives one number a token; or that head beside the model's
//! own, on the same body.

use super::{Decoder, INIT_STREAM, Store};
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, Weights, unit_specs};
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Its place among the streams of a random start, beyond every parameter's own.
const VALUE_HEAD: u64 = 1 << 31;

impl Decoder {
    /// The same model with a value head beside its projection, on the device: a critic that shares the trunk. Its numbers are
    /// normal with the architecture's `initializer_range` and a function of the seed. A model that has one keeps it.
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
        entries.push((spec.slot, value));
        head.store = Store::Device(Weights::new(entries));
        head.specs.push(spec);
        head.range.end += 1;
        self.arch = arch;
        self
    }

    /// Flat index of the value head beside the projection, where there is one.
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

    /// The same model with a value head, on the device: bypasses merged, the projection normal with the architecture's
    /// `initializer_range`, its numbers a function of the seed. Weights are shared until one of the two replaces them. A
    /// model that has a scalar head keeps it.
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
