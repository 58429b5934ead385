//! Example runs of verl, TRL and `NeMo RL`, and what their settings mean here, worked out by hand.

use serde_json::{Value, json};

/// A run: its files, the public model that it is planned for, and what is expected of it.
pub struct Case {
    pub files: &'static [&'static str],
    pub model: &'static str,
    settings: Value,
    /// Keys of ours that the files do not say.
    pub missing: &'static [&'static str],
    /// Keys of theirs that no table has.
    pub unknown: &'static [&'static str],
}

impl Case {
    /// Our keys and their values in the resolved configuration.
    pub fn settings(&self) -> impl Iterator<Item = (&str, Value)> {
        let settings = self.settings.as_object().expect("a mapping");
        settings.iter().map(|(key, value)| (key.as_str(), value.clone()))
    }
}

fn case(files: &'static [&'static str], model: &'static str, settings: Value) -> Case {
    Case { files, model, settings, missing: &[], unknown: &[] }
}

/// All of them.
pub fn all() -> Vec<Case> {
    let mut all = grpo();
    all.extend(others());
    all.extend(losses());
    all.extend(trl());
    all.extend([nemo(), nemo_ppo()]);
    all
}

fn grpo() -> Vec<Case> {
    vec![
        case(
            &["verl/grpo_qwen3_8b.sh"],
            "Qwen3-8B",
            json!({
                "model.path": "Qwen/Qwen3-8B", "precision": "bf16", "objective.name": "grpo",
                "objective.adv_estimator": "grpo", "objective.kl_loss_coef": 0.001, "objective.kl_loss_type": "k3",
                "objective.clip_ratio_c": 3.0, "objective.loss_agg_mode": "token-mean", "objective.scale_rewards": "group",
                "trainer.train_batch_size": 1024, "rollout.n": 5, "update.ppo_mini_batch_size": 256,
                "memory.micro_batch_size": 32, "memory.score_tokens": 49_152, "memory.reference.score_tokens": 49_152,
                "memory.gradient_checkpointing": true, "memory.reference.param_offload": "idle", "memory.param_offload": "none",
                "rollout.prompt_length": 512, "rollout.response_length": 1024, "rollout.gpu_memory_utilization": null,
                "optim.lr": 1e-6, "optim.weight_decay": 0.01, "optim.decay_norms_and_biases": true,
                "trainer.steps": 105, "trainer.save_freq": 20, "trainer.test_freq": 5,
                "task.train": "/srv/data/gsm8k/train.parquet", "task.validation": "/srv/data/gsm8k/test.parquet",
                "task.answer_field": "reward_model.ground_truth", "task.rewards.0.kind": "gsm8k",
                "output": "runs/verl_grpo_example_gsm8k/qwen3_8b_function_rm",
            }),
        ),
        Case {
            missing: &["output"],
            ..case(
                &["verl/grpo_lora_qwen2_5_7b.sh"],
                "Qwen2.5-7B",
                json!({
                    "model.lora.rank": 32, "model.lora.alpha": 32.0, "model.lora.target_modules": "all-linear", "optim.lr": 3e-5,
                    "trainer.train_batch_size": 16, "update.ppo_mini_batch_size": 16, "memory.micro_batch_size": 16,
                    "rollout.max_num_seqs": 512, "rollout.max_num_batched_tokens": 1536, "rollout.max_model_len": 1536,
                    "memory.param_offload": "idle", "memory.optimizer_offload": "idle", "objective.entropy_coeff": 0.001,
                    "trainer.steps": 467,
                }),
            )
        },
        case(
            &["verl/grpo_adapter_qwen2_5_3b.sh"],
            "Qwen2.5-1.5B",
            json!({"model.lora.path": "/path/saved/lora_adapter", "optim.lr": 3e-6, "trainer.steps": 105, "memory.micro_batch_size": 40}),
        ),
        Case {
            missing: &[],
            ..case(
                &["verl/grpo_llama3_1_8b_megatron.yaml", "verl/grpo_llama3_1_8b_overrides.sh"],
                "Qwen3-8B",
                json!({
                    "rollout.n": 8, "trainer.steps": 50, "trainer.train_batch_size": 512, "update.ppo_mini_batch_size": 128,
                    "memory.optimizer_offload": "cpu", "memory.offload_fraction": 0.5, "memory.moments": "bf16",
                    "memory.grad_offload": true, "memory.param_offload": "idle", "memory.checkpoint_every": 1,
                    "memory.recompute_granularity": "block", "memory.gradient_checkpointing": true,
                    "rollout.prompt_length": 512, "rollout.response_length": 1024,
                    "rollout.cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32], "output": "runs/verl_examples/llama",
                }),
            )
        },
    ]
}

