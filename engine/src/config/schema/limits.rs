//! Ranges that keys take by themselves. The program checks them where it reads a configuration; a test holds the two
//! together.

use serde_json::{Number, Value};

/// A bound of a number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// At least.
    AtLeast(f64),
    /// Above.
    Above(f64),
    /// At most.
    AtMost(f64),
    /// Below.
    Below(f64),
}

use Limit::{Above, AtLeast, AtMost, Below};

/// Keys and their bounds. A key without a section in front is one of every section that ends in it.
pub(super) const LIMITS: [(&str, &[Limit]); 87] = [
    ("model.router_aux_loss_coef", &[AtLeast(0.0)]),
    ("model.lora.rank", &[AtLeast(1.0)]),
    ("model.lora.alpha", &[Above(0.0)]),
    ("model.lora.dropout", &[AtLeast(0.0), Below(1.0)]),
    ("task.difficulty", &[AtLeast(1.0), AtMost(6.0)]),
    ("rollout.n", &[AtLeast(1.0)]),
    ("rollout.temperature", &[Above(0.0)]),
    ("rollout.top_k", &[AtLeast(-1.0)]),
    ("rollout.top_p", &[Above(0.0), AtMost(1.0)]),
    ("rollout.min_p", &[AtLeast(0.0), Below(1.0)]),
    ("rollout.prompt_length", &[AtLeast(1.0)]),
    ("rollout.response_length", &[AtLeast(1.0)]),
    ("rollout.max_num_seqs", &[AtLeast(1.0)]),
    ("rollout.max_num_batched_tokens", &[AtLeast(1.0)]),
    ("rollout.max_model_len", &[AtLeast(2.0)]),
    ("rollout.gpu_memory_utilization", &[Above(0.0), AtMost(1.0)]),
    ("rollout.dynamic_sampling.max_num_gen_batches", &[AtLeast(1.0)]),
    ("rollout.dynamic_sampling.oversampling", &[AtLeast(1.0)]),
    ("rollout.multi_turn.max_assistant_turns", &[AtLeast(1.0)]),
    ("rollout.multi_turn.max_tool_response_length", &[AtLeast(1.0)]),
    ("update.ppo_epochs", &[AtLeast(1.0)]),
    ("update.ppo_mini_batch_size", &[AtLeast(1.0)]),
    ("optim.lr", &[Above(0.0)]),
    ("optim.eps", &[Above(0.0)]),
    ("optim.weight_decay", &[AtLeast(0.0)]),
    ("optim.clip_grad", &[Above(0.0)]),
    ("optim.lr_scheduler.warmup_ratio", &[AtLeast(0.0), AtMost(1.0)]),
    ("optim.lr_scheduler.lr_end", &[AtLeast(0.0)]),
    ("optim.lr_scheduler.min_lr", &[AtLeast(0.0)]),
    ("optim.lr_scheduler.min_lr_rate", &[AtLeast(0.0), AtMost(1.0)]),
    ("optim.lr_scheduler.min_lr_ratio", &[AtLeast(0.0), AtMost(1.0)]),
    ("optim.lr_scheduler.timescale", &[AtLeast(1.0)]),
    ("critic.cliprange_value", &[Above(0.0)]),
    ("critic.ulysses_sequence_parallel_size", &[AtLeast(1.0)]),
    ("critic.vf_coef", &[Above(0.0)]),
    ("critic.head_lr", &[Above(0.0)]),
    ("trainer.steps", &[AtLeast(1.0)]),
    ("trainer.train_batch_size", &[AtLeast(1.0)]),
    ("trainer.save_freq", &[AtLeast(-1.0)]),
    ("trainer.max_ckpt_to_keep", &[AtLeast(1.0)]),
    ("sft.steps", &[AtLeast(1.0)]),
    ("sft.epochs", &[AtLeast(1.0)]),
    ("sft.batch_size", &[AtLeast(1.0)]),
    ("sft.max_length", &[AtLeast(2.0)]),
    ("memory.margin", &[AtLeast(0.0), Below(0.9)]),
    ("memory.checkpoint_every", &[AtLeast(1.0)]),
    ("memory.checkpoint_ratio", &[AtLeast(0.0), AtMost(1.0)]),
    ("memory.activation_offload_group", &[AtLeast(1.0)]),
    ("memory.offload_fraction", &[AtLeast(0.0), AtMost(1.0)]),
    ("memory.ulysses_sequence_parallel_size", &[AtLeast(1.0)]),
    ("memory.tensor_model_parallel_size", &[AtLeast(1.0)]),
    ("memory.pipeline_model_parallel_size", &[AtLeast(1.0)]),
    ("rollout.tensor_model_parallel_size", &[AtLeast(1.0)]),
    ("memory.zero_stage", &[AtLeast(0.0), AtMost(3.0)]),
    ("memory.head_rows", &[AtLeast(1.0)]),
    ("memory.train_tokens", &[AtLeast(1.0)]),
    ("memory.score_tokens", &[AtLeast(1.0)]),
    ("memory.micro_batch_size", &[AtLeast(1.0)]),
    ("memory.trace", &[AtLeast(0.0), AtMost(1e6)]),
    ("memory.reference.score_tokens", &[AtLeast(1.0)]),
    ("memory.critic.checkpoint_every", &[AtLeast(1.0)]),
    ("memory.critic.checkpoint_ratio", &[AtLeast(0.0), AtMost(1.0)]),
    ("memory.critic.activation_offload_group", &[AtLeast(1.0)]),
    ("memory.critic.offload_fraction", &[AtLeast(0.0), AtMost(1.0)]),
    ("memory.critic.head_rows", &[AtLeast(1.0)]),
    ("memory.critic.train_tokens", &[AtLeast(1.0)]),
    ("memory.critic.score_tokens", &[AtLeast(1.0)]),
    ("memory.critic.micro_batch_size", &[AtLeast(1.0)]),
    ("objective.adv_eps", &[AtLeast(0.0)]),
    ("objective.gamma", &[AtLeast(0.0), AtMost(1.0)]),
    ("objective.lam", &[AtLeast(0.0), AtMost(1.0)]),
    ("objective.clip_ratio_c", &[Above(1.0)]),
    ("objective.tau_pos", &[Above(0.0)]),
    ("objective.tau_neg", &[Above(0.0)]),
    ("objective.kl_cov_ratio", &[Above(0.0), AtMost(1.0)]),
    ("objective.ppo_kl_coef", &[AtLeast(0.0)]),
    ("objective.clip_cov_ratio", &[Above(0.0), AtMost(1.0)]),
    ("objective.vespo_k_pos", &[AtLeast(0.0)]),
    ("objective.vespo_lambda_pos", &[AtLeast(0.0)]),
    ("objective.vespo_k_neg", &[AtLeast(0.0)]),
    ("objective.vespo_lambda_neg", &[AtLeast(0.0)]),
    ("objective.top_entropy_quantile", &[Above(0.0), AtMost(1.0)]),
    ("objective.kl_loss_coef", &[AtLeast(0.0)]),
    ("objective.entropy_coef_delta", &[AtLeast(0.0)]),
    ("objective.rollout_is_threshold", &[Above(0.0)]),
    ("objective.rollout_is_threshold_lower", &[AtLeast(0.0)]),
    ("objective.kl_ctrl.horizon", &[Above(0.0)]),
];

