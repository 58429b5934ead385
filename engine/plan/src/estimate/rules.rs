//! Rules of thumb of the field, compared with the formulas for public models, and each technique by itself.

pub use crate::estimate::public_models::{names, public};

use crate::config::object;
use crate::estimate::phases::estimate_parallel;
use crate::estimate::{Estimate, Parallel, Sizes, Workload};
use crate::size::Bytes;
use crate::{Error, MemoryConfig, Preset, Result, TECHNIQUES};
use firebrick_spec::{DeviceProfile, Precision};
use serde_json::Value;
use std::fmt;

/// A rule of thumb as the field states it: device bytes over bytes of the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multiplier {
    /// Techniques that are on.
    pub with: &'static str,
    /// The preset that is closest to it here.
    pub preset: Preset,
    /// Least and most of the rule.
    pub rule: [f64; 2],
}

/// Multipliers that guides to verl state for weights in the precision of the run, bf16 as a rule, and `AdamW`.
pub const MULTIPLIERS: [Multiplier; 4] = [
    Multiplier { with: "weights, gradients, AdamW, activations", preset: Preset::Fast, rule: [4.0, 6.0] },
    Multiplier { with: "gradient checkpointing", preset: Preset::Balanced, rule: [2.0, 3.0] },
    Multiplier { with: "checkpointing, activation and state offload", preset: Preset::Constrained, rule: [1.2, 1.8] },
    Multiplier { with: "sharded or streamed weights, checkpointing", preset: Preset::Huge, rule: [1.5, 2.0] },
];

/// Smallest device that the same guides name for a model size, in GiB, optimizations on.
pub const SMALLEST_DEVICE: [(&str, u64); 3] = [("3B", 16), ("8B", 40), ("32B", 160)];

/// Capacities that devices are sold with, in GiB.
const CAPACITIES: [u64; 12] = [4, 6, 8, 12, 16, 24, 32, 48, 80, 141, 192, 288];

/// Precisions that [`table`] has.
pub const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// A public model under the presets, in one precision.
#[derive(Clone, Debug, PartialEq)]
pub struct PublicModel {
    /// Its name.
    pub name: &'static str,
    /// Its parameters.
    pub parameters: u64,
    /// The float type of training, independent of presets.
    pub precision: Precision,
    /// Its needs under the preset of each of [`MULTIPLIERS`].
    pub presets: Vec<PresetNeed>,
}

/// Bytes under a preset.
#[derive(Clone, Debug, PartialEq)]
pub struct PresetNeed {
    /// The preset.
    pub preset: Preset,
    /// Device bytes.
    pub device_bytes: u64,
    /// Device bytes over bytes of the weights, in the precision that they are trained in.
    pub multiplier: f64,
    /// The smallest device sold that holds it, in GiB, with a tenth to spare.
    pub smallest_device_gib: Option<u64>,
    /// Seconds of a step over those of `fast` in the same precision.
    pub relative_time: f64,
}

impl PublicModel {
    /// Name, parameters, precision and needs under each preset, in words.
    pub fn cells(&self) -> Vec<String> {
        let parameters = format!("{:.2} billion", self.parameters as f64 / 1e9);
        let model = [self.name.to_owned(), parameters, self.precision.to_string()];
        model.into_iter().chain(self.presets.iter().map(PresetNeed::to_string)).collect()
    }
}

impl fmt::Display for PresetNeed {
    /// Device bytes, over the weights' bytes, the smallest device sold, time over that of `fast`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.smallest_device_gib.map_or("none".to_owned(), |gib| format!("{gib} GiB"));
        write!(f, "{} x{:.1} ({device}) t{:.1}", Bytes(self.device_bytes), self.multiplier, self.relative_time)
    }
}

/// Public models under the presets, each in every one of [`PRECISIONS`]: a step of 32 rollouts, groups of 8, 512 + 512
/// tokens, no reference.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a preset gives no plan for a model.
pub fn table(profile: &DeviceProfile) -> Result<Vec<PublicModel>> {
    let models = names().flat_map(|name| PRECISIONS.map(|precision| (name, precision)));
    models
        .map(|(name, precision)| {
            let arch = public(name)?.in_precision(precision);
            let parameters = Sizes::new(&arch, None).total();
            let workload = Workload::grpo(arch, [512, 512], 4, 8);
            let presets = under_presets(&workload, 32, profile, &Parallel::default())?;
            Ok(PublicModel { name, parameters, precision, presets })
        })
        .collect()
}

