//! From text to a configuration, and every refusal on the way.

use super::*;
use crate::config::{load, parse};
use crate::objective::policy::PolicyLoss;
use crate::plan::DeviceAbilities;
use firebrick_backends::Precision;
use firebrick_spec::{Backend, DeviceProfile};

const MINIMAL: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: runs/x\n";

fn mapping(text: &str) -> Map<String, Value> {
    serde_saphyr::from_str(text).unwrap()
}

fn error(text: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
    parse(text, &overrides).unwrap_err().to_string()
}

#[test]
fn a_handful_of_keys_is_enough() {
    let config = parse(MINIMAL, &[]).unwrap();
    assert_eq!(config.rollout.n, 8);
    assert_eq!(config.objective, ObjectiveConfig::default());
}

#[test]
fn overrides_set_any_value_and_the_resolved_config_reads_back_the_same() {
    let overrides = ["trainer.steps=7", "objective=grpo", "objective.kl_loss_coef=0.01", "optim.clip_grad=null"];
    let config = parse(MINIMAL, &overrides.map(str::to_owned)).unwrap();
    assert_eq!(config.trainer.steps, 7);
    assert_eq!(config.optim.clip_grad, None);
    assert_eq!(parse(&config.to_yaml().unwrap(), &[]).unwrap(), config);
    assert!(parse(MINIMAL, &["objective.adv_eps=0.1".to_owned()]).is_ok(), "GRPO needs no name");
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
    for algorithm in crate::objective::Algorithm::ALL {
        let name = serde_json::to_value(algorithm).unwrap();
        let settings = objective(name.as_str().unwrap());
        assert_eq!(settings, algorithm.settings(), "{name}");
    }
    let dapo = objective("{name: dapo, clip_ratio_high: 0.3}").policy_loss;
    let PolicyLoss::Clip(clip) = dapo else { panic!("{dapo:?}") };
    assert!((clip.range.clip_ratio_high - 0.3).abs() < 1e-12 && clip.clip_ratio_c.is_none());
    let message = error(MINIMAL, &["objective=gpso"]);
    assert!(message.contains("did you mean `gspo`?"), "{message}");
}

#[test]
fn objective_settings_that_make_no_sense_are_refused_with_the_reason() {
    for (overrides, reason) in [
        (&["objective.tau_pos=2"][..], "policy_loss: sapo"),
        (&["objective=sapo", "objective.clip_ratio_high=0.3"], "policy_loss: clip, cispo, geo_mean or clip_cov"),
        (&["objective.importance_sampling_level=sequence", "objective.policy_loss=vespo"], "clip, cispo or sapo"),
        (&["objective=rloo", "objective.scale_rewards=none"], "grpo, grpo_leave_one_out or pass_at_k"),
        (&["objective.gamma=0.9"], "adv_estimator: reinforce_plus_plus or gae"),
        (
            &["objective=remax", "objective.normalize_advantages=true"],
            "adv_estimator: grpo, grpo_leave_one_out, rloo, rloo_vectorized, opo, pass_at_k or gpg",
        ),
        (&["objective.kl_ctrl.kl_coef=0.1"], "use_kl_in_reward"),
        (&["objective.use_bias_correction_kl=true"], "kl_loss_coef above 0"),
        (&["objective.entropy_target=1"], "use_adaptive_entropy"),
        (&["objective.use_adaptive_entropy=true", "objective.entropy_coeff=2"], "entropy_coef_max"),
        (&["objective.rollout_is_threshold=3"], "objective.rollout_is"),
        (&["objective.rollout_rs=token_k1"], "needs rollout_rs_threshold"),
        (
            &[
                "objective.rollout_rs=token_k2",
                "objective.rollout_rs_threshold=1",
                "objective.rollout_rs_threshold_lower=0.5",
            ],
            "k1 kinds",
        ),
        (&["objective=vespo", "objective.rollout_is=sequence"], "token_truncate"),
        (&["objective=gmpo", "objective.top_entropy_quantile=0.2"], "one term per sequence"),
        (&["objective.top_entropy_quantile=0"], "top_entropy_quantile must be above 0"),
        (&["objective.loss_scale_factor=8"], "seq-mean-token-sum-norm"),
        (&["objective=opo", "objective.multi_objective_aggregation=normalize_then_sum"], "adv_estimator: grpo"),
    ] {
        let message = error(MINIMAL, overrides);
        assert!(message.contains(reason), "{overrides:?}: {message}");
    }
}

