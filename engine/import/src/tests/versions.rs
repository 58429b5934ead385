//! Defaults of verl's versions, and of projects built on it.

use super::at;
use super::cases::launch;
use crate::Imported;
use serde_json::{Value, json};

/// The keys whose defaults differ: KL off the reward, entropy bonus, dual clip.
fn defaults(found: &Imported) -> [Value; 3] {
    let or = |path: &str, default: Value| Some(at(found, path)).filter(|value| !value.is_null()).unwrap_or(default);
    let dual = found.config.contains("clip_ratio_c: null");
    [
        or("/objective/use_kl_in_reward", json!(false)),
        or("/objective/entropy_coeff", json!(0.0)),
        if dual { Value::Null } else { json!(3.0) },
    ]
}

#[test]
fn verl_before_0_4_takes_the_kl_off_the_reward_and_has_an_entropy_bonus_and_no_dual_clip() {
    let old = [json!(true), json!(0.001), Value::Null];
    let old_with_kl_loss = [json!(false), json!(0.001), Value::Null];
    let new = [json!(false), json!(0.0), json!(3.0)];
    let grpo = "algorithm.adv_estimator=grpo";
    let kl_loss = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001";
    for (keys, expected) in [
        // verl 0.2 and TinyZero: sizes of all devices together
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8 critic.ppo_micro_batch_size=8".to_owned(), &old),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=8".to_owned(), &old),
        // verl 0.3: a coefficient, and nothing that says what for
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 algorithm.kl_ctrl.kl_coef=0.001".to_owned(), &old),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=True".to_owned(), &old),
        ("trainer.val_generations_to_log_to_wandb=1".to_owned(), &old),
        // Logic-RL
        (format!("{grpo} {kl_loss} actor_rollout_ref.actor.ppo_micro_batch_size=16"), &old_with_kl_loss),
        // Search-R1
        (format!("{grpo} {kl_loss} data.max_start_length=2048 actor_rollout_ref.rollout.n_agent=5"), &old_with_kl_loss),
        // DeepScaleR, whose trainer never takes the KL off the reward, and whose sides of the clip are -1
        (
            format!("{grpo} actor_rollout_ref.rollout.n_val=8 actor_rollout_ref.actor.clip_ratio_low=-1"),
            &old_with_kl_loss,
        ),
        // verl since 0.4
        (format!("{grpo} algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.001"), &new),
        (
            "actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ppo_micro_batch_size=8".into(),
            &new,
        ),
        ("trainer.device=cuda critic.ppo_micro_batch_size=8".into(), &new),
        // nothing that tells
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8".into(), &new),
    ] {
        assert_eq!(defaults(&launch(&keys)), *expected, "{keys}");
    }
}