/// Bytes of a run's weights in its precision.
pub fn weight_bytes(workload: &Workload) -> u64 {
    let arch = &workload.arch;
    arch.precision.width() * Sizes::new(arch, None).total()
}

/// Needs of a workload under the preset of each of [`MULTIPLIERS`], in its own precision.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a preset gives no plan for the workload.
pub fn under_presets(
    workload: &Workload,
    max_num_seqs: usize,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<PresetNeed>> {
    let (weights, longest) = (weight_bytes(workload) as f64, workload.scored_length() as usize);
    let mut fastest = None;
    let need = |Multiplier { preset, .. }| -> Result<PresetNeed> {
        let mut memory = MemoryConfig::from(preset);
        // the longest sequence has to fit into a micro-batch
        memory.train_tokens = memory.train_tokens.max(longest);
        memory.score_tokens = memory.score_tokens.max(longest);
        let estimate = predicted(workload, &memory, max_num_seqs, profile, parallel)?;
        let seconds = estimate.seconds.total();
        Ok(PresetNeed {
            preset,
            device_bytes: estimate.peak_bytes,
            multiplier: estimate.peak_bytes as f64 / weights,
            smallest_device_gib: CAPACITIES
                .into_iter()
                .find(|gib| estimate.peak_bytes as f64 * 1.1 <= (gib << 30) as f64),
            relative_time: seconds / *fastest.get_or_insert(seconds),
        })
    };
    MULTIPLIERS.into_iter().map(need).collect()
}

fn predicted(
    workload: &Workload,
    memory: &MemoryConfig,
    max_num_seqs: usize,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Estimate> {
    let plan = memory.plans(&workload.arch, workload.reference, workload.critic_arch(), max_num_seqs)?;
    Ok(estimate_parallel(workload, &plan, profile, parallel))
}

/// A technique by itself, on top of gradient checkpointing where it needs that.
#[derive(Clone, Debug, PartialEq)]
pub struct TechniqueCost {
    /// Its settings.
    pub settings: &'static str,
    /// Peak device bytes over those of the plan without it.
    pub bytes: f64,
    /// Seconds of a step over those of the plan without it.
    pub time: f64,
}

/// Gradient checkpointing over the plain plan, and every other technique over gradient checkpointing.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a technique gives no plan for the workload.
pub fn techniques(
    workload: &Workload,
    base: &MemoryConfig,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<TechniqueCost>> {
    let of = |memory: &MemoryConfig| predicted(workload, memory, workload.group.max(1) as usize, profile, parallel);
    let plain =
        MemoryConfig { train_tokens: base.train_tokens, score_tokens: base.score_tokens, ..MemoryConfig::default() };
    let checkpointed = MemoryConfig { gradient_checkpointing: true, ..plain.clone() };
    let cost = |settings: &'static str, from: &MemoryConfig, to: &MemoryConfig| -> Result<TechniqueCost> {
        let (from, to) = (of(from)?, of(to)?);
        Ok(TechniqueCost {
            settings,
            bytes: to.peak_bytes as f64 / from.peak_bytes as f64,
            time: to.seconds.total() / from.seconds.total(),
        })
    };
    let first = cost("gradient_checkpointing: true", &plain, &checkpointed);
    let examples = TECHNIQUES.iter().flat_map(|technique| technique.examples());
    let others = examples.map(|settings| cost(settings, &checkpointed, &with(&checkpointed, settings)?));
    std::iter::once(first).chain(others).collect()
}

/// `memory` with settings such as `param_offload: streamed, order: segment_major`.
fn with(memory: &MemoryConfig, settings: &str) -> Result<MemoryConfig> {
    let refuse = |e: serde_json::Error| Error::Config(format!("memory.{settings}: {e}"));
    let mut keys = object(memory).map_err(refuse)?;
    for (key, value) in settings.split(", ").filter_map(|setting| setting.split_once(": ")) {
        keys.insert(key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into()));
    }
    serde_json::from_value(Value::Object(keys)).map_err(refuse)
}

#[cfg(test)]
mod tests;
