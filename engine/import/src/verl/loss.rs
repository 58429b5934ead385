//! The parts of verl's `actor` that are about the loss: its name, its clip, how it is added up, the KL beside it.

use super::algorithm::CORRECTION;
use super::data::prompts;
use super::version::{OLD, is_before_0_4, is_since_0_4};
use crate::key_mapping::{MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::Value;

/// The entropy bonus.
pub(super) fn entropy(asked: &SourceKey) -> MappedKey {
    let Some(weight) = asked.number() else {
        return asked.wrong("a number");
    };
    let note = match asked.facts {
        facts if facts.is_written(asked.key) || is_since_0_4(facts) => "",
        facts if is_before_0_4(facts) => OLD,
        _ => "0.001 in verl before 0.4: nothing in the files tells the version",
    };
    set_noted("objective.entropy_coeff", weight, note)
}

/// Whether there is a KL to the reference in the loss.
pub(super) fn kl_switch(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("set by objective.kl_loss_coef above 0");
    }
    set("objective.kl_loss_coef", 0.0)
}

pub(super) fn kl_part(asked: &SourceKey, key: &str) -> MappedKey {
    if asked.facts.is_on("actor_rollout_ref.actor.use_kl_loss") {
        return set(key, plain(asked.value));
    }
    not_needed("use_kl_loss is off, so the key is ignored")
}

const MODE: &str = "actor_rollout_ref.actor.policy_loss.loss_mode";

/// Losses that verl adds up by sequence whatever `loss_agg_mode` says.
const BY_SEQUENCE: [&str; 3] = ["gspo", "sapo", "geo_mean"];

fn mode<'a>(asked: &SourceKey<'a>) -> &'a str {
    asked.facts.text(MODE).unwrap_or("vanilla")
}

pub(super) fn policy_loss(asked: &SourceKey) -> MappedKey {
    let settings = |loss: &str, level: &str| {
        let mut all = vec![("objective.policy_loss".to_owned(), Value::from(loss))];
        if ["clip", "cispo", "sapo"].contains(&loss) {
            all.push(("objective.importance_sampling_level".into(), level.into()));
        }
        if asked.text().is_some_and(|mode| BY_SEQUENCE.contains(&mode)) {
            all.push(("objective.loss_agg_mode".into(), "seq-mean-token-mean".into()));
        }
        MappedKey::Set(all, String::new())
    };
    // loss_type of a bypassed correction is another loss
    let correction = CORRECTION;
    if asked.facts.is_on(&format!("{correction}.bypass_mode"))
        && asked.facts.text(&format!("{correction}.loss_type")) == Some("reinforce")
    {
        return not_needed("rollout_correction.loss_type is the loss");
    }
    match asked.text() {
        Some("vanilla" | "clip") => settings("clip", "token"),
        Some("gspo") => settings("clip", "sequence_token"),
        Some("gpg") => settings("reinforce", "token"),
        Some("geo_mean") => settings("geo_mean", "token"),
        Some("cispo") => settings("cispo", "token"),
        Some("sapo") => settings("sapo", "token"),
        Some("clip_cov") => settings("clip_cov", "token"),
        Some("kl_cov") => settings("kl_cov", "token"),
        Some(name) => cannot(format!(
            "no loss {name} here; the run uses the clipped loss. docs/guides/algorithms.md lists the losses"
        )),
        None => asked.wrong("the name of a loss"),
    }
}

/// ε below or above. Below, 1 is all there is: no ratio is negative.
pub(super) fn clip(asked: &SourceKey, key: &str) -> MappedKey {
    let key = format!("objective.{key}");
    match asked.number() {
        Some(low) if key.ends_with("low") && low > 1.0 => {
            set_noted(&key, 1.0, "ratios are above 0, so that 1 bounds as little")
        }
        Some(ratio) if ratio < 0.0 => not_needed("set by clip_ratio"),
        Some(ratio) => set(&key, ratio),
        None if asked.is_absent() => not_needed("set by clip_ratio"),
        None => asked.wrong("a number"),
    }
}

pub(super) fn dual_clip(asked: &SourceKey) -> MappedKey {
    if asked.is_absent() && is_before_0_4(asked.facts) {
        return MappedKey::Set(vec![("objective.clip_ratio_c".into(), Value::Null)], OLD.into());
    }
    if mode(asked) == "gspo" {
        return MappedKey::Set(
            vec![("objective.clip_ratio_c".into(), Value::Null)],
            "verl's gspo has no dual clip".into(),
        );
    }
    set("objective.clip_ratio_c", plain(asked.value))
}

/// Both divide by the sequences of an optimizer step too.
pub(super) fn loss_scale(asked: &SourceKey) -> MappedKey {
    let count = |key: &str, default: i64| asked.facts.whole(key).unwrap_or(default);
    let prompts = count("actor_rollout_ref.actor.ppo_mini_batch_size", 256).min(prompts(asked.facts));
    let sequences = prompts * count("actor_rollout_ref.rollout.n", 1);
    match asked.number() {
        Some(factor) if factor > 0.0 => set_noted(
            "objective.loss_scale_factor",
            plain(&(factor * sequences as f64).into()),
            format!("{factor} x {sequences} sequences of an optimizer step, which verl divides by too"),
        ),
        _ if asked.is_off() => not_needed("sequences x response length, as here by default"),
        _ => asked.wrong("a number above 0"),
    }
}

pub(super) fn aggregation(asked: &SourceKey) -> MappedKey {
    if BY_SEQUENCE.contains(&mode(asked)) {
        return not_needed(format!(
            "verl's {} is a mean over sequences of means over tokens, regardless of this key",
            mode(asked)
        ));
    }
    set("objective.loss_agg_mode", plain(asked.value))
}
