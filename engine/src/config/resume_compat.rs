//! Settings that may change between the sessions of a run.

use crate::config::{Mode, RunConfig};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;

/// Keys besides `memory` and `device` that change no token and no update.
const FREE: [&str; 13] = [
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
    "/critic/ulysses_sequence_parallel_size",
    "/model/lora/merge",
    "/task/environment/workers",
];

/// Such keys of each reward.
const FREE_OF_REWARDS: [&str; 4] = ["workers", "device", "score_tokens", "param_offload"];

/// Maximum characters of a value in a message.
const MAX_CHARS: usize = 40;

/// Checks that only length, intervals, device and memory of a run change between sessions, besides keys that the mode
/// does not read, and the keys `same`, whose files have been compared.
pub(crate) fn check_resume_compat(
    earlier: &RunConfig,
    now: &RunConfig,
    mode: Mode,
    same: &BTreeSet<String>,
) -> Result<()> {
    let whole = [earlier, now].map(|config| serde_json::to_value(config).unwrap_or(Value::Null));
    let [before, after] = [(earlier, &whole[0]), (now, &whole[1])].map(|(config, value)| compared(config, value, mode));
    let used: &[&str] = match mode {
        Mode::Rl => &["model", "task", "objective", "rollout", "update", "optim", "critic", "warmup"],
        Mode::Sft if now.sft.is_some() => &["model", "task", "sft"],
        Mode::Sft => &["model", "task", "warmup"],
    };
    let trainer: &[&str] = match mode {
        Mode::Rl => &["trainer/seed", "trainer/train_batch_size"],
        Mode::Sft => &["trainer/seed"],
    };
    let mut changed = Vec::new();
    for key in used.iter().chain(&["precision", "allow_tf32", "matmul", "deterministic"]).chain(trainer) {
        let path = format!("/{key}");
        let [before, after] = [&before, &after].map(|config| config.pointer(&path).cloned().unwrap_or_default());
        differences(&path, &before, &after, &mut changed);
    }
    changed.retain(|path| !names_same(path, same));
    if changed.is_empty() {
        return Ok(());
    }
    let changes: Vec<String> = changed.iter().map(|path| describe(path, &whole)).collect();
    let detail = format!(
        "the configuration differs from that of the run in {}; change it back, or start a new run with another \
         `output`",
        changes.join(", ")
    );
    Err(Error::Resume { path: now.output.clone(), detail })
}

/// Returns true if a path is one of these keys, or an element of its list.
fn names_same(path: &str, same: &BTreeSet<String>) -> bool {
    let key = dotted(path);
    let element = key.rsplit_once('.').filter(|(_, at)| at.parse::<usize>().is_ok());
    same.contains(&key) || element.is_some_and(|(list, _)| same.contains(list))
}

/// A JSON pointer as a dotted key.
fn dotted(path: &str) -> String {
    path.trim_start_matches('/').replace('/', ".")
}

/// A configuration without the values that may change.
fn compared(config: &RunConfig, whole: &Value, mode: Mode) -> Value {
    let mut value = whole.clone();
    if mode == Mode::Sft {
        let section = if config.sft.is_some() { "/sft" } else { "/warmup/sft" };
        // the length may change, but not its unit
        for key in ["steps", "epochs"] {
            let length = value.pointer_mut(&format!("{section}/{key}"));
            if let Some(length) = length.filter(|l| l.is_number()) {
                *length = Value::Bool(true);
            }
        }
    }
    for key in FREE {
        value.pointer_mut(key).map(Value::take);
    }
    let rewards = value.pointer_mut("/task/rewards").and_then(Value::as_array_mut);
    for reward in rewards.into_iter().flatten().filter_map(Value::as_object_mut) {
        for key in FREE_OF_REWARDS {
            reward.remove(key);
        }
    }
    value
}

/// Adds the JSON pointers below a path at which two values differ.
fn differences(path: &str, before: &Value, after: &Value, changed: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(one), Value::Object(other)) => {
            let new = other.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(new) {
                let [one, other] = [one, other].map(|map| map.get(key).unwrap_or(&Value::Null));
                differences(&format!("{path}/{key}"), one, other, changed);
            }
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            for (at, (one, other)) in one.iter().zip(other).enumerate() {
                differences(&format!("{path}/{at}"), one, other, changed);
            }
        }
        _ if before != after => changed.push(path.to_owned()),
        _ => {}
    }
}

