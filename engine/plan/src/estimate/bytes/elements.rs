//! Numbers a token, and those that adapters keep.

use crate::estimate::{ExpertWidths, Parallel, SUBLAYERS};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::parameters::TargetModule;

/// Numbers a token, by which kind of parallelism divides them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// As wide as the residual stream.
    pub between: u64,
    /// As wide as something inside a sublayer.
    pub inside: u64,
}

impl Elements {
    /// Bytes of one device for so many tokens, of `width` each.
    pub(crate) fn bytes(self, width: u64, tokens: u64, parallel: &Parallel) -> u64 {
        parallel.between(width * tokens * self.between) + parallel.inside(width * tokens * self.inside)
    }
}

/// Kept by adapters of each kind of sublayer, in elements per token: inputs as wide as the residual stream, and as
/// something inside a sublayer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bypass(pub [Elements; SUBLAYERS]);

impl Bypass {
    /// Of a layer of these widths. Where no norm comes before a sublayer, the input that its bypasses share is the
    /// sublayer's own.
    pub fn new(lora: &LoraConfig, [d, q, f, v]: [u64; 4], experts: ExpertWidths, pre_norms: bool) -> Self {
        let has = |target| lora.target_modules.contains(&target);
        let count = |targets: &[TargetModule]| targets.iter().filter(|t| has(**t)).count() as u64;
        let rank = lora.rank as u64;
        // an input of its own and a quarter of it for the mask's bytes, or one input for all that share it
        let inputs = |width: u64, sharing: u64| {
            if lora.dropout > 0.0 { sharing * (width + width.div_ceil(4)) } else { sharing.min(1) * width }
        };
        let normed = pre_norms || lora.dropout > 0.0;
        let sublayer = |wide: &[TargetModule], narrow: TargetModule, inner: u64| {
            let (sharing, own) = (count(wide), count(&[narrow]));
            Elements {
                between: if normed { inputs(d, sharing) } else { 0 },
                inside: inputs(inner, own) + rank * (sharing + own),
            }
        };
        // those of experts read rows of tokens, and rows of choices; those of the shared one are as a dense MLP's
        let routed = {
            let first = [TargetModule::ExpertGate, TargetModule::ExpertUp, TargetModule::ExpertGateUp];
            let (first, last) = (count(&first), count(&[TargetModule::ExpertDown]));
            let shared = u64::from(experts.shared > 0);
            let [wide, narrow] =
                [shared * count(&[TargetModule::Gate, TargetModule::Up]), shared * count(&[TargetModule::Down])];
            let (k, each) = (experts.per_token, experts.per_token * experts.f);
            Elements {
                between: if normed { inputs(d, first + wide) } else { 0 },
                inside: inputs(each, last)
                    + inputs(experts.shared, narrow)
                    + rank * (k * (first + last) + wide + narrow),
            }
        };
        let linear = [TargetModule::DeltaQkv, TargetModule::DeltaZ, TargetModule::DeltaA, TargetModule::DeltaB];
        Self([
            sublayer(&[TargetModule::Q, TargetModule::K, TargetModule::V], TargetModule::O, q),
            sublayer(&linear, TargetModule::DeltaOut, v),
            sublayer(&[TargetModule::Gate, TargetModule::Up], TargetModule::Down, f),
            routed,
        ])
    }
}