fn others() -> Vec<Case> {
    vec![
        case(
            &["verl/ppo_qwen2_7b_reward_model.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "ppo", "objective.adv_estimator": "gae", "critic.optim.lr": 1e-5, "critic.model.path": null,
                "critic.optim.lr_scheduler.warmup_ratio": 0.05, "critic.optim.lr_scheduler.lr_scheduler_type": "constant_with_warmup",
                "optim.lr_scheduler.warmup_ratio": 0.1, "optim.lr_scheduler.lr_scheduler_type": "constant_with_warmup",
                "memory.critic.micro_batch_size": 32, "memory.micro_batch_size": 16, "rollout.n": 1,
                "task.rewards.0.kind": "model", "task.rewards.0.path": "/srv/models/FsfairX-LLaMA3-RM-v0.1",
                "model.path": "/srv/models/Qwen2-7B-Instruct", "task.train.0": "/srv/data/gsm8k/train.parquet",
                "task.train.1": "/srv/data/math/train.parquet",
            }),
        )
        .without(&["trainer.steps"]),
        case(
            &["verl/ppo_qwen3_8b_offload.sh"],
            "Qwen3-8B",
            json!({
                "rollout.prompt_length": 2000, "rollout.response_length": 12_000, "memory.train_tokens": 16_384,
                "memory.ulysses_sequence_parallel_size": 2,
                "memory.param_offload": "idle", "memory.optimizer_offload": "idle", "memory.critic.param_offload": "idle",
                "memory.critic.optimizer_offload": "idle", "rollout.gpu_memory_utilization": 0.9, "rollout.max_num_seqs": 64,
                "rollout.max_num_batched_tokens": 14_000, "memory.micro_batch_size": null, "trainer.steps": 100,
                "trainer.max_ckpt_to_keep": 1, "trainer.test_freq": 0,
            }),
        )
        .without(&["task.rewards"]),
        case(
            &["verl/ppo_gemma.sh"],
            "Qwen2.5-1.5B",
            json!({
                "memory.critic.gradient_checkpointing": false, "memory.gradient_checkpointing": true, "trainer.steps": 210,
                "update.ppo_mini_batch_size": 128, "trainer.train_batch_size": 512,
            }),
        ),
        case(
            &["verl/rloo_qwen2_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "rloo", "objective.importance_sampling_level": "token", "objective.clip_ratio_c": 3.0,
                "objective.loss_agg_mode": "token-mean", "objective.use_kl_in_reward": true, "objective.kl_penalty": "k1",
                "objective.kl_ctrl.kl_coef": 0.001, "trainer.save_freq": -1,
            }),
        ),
        case(
            &["verl/remax_qwen2_5_3b.sh"],
            "Qwen2.5-1.5B",
            json!({
                "objective.name": "remax", "objective.policy_loss": "clip", "objective.loss_agg_mode": "token-mean",
                "objective.use_kl_in_reward": true, "memory.train_tokens": 30_000, "memory.micro_batch_size": null,
                "trainer.steps": 70,
            }),
        ),
        case(
            &["verl/reinforce_pp_baseline_qwen2_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "reinforce_plus_plus_baseline", "objective.kl_loss_coef": 0.0, "objective.use_kl_in_reward": true,
                "update.ppo_mini_batch_size": 1024, "rollout.n": 8, "optim.lr": 3e-6,
            }),
        )
        .without(&["task.rewards", "trainer.steps"]),
    ]
}

