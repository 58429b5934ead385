//! Metrics of `metrics.jsonl`: name, unit, description, and value in a step. The reference page is generated from them.

use super::phase::Phase;
use super::report::{RolloutReport, StepReport};
use super::step_values::{
    actor, batches, count, critic, engine, expert_loads, explained, extra_means, gib, largest, left_out_groups,
    lengths, missing_rewards, ms_per_token, probability_differences, rank_waits, rerouted_share, returns, reward_means,
    rewards, running_statistics, scored, share, some_mean, spread, stats, throughput, truncated_share, turns,
};
use crate::batch::BatchStats;
use crate::objective::mismatch::{DIFF_MAX, DIFF_MEAN};
use crate::rollout::Rollout;
use std::collections::BTreeMap;

/// Metrics of one step or validation, by name.
pub type Metrics = BTreeMap<String, f64>;

/// Metric with the step of a line of `metrics.jsonl`.
pub const GLOBAL_STEP: &str = "training/global_step";

/// A metric, or several metrics whose names follow one pattern.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    /// The name. `{set}` is a variable part of one or more characters, which may contain `/`. `{mean,max,min}` is one
    /// of the listed words.
    pub name: &'static str,
    /// The unit; empty if the metric has none.
    pub unit: &'static str,
    /// One or more sentences in Markdown.
    pub meaning: &'static str,
    values: Values,
}

/// Values of a metric in a step.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Reported under this name by an objective, a phase or a validation.
    Reported,
    /// One value.
    One(fn(&StepReport) -> Option<f64>),
    /// Values by the text between the first and the last brace of the name.
    Each(fn(&StepReport) -> Vec<(String, f64)>),
}

use Values::{Each, One, Reported};

macro_rules! metrics {
    ($($group:literal { $($name:expr, $unit:literal, $values:expr, $meaning:literal;)+ })+) => {
        &[$(($group, &[$(Described { name: $name, unit: $unit, meaning: $meaning, values: $values }),+])),+]
    };
}

