//! verl's keys (its YAML and Hydra overrides, 2024 to 2026) and their conversions.

mod batch;
mod reward_model;
mod rollout;
mod trainer;

use super::assembly::Assembly;
use super::facts::Facts;
use super::rules::Functions;
use serde_json::json;

/// Functions of the table `rules/verl.txt`.
pub(super) const FUNCTIONS: [Functions; 4] =
    [batch::FUNCTIONS, reward_model::FUNCTIONS, rollout::FUNCTIONS, trainer::FUNCTIONS];

/// Adds settings that follow from several keys: the rows' format, the reward, the run folder.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    into.put("task.kind", json!("dataset"));
    // verl has one parameter group
    into.put("optim.decay_norms_and_biases", json!(true));
    if facts.text("algorithm.adv_estimator") == Some("gae") {
        into.put("critic.optim.decay_norms_and_biases", json!(true));
    }
    into.put("task.answer_field", json!("reward_model.ground_truth"));
    // a length penalty alone grades nothing
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let (reward, is_certain) = reward_model::guess(facts);
        into.rewards.insert(0, reward);
        if !is_certain {
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
    if names.iter().any(|name| facts.is_unresolved(name)) {
        return;
    }
    let parts: Vec<&str> = names.iter().filter_map(|name| facts.text(name)).collect();
    if !parts.is_empty() {
        into.put("output", json!(format!("runs/{}", parts.join("/"))));
    }
}
