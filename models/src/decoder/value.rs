//! A critic made from a language model: its body, and a fresh head that gives one number a token.

use super::{Decoder, INIT_STREAM};
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Its place among the streams of a random start, beyond every parameter's own.
const VALUE_HEAD: u64 = 1 << 31;

impl Decoder {
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
        let std = arch.initializer_range as f32;
        let value = |_, spec: &ParamSpec| {
            let value = match own.get(spec.name.as_str()) {
                Some(&index) => self.merged_param(index).upload(&self.device),
                None => {
                    let values = match spec.slot {
                        Slot::Projection => {
                            let mut stream = Stream::new(seed, INIT_STREAM + VALUE_HEAD);
                            (0..spec.numel()).map(|_| stream.normal() * std).collect()
                        }
                        _ => vec![0.0; spec.numel()],
                    };
                    self.arch
                        .precision
                        .matrix(values, spec.rows_cols(), &self.device)
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
