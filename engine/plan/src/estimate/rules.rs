//! Rules of thumb of the field, beside what the formulas say for public models.

use super::parallel::Parallel;
use super::phases::estimate_parallel;
pub use super::public_models::{names, public};
use super::result::Estimate;
use super::sizes::Sizes;
use super::workload::Workload;
use crate::size::Bytes;
use crate::{Error, Result};
use crate::{MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload, Preset};
use firebrick_spec::{DeviceProfile, Precision};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt;

/// A rule of thumb as the field states it: device bytes over bytes of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Multiplier {
    /// What is on.
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

/// What one public model needs under the presets, in one precision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublicModel {
    /// Its name.
    pub name: &'static str,
    /// Its parameters.
    pub parameters: u64,
    /// The float type that it is trained in, whatever the presets set.
    pub precision: Precision,
    /// One entry a preset, in the order of [`MULTIPLIERS`].
    pub presets: Vec<PresetNeed>,
}

/// Bytes under a preset.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PresetNeed {
    /// The preset.
    pub preset: Preset,
    /// Device bytes.
    pub device_bytes: u64,
    /// Host bytes.
    pub host_bytes: u64,
    /// Device bytes over bytes of the weights, in the precision that they are trained in.
    pub multiplier: f64,
    /// The smallest device sold that holds it, in GiB, with a tenth to spare.
    pub smallest_device_gib: Option<u64>,
    /// Seconds of a step over those of `fast` in the same precision.
    pub relative_time: f64,
}

impl PublicModel {
    /// Name, parameters, precision and what it needs under each preset, in words.
    #[must_use]
    pub fn cells(&self) -> Vec<String> {
        let own =
            [self.name.to_owned(), format!("{:.2} billion", self.parameters as f64 / 1e9), self.precision.to_string()];
        let needs = self.presets.iter().map(PresetNeed::to_string);
        own.into_iter().chain(needs).collect()
    }
}

impl fmt::Display for PresetNeed {
    /// Device bytes, over the weights' bytes, the smallest device sold, time over that of `fast`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, multiple) = (Bytes(self.device_bytes), self.multiplier);
        write!(f, "{bytes} x{multiple:.1} (")?;
        match self.smallest_device_gib {
            Some(gib) => write!(f, "{gib} GiB")?,
            None => f.write_str("none")?,
        }
        write!(f, ") t{:.1}", self.relative_time)
    }
}

/// Precisions that [`table`] has.
pub const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// Public models under the presets, each in every one of [`PRECISIONS`]: a step of 32 rollouts, groups of 8, 512 + 512
/// tokens, no reference.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a preset gives no plan for a model.
pub fn table(profile: &DeviceProfile) -> Result<Vec<PublicModel>> {
    let both = |name| PRECISIONS.map(|precision| (name, precision));
    names().flat_map(both).map(|(name, precision)| row(name, precision, profile)).collect()
}

fn row(name: &'static str, precision: Precision, profile: &DeviceProfile) -> Result<PublicModel> {
    let arch = public(name)?.in_precision(precision);
    let parameters = Sizes::of(&arch, None).total();
    let workload = Workload::grpo(arch, [512, 512], 4, 8);
    let presets = under_presets(&workload, 32, profile, &Parallel::default())?;
    Ok(PublicModel { name, parameters, precision, presets })
}

/// A rule of thumb for one run, beside what the formulas say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuleOfRun {
    /// The rule.
    pub rule: Multiplier,
    /// Least and most bytes by the rule: of the weights in the run's precision.
    pub bytes: [u64; 2],
    /// The run under the rule's preset, in its own precision and with its own lengths.
    pub need: PresetNeed,
}

/// Bytes of a run's weights in its precision.
#[must_use]
pub fn weight_bytes(workload: &Workload) -> u64 {
    let arch = &workload.arch;
    arch.precision.width() * Sizes::of(arch, None).total()
}

