//! YAML plus `key.path=value` overrides into a [`RunConfig`], with unknown keys refused and the nearest one named.

use super::RunConfig;
use crate::objective::Algorithm;
use crate::plan::Preset;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Sections that `null` turns off.
const SECTIONS: [&str; 9] = [
    "task",
    "objective",
    "rollout",
    "update",
    "optim",
    "critic",
    "warmup",
    "sft",
    "memory",
];

/// Keys that name files.
const FILES: [&str; 10] = [
    "/memory/plan",
    "/model/path",
    "/critic/model/path",
    "/model/lora/path",
    "/model/tokenizer",
    "/sft/train",
    "/sft/validation",
    "/task/train",
    "/task/validation",
    "/warmup/sft/train",
];

/// Reads a configuration file and applies overrides. Paths in the file are relative to its folder, those in overrides to
/// where the program runs, and so is `output`.
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let in_file = |e| match e {
        Error::Config(detail) => Error::Config(format!("{}: {detail}", path.display())),
        other => other,
    };
    let mut root = mapping(&text).map_err(in_file)?;
    resolve_files(&mut root, path.parent().unwrap_or(Path::new(".")))?;
    override_all(&mut root, overrides).map_err(in_file)?;
    // absolute, so that the config.yaml written into the run folder reproduces the run from anywhere
    resolve_files(&mut root, Path::new("."))?;
    typed(root).map_err(in_file)
}

/// Reads a configuration from text and applies overrides; paths are left as they are.
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    let mut root = mapping(text)?;
    override_all(&mut root, overrides)?;
    typed(root)
}

fn mapping(text: &str) -> Result<Map<String, Value>> {
    match serde_saphyr::from_str(text) {
        Ok(Value::Object(root)) => Ok(root),
        Ok(_) => Err(Error::Config(
            "should be a mapping of sections (model, task, output, …)".into(),
        )),
        Err(e) => Err(Error::Config(format!("is not YAML: {e}"))),
    }
}

fn resolve_files(root: &mut Map<String, Value>, base: &Path) -> Result<()> {
    let mut whole = Value::Object(std::mem::take(root));
    let rewards = whole.pointer("/task/rewards").and_then(Value::as_array);
    let models = (0..rewards.map_or(0, Vec::len)).map(|i| format!("/task/rewards/{i}/path"));
    let files: Vec<String> = FILES.map(str::to_owned).into_iter().chain(models).collect();
    for pointer in files {
        if let Some(Value::String(file)) = whole.pointer_mut(&pointer) {
            let path = base.join(&*file);
            let path = std::path::absolute(&path).map_err(Error::io("resolve", path))?;
            *file = path.to_string_lossy().into_owned();
        }
    }
    if let Value::Object(map) = whole {
        *root = map;
    }
    Ok(())
}

fn override_all(root: &mut Map<String, Value>, overrides: &[String]) -> Result<()> {
    for text in overrides {
        // before each, so that `objective.x=…` finds a section where the file has a name alone
        name_objective(root);
        apply(root, text)?;
    }
    name_objective(root);
    root.retain(|key, section| !(section.is_null() && SECTIONS.contains(&key.as_str())));
    Ok(())
}

/// Puts a preset's settings under those that stand beside it.
fn expand_preset(root: &mut Map<String, Value>) {
    let Some(Value::Object(memory)) = root.get_mut("memory") else {
        return;
    };
    let named = memory.get("preset").cloned().map(serde_json::from_value);
    // a name that is no preset is reported with its place when the section is read
    if let Some(Ok(preset)) = named {
        let preset: Preset = preset;
        let mut settings = preset.settings();
        lay_over(&mut settings, std::mem::take(memory));
        *memory = settings;
    }
}