/// A key with both values, if they are short.
fn describe(path: &str, [before, after]: &[Value; 2]) -> String {
    let key = dotted(path);
    let [before, after] = [before, after].map(|whole| whole.pointer(path).unwrap_or(&Value::Null).to_string());
    if before.len().max(after.len()) > MAX_CHARS {
        return key;
    }
    format!("{key} ({after}, it was {before})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    const CONFIG: &str = "
model: {path: base, lora: {rank: 4}}
task:
  kind: dataset
  train: rows.jsonl
  prompt: '{q}'
  rewards: [{kind: python, file: reward.py, workers: 2}, {kind: model, path: judge}]
output: run
objective: ppo
critic: {ulysses_sequence_parallel_size: 1}
trainer: {steps: 4}
";

    fn resumed(more: &[&str], mode: Mode) -> std::result::Result<(), String> {
        let more: Vec<String> = more.iter().map(|&text| text.to_owned()).collect();
        let [before, now] = [&[][..], &more].map(|overrides| parse(CONFIG, overrides).unwrap());
        check_resume_compat(&before, &now, mode, &BTreeSet::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn settings_that_change_no_result_may_change() {
        for key in [
            "critic.ulysses_sequence_parallel_size=2",
            "memory.ulysses_sequence_parallel_size=2",
            "memory.tensor_model_parallel_size=2",
            "rollout.tensor_model_parallel_size=2",
            "rollout.max_num_seqs=8",
            "model.lora.merge=true",
            "task.rewards.0.workers=4",
            "task.rewards.1.score_tokens=100",
            "memory.budget=1GiB",
            "device=cpu",
            "trainer.steps=9",
            "trainer.test_freq=2",
        ] {
            resumed(&[key], Mode::Rl).expect(key);
        }
    }

    #[test]
    fn what_changes_results_is_refused_by_its_key_with_both_values() {
        for (key, named) in [
            ("optim.lr=0.5", "optim.lr (0.5, it was "),
            ("critic.cliprange_value=0.25", "critic.cliprange_value (0.25, it was 0.5)"),
            ("model.lora.rank=8", "model.lora.rank (8, it was 4)"),
            ("task.rewards.0.file=other.py", "task.rewards.0.file (\"other.py\", it was \"reward.py\")"),
            ("task.train=others.jsonl", "task.train"),
            ("trainer.seed=7", "trainer.seed (7, it was 0)"),
            ("rollout.kv_cache_dtype=int8", "rollout.kv_cache_dtype"),
        ] {
            let message = resumed(&[key], Mode::Rl).expect_err(key);
            assert!(message.contains(named), "{key}: {message}");
        }
    }

    #[test]
    fn a_path_may_change_whose_files_have_been_compared() {
        let same = |keys: &[&str]| keys.iter().map(|&key| key.to_owned()).collect::<BTreeSet<String>>();
        for (before, now, key) in [
            ("task.train=a.jsonl", "task.train=b.jsonl", "task.train"),
            ("task.train=a.jsonl", "task.train=[b.jsonl]", "task.train"),
            ("task.train=[a.jsonl, c.jsonl]", "task.train=[a.jsonl, d.jsonl]", "task.train"),
            ("task.rewards.0.file=a.py", "task.rewards.0.file=b.py", "task.rewards.0.file"),
            ("task.rewards.1.path=a", "task.rewards.1.path=b", "task.rewards.1.path"),
            ("model.path=a", "model.path=b", "model.path"),
        ] {
            let [before, now] = [before, now].map(|text| parse(CONFIG, &[text.to_owned()]).unwrap());
            check_resume_compat(&before, &now, Mode::Rl, &same(&[key])).expect(key);
            let others = same(&["task", "task.rewards", "task.rewards.0", "model", "task.validation"]);
            let message = check_resume_compat(&before, &now, Mode::Rl, &others).expect_err(key).to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn the_length_of_supervised_training_may_change_and_not_its_unit() {
        resumed(&[], Mode::Rl).unwrap();
        let of = |from: &str, to: &str| {
            let config = |sft: &str| {
                parse(&format!("model: {{path: base}}\noutput: run\nsft: {{train: rows.jsonl, {sft}}}\n"), &[]).unwrap()
            };
            check_resume_compat(&config(from), &config(to), Mode::Sft, &BTreeSet::new())
                .map_err(|error| error.to_string())
        };
        of("epochs: 2", "epochs: 4").unwrap();
        of("steps: 2", "steps: 4").unwrap();
        let message = of("epochs: 2", "steps: 4").unwrap_err();
        assert!(
            message.contains("sft.steps (4, it was null)") && message.contains("sft.epochs (null, it was 2)"),
            "{message}"
        );
    }
}
