//! The parts of verl's `actor` that are about the loss: its name, its clip, how it is added up, the KL beside it.

use super::algorithm::CORRECTION;
use super::data::prompts;
use super::version::{OLD, is_before_0_4, is_since_0_4};
use crate::key_mapping::prelude::*;
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
    set("objective.entropy_coeff", weight).noted(note)
}

/// Whether there is a KL to the reference in the loss.
pub(super) fn has_kl(asked: &SourceKey) -> bool {
    asked.facts.is_on("actor_rollout_ref.actor.use_kl_loss")
}

/// Losses that verl adds up by sequence whatever `loss_agg_mode` says.
const BY_SEQUENCE: [&str; 3] = ["gspo", "sapo", "geo_mean"];

fn mode<'a>(asked: &SourceKey<'a>) -> &'a str {
    asked.facts.text("actor_rollout_ref.actor.policy_loss.loss_mode").unwrap_or("vanilla")
}

pub(super) fn policy_loss(asked: &SourceKey) -> MappedKey {
    // loss_type of a bypassed correction is another loss
    if asked.facts.is_on(&format!("{CORRECTION}.bypass_mode"))
        && asked.facts.text(&format!("{CORRECTION}.loss_type")) == Some("reinforce")
    {
        return not_needed("rollout_correction.loss_type is the loss");
    }
    let (loss, level) = match asked.text() {
        Some("vanilla" | "clip") => ("clip", "token"),
        Some("gspo") => ("clip", "sequence_token"),
        Some("gpg") => ("reinforce", ""),
        Some(loss @ ("cispo" | "sapo")) => (loss, "token"),
        Some(loss @ ("geo_mean" | "clip_cov" | "kl_cov")) => (loss, ""),
        Some(name) => return no_loss(name),
        None => return asked.wrong("the name of a loss"),
    };
    let mut all = vec![("objective.policy_loss", loss.into())];
    if !level.is_empty() {
        all.push(("objective.importance_sampling_level", level.into()));
    }
    if asked.text().is_some_and(|mode| BY_SEQUENCE.contains(&mode)) {
        all.push(("objective.loss_agg_mode", "seq-mean-token-mean".into()));
    }
    set_all(all)
}

fn no_loss(name: &str) -> MappedKey {
    cannot(format!("no loss {name} here; the run uses the clipped loss. docs/guides/algorithms.md lists the losses"))
}

/// The ε on both sides, which recent verl reads only where that of each side is null.
pub(super) fn clip_ratio(asked: &SourceKey) -> MappedKey {
    let given = |side: &&str| {
        let theirs = format!("actor_rollout_ref.actor.clip_ratio_{side}");
        asked.facts.is_written(&theirs) && asked.facts.number(&theirs).is_some_and(|ratio| ratio >= 0.0)
    };
    let open: Vec<&str> = ["low", "high"].into_iter().filter(|side| !given(side)).collect();
    match asked.number() {
        _ if open.is_empty() => not_needed("clip_ratio_low and clip_ratio_high are given"),
        None => asked.wrong("a number"),
        Some(ratio) => set_all(open.iter().map(|side| (format!("objective.clip_ratio_{side}"), ratio.into()))).noted(
            if is_before_0_4(asked.facts) {
                ""
            } else {
                "verl since 0.4 reads clip_ratio_low and clip_ratio_high instead, which are 0.2 there"
            },
        ),
    }
}

/// ε below or above. Below, 1 is all there is: no ratio is negative.
pub(super) fn clip(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.number() {
        Some(low) if key.ends_with("low") && low > 1.0 => {
            set(key, 1.0).noted("ratios are above 0, so that 1 bounds as little")
        }
        Some(ratio) if ratio >= 0.0 => set(key, ratio),
        None if !asked.is_absent() => asked.wrong("a number"),
        _ => not_needed("set by clip_ratio"),
    }
}

pub(super) fn dual_clip(asked: &SourceKey) -> MappedKey {
    if asked.is_absent() && is_before_0_4(asked.facts) {
        return set("objective.clip_ratio_c", Value::Null).noted(OLD);
    }
    if mode(asked) == "gspo" {
        return set("objective.clip_ratio_c", Value::Null).noted("verl's gspo has no dual clip");
    }
    set("objective.clip_ratio_c", plain(asked.value))
}

/// Both divide by the sequences of an optimizer step too.
pub(super) fn loss_scale(asked: &SourceKey) -> MappedKey {
    let count = |key: &str, default: i64| asked.facts.whole(key).unwrap_or(default);
    let prompts = count("actor_rollout_ref.actor.ppo_mini_batch_size", 256).min(prompts(asked.facts));
    let sequences = prompts * count("actor_rollout_ref.rollout.n", 1);
    match asked.number() {
        Some(factor) if factor > 0.0 => set("objective.loss_scale_factor", plain(&(factor * sequences as f64).into()))
            .noted(format!("{factor} x {sequences} sequences of an optimizer step, which verl divides by too")),
        _ if asked.is_off() => not_needed("sequences x response length, as here by default"),
        _ => asked.wrong("a number above 0"),
    }
}

pub(super) fn aggregation(asked: &SourceKey) -> MappedKey {
    match mode(asked) {
        mode if BY_SEQUENCE.contains(&mode) => {
            not_needed(format!("verl's {mode} is a mean over sequences of means over tokens, regardless of this key"))
        }
        _ => set("objective.loss_agg_mode", plain(asked.value)),
    }
}
