//! Rules of thumb of the field, beside what the formulas say for public models.

use super::parallel::Parallel;
use super::phases::{estimate, estimate_parallel};
use super::result::Estimate;
use super::sizes::Sizes;
use super::workload::Workload;
use crate::{Error, Result};
use crate::{MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload, Preset};
use firebrick_spec::Arch;
use firebrick_spec::DeviceProfile;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;

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

/// Multipliers that guides to verl state for bf16 weights and `AdamW`.
pub const MULTIPLIERS: [Multiplier; 4] = [
    Multiplier {
        with: "weights, gradients, AdamW, activations",
        preset: Preset::Fast,
        rule: [4.0, 6.0],
    },
    Multiplier {
        with: "gradient checkpointing",
        preset: Preset::Balanced,
        rule: [2.0, 3.0],
    },
    Multiplier {
        with: "checkpointing, activation and state offload",
        preset: Preset::Constrained,
        rule: [1.2, 1.8],
    },
    Multiplier {
        with: "sharded or streamed weights, checkpointing",
        preset: Preset::Huge,
        rule: [1.5, 2.0],
    },
];

/// Smallest device that the same guides name for a model size, in GiB, optimizations on.
pub const SMALLEST_DEVICE: [(&str, u64); 3] = [("3B", 16), ("8B", 40), ("32B", 160)];

/// Capacities that devices are sold with, in GiB.
const CAPACITIES: [u64; 12] = [4, 6, 8, 12, 16, 24, 32, 48, 80, 141, 192, 288];

/// Hidden size, MLP width, layers, heads, key/value heads, head width, vocabulary, tied, and the family.
type Public = (&'static str, &'static str, [usize; 7], bool);

/// Public models, from their `config.json` (2024 to 2025).
const MODELS: [Public; 14] = [
    (
        "Qwen2.5-0.5B",
        "qwen2",
        [896, 4864, 24, 14, 2, 64, 151_936],
        true,
    ),
    (
        "Qwen2.5-1.5B",
        "qwen2",
        [1536, 8960, 28, 12, 2, 128, 151_936],
        true,
    ),
    (
        "Qwen2.5-3B",
        "qwen2",
        [2048, 11_008, 36, 16, 2, 128, 151_936],
        true,
    ),
    (
        "Qwen2.5-7B",
        "qwen2",
        [3584, 18_944, 28, 28, 4, 128, 152_064],
        false,
    ),
    (
        "Qwen2.5-32B",
        "qwen2",
        [5120, 27_648, 64, 40, 8, 128, 152_064],
        false,
    ),
    (
        "Qwen3-0.6B",
        "qwen3",
        [1024, 3072, 28, 16, 8, 128, 151_936],
        true,
    ),
    (
        "Qwen3-4B",
        "qwen3",
        [2560, 9728, 36, 32, 8, 128, 151_936],
        true,
    ),
    (
        "Qwen3-8B",
        "qwen3",
        [4096, 12_288, 36, 32, 8, 128, 151_936],
        false,
    ),
    (
        "Llama-3.2-1B",
        "llama",
        [2048, 8192, 16, 32, 8, 64, 128_256],
        true,
    ),
    (
        "Llama-3.2-3B",
        "llama",
        [3072, 8192, 28, 24, 8, 128, 128_256],
        true,
    ),
    (
        "Llama-3.1-8B",
        "llama",
        [4096, 14_336, 32, 32, 8, 128, 128_256],
        false,
    ),
    (
        "Llama-3.1-70B",
        "llama",
        [8192, 28_672, 80, 64, 8, 128, 128_256],
        false,
    ),
    (
        "Mistral-7B-v0.3",
        "mistral",
        [4096, 14_336, 32, 32, 8, 128, 32_768],
        false,
    ),
    (
        "Gemma-2-2B",
        "gemma2",
        [2304, 9216, 26, 8, 4, 256, 256_000],
        true,
    ),
];

/// Names of the public models that are known here.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|m| m.0)
}

