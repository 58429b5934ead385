//! verl's keys (its YAML and Hydra overrides, 2024 to 2026) and what they become.

mod actor;
mod algorithm;
mod critic;
mod data;
mod loss;
mod model;
mod multi_turn;
mod optimizer;
mod reward_model;
mod rollout;
mod trainer;
mod version;

use super::assembly::Assembly;
use super::entry::PROGRAM;
use super::facts::Facts;
use super::key_mapping::KeyTable;
use super::literal::settings;
use serde_json::{Value, json};

/// All tables.
pub(super) const TABLES: &[KeyTable] = &[
    data::TABLE,
    model::TABLE,
    model::LIGER,
    actor::TABLE,
    actor::REFERENCE,
    rollout::TABLE,
    multi_turn::TABLE,
    algorithm::TABLE,
    critic::TABLE,
    reward_model::TABLE,
    trainer::TABLE,
    trainer::AROUND,
];

/// What verl does where a file does not say (`ppo_trainer.yaml` of its versions), as far as it sets something here.
const DEFAULTS: [(&str, &str); 4] = [
    ("algorithm.", "adv_estimator=gae kl_ctrl.kl_coef=0.001"),
    (
        "actor_rollout_ref.actor.",
        "policy_loss.loss_mode=vanilla clip_ratio_low=0.2 clip_ratio_high=0.2 loss_agg_mode=token-mean \
         policy_loss.ppo_kl_coef=0.1 use_kl_loss=false kl_loss_coef=0.001 kl_loss_type=low_var_kl \
         ppo_mini_batch_size=256 fsdp_config.dtype=bfloat16",
    ),
    ("actor_rollout_ref.", "model.enable_gradient_checkpointing=true rollout.n=1 model.lora_alpha=16"),
    ("", "data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 trainer.save_freq=-1"),
];

/// The defaults of the version that the files are of.
pub(super) fn defaults(facts: &Facts) -> Vec<(String, Value)> {
    let old = version::is_before_0_4(facts);
    // verl before 0.4 took the KL off the reward wherever it was not in the loss
    let in_loss = facts.is_on("actor_rollout_ref.actor.use_kl_loss");
    let kl_in_reward = old && !in_loss && !version::is_deepscaler(facts);
    let mut all = DEFAULTS.to_vec();
    all.push(("algorithm.", if kl_in_reward { "use_kl_in_reward=true" } else { "use_kl_in_reward=false" }));
    let of_version = if old { "clip_ratio_c= entropy_coeff=0.001" } else { "clip_ratio_c=3.0 entropy_coeff=0" };
    all.push(("actor_rollout_ref.actor.", of_version));
    if version::is_search_r1(facts) {
        all.push(("actor_rollout_ref.rollout.", "top_p=0.95"));
    }
    if version::is_deepscaler(facts) {
        all.push(("actor_rollout_ref.rollout.", "val_temperature=0.6 n_val=8"));
    }
    all.into_iter().flat_map(|(section, text)| settings(section, text)).collect()
}

/// Why the files are not of a run that is imported: supervised training, or what only samples.
pub(super) fn refusal(facts: &Facts) -> Option<String> {
    let program = facts.text(PROGRAM).unwrap_or_default();
    let is_sft = program.contains("sft_trainer")
        || ["model.partial_pretrain", "data.prompt_dict_keys", "data.response_dict_keys", "data.multiturn."]
            .iter()
            .any(|start| facts.has_below(start));
    if is_sft {
        return Some(
            "the files are of supervised training (verl's sft_trainer), which is not imported: write a configuration with \
             a section `sft` for `firebrick sft` (docs/reference/configuration.md)"
                .into(),
        );
    }
    ["main_generation", "main_eval"].iter().any(|name| program.contains(name)).then(|| {
        format!(
            "{program} trains nothing, and its files are not imported: `firebrick generate` samples from a model, \
             `firebrick eval` evaluates one"
        )
    })
}

/// What follows from several keys: the rows' form, what grades them, the run folder.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    into.put("task.kind", json!("dataset"));
    // verl's parameter groups are one
    into.put("optim.decay_norms_and_biases", json!(true));
    if facts.text("algorithm.adv_estimator") == Some("gae") {
        into.put("critic.optim.decay_norms_and_biases", json!(true));
    }
    into.put("task.answer_field", json!("reward_model.ground_truth"));
    // what only adds to a reward is none by itself
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let (reward, sure) = reward_model::guess(facts);
        into.rewards.insert(0, reward);
        if !sure {
            into.replace_rewards("what grades a completion: verl chooses a function for each row by its data_source");
        }
    }
    output(facts, into);
}

fn output(facts: &Facts, into: &mut Assembly) {
    if into.has("output") {
        return;
    }
    let names = ["trainer.project_name", "trainer.experiment_name"];
    if names.iter().any(|name| facts.is_open(name)) {
        return;
    }
    let parts: Vec<&str> = names.iter().filter_map(|name| facts.text(name)).collect();
    if !parts.is_empty() {
        into.put("output", json!(format!("runs/{}", parts.join("/"))));
    }
}