#[test]
fn overrides_reach_into_lists() {
    let task = "{kind: jsonl, train: t.jsonl, rewards: [{kind: exact}, {kind: length, max: 3}]}";
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
fn programs_of_rewards_are_paths_beside_the_file_or_names_on_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let rewards = "[{kind: python, file: r.py}, {kind: python, name: own, file: r.py, python: .venv/bin/python},
        {kind: command, command: [judge, ./x]}, {kind: command, name: own2, command: [./judge], folder: there}]";
    let task = format!("{{kind: jsonl, train: t.jsonl, rewards: {rewards}}}");
    let file = folder.path().join("run.yaml");
    let text = format!("model: {{path: m}}\noutput: runs/x\ntask: {task}\n");
    std::fs::write(&file, text).unwrap();
    let config = serde_json::to_value(load(&file, &[]).unwrap()).unwrap();
    let rewards = &config["task"]["rewards"];
    let beside = |name: &str| folder.path().join(name).display().to_string();
    assert_eq!(rewards[0]["file"], beside("r.py"));
    assert_eq!(rewards[0]["python"], "python3");
    assert_eq!(rewards[1]["python"], beside(".venv/bin/python"));
    assert_eq!(rewards[2]["command"], serde_json::json!(["judge", "./x"]));
    assert_eq!(rewards[3]["command"][0], beside("judge"));
    assert_eq!(rewards[3]["folder"], beside("there"));
}

#[test]
fn a_preset_sets_what_is_not_written_beside_it() {
    let with = |memory: &str| {
        let config = parse(&format!("{MINIMAL}memory: {memory}\n"), &[]).unwrap();
        let yaml = config.to_yaml().unwrap();
        assert_eq!(parse(&yaml, &[]).unwrap().to_yaml().unwrap(), yaml);
        config.memory
    };
    for preset in ["constrained", "balanced", "fast", "huge"] {
        with(&format!("{{preset: {preset}}}"));
    }
    let memory = with("{preset: constrained, head_rows: 32, reference: {score_tokens: 64}}");
    assert!(memory.activation_offload && memory.gradient_checkpointing);
    assert_eq!(memory.head_rows, 32);
    assert_eq!(memory.reference.score_tokens, Some(64));
    assert_eq!(memory.reference.param_offload, crate::plan::ParamOffload::Idle);
    let message = error(MINIMAL, &["memory.preset=balance"]);
    assert!(message.contains("did you mean `balanced`?"), "{message}");
}

#[test]
fn a_preset_reaches_precision_and_sampling_and_gives_way_to_what_is_written_and_to_the_device() {
    let with = |overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
        parse(&format!("{MINIMAL}memory: {{preset: huge}}\n"), &overrides).unwrap()
    };
    let settled = |mut config: RunConfig, backend| {
        let mut profile = DeviceProfile::assumed(backend);
        profile.capacity_bytes = Some(24 << 30);
        config.restrict_to(&DeviceAbilities::new(&profile, None));
        config
    };
    let share = |config: &RunConfig| config.rollout.gpu_memory_utilization;

    let on_gpu = settled(with(&[]), Backend::Cuda);
    assert_eq!(on_gpu.precision, Precision::Bf16);
    assert_eq!((share(&on_gpu), on_gpu.rollout.max_num_seqs), (Some(0.85), 64));
    assert!(on_gpu.applied_preset.left_out.is_empty());
    assert!(!on_gpu.scales_loss(), "bf16 has the range of f32");

    let on_cpu = settled(with(&[]), Backend::Cpu);
    assert_eq!(on_cpu.precision, Precision::F32);
    assert_eq!((share(&on_cpu), on_cpu.rollout.max_num_seqs), (None, 64));
    assert_eq!(on_cpu.applied_preset.left_out.len(), 2);
    // the resolved configuration says what is run, and a device does not change it again
    let yaml = on_cpu.to_yaml().unwrap();
    let again = settled(parse(&yaml, &[]).unwrap(), Backend::Cuda);
    assert_eq!(again.to_yaml().unwrap(), yaml);

    let written = ["precision=f16", "rollout.gpu_memory_utilization=0.3"];
    let on_cpu = settled(with(&written), Backend::Cpu);
    assert_eq!(on_cpu.precision, Precision::F16);
    assert_eq!(share(&on_cpu), Some(0.3));
    assert!(on_cpu.scales_loss(), "f16 brings a loss scale");
    let planned = settled(with(&["memory.budget=8GiB"]), Backend::Cuda);
    assert_eq!((planned.precision, share(&planned)), (Precision::Bf16, None));
    let unlimited = with(&["rollout.gpu_memory_utilization=null"]);
    assert_eq!(share(&unlimited), None);
    let limited = with(&["rollout.kv_cache_memory_bytes=1GiB"]);
    assert_eq!(share(&limited), None, "one limit is enough");
    assert_eq!(with(&["rollout.precision=f32"]).precision, Precision::F32);
}