fn losses() -> Vec<Case> {
    vec![
        case(
            &["verl/dapo_qwen2_5_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.clip_ratio_low": 0.2, "objective.clip_ratio_high": 0.28, "objective.clip_ratio_c": 10.0,
                "rollout.dynamic_sampling.enable": true, "rollout.dynamic_sampling.metric": "verl_math",
                "rollout.dynamic_sampling.max_num_gen_batches": 10, "rollout.dynamic_sampling.oversampling": 3.0,
                "task.rewards.1.kind": "length", "task.rewards.1.buffer": 4096, "task.rewards.1.weight": 1.0,
                "memory.train_tokens": 40_960, "memory.ulysses_sequence_parallel_size": 4, "optim.lr_scheduler.warmup_steps": 10, "optim.weight_decay": 0.1,
                "model.path": "Qwen/Qwen2.5-Math-7B", "output": "/srv/ckpts/DAPO/DAPO-Qwen2.5-7B-Math",
                "rollout.gpu_memory_utilization": 0.8, "rollout.top_k": -1,
            }),
        )
        .without(&["task.rewards", "trainer.steps"]),
        case(
            &["verl/gmpo_qwen2_5_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "gmpo", "objective.policy_loss": "geo_mean", "objective.clip_ratio_low": 0.4,
                "objective.clip_ratio_high": 0.4, "objective.loss_agg_mode": "seq-mean-token-mean", "trainer.steps": 200,
                "memory.train_tokens": 81_920, "memory.score_tokens": 122_880, "memory.ulysses_sequence_parallel_size": 4,
                "update.ppo_mini_batch_size": 32,
            }),
        )
        .without(&["task.rewards"]),
        case(
            &["verl/gspo_qwen2_5_3b.sh"],
            "Qwen2.5-1.5B",
            json!({
                "objective.name": "gspo_token", "objective.importance_sampling_level": "sequence_token",
                "objective.clip_ratio_low": 0.0003, "objective.clip_ratio_high": 0.0004, "objective.clip_ratio_c": null,
                "objective.loss_agg_mode": "seq-mean-token-mean", "update.ppo_mini_batch_size": 128, "trainer.train_batch_size": 512,
                "optim.lr_scheduler.warmup_ratio": 0.05, "trainer.steps": 500, "task.train": "/data/gsm8k/train.parquet",
            }),
        ),
        case(
            &["verl/cispo_qwen2_5_0_5b.sh"],
            "Qwen2.5-0.5B",
            json!({
                "objective.name": "cispo", "objective.clip_ratio_low": 1.0, "objective.clip_ratio_high": 0.2,
                "objective.kl_loss_coef": 0.001, "trainer.steps": 87,
            }),
        ),
        case(
            &["verl/gpg_qwen2_7b.sh"],
            "Qwen2.5-7B",
            json!({"objective.name": "gpg", "objective.policy_loss": "reinforce", "objective.kl_loss_coef": 0.0}),
        )
        .without(&["task.rewards", "trainer.steps"]),
        case(
            &["verl/kl_cov_qwen2_5_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "kl_cov", "objective.kl_cov_ratio": 0.002, "objective.ppo_kl_coef": 1.0,
                "memory.micro_batch_size": 4, "optim.lr_scheduler.lr_scheduler_type": "cosine_with_min_lr",
                "optim.lr_scheduler.min_lr_rate": 0.1, "optim.lr_scheduler.warmup_ratio": 0.05, "rollout.top_k": 50,
                "trainer.steps": 58, "task.train": "/data/gsm8k/train.parquet",
            }),
        )
        .without(&["output"]),
        case(
            &["verl/rollout_correction_qwen2_5_7b.sh"],
            "Qwen2.5-7B",
            json!({
                "objective.name": "rloo", "objective.policy_loss": "reinforce", "objective.rollout_is": "sequence_truncate",
                "objective.rollout_is_threshold": 2.0, "objective.rollout_is_batch_normalize": true,
                "update.old_log_probs": null, "optim.lr": 5e-7,
            }),
        )
        .without(&["task.rewards", "trainer.steps"]),
    ]
}