/// The bounds of a key: those of its whole path, or of the section that it ends with (`critic.optim.lr`: `optim.lr`).
pub(super) fn of(path: &str) -> Option<&'static [Limit]> {
    let ends = |key: &str| {
        let before = path.strip_suffix(key);
        before.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    // `memory.critic.…` ends with no other key's path
    let known = LIMITS.iter().find(|(key, _)| ends(key));
    known.map(|(_, limits)| *limits)
}

fn number(bound: f64) -> Value {
    if bound.fract() == 0.0 {
        return Value::from(bound as i64);
    }
    Number::from_f64(bound).map_or(Value::Null, Value::Number)
}

/// Writes the bounds into the properties of a schema, whose path is `prefix`.
pub(super) fn set(schema: &mut Value, prefix: &str) {
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for (key, own) in properties {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            for limit in of(&path).into_iter().flatten() {
                let (word, bound) = match *limit {
                    AtLeast(bound) => ("minimum", bound),
                    Above(bound) => ("exclusiveMinimum", bound),
                    AtMost(bound) => ("maximum", bound),
                    Below(bound) => ("exclusiveMaximum", bound),
                };
                own[word] = number(bound);
            }
            set(own, &path);
        }
    }
    for word in ["anyOf", "oneOf"] {
        let all = schema.get_mut(word).and_then(Value::as_array_mut);
        all.into_iter().flatten().for_each(|one| set(one, prefix));
    }
    if let Some(items) = schema.get_mut("items") {
        set(items, prefix);
    }
}
