//! What may change between the sessions of a run.

use crate::config::{Mode, RunConfig};
use crate::{Error, Result};
use serde_json::Value;

/// Keys of `rollout` that are about memory and time alone.
const ENGINE_KEYS: [&str; 10] = [
    "/rollout/tensor_model_parallel_size",
    "/rollout/max_num_seqs",
    "/rollout/max_num_batched_tokens",
    "/rollout/enforce_eager",
    "/rollout/cudagraph_capture_sizes",
    "/rollout/async_scheduling",
    "/rollout/kv_cache_memory_bytes",
    "/rollout/pack_weights",
    "/rollout/gpu_memory_utilization",
    "/rollout/free_cache",
];

/// Only the run's length, rhythm, device and memory may change between sessions; what the mode does not read may too.
pub(crate) fn check_resume_compat(earlier: &RunConfig, now: &RunConfig, mode: Mode) -> Result<()> {
    let value = |config: &RunConfig| {
        let mut value = serde_json::to_value(config).unwrap_or(Value::Null);
        if mode == Mode::Sft {
            let section = if config.sft.is_some() { "/sft" } else { "/warmup/sft" };
            // how long, but not by what it is counted
            for key in ["steps", "epochs"] {
                let length = value.pointer_mut(&format!("{section}/{key}"));
                if let Some(length) = length.filter(|l| l.is_number()) {
                    *length = Value::Bool(true);
                }
            }
        }
        // how many are sampled at a time, and where, changes no token
        for key in ENGINE_KEYS {
            value.pointer_mut(key).map(Value::take);
        }
        value
    };
    let (before, after) = (value(earlier), value(now));
    let used: &[&str] = match mode {
        Mode::Rl => &["model", "task", "objective", "rollout", "update", "optim", "critic", "warmup"],
        Mode::Sft if now.sft.is_some() => &["model", "task", "sft"],
        Mode::Sft => &["model", "task", "warmup"],
    };
    let mut changed: Vec<String> = used
        .iter()
        .chain(&["precision", "allow_tf32", "deterministic"])
        .filter(|k| before[**k] != after[**k])
        .map(|k| (*k).to_owned())
        .collect();
    let trainer: &[&str] = match mode {
        Mode::Rl => &["seed", "train_batch_size"],
        Mode::Sft => &["seed"],
    };
    for key in trainer {
        if before["trainer"][*key] != after["trainer"][*key] {
            changed.push(format!("trainer.{key}"));
        }
    }
    if changed.is_empty() {
        return Ok(());
    }
    let detail = format!(
        "the configuration differs from that of the run in {}; change it back, or start a new run with another \
         `output`",
        changed.join(", ")
    );
    Err(Error::Resume { path: now.output.clone(), detail })
}