fn trl() -> Vec<Case> {
    vec![
        case(
            &["trl/zero3_8gpu.yaml", "trl/grpo_qwen2_5_1_5b.yaml"],
            "Qwen2.5-1.5B",
            json!({
                "trainer.train_batch_size": 32, "rollout.n": 16, "update.ppo_mini_batch_size": 32, "memory.micro_batch_size": 16,
                "objective.adv_eps": 1e-4, "objective.clip_ratio_c": null, "objective.loss_agg_mode": "token-mean",
                "objective.kl_loss_coef": 0.0, "objective.rollout_is": "sequence_mask", "objective.rollout_is_threshold": 3.0,
                "optim.lr": 2e-5, "optim.weight_decay": 0.0, "optim.decay_norms_and_biases": false,
                "optim.lr_scheduler.lr_scheduler_type": "cosine_with_min_lr", "optim.lr_scheduler.min_lr_rate": 0.1,
                "optim.lr_scheduler.warmup_ratio": 0.1, "precision": "bf16", "trainer.seed": 42,
                "rollout.prompt_length": 512, "rollout.response_length": 2048, "task.rewards.0.name": "accuracy",
                "task.rewards.1.weight": 0.5, "task.answer_field": "solution", "trainer.max_ckpt_to_keep": 1,
            }),
        )
        .without(&["trainer.steps"]),
        case(
            &["trl/gspo_qwen3_4b.py"],
            "Qwen3-8B",
            json!({
                "objective.name": "gspo", "objective.importance_sampling_level": "sequence", "objective.clip_ratio_low": 0.0003,
                "objective.clip_ratio_high": 0.0004, "objective.scale_rewards": "batch", "trainer.train_batch_size": 32,
                "update.ppo_mini_batch_size": 8, "rollout.n": 8, "trainer.steps": 100, "trainer.save_freq": 10,
                "trainer.test_freq": 25, "optim.lr_scheduler.warmup_steps": 2, "optim.betas": [0.9, 0.95],
                "memory.moments": "block8", "rollout.temperature": 0.9, "rollout.top_k": 50, "rollout.response_length": 2048,
                "model.lora.rank": 32, "model.lora.alpha": 64.0, "model.path": "Qwen/Qwen3-4B",
            }),
        )
        .without(&["task.train"]),
        case(
            &["trl/rloo_qwen3_0_6b.py"],
            "Qwen2.5-0.5B",
            json!({
                "objective.name": "rloo", "objective.importance_sampling_level": "sequence_product",
                "objective.use_kl_in_reward": true, "objective.kl_ctrl.kl_coef": 0.05, "rollout.n": 2,
                "trainer.train_batch_size": 32, "update.ppo_mini_batch_size": 8, "model.lora.rank": 8, "model.lora.alpha": 8.0,
                "rollout.response_length": 1024, "optim.lr_scheduler.lr_scheduler_type": "linear", "optim.lr": 1e-5,
            }),
        )
        .without(&["task.train", "trainer.steps"]),
        case(
            &["trl/ppo_llama3_2_1b.sh"],
            "Qwen2.5-1.5B",
            json!({
                "objective.name": "ppo", "objective.lam": 0.95, "objective.use_kl_in_reward": true,
                "objective.kl_ctrl.kl_coef": 0.05, "critic.cliprange_value": 0.2, "critic.optim.lr": 3e-6, "optim.lr": 3e-6,
                "trainer.train_batch_size": 64, "update.ppo_mini_batch_size": 32, "update.ppo_epochs": 1, "rollout.n": 1,
                "trainer.steps": 157, "rollout.response_length": 53, "rollout.temperature": 0.7, "task.rewards.0.kind": "model",
                "memory.micro_batch_size": 4,
            }),
        )
        .without(&["task.train"]),
        case(
            &["trl/dr_grpo_qwen2_5_0_5b.json"],
            "Qwen2.5-0.5B",
            json!({
                "objective.loss_agg_mode": "seq-mean-token-sum-norm", "objective.scale_rewards": "none",
                "objective.kl_loss_coef": 0.04, "update.ppo_epochs": 2, "trainer.train_batch_size": 8, "rollout.n": 4,
                "update.ppo_mini_batch_size": 8, "trainer.steps": 50, "trainer.save_freq": -1, "optim.clip_grad": 0.2,
                "optim.betas": [0.9, 0.99], "optim.weight_decay": 0.1, "precision": "f16", "rollout.prompt_length": 256,
                "task.rewards.0.kind": "python", "task.rewards.0.function": "correctness",
                "task.rewards.1.kind": "model", "task.rewards.1.path": "org/reward-model",
            }),
        )
        .without(&["task.train"]),
    ]
}

