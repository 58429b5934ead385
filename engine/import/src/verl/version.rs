//! Which verl a file is of, as far as its defaults differ.

use crate::facts::Facts;

/// What begins keys that verl has had since 0.4 (June 2025), and that earlier scripts do not add.
const SINCE_0_4: [&str; 37] = [
    "actor_rollout_ref.actor.clip_ratio_",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.fsdp_config.model_dtype",
    "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.megatron.use_mbridge",
    "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.model.lora",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.use_liger",
    "actor_rollout_ref.model.use_shm",
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.rollout.agent.",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.rollout.checkpoint_engine",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.rollout.mode",
    "actor_rollout_ref.rollout.multi_turn.",
    "algorithm.filter_groups",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.rollout_correction",
    "algorithm.use_kl_in_reward",
    "data.apply_chat_template_kwargs",
    "data.custom_cls",
    "data.filter_overlong_prompts_workers",
    "data.reward_fn_key",
    "data.train_max_samples",
    "global_profiler",
    "model_engine",
    "reward.",
    "reward_model.launch_reward_fn_async",
    "reward_model.sandbox_fusion",
    "trainer.device",
    "trainer.log_val_generations",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
];

/// Keys of verl before that, and of what was built on it (Search-R1, simpleRL, `DeepScaleR`).
const BEFORE_0_4: [&str; 20] = [
    "actor_rollout_ref.actor.fsdp_config.grad_offload",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.state_masking",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.rollout.micro_rollout_batch_size",
    "actor_rollout_ref.rollout.n_agent",
    "actor_rollout_ref.rollout.n_val",
    "actor_rollout_ref.rollout.swap_space",
    "actor_rollout_ref.rollout.use_fire_sampling",
    "actor_rollout_ref.rollout.val_temperature",
    "algorithm.no_think_rl",
    "critic.ppo_micro_batch_size",
    "data.max_obs_length",
    "data.max_start_length",
    "reward_model.micro_batch_size",
    "trainer.remove_clip",
    "trainer.remove_previous_ckpt",
    "trainer.remove_previous_ckpt_in_save",
    "trainer.val_generations_to_log_to_wandb",
];

/// For notes.
pub(super) const OLD: &str = "the default of verl before 0.4, which the files are of by their keys";

/// Whether the files are of verl before 0.4: it took the KL off the reward wherever it was not in the loss, had an
/// entropy bonus, and no dual clip.
pub(super) fn is_before_0_4(facts: &Facts) -> bool {
    if is_deepscaler(facts) || is_search_r1(facts) {
        return true;
    }
    // a KL coefficient is written for something: later files say with use_kl_in_reward or use_kl_loss for what
    let only_a_coefficient =
        facts.has_below("algorithm.kl_ctrl.") && !facts.is_given("actor_rollout_ref.actor.use_kl_loss");
    !is_since_0_4(facts) && (only_a_coefficient || BEFORE_0_4.iter().any(|key| facts.is_given(key)))
}

/// Whether a key is written that only verl since 0.4 has.
pub(super) fn is_since_0_4(facts: &Facts) -> bool {
    SINCE_0_4.iter().any(|start| facts.has_below(start))
}

/// Whether `DeepScaleR`'s trainer runs, which never takes the KL off the reward.
pub(super) fn is_deepscaler(facts: &Facts) -> bool {
    ["n_val", "val_temperature"].iter().any(|key| facts.is_given(&format!("actor_rollout_ref.rollout.{key}")))
}

/// Whether the files are Search-R1's.
pub(super) fn is_search_r1(facts: &Facts) -> bool {
    ["data.max_start_length", "data.max_obs_length", "actor_rollout_ref.rollout.n_agent"]
        .iter()
        .any(|key| facts.is_given(key))
}
