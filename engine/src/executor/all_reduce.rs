//! Gradients of a whole optimizer step, summed over the ranks that computed parts of it.

use super::gradient::Gradient;
use super::gradients::Gradients;
use super::runtime::Runtime;
use crate::Result;
use burn::tensor::DType;
use firebrick_backends::PrecisionExt;
use firebrick_backends::collective::{Element, Flat};
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use firebrick_models::unit::ParamSpec;

impl Gradients {
    /// Adds up the gradients of all ranks that have the same weights, in their order, unit by unit: afterwards these have the same ones, to
    /// the bit. A rank that had no micro-batch contributes zeros.
    ///
    /// # Errors
    /// Where a copy fails, or a rank has failed or is gone.
    pub fn all_reduce(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        for unit in decoder.units() {
            self.sum_parts(decoder, unit.range.clone(), runtime)?;
        }
        let world = runtime.world().replicas();
        if world.is_solo() {
            return Ok(());
        }
        self.finish()?;
        let specs: Vec<[usize; 2]> = decoder.specs().map(ParamSpec::rows_cols).collect();
        let own: Vec<u8> = (0..specs.len())
            .map(|index| u8::from(self.has(index)))
            .collect();
        let all = world.exchange(own)?;
        // units without gradients anywhere are frozen ones
        let found = |index: &usize| all.iter().any(|rank| rank.get(*index) == Some(&1));
        let element = match decoder.arch().precision.dtype(decoder.device()) {
            DType::F64 => Element::F64,
            _ => Element::F32,
        };
        for unit in decoder.units() {
            let params: Vec<usize> = unit.range.clone().filter(found).collect();
            if params.is_empty() {
                continue;
            }
            let mut flat = Vec::with_capacity(params.len());
            for &index in &params {
                let [rows, cols] = specs[index];
                flat.push(match self.take_own(index) {
                    Some(gradient) => gradient.into_host()?.into_flat(),
                    None => Flat::zeros(element, rows * cols),
                });
            }
            let lengths: Vec<usize> = flat.iter().map(Flat::len).collect();
            let sum = world.all_reduce(Flat::concat(flat))?;
            for (&index, values) in params.iter().zip(sum.split(&lengths)) {
                let sum = HostTensor::from_flat(values, specs[index]);
                self.put(index, Gradient::Host(sum), decoder.device());
            }
        }
        Ok(())
    }
}