fn nemo() -> Case {
    case(
        &["nemo/grpo_qwen2_5_1_5b.yaml"],
        "Qwen2.5-1.5B",
        json!({
            "model.path": "Qwen/Qwen2.5-1.5B", "trainer.train_batch_size": 32, "rollout.n": 16, "update.ppo_mini_batch_size": 8,
            "memory.micro_batch_size": 4, "memory.train_tokens": 4096, "memory.score_tokens": 8192, "trainer.steps": 500,
            "memory.gradient_checkpointing": true, "precision": "bf16", "objective.kl_loss_coef": 0.01,
            "objective.clip_ratio_low": 0.2, "objective.clip_ratio_high": 0.28, "objective.clip_ratio_c": null, "optim.lr": 5e-6,
            "rollout.prompt_length": 512, "rollout.response_length": 512, "rollout.max_model_len": 1024,
            "objective.adv_estimator": "grpo_leave_one_out", "optim.decay_norms_and_biases": true,
            "rollout.val_kwargs.temperature": 1.0, "trainer.val_before_train": false, "trainer.save_freq": 10, "trainer.test_freq": 10, "trainer.seed": 42, "output": "results/grpo",
        }),
    )
    .without(&["task.rewards", "task.answer_field", "task.train"])
}

fn nemo_ppo() -> Case {
    case(
        &["nemo/ppo_base.yaml", "nemo/ppo_qwen2_5_1_5b_megatron.yaml"],
        "Qwen2.5-1.5B",
        json!({
            "objective.name": "ppo", "objective.lam": 0.97, "objective.gamma": 1.0, "objective.kl_loss_coef": 0.0,
            "objective.clip_ratio_high": 0.28, "objective.clip_ratio_c": 10.0, "rollout.n": 4, "trainer.train_batch_size": 64,
            "trainer.steps": 200, "trainer.seed": 7, "trainer.test_freq": 25, "update.ppo_epochs": 2,
            "update.ppo_mini_batch_size": 64, "memory.train_tokens": 8192, "memory.gradient_checkpointing": true,
            // Megatron's for the policy, which leaves norms and biases out of the decay; PyTorch's for the critic
            "optim.lr": 2e-6, "optim.weight_decay": 0.1, "optim.decay_norms_and_biases": false,
            "optim.lr_scheduler.warmup_steps": 10, "critic.optim.lr": 1e-5, "critic.optim.weight_decay": 0.1,
            "critic.optim.decay_norms_and_biases": true, "critic.optim.clip_grad": 0.5, "critic.warmup": 5,
            "critic.cliprange_value": 0.3, "memory.critic.micro_batch_size": 8,
            "memory.critic.gradient_checkpointing": true, "rollout.prompt_length": 512, "rollout.response_length": 2048,
            "rollout.max_model_len": 2048, "output": "results/ppo",
        }),
    )
    .without(&["task.rewards", "task.answer_field", "task.train"])
}

impl Case {
    /// The same, with keys of ours that the files do not say.
    fn without(mut self, missing: &'static [&'static str]) -> Self {
        self.missing = missing;
        self
    }
}