#[test]
fn memory_settings_that_make_no_sense_together_are_refused_with_the_reason() {
    for (overrides, reason) in [
        (&["memory.activation_offload=true"][..], "turn on memory.gradient_checkpointing"),
        (&["memory.param_offload=streamed"], "a kept graph would hold on to them"),
        (&["memory.order=segment_major"], "requires memory.param_offload: streamed"),
        (&["memory.offload_fraction=0.5"], "requires memory.optimizer_offload: cpu"),
        (&["memory.offload_fraction=1.5"], "offload_fraction must be at most 1, found 1.5"),
        (&["memory.activation_offload_group=2"], "requires memory.activation_offload"),
        (&["memory.checkpoint_every=2"], "turn on memory.gradient_checkpointing"),
        (&["memory.checkpoint_layers=[0]"], "turn on memory.gradient_checkpointing"),
        (&["memory.recompute_granularity=half"], "requires memory.gradient_checkpointing"),
        (&["memory.step_in_backward=true", "memory.optimizer_offload=idle"], "optimizer_offload: cpu"),
        (&["memory.head_rows=0"], "memory.head_rows must be at least 1"),
        (&["memory.margin=1"], "margin must be below 0.9, found 1"),
        (&["memory.budget=much"], "8GiB"),
    ] {
        let message = error(MINIMAL, overrides);
        assert!(message.contains(reason), "{overrides:?}: {message}");
    }
}

#[test]
fn an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one() {
    let message = error(&format!("{MINIMAL}trainer: {{stepz: 3}}\n"), &[]);
    assert!(message.contains("trainer") && message.contains("`stepz`; did you mean `steps`?"), "{message}");
    let message = error(MINIMAL, &["rolout.n=4"]);
    assert!(message.contains("did you mean `rollout`?"), "{message}");
}

#[test]
fn a_wrong_type_names_the_key() {
    let message = error(&format!("{MINIMAL}trainer: {{steps: many}}\n"), &[]);
    assert!(message.contains("trainer.steps") && message.contains("many"), "{message}");
}

#[test]
fn settings_that_cannot_work_are_refused_by_key() {
    for (overrides, key) in [
        (&["rollout.n=0"][..], "rollout.n"),
        (&["rollout.temperature=0"], "rollout.temperature"),
        (&["rollout.top_p=0"], "top_p"),
        (&["optim.betas=[1.0, 0.9]"], "optim.betas"),
        (&["update.ppo_mini_batch_size=5"], "update.ppo_mini_batch_size"),
        (&["objective.clip_ratio_c=0.5"], "clip_ratio_c"),
        (&["trainer.steps"], "key.path=value"),
    ] {
        let message = error(MINIMAL, overrides);
        assert!(message.contains(key), "{message}");
    }
}

