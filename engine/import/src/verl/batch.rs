//! verl's batches, and the ranks of policy, reference and critic.

use crate::common::size;
use crate::facts::Facts;
use crate::rules::prelude::*;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: generated loss_scale mini_batch shared_sequences;
    To: critic_tokens micro_batch policy_degree policy_tokens sequences;
    Holds: one_mini_batch;
};

/// Prompts per training step: all prompts of verl's loader, unless DAPO's filter drops some.
fn prompts(facts: &Facts) -> i64 {
    let drawn = facts.whole("data.gen_batch_size").filter(|_| !filters(facts));
    drawn.or_else(|| facts.whole("data.train_batch_size")).unwrap_or(1024)
}

fn filters(facts: &Facts) -> bool {
    facts.is_on("algorithm.filter_groups.enable")
}

/// DAPO's larger batches; it drops prompts whose rewards are all equal.
fn generated(source: &SourceKey) -> MappedKey {
    let prompts = source.facts.number("data.train_batch_size");
    match (source.number(), prompts) {
        (Some(_), _) if !filters(source.facts) => size(source, "trainer.train_batch_size"),
        (Some(drawn), Some(prompts)) if drawn >= prompts && prompts > 0.0 => {
            let key = "rollout.dynamic_sampling.oversampling";
            set(key, drawn / prompts).with_note("gen_batch_size / train_batch_size")
        }
        (Some(_), _) => not_needed("a round draws the prompts that are missing in data.train_batch_size, at least"),
        _ => source.off_or_wrong("a number of prompts"),
    }
}

const MATRICES: &str = "memory.tensor_model_parallel_size";
const STAGES: &str = "memory.pipeline_model_parallel_size";
const SEQUENCES: &str = "memory.ulysses_sequence_parallel_size";

/// Returns true if all prompts of a step make one mini-batch.
fn one_mini_batch(source: &SourceKey) -> bool {
    prompts(source.facts) <= source.facts.whole("actor_rollout_ref.actor.ppo_mini_batch_size").unwrap_or(256)
}

/// Prompts per optimizer step, in both engines.
fn mini_batch(source: &SourceKey) -> MappedKey {
    let prompts = prompts(source.facts);
    match source.count() {
        Some(mini) if mini <= prompts && prompts % mini == 0 => set("update.ppo_mini_batch_size", mini),
        Some(mini) => cannot(format!(
            "update.ppo_mini_batch_size has to divide trainer.train_batch_size, and {prompts} is no multiple of {mini}; without it \
             all prompts make one optimizer step"
        )),
        None => source.wrong("a number of prompts"),
    }
}

/// Sequences of a micro-batch; the older key counts those of all devices, `devices` lists the keys of their numbers.
fn micro_batch(source: &SourceKey, devices: &str) -> MappedKey {
    let counts = devices.split_whitespace().map(|key| source.facts.whole(key).unwrap_or(1).max(1));
    let Some(n) = source.count() else {
        return source.off_or_wrong("a number of sequences");
    };
    set("memory.micro_batch_size", (n / counts.product::<i64>()).max(1)).with_note(
        "sequences; without it only memory.train_tokens splits a step into micro-batches, with the same results",
    )
}

/// The policy's parallel degree of a Firebrick setting.
fn degree(source: &SourceKey, key: &str) -> i64 {
    let verl_keys: &[&str] = match key {
        MATRICES => &["megatron.tensor_model_parallel_size"],
        STAGES => &["megatron.pipeline_model_parallel_size"],
        _ => &[
            "ulysses_sequence_parallel_size",
            "fsdp_config.ulysses_sequence_parallel_size",
            "megatron.context_parallel_size",
        ],
    };
    let degrees = verl_keys.iter().filter_map(|key| source.facts.whole(&format!("actor_rollout_ref.actor.{key}")));
    degrees.max().unwrap_or(1).max(1)
}

/// The policy's sequence-parallel ranks.
fn policy_sharing(source: &SourceKey) -> i64 {
    degree(source, SEQUENCES)
}

/// The degree of another model: all models have the policy's.
fn policy_degree(source: &SourceKey, ours: &str) -> MappedKey {
    let policy = degree(source, ours);
    match source.whole().map_or(1, |n| n.max(1)) {
        n if n == policy => not_needed("policy, reference and critic have the same"),
        n => not_needed(format!(
            "policy, reference and critic are divided over the same ranks, with the same results: the policy's degree is \
             {policy} and this is {n}, and the former applies ({ours})"
        )),
    }
}

/// Token limit of a micro-batch over `ranks` ranks; the source counts the tokens of one rank.
fn tokens_of_ranks(source: &SourceKey, key: &str, ranks: i64) -> MappedKey {
    match source.count() {
        Some(n) if ranks > 1 => {
            set(key, n * ranks).with_note(format!("{n} on each of the {ranks} ranks that share a micro-batch"))
        }
        _ => size(source, key),
    }
}

fn policy_tokens(source: &SourceKey, key: &str) -> MappedKey {
    tokens_of_ranks(source, key, policy_sharing(source))
}

/// Token limit for a number of sequences in a scoring batch.
fn sequences(source: &SourceKey, key: &str) -> MappedKey {
    let length = |key| source.facts.whole(key).unwrap_or(512).max(1);
    let longest = length("data.max_prompt_length") + length("data.max_response_length");
    match source.count() {
        Some(n) => set(key, n * longest).with_note(format!("{n} sequences of at most {longest} tokens")),
        None => source.off_or_wrong("a number of sequences"),
    }
}

/// The critic's sequence-parallel ranks; the policy's by default.
fn critic_sharing(source: &SourceKey) -> i64 {
    let keys = ["critic.", "critic.fsdp."].map(|section| format!("{section}ulysses_sequence_parallel_size"));
    let keys = keys.iter().map(String::as_str).chain(["critic.megatron.context_parallel_size"]);
    let degree = keys.filter_map(|key| source.facts.whole(key)).max();
    degree.map_or_else(|| policy_sharing(source), |n| n.max(1))
}

fn shared_sequences(source: &SourceKey) -> MappedKey {
    match critic_sharing(source) {
        degree if degree == policy_sharing(source) => not_needed("as many as share the policy's, as here by default"),
        degree => set("critic.ulysses_sequence_parallel_size", degree),
    }
}

fn critic_tokens(source: &SourceKey, key: &str) -> MappedKey {
    tokens_of_ranks(source, key, critic_sharing(source))
}

/// Both engines also divide by the sequences of an optimizer step.
fn loss_scale(source: &SourceKey) -> MappedKey {
    let count = |key: &str, default: i64| source.facts.whole(key).unwrap_or(default);
    let prompts = count("actor_rollout_ref.actor.ppo_mini_batch_size", 256).min(prompts(source.facts));
    let sequences = prompts * count("actor_rollout_ref.rollout.n", 1);
    match source.number() {
        Some(factor) if factor > 0.0 => set("objective.loss_scale_factor", plain(&(factor * sequences as f64).into()))
            .with_note(format!("{factor} x {sequences} sequences of an optimizer step, which verl divides by too")),
        _ if source.is_off() => not_needed("sequences x response length, as here by default"),
        _ => source.wrong("a number above 0"),
    }
}
