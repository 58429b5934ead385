//! Random initialisation.

use super::{Decoder, NewParam, RankShard};
use crate::arch::Arch;
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot};
use burn::tensor::Device;
use firebrick_backends::PrecisionExt;
use std::convert::Infallible;

/// First random stream of a seed that initialises weights; streams of other purposes have other high words.
pub(super) const INIT_STREAM: u64 = 1 << 32;

impl Decoder {
    /// Random initialisation: matrices, sinks and the biases of routers normal with standard deviation
    /// `initializer_range`, norms the identity, other biases zero; what gated `DeltaNet` has besides as transformers
    /// does, convolutions uniform within ±1 / √taps. The numbers depend on the seed and the parameter's index alone;
    /// those of a quantized base are then quantised.
    pub fn random(arch: Arch, seed: u64, device: &Device) -> Self {
        let shape = arch.clone();
        let value = |index, spec: &ParamSpec| Ok::<_, Infallible>(drawn(&shape, seed, (index, spec), device));
        let Ok(decoder) = Self::build(arch, device, value);
        decoder
    }

    /// A rank's part of [`Self::random`].
    ///
    /// # Errors
    /// Those of [`build_shard`](Self::build_shard).
    pub fn random_shard(arch: Arch, seed: u64, part: RankShard<'_>, device: &Device) -> crate::Result<Self> {
        let shape = arch.clone();
        Self::build_shard(arch, part, device, |index, spec| {
            Ok::<_, crate::Error>(drawn(&shape, seed, (index, spec), device))
        })
    }
}

/// The numbers of a parameter at the start.
fn drawn(arch: &Arch, seed: u64, (index, spec): (usize, &ParamSpec), device: &Device) -> NewParam {
    let (std, norm) = (arch.initializer_range as f32, 1.0 - arch.norm_offset as f32);
    let values: Vec<f32> = if let Some(values) = delta_net(seed, index, spec) {
        values
    } else if spec.slot.is_norm() {
        vec![norm; spec.numel()]
    } else if spec.slot.is_norm_or_bias() && !matches!(spec.slot, Slot::Sinks | Slot::RouterBias) {
        vec![0.0; spec.numel()]
    } else {
        Stream::new(seed, INIT_STREAM + index as u64).normals(spec.numel(), std)
    };
    match spec.layout(arch) {
        Some(layout) => NewParam::quantized(&values, layout, device),
        None => arch.precision.matrix(values, spec.rows_cols(), device).into(),
    }
}

/// Parameters of gated `DeltaNet` that are neither matrices nor norms with the offset of others: decays are the logs of
/// numbers uniform in (0, 16).
fn delta_net(seed: u64, index: usize, spec: &ParamSpec) -> Option<Vec<f32>> {
    let n = spec.numel();
    let mut stream = Stream::new(seed, INIT_STREAM + index as u64);
    Some(match spec.slot {
        Slot::DecayLog => (0..n).map(|_| (16.0 * stream.uniform()).ln()).collect(),
        Slot::TimeBias | Slot::DeltaNorm => vec![1.0; n],
        Slot::Convolution => {
            let bound = (spec.rows_cols()[1] as f32).sqrt().recip();
            let draw = || (2.0 * stream.uniform() - 1.0) * bound;
            std::iter::repeat_with(draw).take(n).collect()
        }
        _ => return None,
    })
}
