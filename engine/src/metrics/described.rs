//! Descriptions of the metrics in `metrics.jsonl`: the reference page of metrics is generated from them.

/// A metric, or several metrics whose names follow one pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// The name. `{set}` is a variable part of one or more characters, which may contain `/`. `{mean,max,min}` is one
    /// of the listed words.
    pub name: &'static str,
    /// The unit; empty if the metric has none.
    pub unit: &'static str,
    /// One or more sentences in Markdown.
    pub meaning: &'static str,
}

const fn of(name: &'static str, unit: &'static str, meaning: &'static str) -> Described {
    Described { name, unit, meaning }
}

/// All metrics in the order of the reference page, by group: a heading and the metrics below it.
pub const METRICS: &[(&str, &[Described])] = &[
    (
        "Progress",
        &[
            of(
                "training/global_step",
                "steps",
                "Finished steps. The line of step 0 has the validation before training.",
            ),
            of("training/epoch", "epochs", "Finished epochs, in supervised fine-tuning on a finite data set."),
        ],
    ),
    (
        "Rewards",
        &[
            of(
                "critic/score/{mean,max,min}",
                "",
                "Reward per completion, before any KL penalty. The mean should rise. TRL: `reward`.",
            ),
            of(
                "critic/rewards/{mean,max,min}",
                "",
                "Reward per completion after the KL penalty of `use_kl_in_reward`.",
            ),
            of(
                "reward/{name}/mean",
                "",
                "One reward by name, before its weight, averaged over the completions to which it applies. The reward \
                 that environments return is `environment`. TRL: `rewards/{name}/mean`.",
            ),
            of("reward/{name}/missing", "completions", "Completions to which the reward does not apply."),
            of(
                "reward/{name}/{key}/mean",
                "",
                "Number or boolean that a reward function returns besides its reward, or passes to `log_extra` or \
                 `log_metric`, averaged over completions.",
            ),
            of(
                "reward/{name}/{running_mean,running_std}",
                "",
                "Statistics of a reward over the whole run. Rewards with `normalize` are normalized by them.",
            ),
            of("reward/repeated", "completions", "Completions scored again after a worker crashed or timed out."),
            of("reward/lost", "completions", "Completions whose worker crashed or timed out twice."),
            of(
                "frac_reward_zero_std",
                "",
                "Fraction of sampled groups whose rewards are all equal. Near 1, group-relative objectives learn \
                 little.",
            ),
        ],
    ),
    (
        "Policy update",
        &[
            of("actor/pg_loss", "", "Policy loss, averaged over optimizer steps."),
            of("actor/pg_clipfrac", "", "Fraction of scored tokens whose probability ratio is clipped."),
            of(
                "actor/pg_clipfrac_lower",
                "",
                "Fraction of scored tokens bounded by the dual clip, or by GMPO's clip at negative advantages.",
            ),
            of(
                "actor/ppo_kl",
                "nats",
                "Mean old log-prob minus new log-prob per scored token: an estimate of their KL divergence. `kl_cov` \
                 averages the absolute difference.",
            ),
            of("actor/entropy", "nats", "Entropy of the policy per scored token. At 0, completions no longer vary."),
            of("actor/entropy_coeff", "", "Adaptive entropy coefficient after the step."),
            of("actor/kl_loss", "nats", "KL divergence to the reference policy, before its coefficient. TRL: `kl`."),
            of(
                "actor/reward_kl_penalty",
                "nats",
                "KL penalty in the rewards before its coefficient: mean per token, averaged over completions.",
            ),
            of("actor/reward_kl_penalty_coeff", "", "Coefficient of the KL penalty in this step's rewards."),
            of(
                "actor/router_aux_loss",
                "",
                "Load-balancing loss of mixture-of-experts routers, before its coefficient.",
            ),
            of("actor/grad_norm", "", "Gradient norm before clipping, averaged over optimizer steps."),
            of("actor/lr", "", "Learning rate of the policy. TRL: `learning_rate`."),
            of("actor/loss_scale", "", "Loss scale of f16 training. A dynamic scale falls when gradients overflow."),
            of("actor/skipped_empty", "steps", "Optimizer steps skipped because no token had a weight in the loss."),
        ],
    ),
    (
        "Ratios and clipping",
        &[
            of(
                "clip_ratio/{low_mean,high_mean,region_mean}",
                "",
                "Fraction of tokens clipped at a negative advantage, at a positive advantage, or at either. A fraction \
                 of sequences if the ratio is per sequence. TRL's names.",
            ),
            of("clip_ratio/low_min", "", "Smallest `low_mean` of a sequence, with losses over whole sequences."),
            of("clip_ratio/high_max", "", "Largest `high_mean` of a sequence, with losses over whole sequences."),
            of(
                "cispo_clip_ratio",
                "",
                "Fraction of tokens with a positive advantage and a ratio above the clip range, with `cispo`. TRL's \
                 name.",
            ),
            of("vespo/phi_seq_mean", "", "Mean weight of a sequence with `vespo`. TRL's name."),
        ],
    ),
    (
        "Advantages and critic",
        &[
            of("critic/advantages/{mean,max,min}", "", "Advantages of scored tokens."),
            of(
                "critic/values/{mean,max,min}",
                "",
                "Values that the critic predicted before its update, of scored tokens.",
            ),
            of("critic/returns/{mean,max,min}", "", "Returns that the critic learns to predict, of scored tokens."),
            of(
                "critic/vf_explained_var",
                "",
                "Fraction of the variance of returns that values explain. 1 is perfect; at 0 or below the critic does \
                 not help.",
            ),
            of("critic/vf_loss", "", "Value loss, averaged over optimizer steps."),
            of("critic/vf_clipfrac", "", "Fraction of scored tokens whose value is clipped."),
            of("critic/vpred_mean", "", "Mean value of scored tokens during the update."),
            of("critic/grad_norm", "", "Gradient norm of the critic before clipping."),
            of("critic/lr", "", "Learning rate of the critic, or of the value head if it shares the policy's trunk."),
            of("critic/loss_scale", "", "Loss scale of the critic in f16 training."),
            of("critic/skipped_empty", "steps", "`actor/skipped_empty` of the critic."),
        ],
    ),
    (
        "Sampler and trainer",
        &[
            of(
                "training/rollout_probs_diff_mean",
                "",
                "Mean absolute difference between a token's probability in the sampler and in the trainer. It is near \
                 0 if both use the same precision. With `update.old_log_probs: sampler` it is measured in the first \
                 optimizer step.",
            ),
            of(
                "training/rollout_probs_diff_max",
                "",
                "Largest absolute difference between a token's probability in the sampler and in the trainer.",
            ),
            of(
                "rollout_corr/rollout_is_{mean,max,min}",
                "",
                "Importance-sampling ratios between trainer and sampler before truncation, over scored tokens. Near 1 \
                 is good.",
            ),
            of(
                "rollout_corr/rollout_is_std",
                "",
                "Standard deviation of the ratios, clamped to the threshold and its inverse.",
            ),
            of("rollout_corr/rollout_is_ratio_fraction_high", "", "Fraction of ratios above the threshold."),
            of(
                "rollout_corr/rollout_is_ratio_fraction_low",
                "",
                "Fraction of ratios below the inverse of the threshold.",
            ),
            of(
                "rollout_corr/rollout_is_eff_sample_size",
                "",
                "Effective sample size as a fraction of all scored tokens. 1 means equal ratios.",
            ),
            of(
                "rollout_corr/rollout_is_batch_norm_factor",
                "",
                "Mean weight, by which `rollout_is_batch_normalize` divides all weights.",
            ),
            of("rollout_corr/rollout_rs_masked_fraction", "", "Fraction of sampled tokens that `rollout_rs` rejects."),
            of(
                "rollout_corr/rollout_rs_seq_masked_fraction",
                "",
                "Fraction of sequences with at least one token that `rollout_rs` rejects.",
            ),
        ],
    ),
    (
        "Lengths",
        &[
            of(
                "response_length/{mean,max,min}",
                "tokens",
                "Tokens per completion, tokens from environments included. TRL: `completions/{mean,max,min}_length`.",
            ),
            of(
                "response_length/clip_ratio",
                "",
                "Fraction of completions that reached the length limit. Near 1, raise `rollout.response_length`. TRL: \
                 `completions/clipped_ratio`.",
            ),
            of("prompt_length/{mean,max,min}", "tokens", "Tokens per prompt, averaged over completions."),
        ],
    ),
    (
        "Sampling",
        &[
            of(
                "rollout/prefill_tokens_per_second",
                "tokens/s",
                "Prompt tokens, recomputed tokens included, per second of prefill.",
            ),
            of("rollout/decode_tokens_per_second", "tokens/s", "Tokens per second of decoding."),
            of(
                "rollout/slot_occupancy",
                "",
                "Running sequences divided by `rollout.max_num_seqs`, averaged over decoding steps.",
            ),
            of(
                "rollout/overrun_tokens",
                "tokens",
                "Tokens decoded for sequences that had already ended, because decoding runs one token ahead.",
            ),
            of("rollout/preemptions", "", "Times that a sequence lost its cache blocks because the KV cache was full."),
            of("rollout/preempted", "sequences", "Sequences preempted at least once. If many, enlarge the KV cache."),
            of("rollout/recomputed_tokens", "tokens", "Tokens computed again after a preemption."),
            of(
                "rollout/prefix_cache_hits",
                "tokens",
                "Prompt tokens found in the cache, from another prompt or from before a preemption.",
            ),
            of("rollout/peak_cache_bytes", "bytes", "Peak size of the KV cache blocks in use."),
            of(
                "rollout/kv_waste",
                "",
                "Fraction of cache slots in use that hold no token, averaged over decoding steps.",
            ),
            of(
                "rollout/kv_shared",
                "",
                "Fraction of cache blocks saved by sharing prefixes, averaged over decoding steps.",
            ),
            of(
                "rollout/unjudged",
                "completions",
                "Completions to which no reward applies. They are in no statistic and not trained on.",
            ),
            of(
                "rollout/masked",
                "completions",
                "Completions with a reward but without a trained token: because of `mask_truncated_completions` or \
                 `rollout_rs`, or because ReMax's greedy completion has no reward.",
            ),
            of("rollout/num_gen_batches", "", "Batches of prompts sampled in the step; 1 without dynamic sampling."),
            of("rollout/dropped_groups", "groups", "Sampled groups that the step does not train on."),
            of("rollout/left_out_groups", "groups", "Groups excluded because a reward or an environment failed."),
            of(
                "rollout/{expert_load_max,expert_load_min}",
                "",
                "Load of the most or least used expert of a layer divided by the layer's mean, averaged over layers. 1 \
                 is even.",
            ),
            of("rollout/experts_unused", "", "Fraction of experts that no token used."),
            of(
                "rollout/rerouted",
                "",
                "Fraction of tokens, counted per layer, whose experts differ between sampler and trainer. 0 with \
                 `rollout.router_replay`.",
            ),
        ],
    ),
    (
        "Turns and tools",
        &[
            of("num_turns/{mean,max,min}", "turns", "Turns of the model per rollout."),
            of("tools/call_frequency", "", "Tool calls per rollout. TRL's name."),
            of("tools/failure_frequency", "", "Fraction of tool calls that failed. TRL's name."),
            of("environment/retries", "", "Times that a rollout restarted with a fresh environment."),
            of("environment/lost", "rollouts", "Rollouts whose environment failed twice."),
            of(
                "environment/template_mismatch",
                "rollouts",
                "Rollouts whose tokens differ from the chat template's output for the whole conversation. It should be \
                 0.",
            ),
        ],
    ),
    (
        "Supervised fine-tuning",
        &[
            of("train/loss", "nats", "Negative log-likelihood per scored token of the step's examples. TRL: `loss`."),
            of("train/entropy", "nats", "Entropy of the model per scored token."),
            of(
                "val/loss",
                "nats",
                "Negative log-likelihood per scored token of validation examples. TRL: `eval_loss`.",
            ),
            of("val/perplexity", "", "Exponential of `val/loss`."),
        ],
    ),
    (
        "Validation",
        &[
            of(
                "val-core/{set}/reward",
                "",
                "Mean reward of all validation completions of a set. The task's name is the aggregate of all sets.",
            ),
            of(
                "val-aux/{task}/unjudged",
                "completions",
                "Validation completions without a reward, in no other metric.",
            ),
            of(
                "val-{core,aux}/{set}/{acc,reward}/mean@{n}",
                "",
                "Mean over the completions of a prompt, then over prompts. `acc` is 1 if the first rule that compares \
                 with the ground truth accepts the completion, else 0. `n` is `rollout.val_kwargs.n`. `val-core` has \
                 the main statistics: `acc`, or `reward` in sets without such a rule, at the largest number of \
                 samples. `val-aux` has all others.",
            ),
            of(
                "val-{core,aux}/{set}/{acc,reward}/best@{k}/mean",
                "",
                "Expected best of `k` completions, drawn with replacement. `k` is 2, 4, 8, … and `n`.",
            ),
            of(
                "val-aux/{set}/{acc,reward}/worst@{k}/mean",
                "",
                "Expected worst of `k` completions, drawn with replacement.",
            ),
            of(
                "val-{core,aux}/{set}/{acc,reward}/maj@{k}/mean",
                "",
                "Mean over 1,000 draws of the value of the answer most frequent among `k` completions.",
            ),
            of(
                "val-{core,aux}/{set}/acc/pass@{k}",
                "",
                "Unbiased estimate of the probability that at least one of `k` completions is correct.",
            ),
            of(
                "val-aux/{set}/{acc,reward}/std@{n}",
                "",
                "Standard deviation among the completions of a prompt, averaged over prompts.",
            ),
        ],
    ),
    (
        "Micro-batches",
        &[
            of("batch/num_micro_batches", "", "Micro-batches of the policy update, over all optimizer steps."),
            of("batch/num_critic_micro_batches", "", "Micro-batches of the critic update."),
            of("batch/{tokens,critic_tokens}", "tokens", "Tokens of the sequences of the policy or critic update."),
            of(
                "batch/{padding,critic_padding}",
                "",
                "Fraction of rows that is padding, attention excepted. 0 with packed sequences.",
            ),
            of(
                "batch/{attention_padding,critic_attention_padding}",
                "",
                "Fraction of padding in attention computed by tensor operations. Fused kernels need no padding.",
            ),
            of("batch/{largest_micro_batch,critic_largest_micro_batch}", "tokens", "Rows of the largest micro-batch."),
            of("batch/{token_budget,critic_token_budget}", "tokens", "Limit on the rows of a micro-batch."),
            of(
                "batch/{imbalance,critic_imbalance}",
                "",
                "Cost of the most expensive micro-batch divided by the mean cost; the largest of all optimizer steps.",
            ),
        ],
    ),
    (
        "Times",
        &[
            of("timing_s/step", "s", "Whole step, without validation and checkpoint."),
            of("timing_s/gen", "s", "Sampling. Rules and reward functions run at the same time."),
            of("timing_s/reward", "s", "Rewards after sampling: results that are still pending, and reward models."),
            of("timing_s/reward_wait", "s", "Wait for reward functions and commands after the last completion."),
            of("timing_s/gen_max", "s", "Sampling of greedy baselines (ReMax)."),
            of("timing_s/reward_max", "s", "Rewards of greedy baselines."),
            of("timing_s/old_log_prob", "s", "Log-probs of the policy before its update."),
            of("timing_s/ref", "s", "Log-probs of the reference policy."),
            of("timing_s/values", "s", "Values of the critic."),
            of("timing_s/adv", "s", "Advantages."),
            of("timing_s/update_critic", "s", "Update of the critic."),
            of("timing_s/update_actor", "s", "Update of the policy, or of the model in supervised fine-tuning."),
            of("timing_s/testing", "s", "Sampling of validation completions."),
            of("timing_s/testing_reward", "s", "Rewards of validation completions."),
            of("timing_s/val_loss", "s", "Loss of validation examples."),
            of(
                "timing_s/rank_wait/{max,mean}",
                "s",
                "Wait of ranks, after sampling and rewards, for the slowest rank.",
            ),
            of("timing_per_token_ms/gen", "ms/token", "Sampling time per completion token."),
            of(
                "timing_per_token_ms/update_actor",
                "ms/token",
                "Time of the policy update per token of prompts and completions.",
            ),
        ],
    ),
    (
        "Throughput and memory",
        &[
            of("perf/time_per_step", "s", "Equal to `timing_s/step`."),
            of(
                "perf/total_num_tokens",
                "tokens",
                "Tokens of prompts and completions. A prompt counts once per completion.",
            ),
            of(
                "perf/throughput",
                "tokens/s",
                "`perf/total_num_tokens` per second of all phases. verl divides by the number of GPUs.",
            ),
            of("perf/max_memory_allocated_gb", "GiB", "Peak memory allocated on the device, or on the heap for a CPU."),
            of(
                "perf/max_memory_reserved_gb",
                "GiB",
                "Most device memory reserved at the end of a phase, with the free pages of the pools. Equal to the \
                 allocated peak on a CPU.",
            ),
            of(
                "perf/device_memory_used_gb",
                "GiB",
                "Most device memory in use at the end of a phase according to the driver, other programs included \
                 (CUDA).",
            ),
            of("perf/cpu_memory_used_gb", "GiB", "Peak resident set of the process since its start."),
        ],
    ),
];

/// The description of a metric. If several patterns match, the one with the most fixed characters counts.
#[must_use]
pub fn described(name: &str) -> Option<&'static Described> {
    let all = METRICS.iter().flat_map(|(_, rows)| rows.iter());
    all.filter(|row| matches(row.name, name)).max_by_key(|row| fixed_characters(row.name))
}

fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('{') else {
        return pattern == name;
    };
    let (Some((part, after)), Some(name)) = (rest.split_once('}'), name.strip_prefix(before)) else {
        return false;
    };
    let is_listed = |word: &str| !part.contains(',') || part.split(',').any(|listed| listed == word);
    let mut ends = name.char_indices().map(|(start, character)| start + character.len_utf8());
    ends.any(|end| is_listed(&name[..end]) && matches(after, &name[end..]))
}

fn fixed_characters(pattern: &str) -> usize {
    pattern.split('{').map(|part| part.split_once('}').map_or(part, |(_, after)| after).len()).sum()
}

#[cfg(test)]
mod tests;