#[test]
fn a_chat_template_in_the_configuration_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let task = "{kind: dataset, train: a.jsonl, rewards: [{kind: length, max: 3}]}";
    let text = format!("model: {{path: m, chat_template: \"{template}\"}}\noutput: o\ntask: {task}\n");
    std::fs::write(&file, text).unwrap();
    assert_eq!(load(&file, &[]).unwrap().model.template().unwrap().as_deref(), Some(template));
}

#[test]
fn names_of_the_hub_stay_and_paths_become_absolute() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("models/local")).unwrap();
    let file = folder.path().join("run.yaml");
    let load_with = |model: &str, train: &str| {
        let task = format!("{{kind: dataset, train: {train}, rewards: [{{kind: length, max: 3}}]}}");
        let text = format!("model: {{path: {model}, chat_template: a/chat}}\noutput: o\ntask: {task}\n");
        std::fs::write(&file, text).unwrap();
        load(&file, &[]).unwrap()
    };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let config = load_with(
        "owner/tiny@main",
        "[{path: rows/a.jsonl, weight: 1}, {path: \"hf://datasets/owner/rows/*.parquet\", weight: 2}]",
    );
    assert_eq!(config.model.path.unwrap().to_str(), Some("owner/tiny@main"));
    assert_eq!(config.model.chat_template.unwrap().display().to_string(), at("a/chat"));
    let task = serde_json::to_value(&config.task).unwrap();
    assert_eq!(
        task["train"],
        serde_json::json!([
            {"path": at("rows/a.jsonl"), "weight": 1.0},
            {"path": "hf://datasets/owner/rows/*.parquet", "weight": 2.0},
        ])
    );
    let config = load_with("models/local", "[rows/a.jsonl, \"data/*.parquet\"]");
    assert_eq!(config.model.path.unwrap().display().to_string(), at("models/local"));
    let task = serde_json::to_value(&config.task).unwrap();
    let paths = [at("rows/a.jsonl"), at("data/*.parquet")];
    assert_eq!(task["train"], serde_json::json!(paths));
}

#[test]
fn a_section_with_one_key_set_keeps_the_defaults_of_its_place() {
    let with = |overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
        parse(MINIMAL, &overrides).unwrap_or_else(|e| panic!("{overrides:?}: {e}"))
    };
    let critic = with(&["objective=ppo", "critic.optim.weight_decay=0"]).critic.unwrap();
    let expected = crate::optim::OptimConfig { lr: 1e-5, weight_decay: 0.0, ..Default::default() };
    assert_eq!(critic.optim, expected);
    assert_eq!(with(&["warmup.sft.optim.weight_decay=0"]).warmup.sft.unwrap().optim, expected);
    let policy = crate::optim::OptimConfig { weight_decay: 0.0, ..Default::default() };
    assert_eq!(with(&["optim.weight_decay=0"]).optim, policy);
    let given = with(&["objective=ppo", "critic.optim={lr: 3e-6}"]);
    let critic = crate::optim::OptimConfig { lr: 3e-6, ..Default::default() };
    assert_eq!(given.critic.unwrap().optim, critic);
}