/// The rules of thumb for a run: their multiples of its weights in its precision, and what the formulas say of it under
/// the presets.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a preset gives no plan for the workload.
pub fn of_run(
    workload: &Workload,
    max_num_seqs: usize,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<RuleOfRun>> {
    let weights = weight_bytes(workload) as f64;
    let needs = under_presets(workload, max_num_seqs, profile, parallel)?;
    let rules = MULTIPLIERS.into_iter().zip(needs);
    let beside = |(rule, need): (Multiplier, PresetNeed)| RuleOfRun {
        bytes: rule.rule.map(|multiple| (weights * multiple) as u64),
        rule,
        need,
    };
    Ok(rules.map(beside).collect())
}

/// What a workload needs under each of the presets, in its own precision.
fn under_presets(
    workload: &Workload,
    max_num_seqs: usize,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<PresetNeed>> {
    let estimates = MULTIPLIERS
        .iter()
        .map(|m| {
            let estimate = under_preset(workload, m.preset, max_num_seqs, profile, parallel)?;
            Ok((m.preset, estimate))
        })
        .collect::<Result<Vec<_>>>()?;
    let fastest = estimates.first().map_or(1.0, |(_, e)| e.seconds.total());
    let weights = weight_bytes(workload) as f64;
    let need = |(preset, e): (Preset, Estimate)| PresetNeed {
        preset,
        device_bytes: e.peak_bytes,
        host_bytes: e.host_peak_bytes,
        multiplier: e.peak_bytes as f64 / weights,
        smallest_device_gib: smallest_device(e.peak_bytes),
        relative_time: e.seconds.total() / fastest,
    };
    Ok(estimates.into_iter().map(need).collect())
}

/// The smallest device sold that holds so many bytes with a tenth to spare, in GiB.
#[must_use]
pub fn smallest_device(bytes: u64) -> Option<u64> {
    CAPACITIES.into_iter().find(|gib| bytes as f64 * 1.1 <= (gib << 30) as f64)
}

fn under_preset(
    workload: &Workload,
    preset: Preset,
    max_num_seqs: usize,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Estimate> {
    let mut memory = with_preset(preset)?;
    // the longest sequence has to fit into a micro-batch
    let longest = workload.scored_length() as usize;
    memory.train_tokens = memory.train_tokens.max(longest);
    memory.score_tokens = memory.score_tokens.max(longest);
    let plan = memory.plans(&workload.arch, workload.reference, workload.critic_arch(), max_num_seqs)?;
    Ok(estimate_parallel(workload, &plan, profile, parallel))
}

/// The settings of a preset over the defaults.
///
/// # Errors
/// `Error::Config` where the preset's settings are no settings of memory.
pub fn with_preset(preset: Preset) -> Result<MemoryConfig> {
    let settings: Map<String, Value> = preset.settings();
    serde_json::from_value(Value::Object(settings)).map_err(|e| Error::Config(format!("memory.preset: {e}")))
}

/// A technique by itself, on top of gradient checkpointing where it needs that.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TechniqueCost {
    /// Its settings.
    pub settings: String,
    /// Peak device bytes over those of the plan without it.
    pub bytes: f64,
    /// Seconds of a step over those of the plan without it.
    pub time: f64,
}

/// What each technique does to one workload, by itself.
///
/// # Errors
/// `Error::Config` or `Error::Plan` where a technique gives no plan for the workload.
pub fn techniques(
    workload: &Workload,
    base: &MemoryConfig,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<TechniqueCost>> {
    let seqs = workload.group.max(1) as usize;
    let of = |memory: &MemoryConfig| -> Result<Estimate> {
        let plan = memory.plans(&workload.arch, workload.reference, workload.critic_arch(), seqs)?;
        Ok(estimate_parallel(workload, &plan, profile, parallel))
    };
    let plain =
        MemoryConfig { train_tokens: base.train_tokens, score_tokens: base.score_tokens, ..MemoryConfig::default() };
    let checkpointed = MemoryConfig { gradient_checkpointing: true, ..plain.clone() };
    let mut all = Vec::new();
    let mut add = |settings: &str, from: &MemoryConfig, to: MemoryConfig| -> Result<()> {
        let (from, to) = (of(from)?, of(&to)?);
        all.push(TechniqueCost {
            settings: settings.to_owned(),
            bytes: to.peak_bytes as f64 / from.peak_bytes as f64,
            time: to.seconds.total() / from.seconds.total(),
        });
        Ok(())
    };
    add("gradient_checkpointing: true", &plain, checkpointed.clone())?;
    for (settings, change) in changes() {
        let mut to = checkpointed.clone();
        change(&mut to);
        add(settings, &checkpointed, to)?;
    }
    Ok(all)
}

type Change = (&'static str, fn(&mut MemoryConfig));

fn changes() -> [Change; 8] {
    [
        ("activation_offload: true", |m| m.activation_offload = true),
        ("grad_offload: true", |m| m.grad_offload = true),
        ("optimizer_offload: idle", |m| {
            m.optimizer_offload = OptimizerOffload::Idle;
        }),
        ("optimizer_offload: cpu", |m| {
            m.optimizer_offload = OptimizerOffload::Cpu;
        }),
        ("moments: block8", |m| m.moments = MomentKind::Block8),
        ("param_offload: streamed", |m| {
            m.param_offload = ParamOffload::Streamed;
        }),
        ("param_offload: streamed, order: segment_major", |m| {
            m.param_offload = ParamOffload::Streamed;
            m.order = Order::SegmentMajor;
        }),
        ("head_rows: 128", |m| m.head_rows = 128),
    ]
}

#[cfg(test)]
mod tests;
