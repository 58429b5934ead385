//! `NeMo RL`'s GRPO configurations.

use super::turns::at;
use super::{imported, outcome, refusal};
use crate::{Imported, KeyOutcome, Options, SourceFile, import};
use serde_json::{Value, json};

/// A run with these sections more.
fn nemo(more: &str) -> Imported {
    let start = "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 100}\n";
    imported("run.yaml", &format!("{start}{more}"))
}

/// A run whose `policy` has these keys.
fn policy(keys: &str) -> Imported {
    nemo(&format!("policy: {{model_name: q/m, {keys}}}\n"))
}

fn layered(files: &[(&str, &str)]) -> Imported {
    let files: Vec<SourceFile> = files.iter().map(|(name, text)| SourceFile::new(*name, *text)).collect();
    import(&files, &Options::default(), &|_: &str| None).unwrap_or_else(|e| panic!("{e}"))
}

fn gaps(found: &Imported) -> Vec<&str> {
    found.gaps().map(|row| row.key.as_str()).collect()
}

#[test]
fn megatrons_optimizer_counts_where_megatron_trains() {
    let base = "policy:\n  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01}}\n";
    let run = "defaults: base.yaml\ngrpo: {max_num_steps: 100}\npolicy:\n  model_name: q/m\n  optimizer: null\n  max_grad_norm: 1.0\n  \
               megatron_cfg:\n    enabled: true\n    activation_checkpointing: true\n    tensor_model_parallel_size: 2\n    \
               optimizer: {optimizer: adam, lr: 3.0e-7, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.98, adam_eps: 1.0e-8, \
               clip_grad: \"${policy.max_grad_norm}\", optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}\n    \
               scheduler: {lr_decay_style: constant, lr_warmup_iters: 13, lr_warmup_init: 3.0e-8, lr_decay_iters: 1000, \
               start_weight_decay: \"${policy.megatron_cfg.optimizer.weight_decay}\"}\n";
    let found = layered(&[("base.yaml", base), ("run.yaml", run)]);
    let optim = at(&found, "/optim");
    assert_eq!(optim["lr"], 3e-7);
    assert_eq!(optim["weight_decay"], 0.1);
    assert_eq!(optim["betas"], json!([0.9, 0.98]));
    assert_eq!(optim["clip_grad"], 1);
    // Megatron leaves norms and biases out of the decay
    assert_eq!(optim["decay_norms_and_biases"], Value::Null);
    let schedule = json!({"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 0, "warmup_steps": 13});
    for (key, value) in schedule.as_object().expect("a mapping") {
        assert_eq!(optim["lr_scheduler"][key], *value, "{key}");
    }
    assert!((optim["lr_scheduler"]["min_lr_ratio"].as_f64().expect("a share") - 0.1).abs() < 1e-12);
    assert_eq!(at(&found, "/memory/optimizer_offload"), "cpu");
    assert_eq!(at(&found, "/memory/offload_fraction"), 0.5);
    assert_eq!(at(&found, "/memory/gradient_checkpointing"), true);
    assert_eq!(at(&found, "/memory/tensor_model_parallel_size"), 2);
    let taken = outcome(&found, "policy.optimizer.kwargs.lr");
    assert!(matches!(taken, KeyOutcome::NotNeeded { why } if why.contains("in place of the section")), "{taken:?}");
    assert_eq!(gaps(&found), [""; 0]);
}

#[test]
fn pytorchs_optimizer_counts_where_megatron_is_off_and_decays_norms_and_biases() {
    let found = policy(
        "optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1e-8}}, \
         megatron_cfg: {enabled: false, optimizer: {lr: 1.0e-3}, scheduler: {lr_decay_style: cosine}}",
    );
    assert_eq!(at(&found, "/optim/lr"), 5e-6);
    assert_eq!(at(&found, "/optim/decay_norms_and_biases"), true);
    assert_eq!(at(&found, "/optim/lr_scheduler"), Value::Null);
    assert_eq!(gaps(&found), [""; 0]);
}

#[test]
fn schedules_of_both_become_one() {
    let torch = |parts: &str| {
        let found = policy(&format!("optimizer: {{kwargs: {{lr: 2.0e-6}}}}, scheduler: {parts}"));
        (at(&found, "/optim/lr_scheduler"), gaps(&found).len())
    };
    let linear = |more: &str| format!("{{name: torch.optim.lr_scheduler.LinearLR, kwargs: {{{more}}}}}");
    let constant = "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}";
    let warm = linear("start_factor: 0.1, end_factor: 1.0, total_iters: 50");
    assert_eq!(
        torch(&format!("[{warm}, {constant}, {{milestones: [50]}}]")).0,
        json!({"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 0, "min_lr_ratio": 0.1, "warmup_steps": 50})
    );
    assert_eq!(torch(&format!("[{constant}]")), (Value::Null, 0));
    let cosine = "{name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 40, eta_min: 1.0e-6}}";
    assert_eq!(
        torch(&format!("[{cosine}]")).0,
        json!({
            "lr_scheduler_type": "warmup_stable_decay", "num_stable_steps": 0, "num_decay_steps": 40,
            "decay_type": "cosine", "min_lr_ratio": 0.5
        })
    );
    assert_eq!(torch("[{name: torch.optim.lr_scheduler.StepLR, kwargs: {step_size: 3}}]"), (Value::Null, 1));

    let megatron = |scheduler: &str| {
        let found = policy(&format!(
            "megatron_cfg: {{enabled: true, optimizer: {{lr: 1.0e-6, min_lr: 1.0e-7}}, scheduler: {{{scheduler}}}}}"
        ));
        let gaps = gaps(&found).into_iter().map(str::to_owned).collect::<Vec<_>>();
        (at(&found, "/optim/lr_scheduler"), gaps)
    };
    let (cosine, none) = megatron("lr_decay_style: cosine, lr_warmup_iters: 0, lr_decay_iters: 200");
    assert_eq!(cosine["num_decay_steps"], 200);
    assert_eq!(cosine["decay_type"], "cosine");
    assert!((cosine["min_lr_ratio"].as_f64().expect("a share") - 0.1).abs() < 1e-12);
    assert_eq!(none, [""; 0]);
    let (plain, _) = megatron("lr_decay_style: constant, lr_warmup_iters: 10, lr_warmup_init: 0");
    assert_eq!(plain, json!({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}));
    let (_, other) =
        megatron("lr_decay_style: cosine, lr_warmup_iters: 10, lr_warmup_init: 5.0e-7, lr_decay_iters: 200");
    assert_eq!(other, ["policy.megatron_cfg.scheduler.lr_warmup_init"]);
    assert_eq!(megatron("lr_decay_style: WSD").1, ["policy.megatron_cfg.scheduler.lr_decay_style"]);
}

#[test]
fn a_warm_up_that_a_run_does_not_reach_the_end_of_is_a_gap_that_leaves_the_rate() {
    let warm = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 500}}";
    let found = policy(&format!("optimizer: {{kwargs: {{lr: 2.0e-6}}}}, scheduler: [{warm}, {{milestones: [500]}}]"));
    assert_eq!(found.problem, None);
    assert_eq!(at(&found, "/optim/lr"), 2e-6);
    assert_eq!(at(&found, "/optim/lr_scheduler"), Value::Null);
    assert_eq!(gaps(&found), ["policy.scheduler"]);
}

#[test]
fn a_total_length_bounds_prompt_and_completion_together() {
    let lengths = |found: &Imported| {
        ["prompt_length", "response_length", "max_model_len"].map(|key| at(found, &format!("/rollout/{key}")))
    };
    let all = "max_total_sequence_length: 4096, generation: {max_new_tokens: \"${policy.max_total_sequence_length}\"}";
    let data = "data: {max_input_seq_length: \"${policy.max_total_sequence_length}\"}\n";
    let found = nemo(&format!("policy: {{model_name: q/m, {all}}}\n{data}"));
    // completions take what the prompt leaves of 4,096
    assert_eq!(lengths(&found), [json!(2048), json!(4096), json!(4096)]);
    assert_eq!(gaps(&found), [""; 0]);
    let own = nemo(
        "policy: {model_name: q/m, max_total_sequence_length: 4096, generation: {max_new_tokens: 1000}}\n\
         data: {max_input_seq_length: 512}\n",
    );
    assert_eq!(lengths(&own), [json!(512), json!(1000), json!(4096)]);
    assert_eq!(lengths(&policy("max_total_sequence_length: 100")), [json!(50), json!(100), json!(100)]);
    // a token budget holds what there can be together
    assert_eq!(at(&found, "/memory/train_tokens"), Value::Null);
}

#[test]
fn a_length_penalty_alone_is_no_reward_and_has_its_own_limit() {
    let shaped = |more: &str| {
        nemo(&format!(
            "policy: {{model_name: q/m, max_total_sequence_length: 16384, generation: {{max_new_tokens: 16384}}}}\n\
             data: {{max_input_seq_length: 2048}}\nenv: {{math: {{num_workers: 8}}}}\n{more}"
        ))
    };
    let shaping =
        "{enabled: true, overlong_buffer_length: 2048, overlong_buffer_penalty: 1, max_response_length: 14336}";
    let found = imported(
        "run.yaml",
        &format!(
            "grpo: {{max_num_steps: 100, use_dynamic_sampling: true, reward_shaping: {shaping}}}\n\
             policy: {{model_name: q/m}}\nenv: {{math: {{num_workers: 8}}}}\n"
        ),
    );
    let penalty = json!({"kind": "length", "buffer": 2048, "weight": 1.0, "limit": 14_336});
    assert_eq!(at(&found, "/task/rewards"), json!([{"kind": "math"}, penalty]));
    assert!(found.missing.iter().any(|missing| missing.key == "task.rewards"));
    // groups are compared without the penalty
    assert_eq!(at(&found, "/rollout/dynamic_sampling/metric"), "math");
    assert_eq!(gaps(&found), [""; 0]);
    assert_eq!(at(&shaped(""), "/task/rewards"), json!([{"kind": "math"}]));
}

#[test]
fn a_scaled_reward_has_its_range_and_factor() {
    let found = imported(
        "run.yaml",
        "grpo: {max_num_steps: 1, reward_scaling: {enabled: true, source_min: 0.0, source_max: 1.0, target_min: -1.0, \
         target_max: 1.0}}\nenv: {dapo: {num_workers: 8}}\n",
    );
    assert_eq!(at(&found, "/task/rewards"), json!([{"kind": "verl_math", "weight": 2.0, "clip": [0.0, 1.0]}]));
    assert_eq!(gaps(&found), [""; 0]);
}

#[test]
fn what_a_file_leaves_out_is_nemo_rls() {
    let found = policy("precision: bfloat16");
    assert_eq!(at(&found, "/objective/adv_estimator"), "grpo_leave_one_out");
    assert!(found.config.contains("clip_ratio_c: null"), "{}", found.config);
    assert_eq!(at(&found, "/objective/kl_loss_coef"), 0.01);
    assert_eq!(at(&found, "/trainer/val_before_train"), false);
    assert_eq!(at(&found, "/trainer/test_freq"), 10);
    assert_eq!(at(&found, "/trainer/seed"), 42);
    // validation samples as training does
    assert_eq!(at(&found, "/rollout/val_kwargs/temperature"), 1.0);
    // a guide to memory says nothing of a run
    let guide = imported("guide.yaml", "policy: {train_micro_batch_size: 4, gradient_checkpointing: true}\n");
    assert_eq!(guide.assumed.len(), 0);
}

#[test]
fn validation_samples_as_its_keys_say() {
    let found = nemo(
        "policy: {model_name: q/m, generation: {temperature: 0.8, top_p: 0.9, top_k: null, val_temperature: 0.6, \
         val_top_p: \"${.top_p}\", val_top_k: 20}}\n",
    );
    assert_eq!(at(&found, "/rollout/val_kwargs"), json!({"temperature": 0.6, "top_p": 0.9, "top_k": 20}));
    let several =
        imported("run.yaml", "grpo: {max_num_steps: 1, val_num_generations_per_prompt: 4, val_at_start: true}\n");
    assert_eq!(at(&several, "/rollout/val_kwargs/n"), 4);
    assert_eq!(at(&several, "/trainer/val_before_train"), true);
}

#[test]
fn importance_weights_are_of_their_kind() {
    let loss = |keys: &str| {
        at(&nemo(&format!("loss_fn: {{use_importance_sampling_correction: true, {keys}}}\n")), "/objective")
    };
    let of =
        |kind: &str| format!("truncated_importance_sampling_type: {kind}, truncated_importance_sampling_ratio: 5.0");
    let tis = loss(&of("tis"));
    assert_eq!((&tis["rollout_is"], &tis["rollout_is_threshold"]), (&json!("token_truncate"), &json!(5.0)));
    let icepop = loss(&format!("{}, truncated_importance_sampling_ratio_min: 0.5", of("icepop")));
    assert_eq!(icepop["rollout_is"], "token_mask");
    assert_eq!(icepop["rollout_is_threshold_lower"], 0.5);
    let masked = loss(&format!("{}, truncated_importance_sampling_ratio_min: 0.999", of("seq-mask-tis")));
    assert_eq!(masked["rollout_rs"], "seq_mean_k1");
    assert_eq!(masked["rollout_rs_threshold"], "0.999_5");
    // without a kind nothing is truncated
    assert_eq!(loss("token_level_loss: true")["rollout_is_threshold"], 1e9);
    assert_eq!(
        loss("sequence_level_importance_ratios: true, token_level_loss: false")["rollout_is"],
        "sequence_truncate"
    );
}

#[test]
fn prompts_come_from_their_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let prompt = write("cot.txt", "Answer inside of \\boxed{{}}.\n{}\n");
    let system = write("system.txt", "You are careful.");
    let found = nemo(&format!(
        "policy: {{model_name: q/m}}\ndata:\n  train: {{data_path: rows.jsonl, input_key: problem}}\n  \
         default: {{prompt_file: {prompt}, system_prompt_file: {system}}}\n"
    ));
    let messages = json!([{"role": "user", "content": "Answer inside of \\boxed{{}}.\n{problem}\n"}]);
    assert_eq!(at(&found, "/task/messages"), messages);
    assert_eq!(at(&found, "/task/system_prompt"), "You are careful.");
    assert_eq!(gaps(&found), [""; 0]);
    let absent = nemo("data: {default: {prompt_file: no/such.txt, system_prompt_file: null}}\n");
    assert_eq!(gaps(&absent), ["data.default.prompt_file"]);
}

#[test]
fn transformer_engines_optimizer_is_adamw_with_moments_of_2_bytes() {
    let found = policy(
        "optimizer: {name: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam, kwargs: {lr: 1.0e-6, \
         master_weights: true, store_param_remainders: true, exp_avg_dtype: torch.bfloat16, exp_avg_sq_dtype: torch.bfloat16}}, \
         router_replay: {enabled: true}",
    );
    assert_eq!(at(&found, "/memory/moments"), "bf16");
    assert_eq!(at(&found, "/rollout/router_replay"), true);
    assert_eq!(gaps(&found), [""; 0]);
}

#[test]
fn templates_kwargs_trackers_and_parallel_sequences_are_mapped() {
    let found = nemo(
        "policy: {model_name: q/m, tokenizer: {name: \"${policy.model_name}\", chat_template: t.jinja, \
         chat_template_kwargs: {enable_thinking: false}}, dtensor_cfg: {context_parallel_size: 2, sequence_parallel: true}}\n\
         logger: {wandb_enabled: true, tensorboard_enabled: true}\n",
    );
    assert_eq!(at(&found, "/model/chat_template"), "t.jinja");
    assert_eq!(at(&found, "/model/chat_template_kwargs"), json!({"enable_thinking": false}));
    assert_eq!(at(&found, "/memory/ulysses_sequence_parallel_size"), 2);
    assert_eq!(at(&found, "/trainer/logger"), json!(["console", "file", "tensorboard", "trackio"]));
    assert_eq!(gaps(&found), [""; 0]);
    let null = policy("tokenizer: {chat_template: null}");
    assert!(at(&null, "/model/chat_template").as_str().is_some_and(|own| own.contains("message['content']")));
}

#[test]
fn a_file_of_defaults_has_to_be_among_the_files() {
    let run = ("run.yaml", "defaults: ../base.yaml\ngrpo: {max_num_steps: 1}\n");
    assert_eq!(gaps(&layered(&[run])), ["defaults"]);
    assert_eq!(gaps(&layered(&[("configs/base.yaml", "grpo: {seed: 1}\n"), run])), [""; 0]);
}

#[test]
fn runs_of_other_kinds_are_refused() {
    for (text, what) in [
        ("sft: {max_num_steps: 60}\npolicy: {model_name: m}\n", "supervised training"),
        ("dpo: {max_num_epochs: 1}\npolicy: {model_name: m}\n", "DPO"),
        ("distillation: {max_num_steps: 1}\npolicy: {model_name: m}\n", "distillation"),
        ("ppo: {ppo_epochs: 4}\npolicy: {model_name: m}\n", "PPO"),
    ] {
        let said = refusal("run.yaml", text);
        assert!(said.contains(what), "{said}");
    }
}