#[test]
fn an_empty_section_is_the_same_as_none() {
    let mut checked = 0;
    for key in crate::config::keys() {
        let optional = ["null", "list"].iter().any(|word| key.takes.contains(word));
        let (parent, _) = key.path.rsplit_once('.').unwrap_or_default();
        if !key.is_section || optional || !key.kinds.is_empty() || ["model", "task"].contains(&&*key.path) {
            continue;
        }
        let with = |section: &str| {
            let overrides = [format!("{section}={{}}")];
            let mut root = mapping(MINIMAL);
            apply_overrides(&mut root, &overrides)
                .and_then(|()| read(root))
                .unwrap_or_else(|e| panic!("{section}: {e}"))
        };
        let expected = if parent.is_empty() { read(mapping(MINIMAL)).unwrap() } else { with(parent) };
        let config = with(&key.path);
        let optional_parent = parent == "model" || parent.starts_with("task");
        if !optional_parent {
            assert_eq!(config, expected, "{}", key.path);
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked}");
}

/// Keys that take text which is no path. A new key of text is put here, or into `PATHS`.
const NO_PATHS: &[&str] = &[
    "device",
    "model.lora.target_modules",
    "model.lora.target_parameters",
    "task.operations",
    "task.name",
    "task.prompt",
    "task.messages.role",
    "task.messages.content",
    "task.prompt_field",
    "task.system_prompt",
    "task.answer",
    "task.answer_field",
    "task.answer_extract.regex",
    "task.solution",
    "task.solution_field",
    "task.environment.class",
    "task.rewards.name",
    "task.rewards.pattern",
    "task.rewards.letters",
    "task.rewards.device",
    "task.rewards.function",
    "task.rewards.clip",
    "task.rewards.tags",
    "objective.rollout_rs",
    "objective.rollout_rs_threshold",
    "rollout.stop",
    "rollout.cudagraph_capture_sizes",
    "optim.betas",
    "critic.optim.betas",
    "sft.optim.betas",
    "warmup.sft.optim.betas",
    "rollout.kv_cache_memory_bytes",
    "rollout.dynamic_sampling.metric",
    "trainer.keep_best",
    "trainer.project_name",
    "trainer.experiment_name",
    "memory.checkpoint_layers",
    "memory.critic.checkpoint_layers",
    "memory.budget",
    "memory.host_budget",
    "memory.limit",
];

#[test]
fn a_leading_tilde_is_the_home_folder_in_every_path_of_a_configuration() {
    let dotted =
        |pointer: &str| pointer.split('/').filter(|key| !key.is_empty() && *key != "*").collect::<Vec<_>>().join(".");
    let paths: Vec<String> = PATHS.iter().map(|(pointer, _)| dotted(pointer)).collect();
    let is_path = |key: &str| {
        let is_listed =
            paths.iter().any(|path| key == path || key.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')));
        is_listed || key == "task.rewards.command"
    };
    let keys = crate::config::keys();
    let text = |key: &&crate::config::Key| {
        !key.is_section && key.values.is_empty() && (key.takes.contains("text") || key.takes.contains("list"))
    };
    let unknown: Vec<&str> = keys
        .iter()
        .filter(text)
        .map(|key| key.path.as_str())
        .filter(|key| !is_path(key) && !NO_PATHS.contains(key))
        .collect();
    assert!(unknown.is_empty(), "neither in PATHS nor in NO_PATHS: {unknown:?}");
    for path in &paths {
        assert!(keys.iter().any(|key| key.path == *path || key.path.starts_with(&format!("{path}."))), "no key {path}");
    }
}

#[test]
fn paths_are_resolved_against_the_home_folder_in_whatever_form_they_have() {
    let home = expand_home(Path::new("~")).to_string_lossy().into_owned();
    let text = "output: ~/runs/x\nmodel: {path: ~/m, tokenizer: owner/name, lora: {path: ~/a}}\ntask:\n  kind: dataset\n  \
                train: [~/a.jsonl, {path: ~/b.csv, weight: 2}]\n  validation: {one: ~/c.jsonl, two: [~/d, e/f.json]}\n  \
                rewards:\n  - {kind: command, command: [python3, ~/r.py, --x=~/y], folder: ~/w}\n  \
                - {kind: python, file: ~/r.py, python: ~/venv/bin/python}\n";
    let mut root = mapping(text);
    resolve_files(&mut root, Path::new("/base")).unwrap();
    let resolved = Value::Object(root);
    let expected = serde_json::json!({
        "output": format!("{home}/runs/x"),
        "model": {"path": format!("{home}/m"), "tokenizer": "owner/name", "lora": {"path": format!("{home}/a")}},
        "task": {
            "kind": "dataset",
            "train": [format!("{home}/a.jsonl"), {"path": format!("{home}/b.csv"), "weight": 2}],
            "validation": {"one": format!("{home}/c.jsonl"), "two": [format!("{home}/d"), "/base/e/f.json"]},
            "rewards": [
                {"kind": "command", "command": ["python3", format!("{home}/r.py"), "--x=~/y"], "folder": format!("{home}/w")},
                {"kind": "python", "file": format!("{home}/r.py"), "python": format!("{home}/venv/bin/python")},
            ],
        },
    });
    assert_eq!(resolved, expected);
}