/// All metrics in the order of the reference page, by group: a heading and the metrics below it. A row is a name, a
/// unit, the value in a step, and a description.
pub const METRICS: &[(&str, &[Described])] = metrics! {
    "Progress" {
        GLOBAL_STEP, "steps", One(|r| Some(r.step as f64)),
            "Finished steps. The line of step 0 has the validation before training.";
        "training/epoch", "epochs", One(|r| r.epoch),
            "Finished epochs, in supervised fine-tuning on a finite data set.";
    }
    "Rewards" {
        "critic/score/{mean,max,min}", "", Each(|r| spread(&rewards(r, |rollout| rollout.reward))),
            "Reward per completion, before any KL penalty. The mean should rise. TRL: `reward`.";
        "critic/rewards/{mean,max,min}", "",
            Each(|r| spread(&rewards(r, |rollout| rollout.reward.map(|_| rollout.penalized_reward)))),
            "Reward per completion after the KL penalty of `use_kl_in_reward`.";
        "reward/{name}/mean", "", Each(reward_means),
            "One reward by name, before its weight, averaged over the completions to which it applies. The reward that \
             environments return is `environment`. TRL: `rewards/{name}/mean`.";
        "reward/{name}/missing", "completions", Each(missing_rewards),
            "Completions to which the reward does not apply.";
        "reward/{name}/{key}/mean", "", Each(extra_means),
            "Number or boolean that a reward function returns besides its reward, or passes to `log_extra` or \
             `log_metric`, averaged over completions.";
        "reward/{name}/{running_mean,running_std}", "", Each(running_statistics),
            "Statistics of a reward over the whole run. Rewards with `normalize` are normalized by them.";
        "reward/repeated", "completions", One(|r| Some(stats(r)?.programs?.repeated as f64)),
            "Completions scored again after a worker crashed or timed out.";
        "reward/lost", "completions", One(|r| Some(stats(r)?.programs?.lost as f64)),
            "Completions whose worker crashed or timed out twice.";
        "frac_reward_zero_std", "", One(|r| Some(stats(r)?.zero_std_groups / stats(r)?.sampled_groups.max(1) as f64)),
            "Fraction of sampled groups whose rewards are all equal. Near 1, group-relative objectives learn little.";
    }
    "Policy update" {
        "actor/pg_loss", "", Reported, "Policy loss, averaged over optimizer steps.";
        "actor/pg_clipfrac", "", Reported, "Fraction of scored tokens whose probability ratio is clipped.";
        "actor/pg_clipfrac_lower", "", Reported,
            "Fraction of scored tokens bounded by the dual clip, or by GMPO's clip at negative advantages.";
        "actor/ppo_kl", "nats", Reported,
            "Mean old log-prob minus new log-prob per scored token: an estimate of their KL divergence. `kl_cov` \
             averages the absolute difference.";
        "actor/entropy", "nats", Reported, "Entropy of the policy per scored token. At 0, completions no longer vary.";
        "actor/entropy_coeff", "", One(|r| r.rollout.as_ref()?.entropy_coeff),
            "Adaptive entropy coefficient after the step.";
        "actor/kl_loss", "nats", Reported, "KL divergence to the reference policy, before its coefficient. TRL: `kl`.";
        "actor/reward_kl_penalty", "nats", Reported,
            "KL penalty in the rewards before its coefficient: mean per token, averaged over completions.";
        "actor/reward_kl_penalty_coeff", "", Reported, "Coefficient of the KL penalty in this step's rewards.";
        "actor/router_aux_loss", "", Reported,
            "Load-balancing loss of mixture-of-experts routers, before its coefficient.";
        "actor/grad_norm", "", One(|r| actor(r)?.grad_norm.value()),
            "Gradient norm before clipping, averaged over optimizer steps.";
        "actor/lr", "", One(|r| Some(actor(r)?.lr)), "Learning rate of the policy. TRL: `learning_rate`.";
        "actor/loss_scale", "", One(|r| actor(r)?.loss_scale.value()),
            "Loss scale of f16 training. A dynamic scale falls when gradients overflow.";
        "actor/skipped_empty", "steps", One(|r| Some(actor(r)?.skipped_empty as f64)),
            "Optimizer steps skipped because no token had a weight in the loss.";
        "actor/skipped_non_finite", "steps", One(|r| Some(actor(r)?.skipped_non_finite as f64)),
            "Optimizer steps skipped because of NaN or infinite values.";
    }
    "Ratios and clipping" {
        "clip_ratio/{low_mean,high_mean,region_mean}", "", Reported,
            "Fraction of tokens clipped at a negative advantage, at a positive advantage, or at either. A fraction of \
             sequences if the ratio is per sequence. TRL's names.";
        "clip_ratio/low_min", "", Reported, "Smallest `low_mean` of a sequence, with losses over whole sequences.";
        "clip_ratio/high_max", "", Reported, "Largest `high_mean` of a sequence, with losses over whole sequences.";
        "cispo_clip_ratio", "", Reported,
            "Fraction of tokens with a positive advantage and a ratio above the clip range, with `cispo`. TRL's name.";
        "vespo/phi_seq_mean", "", Reported, "Mean weight of a sequence with `vespo`. TRL's name.";
    }
    "Advantages and critic" {
        "critic/advantages/{mean,max,min}", "", Each(|r| spread(&scored(r, |columns| &columns.advantage))),
            "Advantages of scored tokens.";
        "critic/values/{mean,max,min}", "", Each(|r| spread(&scored(r, |columns| &columns.value))),
            "Values that the critic predicted before its update, of scored tokens.";
        "critic/returns/{mean,max,min}", "", Each(|r| spread(&returns(r))),
            "Returns that the critic learns to predict, of scored tokens.";
        "critic/vf_explained_var", "", One(explained),
            "Fraction of the variance of returns that values explain. 1 is perfect; at 0 or below the critic does not \
             help.";
        "critic/vf_loss", "", Reported, "Value loss, averaged over optimizer steps.";
        "critic/vf_clipfrac", "", Reported, "Fraction of scored tokens whose value is clipped.";
        "critic/vpred_mean", "", Reported, "Mean value of scored tokens during the update.";
        "critic/grad_norm", "", One(|r| critic(r)?.grad_norm.value()), "Gradient norm of the critic before clipping.";
        "critic/lr", "", One(|r| actor(r).and_then(|update| update.value_lr).or_else(|| Some(critic(r)?.lr))),
            "Learning rate of the critic, or of the value head if it shares the policy's trunk.";
        "critic/loss_scale", "", One(|r| critic(r)?.loss_scale.value()), "Loss scale of the critic in f16 training.";
        "critic/skipped_empty", "steps", One(|r| Some(critic(r)?.skipped_empty as f64)),
            "`actor/skipped_empty` of the critic.";
        "critic/skipped_non_finite", "steps", One(|r| Some(critic(r)?.skipped_non_finite as f64)),
            "`actor/skipped_non_finite` of the critic.";
    }
    "Sampler and trainer" {
        DIFF_MEAN, "", One(|r| some_mean(&probability_differences(r))),
            "Mean absolute difference between a token's probability in the sampler and in the trainer. It is near 0 if \
             both use the same precision. With `update.old_log_probs: sampler` it is measured in the first optimizer \
             step.";
        DIFF_MAX, "", One(|r| largest(&probability_differences(r))),
            "Largest absolute difference between a token's probability in the sampler and in the trainer.";
        "rollout_corr/rollout_is_{mean,max,min}", "", Reported,
            "Importance-sampling ratios between trainer and sampler before truncation, over scored tokens. Near 1 is \
             good.";
        "rollout_corr/rollout_is_std", "", Reported,
            "Standard deviation of the ratios, clamped to the threshold and its inverse.";
        "rollout_corr/rollout_is_ratio_fraction_high", "", Reported, "Fraction of ratios above the threshold.";
        "rollout_corr/rollout_is_ratio_fraction_low", "", Reported,
            "Fraction of ratios below the inverse of the threshold.";
        "rollout_corr/rollout_is_eff_sample_size", "", Reported,
            "Effective sample size as a fraction of all scored tokens. 1 means equal ratios.";
        "rollout_corr/rollout_is_batch_norm_factor", "", Reported,
            "Mean weight, by which `rollout_is_batch_normalize` divides all weights.";
        "rollout_corr/rollout_rs_masked_fraction", "", Reported,
            "Fraction of sampled tokens that `rollout_rs` rejects.";
        "rollout_corr/rollout_rs_seq_masked_fraction", "", Reported,
            "Fraction of sequences with at least one token that `rollout_rs` rejects.";
    }
    "Lengths" {
        "response_length/{mean,max,min}", "tokens", Each(|r| spread(&lengths(r, |rollout| rollout.completion.len()))),
            "Tokens per completion, tokens from environments included. TRL: `completions/{mean,max,min}_length`.";
        "response_length/clip_ratio", "", One(truncated_share),
            "Fraction of completions that reached the length limit. Near 1, raise `rollout.response_length`. TRL: \
             `completions/clipped_ratio`.";
        "prompt_length/{mean,max,min}", "tokens", Each(|r| spread(&lengths(r, |rollout| rollout.prompt.len()))),
            "Tokens per prompt, averaged over completions.";
    }
    "Sampling" {
        "rollout/prefill_tokens_per_second", "tokens/s", One(|r| Some(engine(r)?.prefill_rate())),
            "Prompt tokens, recomputed tokens included, per second of prefill.";
        "rollout/decode_tokens_per_second", "tokens/s", One(|r| Some(engine(r)?.decode_rate())),
            "Tokens per second of decoding.";
        "rollout/slot_occupancy", "", One(|r| Some(engine(r)?.occupancy())),
            "Running sequences divided by `rollout.max_num_seqs`, averaged over decoding steps.";
        "rollout/overrun_tokens", "tokens", One(|r| Some(engine(r)?.overrun as f64)),
            "Tokens decoded for sequences that had already ended, because decoding runs one token ahead.";
        "rollout/preemptions", "", One(|r| Some(engine(r)?.preemptions as f64)),
            "Times that a sequence lost its cache blocks because the KV cache was full.";
        "rollout/preempted", "sequences", One(|r| Some(engine(r)?.preempted as f64)),
            "Sequences preempted at least once. If many, enlarge the KV cache.";
        "rollout/recomputed_tokens", "tokens", One(|r| Some(engine(r)?.recomputed_tokens as f64)),
            "Tokens computed again after a preemption.";
        "rollout/prefix_cache_hits", "tokens", One(|r| Some(engine(r)?.prefix_cache_hits as f64)),
            "Prompt tokens found in the cache, from another prompt or from before a preemption.";
        "rollout/peak_cache_bytes", "bytes", One(|r| Some(engine(r)?.peak_cache_bytes as f64)),
            "Peak size of the KV cache blocks in use.";
        "rollout/kv_waste", "", One(|r| Some(engine(r)?.kv_waste())),
            "Fraction of cache slots in use that hold no token, averaged over decoding steps.";
        "rollout/kv_shared", "", One(|r| Some(engine(r)?.kv_shared())),
            "Fraction of cache blocks saved by sharing prefixes, averaged over decoding steps.";
        "rollout/unjudged", "completions", One(|r| count(r, |rollout| rollout.reward.is_none())),
            "Completions to which no reward applies. They are in no statistic and not trained on.";
        "rollout/masked", "completions", One(|r| count(r, |rollout| rollout.reward.is_some() && !rollout.is_scored())),
            "Completions with a reward but without a trained token: because of `mask_truncated_completions` or \
             `rollout_rs`, or because ReMax's greedy completion has no reward.";
        "rollout/num_gen_batches", "", One(|r| Some(stats(r)?.gen_batches as f64)),
            "Batches of prompts sampled in the step; 1 without dynamic sampling.";
        "rollout/dropped_groups", "groups", One(|r| Some((stats(r)?.sampled_groups - stats(r)?.kept_groups) as f64)),
            "Sampled groups that the step does not train on.";
        "rollout/left_out_groups", "groups", One(left_out_groups),
            "Groups excluded because a reward or an environment failed.";
        "rollout/{expert_load_max,expert_load_min}", "", Each(expert_loads),
            "Load of the most or least used expert of a layer divided by the layer's mean, averaged over layers. 1 is \
             even.";
        "rollout/experts_unused", "", One(|r| Some(stats(r)?.experts?.unused)),
            "Fraction of experts that no token used.";
        "rollout/rerouted", "", One(rerouted_share),
            "Fraction of tokens, counted per layer, whose experts differ between sampler and trainer. 0 with \
             `rollout.router_replay`.";
    }
    "Turns and tools" {
        "num_turns/{mean,max,min}", "turns",
            Each(|r| turns(r).map_or_else(Vec::new, |_| spread(&lengths(r, Rollout::num_turns)))),
            "Turns of the model per rollout.";
        "tools/call_frequency", "", One(|r| Some(share(turns(r)?.tool_calls, turns(r)?.rollouts))),
            "Tool calls per rollout. TRL's name.";
        "tools/failure_frequency", "", One(|r| Some(share(turns(r)?.failed_calls, turns(r)?.tool_calls))),
            "Fraction of tool calls that failed. TRL's name.";
        "environment/retries", "", One(|r| Some(turns(r)?.retries as f64)),
            "Times that a rollout restarted with a fresh environment.";
        "environment/lost", "rollouts", One(|r| Some(turns(r)?.lost as f64)),
            "Rollouts whose environment failed twice.";
        "environment/template_mismatch", "rollouts", One(|r| Some(turns(r)?.differ_from_template as f64)),
            "Rollouts whose tokens differ from the chat template's output for the whole conversation. It should be 0.";
    }
    "Supervised fine-tuning" {
        "train/loss", "nats", Reported, "Negative log-likelihood per scored token of the step's examples. TRL: `loss`.";
        "train/entropy", "nats", Reported, "Entropy of the model per scored token.";
        "val/loss", "nats", Reported,
            "Negative log-likelihood per scored token of validation examples. TRL: `eval_loss`.";
        "val/perplexity", "", Reported, "Exponential of `val/loss`.";
    }
    "Validation" {
        "val-core/{set}/reward", "", Reported,
            "Mean reward of all validation completions of a set. The task's name is the aggregate of all sets.";
        "val-aux/{task}/unjudged", "completions", Reported,
            "Validation completions without a reward, in no other metric.";
        "val-{core,aux}/{set}/{acc,reward}/mean@{n}", "", Reported,
            "Mean over the completions of a prompt, then over prompts. `acc` is 1 if the first rule that compares with \
             the ground truth accepts the completion, else 0. `n` is `rollout.val_kwargs.n`. `val-core` has the main \
             statistics: `acc`, or `reward` in sets without such a rule, at the largest number of samples. `val-aux` \
             has all others.";
        "val-{core,aux}/{set}/{acc,reward}/best@{k}/mean", "", Reported,
            "Expected best of `k` completions, drawn with replacement. `k` is 2, 4, 8, … and `n`.";
        "val-aux/{set}/{acc,reward}/worst@{k}/mean", "", Reported,
            "Expected worst of `k` completions, drawn with replacement.";
        "val-{core,aux}/{set}/{acc,reward}/maj@{k}/mean", "", Reported,
            "Mean over 1,000 draws of the value of the answer most frequent among `k` completions.";
        "val-{core,aux}/{set}/acc/pass@{k}", "", Reported,
            "Unbiased estimate of the probability that at least one of `k` completions is correct.";
        "val-aux/{set}/{acc,reward}/std@{n}", "", Reported,
            "Standard deviation among the completions of a prompt, averaged over prompts.";
    }
    "Micro-batches" {
        "batch/num_micro_batches", "", One(|r| Some(actor(r)?.batch.micro_batches as f64)),
            "Micro-batches of the policy update, over all optimizer steps.";
        "batch/num_critic_micro_batches", "", One(|r| Some(critic(r)?.batch.micro_batches as f64)),
            "Micro-batches of the critic update.";
        "batch/{tokens,critic_tokens}", "tokens", Each(|r| batches(r, "tokens", |batch| batch.tokens as f64)),
            "Tokens of the sequences of the policy or critic update.";
        "batch/{unique_tokens,critic_unique_tokens}", "tokens",
            Each(|r| batches(r, "unique_tokens", |batch| batch.unique_tokens as f64)),
            "Tokens that are computed: a shared prompt counts once.";
        "batch/{shared_tokens,critic_shared_tokens}", "tokens",
            Each(|r| batches(r, "shared_tokens", |batch| (batch.tokens - batch.unique_tokens) as f64)),
            "Tokens that `memory.share_prefix` saves.";
        "batch/{padding,critic_padding}", "", Each(|r| batches(r, "padding", BatchStats::padding)),
            "Fraction of rows that is padding, attention excepted. 0 with packed sequences.";
        "batch/{attention_padding,critic_attention_padding}", "",
            Each(|r| batches(r, "attention_padding", BatchStats::attention_padding)),
            "Fraction of padding in attention computed by tensor operations. Fused kernels need no padding.";
        "batch/{largest_micro_batch,critic_largest_micro_batch}", "tokens",
            Each(|r| batches(r, "largest_micro_batch", |batch| batch.largest as f64)),
            "Rows of the largest micro-batch.";
        "batch/{token_budget,critic_token_budget}", "tokens",
            Each(|r| batches(r, "token_budget", |batch| batch.budget as f64)),
            "Limit on the rows of a micro-batch.";
        "batch/{imbalance,critic_imbalance}", "", Each(|r| batches(r, "imbalance", |batch| batch.imbalance)),
            "Cost of the most expensive micro-batch divided by the mean cost; the largest of all optimizer steps.";
    }
    "Times" {
        "timing_s/step", "s", One(|r| Some(r.seconds)), "Whole step, without validation and checkpoint.";
        "timing_s/save_checkpoint", "s", One(|r| r.save_seconds), "Wait for the checkpoint of an earlier step.";
        "timing_s/gen", "s", Reported, "Sampling. Rules and reward functions run at the same time.";
        "timing_s/reward", "s", Reported, "Rewards after sampling: results that are still pending, and reward models.";
        "timing_s/reward_wait", "s", One(|r| Some(stats(r)?.programs?.wait_seconds)),
            "Wait for reward functions and commands after the last completion.";
        "timing_s/gen_max", "s", Reported, "Sampling of greedy baselines (ReMax).";
        "timing_s/reward_max", "s", Reported, "Rewards of greedy baselines.";
        "timing_s/old_log_prob", "s", Reported, "Log-probs of the policy before its update.";
        "timing_s/ref", "s", Reported, "Log-probs of the reference policy.";
        "timing_s/values", "s", Reported, "Values of the critic.";
        "timing_s/adv", "s", Reported, "Advantages.";
        "timing_s/update_critic", "s", Reported, "Update of the critic.";
        "timing_s/update_actor", "s", Reported, "Update of the policy, or of the model in supervised fine-tuning.";
        "timing_s/testing", "s", Reported, "Sampling of validation completions.";
        "timing_s/testing_reward", "s", Reported, "Rewards of validation completions.";
        "timing_s/val_loss", "s", Reported, "Loss of validation examples.";
        "timing_s/rank_wait/{max,mean}", "s", Each(rank_waits),
            "Wait of ranks, after sampling and rewards, for the slowest rank.";
        "timing_per_token_ms/gen", "ms/token",
            One(|r| ms_per_token(r, Phase::Generate, RolloutReport::completion_tokens)),
            "Sampling time per completion token.";
        "timing_per_token_ms/update_actor", "ms/token",
            One(|r| ms_per_token(r, Phase::UpdateActor, RolloutReport::total_tokens)),
            "Time of the policy update per token of prompts and completions.";
    }
    "Throughput and memory" {
        "perf/time_per_step", "s", One(|r| Some(r.seconds)), "Equal to `timing_s/step`.";
        "perf/total_num_tokens", "tokens", One(|r| Some(r.rollout.as_ref()?.total_tokens() as f64)),
            "Tokens of prompts and completions. A prompt counts once per completion.";
        "perf/throughput", "tokens/s", One(throughput),
            "`perf/total_num_tokens` per second of all phases. verl divides by the number of GPUs.";
        "perf/max_memory_allocated_gb", "GiB", One(|r| Some(gib(r.memory.as_ref()?.allocated_bytes))),
            "Peak memory allocated on the device, or on the heap for a CPU.";
        "perf/max_memory_reserved_gb", "GiB", One(|r| Some(gib(r.memory.as_ref()?.reserved_bytes))),
            "Most device memory reserved at the end of a phase, with the free pages of the pools. Equal to the \
             allocated peak on a CPU.";
        "perf/device_memory_used_gb", "GiB", One(|r| r.memory.as_ref()?.device_used_bytes.map(gib)),
            "Most device memory in use at the end of a phase according to the driver, other programs included (CUDA).";
        "perf/cpu_memory_used_gb", "GiB", One(|r| Some(gib(r.memory.as_ref()?.resident_bytes.unwrap_or(0)))),
            "Peak resident set of the process since its start.";
    }
};

impl Described {
    /// Adds the values in a step.
    pub(super) fn add(&self, report: &StepReport, metrics: &mut Metrics) {
        match self.values {
            Reported => {}
            One(value) => metrics.extend(value(report).map(|value| (self.name.to_owned(), value))),
            Each(values) => {
                let (before, rest) = self.name.split_once('{').unwrap_or((self.name, ""));
                let (_, after) = rest.rsplit_once('}').unwrap_or_default();
                let named = values(report).into_iter();
                metrics.extend(named.map(|(part, value)| (format!("{before}{part}{after}"), value)));
            }
        }
    }
}

/// The description of a metric. If several patterns match, the one with the most fixed characters counts.
pub fn described(name: &str) -> Option<&'static Described> {
    let rows = METRICS.iter().flat_map(|(_, rows)| rows.iter());
    rows.filter(|row| matches(row.name, name)).max_by_key(|row| fixed_characters(row.name))
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
