//! The needs of public models under each preset, and each technique by itself.

pub use crate::estimate::public_models::{names, public};

use crate::config::object;
use crate::estimate::phases::estimate_parallel;
use crate::estimate::{Estimate, Parallel, Sizes, Workload};
use crate::{Error, MemoryConfig, Preset, Result, TECHNIQUES};
use firebrick_spec::{DeviceProfile, Precision};
use serde_json::Value;

/// Presets that [`table`] has, the fastest first.
pub const PRESETS: [Preset; 4] = [Preset::Fast, Preset::Balanced, Preset::Constrained, Preset::Huge];

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
    /// Its needs under each of [`PRESETS`].
    pub presets: Vec<PresetNeed>,
}

/// Bytes under a preset.
#[derive(Clone, Debug, PartialEq)]
pub struct PresetNeed {
    /// Device bytes.
    pub device_bytes: u64,
    /// Device bytes over bytes of the weights, in the precision that they are trained in.
    pub multiplier: f64,
    /// Seconds of a step over those of `fast` in the same precision.
    pub relative_time: f64,
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
            let workload = Workload::grpo(public(name)?.in_precision(precision), [512, 512], 4, 8);
            let parameters = Sizes::new(&workload.arch, None).total();
            let under = |preset| predicted(&workload, &MemoryConfig::from(preset), 32, profile, &Parallel::default());
            let estimates = PRESETS.map(under).into_iter().collect::<Result<Vec<Estimate>>>()?;
            let fastest = estimates[0].seconds.total();
            let need = |estimate: &Estimate| PresetNeed {
                device_bytes: estimate.peak_bytes,
                multiplier: estimate.peak_bytes as f64 / (precision.width() * parameters) as f64,
                relative_time: estimate.seconds.total() / fastest,
            };
            Ok(PublicModel { name, parameters, precision, presets: estimates.iter().map(need).collect() })
        })
        .collect()
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
    let examples = TECHNIQUES.iter().flat_map(|technique| technique.about().examples);
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
