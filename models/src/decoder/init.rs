//! Random initialisation.

use super::Decoder;
use crate::arch::Arch;
use crate::random::Stream;
use burn::tensor::Device;
use firebrick_backends::PrecisionExt;
use std::convert::Infallible;

/// First random stream of a seed that initialises weights; streams of other purposes have other high words.
pub(super) const INIT_STREAM: u64 = 1 << 32;

impl Decoder {
    /// Random initialisation: matrices normal with standard deviation `initializer_range`, norms the identity, biases zero. The numbers
    /// depend on the seed and the parameter's index alone.
    #[must_use]
    pub fn random(arch: Arch, seed: u64, device: &Device) -> Self {
        let (std, norm) = (
            arch.initializer_range as f32,
            if arch.norm_offset { 0.0 } else { 1.0 },
        );
        let precision = arch.precision;
        let built = Self::build(arch, device, |index, spec| {
            let values: Vec<f32> = if spec.slot.is_norm() {
                vec![norm; spec.numel()]
            } else if spec.slot.is_norm_or_bias() {
                vec![0.0; spec.numel()]
            } else {
                let mut stream = Stream::new(seed, INIT_STREAM + index as u64);
                (0..spec.numel()).map(|_| stream.normal() * std).collect()
            };
            Ok::<_, Infallible>(precision.matrix(values, spec.rows_cols(), device))
        });
        match built {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
    }
}