/// The architecture of a public model by name.
pub fn public(name: &str) -> Result<Arch> {
    let Some((_, family, [d, f, layers, heads, kv, dim, vocab], tied)) =
        MODELS.iter().find(|m| m.0.eq_ignore_ascii_case(name))
    else {
        let known: Vec<&str> = names().collect();
        return Err(Error::Config(format!(
            "no public model {name:?}; known: {}",
            known.join(", ")
        )));
    };
    let config = json!({
        "model_type": family, "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 32_768,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    });
    let Value::Object(config) = config else {
        return Err(Error::Config("a model's config should be an object".into()));
    };
    Ok(Arch::from_config(&config, Path::new(name))?)
}

/// What one public model needs under the presets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublicModel {
    /// Its name.
    pub name: &'static str,
    /// Its parameters.
    pub parameters: u64,
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
    /// Device bytes over bytes of the f32 weights.
    pub multiplier: f64,
    /// The smallest device sold that holds it, in GiB, with a tenth to spare.
    pub smallest_device_gib: Option<u64>,
    /// Seconds of a step over those of `fast`.
    pub relative_time: f64,
}

/// Public models under the presets, in f32: a step of 32 rollouts, groups of 8, 512 + 512 tokens, no reference.
pub fn table(profile: &DeviceProfile) -> Result<Vec<PublicModel>> {
    names().map(|name| row(name, profile)).collect()
}

fn row(name: &'static str, profile: &DeviceProfile) -> Result<PublicModel> {
    let arch = public(name)?;
    let parameters = Sizes::of(&arch, None).total();
    let workload = Workload::grpo(arch, [512, 512], 4, 8);
    let estimates = MULTIPLIERS
        .iter()
        .map(|m| Ok((m.preset, preset(&workload, m.preset, profile)?)))
        .collect::<Result<Vec<_>>>()?;
    let fastest = estimates.first().map_or(1.0, |(_, e)| e.seconds.total());
    let presets = estimates
        .into_iter()
        .map(|(preset, e)| PresetNeed {
            preset,
            device_bytes: e.peak_bytes,
            host_bytes: e.host_peak_bytes,
            multiplier: e.peak_bytes as f64 / (4 * parameters) as f64,
            smallest_device_gib: smallest_device(e.peak_bytes),
            relative_time: e.seconds.total() / fastest,
        })
        .collect();
    Ok(PublicModel {
        name,
        parameters,
        presets,
    })
}

/// The smallest device sold that holds so many bytes with a tenth to spare, in GiB.
#[must_use]
pub fn smallest_device(bytes: u64) -> Option<u64> {
    CAPACITIES
        .into_iter()
        .find(|gib| bytes as f64 * 1.1 <= (gib << 30) as f64)
}

fn preset(workload: &Workload, preset: Preset, profile: &DeviceProfile) -> Result<Estimate> {
    let memory = with_preset(preset)?;
    let plan = memory.plans(
        &workload.arch,
        workload.reference,
        workload.critic_arch(),
        32,
    )?;
    Ok(estimate(workload, &plan, profile))
}

/// The settings of a preset over the defaults.
pub fn with_preset(preset: Preset) -> Result<MemoryConfig> {
    let settings: Map<String, Value> = preset.settings();
    serde_json::from_value(Value::Object(settings))
        .map_err(|e| Error::Config(format!("memory.preset: {e}")))
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
pub fn techniques(
    workload: &Workload,
    base: &MemoryConfig,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Result<Vec<TechniqueCost>> {
    let seqs = workload.group.max(1) as usize;
    let of = |memory: &MemoryConfig| -> Result<Estimate> {
        let plan = memory.plans(
            &workload.arch,
            workload.reference,
            workload.critic_arch(),
            seqs,
        )?;
        Ok(estimate_parallel(workload, &plan, profile, parallel))
    };
    let plain = MemoryConfig {
        train_tokens: base.train_tokens,
        score_tokens: base.score_tokens,
        ..MemoryConfig::default()
    };
    let checkpointed = MemoryConfig {
        gradient_checkpointing: true,
        ..plain.clone()
    };
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