fn lay_over(under: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => lay_over(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

/// Puts an algorithm's settings under those that stand beside its name.
fn expand_objective(root: &mut Map<String, Value>) {
    let Some(Value::Object(section)) = root.get_mut("objective") else {
        return;
    };
    let named = section.get("name").cloned().map(serde_json::from_value);
    // a name that is no algorithm is reported with its place when the section is read
    if let Some(Ok(algorithm)) = named {
        let algorithm: Algorithm = algorithm;
        if let Ok(Value::Object(mut settings)) = serde_json::to_value(algorithm.settings()) {
            lay_over(&mut settings, std::mem::take(section));
            *section = settings;
        }
    }
}

fn typed(mut root: Map<String, Value>) -> Result<RunConfig> {
    expand_preset(&mut root);
    expand_objective(&mut root);
    let mut config: RunConfig =
        serde_path_to_error::deserialize(Value::Object(root)).map_err(|e| {
            let path = e.path().to_string();
            Error::Config(describe(&path, &e.into_inner().to_string()))
        })?;
    if config.objective.needed().values {
        config.critic.get_or_insert_default();
    }
    config.check()?;
    if let Some(lora) = &mut config.model.lora {
        lora.spell_out();
    }
    Ok(config)
}

/// `objective: grpo` is short for `objective: {name: grpo}`, and a section without a name is GRPO's.
fn name_objective(root: &mut Map<String, Value>) {
    match root.get_mut("objective") {
        Some(section @ Value::String(_)) => *section = serde_json::json!({"name": section.take()}),
        Some(Value::Object(section)) => {
            section.entry("name").or_insert_with(|| "grpo".into());
        }
        _ => {}
    }
}

/// Sets one value: `a.b.c=1`; entries of lists go by their number, from 0. The value is read as YAML, so that numbers, lists
/// and `null` work.
fn apply(root: &mut Map<String, Value>, text: &str) -> Result<()> {
    let Some((path, value)) = text.split_once('=') else {
        return Err(Error::Config(format!(
            "override {text:?} should be key.path=value"
        )));
    };
    let value: Value = serde_saphyr::from_str(value)
        .map_err(|e| Error::Config(format!("override {text:?}: the value is not YAML: {e}")))?;
    let keys: Vec<&str> = path.split('.').collect();
    let mut whole = Value::Object(std::mem::take(root));
    let done = set(&mut whole, "", &keys, value);
    if let Value::Object(map) = whole {
        *root = map;
    }
    done.map_err(|what| Error::Config(format!("override {text:?}: {what}")))
}

/// Sets the value at a path below `at`, which is called `name`; sections that are missing are made.
fn set(at: &mut Value, name: &str, keys: &[&str], value: Value) -> Result<(), String> {
    let Some((key, rest)) = keys.split_first() else {
        *at = value;
        return Ok(());
    };
    if at.is_null() {
        *at = Value::Object(Map::new());
    }
    let next = match at {
        Value::Object(map) => map.entry(*key).or_insert(Value::Null),
        Value::Array(list) => {
            let len = list.len();
            let entry = key.parse().ok().and_then(|at: usize| list.get_mut(at));
            entry.ok_or_else(|| {
                format!(
                    "`{name}` is a list of {len} entries, counted from 0; `{key}` is none of them"
                )
            })?
        }
        _ => return Err(format!("`{name}` is a value, not a section")),
    };
    set(next, key, rest, value)
}

/// Adds the place and, for an unknown key, the nearest known one to serde's message.
fn describe(path: &str, message: &str) -> String {
    let place = if path == "." {
        String::new()
    } else {
        format!("{path}: ")
    };
    let unknown = ["unknown field `", "unknown variant `"];
    let Some(rest) = unknown
        .iter()
        .find_map(|prefix| message.strip_prefix(prefix))
    else {
        return format!("{place}{message}");
    };
    let mut names = rest.split('`').step_by(2).map(str::to_owned);
    let found = names.next().unwrap_or_default();
    let known: Vec<String> = rest
        .split('`')
        .skip(2)
        .step_by(2)
        .map(str::to_owned)
        .collect();
    let nearest = known
        .iter()
        .max_by(|a, b| strsim::jaro_winkler(a, &found).total_cmp(&strsim::jaro_winkler(b, &found)));
    let what = if message.starts_with(unknown[0]) {
        "unknown key"
    } else {
        "unknown value"
    };
    match nearest {
        Some(nearest) => format!(
            "{place}{what} `{found}`; did you mean `{nearest}`? Known: {}",
            known.join(", ")
        ),
        None => format!("{place}{what} `{found}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: runs/x\n";

    fn error(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
        parse(text, &overrides).unwrap_err().to_string()
    }

    #[test]
    fn a_handful_of_keys_is_enough() {
        let config = parse(MINIMAL, &[]).unwrap();
        assert_eq!(config.rollout.n, 8);
        assert_eq!(config.objective, crate::config::ObjectiveConfig::default());
    }

    #[test]
    fn overrides_set_any_value_and_the_resolved_config_reads_back_the_same() {
        let overrides = [
            "trainer.steps=7",
            "objective=grpo",
            "objective.kl_loss_coef=0.01",
            "optim.clip_grad=null",
        ];
        let config = parse(MINIMAL, &overrides.map(str::to_owned)).unwrap();
        assert_eq!(config.trainer.steps, 7);
        assert_eq!(config.optim.clip_grad, None);
        assert_eq!(parse(&config.to_yaml().unwrap(), &[]).unwrap(), config);
        assert!(
            parse(MINIMAL, &["objective.adv_eps=0.1".to_owned()]).is_ok(),
            "GRPO needs no name"
        );
        let warmed = format!("{MINIMAL}warmup: {{sft: {{steps: 3}}}}\n");
        let off = parse(&warmed, &["warmup=null".to_owned()]).unwrap();
        assert_eq!(off.warmup.sft, None, "null turns a section off");
        assert!(error(MINIMAL, &["warmpu=null"]).contains("did you mean `warmup`?"));
    }

    #[test]
    fn an_algorithm_sets_what_is_not_written_beside_its_name() {
        let objective = |section: &str| {
            let config = parse(&format!("{MINIMAL}objective: {section}\n"), &[]).unwrap();
            assert_eq!(parse(&config.to_yaml().unwrap(), &[]).unwrap(), config);
            config.objective
        };
        for algorithm in Algorithm::ALL {
            let name = serde_json::to_value(algorithm).unwrap();
            let settings = objective(name.as_str().unwrap());
            assert_eq!(settings, algorithm.settings(), "{name}");
        }
        let dapo = objective("{name: dapo, clip_ratio_high: 0.3}");
        assert!((dapo.clip_ratio_high - 0.3).abs() < 1e-12 && dapo.clip_ratio_c.is_none());
        let message = error(MINIMAL, &["objective=gpso"]);
        assert!(message.contains("did you mean `gspo`?"), "{message}");
    }

    #[test]
    fn objective_settings_that_make_no_sense_are_refused_with_the_reason() {
        for (overrides, reason) in [
            (&["objective.tau_pos=2"][..], "policy_loss: sapo"),
            (
                &["objective=sapo", "objective.clip_ratio_high=0.3"],
                "that clips",
            ),
            (
                &[
                    "objective.importance_sampling_level=sequence",
                    "objective.policy_loss=vespo",
                ],
                "one of their own",
            ),
            (
                &["objective=rloo", "objective.scale_rewards=none"],
                "grpo or pass_at_k",
            ),
            (
                &["objective.gamma=0.9"],
                "adv_estimator: reinforce_plus_plus or gae",
            ),
            (
                &["objective=remax", "objective.normalize_advantages=true"],
                "one advantage a completion",
            ),
            (&["objective.kl_ctrl.kl_coef=0.1"], "use_kl_in_reward"),
            (
                &["objective.use_bias_correction_kl=true"],
                "kl_loss_coef above 0",
            ),
            (&["objective.entropy_target=1"], "use_adaptive_entropy"),
            (
                &[
                    "objective.use_adaptive_entropy=true",
                    "objective.entropy_coeff=2",
                ],
                "entropy_coef_max",
            ),
            (
                &["objective.rollout_is_threshold=3"],
                "objective.rollout_is",
            ),
            (
                &["objective.rollout_rs=token_k1"],
                "needs rollout_rs_threshold",
            ),
            (
                &[
                    "objective.rollout_rs=token_k2",
                    "objective.rollout_rs_threshold=1",
                    "objective.rollout_rs_threshold_lower=0.5",
                ],
                "k1 kinds",
            ),
            (
                &["objective=vespo", "objective.rollout_is=sequence"],
                "token_truncate",
            ),
            (
                &["objective=gmpo", "objective.top_entropy_quantile=0.2"],
                "one term a sequence",
            ),
            (
                &["objective.top_entropy_quantile=0"],
                "above 0 and at most 1",
            ),
            (
                &["objective.loss_scale_factor=8"],
                "seq-mean-token-sum-norm",
            ),
            (
                &[
                    "objective=opo",
                    "objective.multi_objective_aggregation=normalize_then_sum",
                ],
                "adv_estimator: grpo",
            ),
        ] {
            let message = error(MINIMAL, overrides);
            assert!(message.contains(reason), "{overrides:?}: {message}");
        }
    }

    #[test]
    fn overrides_reach_into_lists() {
        let task =
            "{kind: jsonl, train: t.jsonl, rewards: [{kind: exact}, {kind: length, max: 3}]}";
        let text = format!("model: {{path: m}}\noutput: o\ntask: {task}\n");
        let config = parse(&text, &["task.rewards.1.weight=0.5".to_owned()]).unwrap();
        let task = serde_json::to_value(&config.task).unwrap();
        assert_eq!(task["rewards"][1]["weight"], 0.5);
        assert_eq!(task["rewards"][0]["weight"], 1.0);
        let message = error(&text, &["task.rewards.2.weight=1"]);
        assert!(message.contains("a list of 2 entries"), "{message}");
        assert!(error(&text, &["output.x=1"]).contains("`output` is a value"));
    }

    #[test]
    fn a_preset_sets_what_is_not_written_beside_it() {
        let with = |memory: &str| {
            let config = parse(&format!("{MINIMAL}memory: {memory}\n"), &[]).unwrap();
            assert_eq!(parse(&config.to_yaml().unwrap(), &[]).unwrap(), config);
            config.memory
        };
        for preset in ["constrained", "balanced", "fast", "huge"] {
            with(&format!("{{preset: {preset}}}"));
        }
        let memory = with("{preset: constrained, head_rows: 32, reference: {score_tokens: 64}}");
        assert!(memory.activation_offload && memory.gradient_checkpointing);
        assert_eq!(memory.head_rows, 32);
        assert_eq!(memory.reference.score_tokens, Some(64));
        assert_eq!(
            memory.reference.param_offload,
            crate::plan::ParamOffload::Idle
        );
        let message = error(MINIMAL, &["memory.preset=balance"]);
        assert!(message.contains("did you mean `balanced`?"), "{message}");
    }

    #[test]
    fn memory_settings_that_make_no_sense_together_are_refused_with_the_reason() {
        for (overrides, reason) in [
            (
                &["memory.activation_offload=true"][..],
                "turn on memory.gradient_checkpointing",
            ),
            (
                &["memory.param_offload=streamed"],
                "a kept graph would hold on to them",
            ),
            (
                &["memory.order=segment_major"],
                "goes with memory.param_offload: streamed",
            ),
            (
                &["memory.offload_fraction=0.5"],
                "goes with memory.optimizer_offload: cpu",
            ),
            (&["memory.offload_fraction=1.5"], "between 0 and 1"),
            (
                &["memory.activation_offload_group=2"],
                "goes with memory.activation_offload",
            ),
            (
                &["memory.checkpoint_every=2"],
                "turn on memory.gradient_checkpointing",
            ),
            (
                &["memory.checkpoint_layers=[0]"],
                "turn on memory.gradient_checkpointing",
            ),
            (
                &["memory.recompute_granularity=half"],
                "goes with memory.gradient_checkpointing",
            ),
            (
                &[
                    "memory.step_in_backward=true",
                    "memory.optimizer_offload=idle",
                ],
                "optimizer_offload: cpu",
            ),
            (
                &["memory.head_rows=0"],
                "memory.head_rows should be at least 1",
            ),
            (&["memory.margin=1"], "between 0 and 0.9"),
            (&["memory.budget=much"], "8GiB"),
        ] {
            let message = error(MINIMAL, overrides);
            assert!(message.contains(reason), "{overrides:?}: {message}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one() {
        let message = error(&format!("{MINIMAL}trainer: {{stepz: 3}}\n"), &[]);
        assert!(
            message.contains("trainer") && message.contains("`stepz`; did you mean `steps`?"),
            "{message}"
        );
        let message = error(MINIMAL, &["rolout.n=4"]);
        assert!(message.contains("did you mean `rollout`?"), "{message}");
    }

    #[test]
    fn a_wrong_type_names_the_key() {
        let message = error(&format!("{MINIMAL}trainer: {{steps: many}}\n"), &[]);
        assert!(
            message.contains("trainer.steps") && message.contains("many"),
            "{message}"
        );
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_key() {
        for (overrides, key) in [
            (&["rollout.n=0"][..], "rollout.n"),
            (&["rollout.temperature=0"], "rollout.temperature"),
            (&["rollout.top_p=0"], "top_p"),
            (&["optim.betas=[1.0, 0.9]"], "optim.betas"),
            (
                &["update.ppo_mini_batch_size=5"],
                "update.ppo_mini_batch_size",
            ),
            (&["objective.clip_ratio_c=0.5"], "clip_ratio_c"),
            (&["trainer.steps"], "key.path=value"),
        ] {
            let message = error(MINIMAL, overrides);
            assert!(message.contains(key), "{message}");
        }
    }
}
