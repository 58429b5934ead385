//! Which verl a file is of, as far as its defaults differ.

use crate::facts::Facts;

/// What begins keys that verl has had since 0.4 (June 2025), and that earlier scripts do not add: their sections, and
/// what follows those.
const SINCE_0_4: [(&str, &str); 6] = [
    (
        "actor_rollout_ref.actor.",
        "clip_ratio_ fsdp_config.dtype fsdp_config.model_dtype fsdp_config.offload_policy loss_agg_mode \
         megatron.use_mbridge optim.lr_scheduler_type policy_loss",
    ),
    ("actor_rollout_ref.", "model.lora model.use_fused_kernels model.use_liger model.use_shm nccl_timeout"),
    ("actor_rollout_ref.rollout.", "agent. calculate_log_probs checkpoint_engine engine_kwargs mode multi_turn."),
    ("algorithm.", "filter_groups norm_adv_by_std_in_grpo rollout_correction use_kl_in_reward"),
    ("data.", "apply_chat_template_kwargs custom_cls filter_overlong_prompts_workers reward_fn_key train_max_samples"),
    (
        "",
        "global_profiler model_engine reward. reward_model.launch_reward_fn_async reward_model.sandbox_fusion \
         trainer.device trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir",
    ),
];

/// Keys of verl before that, and of what was built on it (Search-R1, simpleRL, `DeepScaleR`).
const BEFORE_0_4: [(&str, &str); 4] = [
    ("actor_rollout_ref.actor.", "fsdp_config.grad_offload ppo_micro_batch_size state_masking"),
    (
        "actor_rollout_ref.rollout.",
        "log_prob_micro_batch_size micro_rollout_batch_size n_agent n_val swap_space use_fire_sampling val_temperature",
    ),
    ("trainer.", "remove_clip remove_previous_ckpt remove_previous_ckpt_in_save val_generations_to_log_to_wandb"),
    (
        "",
        "actor_rollout_ref.ref.log_prob_micro_batch_size algorithm.no_think_rl critic.ppo_micro_batch_size \
         data.max_obs_length data.max_start_length reward_model.micro_batch_size",
    ),
];

/// For notes.
pub(super) const OLD: &str = "the default of verl before 0.4, which the files are of by their keys";

fn any(keys: &[(&str, &str)], has: impl Fn(&str) -> bool) -> bool {
    keys.iter().any(|(section, names)| names.split_whitespace().any(|name| has(&format!("{section}{name}"))))
}

/// Whether the files are of verl before 0.4: it took the KL off the reward wherever it was not in the loss, had an
/// entropy bonus, and no dual clip.
pub(super) fn is_before_0_4(facts: &Facts) -> bool {
    if is_deepscaler(facts) || is_search_r1(facts) {
        return true;
    }
    // a KL coefficient is written for something: later files say with use_kl_in_reward or use_kl_loss for what
    let only_a_coefficient =
        facts.has_below("algorithm.kl_ctrl.") && !facts.is_given("actor_rollout_ref.actor.use_kl_loss");
    !is_since_0_4(facts) && (only_a_coefficient || any(&BEFORE_0_4, |key| facts.is_given(key)))
}

/// Whether a key is written that only verl since 0.4 has.
pub(super) fn is_since_0_4(facts: &Facts) -> bool {
    any(&SINCE_0_4, |start| facts.has_below(start))
}

/// Whether `DeepScaleR`'s trainer runs, which never takes the KL off the reward.
pub(super) fn is_deepscaler(facts: &Facts) -> bool {
    any(&[("actor_rollout_ref.rollout.", "n_val val_temperature")], |key| facts.is_given(key))
}

/// Whether the files are Search-R1's.
pub(super) fn is_search_r1(facts: &Facts) -> bool {
    let keys = ["data.max_start_length", "data.max_obs_length", "actor_rollout_ref.rollout.n_agent"];
    keys.iter().any(|key| facts.is_given(key))
}
