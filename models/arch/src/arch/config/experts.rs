//! Which layers have experts, and how many.

use super::fields::Fields;
use crate::arch::family::{ExpertDefaults, FamilySpec};
use crate::arch::{Experts, FeedForward, MAX_EXPERT_LAYERS};
use firebrick_spec::Result;
use serde_json::Value;

/// The feed-forwards of all layers.
pub(super) fn feed_forwards(f: &Fields<'_>, spec: &FamilySpec, layers: usize) -> Result<Vec<FeedForward>> {
    let Some(defaults) = &spec.experts else {
        return Ok(vec![FeedForward::Dense; layers]);
    };
    if layers > MAX_EXPERT_LAYERS {
        return Err(f.error(format!(
            "`num_hidden_layers` ({layers}) must be at most {MAX_EXPERT_LAYERS} in a model with experts"
        )));
    }
    let experts = FeedForward::Experts(experts(f, defaults)?);
    if !defaults.some_dense {
        return Ok(vec![experts; layers]);
    }
    let dense = dense_layers(f)?;
    let step = f.size("decoder_sparse_step")?.unwrap_or(1);
    let feed_forward = |layer: usize| {
        if dense.contains(&layer) || !(layer + 1).is_multiple_of(step) { FeedForward::Dense } else { experts }
    };
    Ok((0..layers).map(feed_forward).collect())
}

/// `num_experts` is `num_local_experts` in configs of transformers 5. Defaults are transformers' of the family.
fn experts(f: &Fields<'_>, defaults: &ExpertDefaults) -> Result<Experts> {
    let count = match f.size("num_experts")? {
        Some(count) => count,
        None => f.size("num_local_experts")?.unwrap_or(defaults.count),
    };
    // a route has 16 bits for an expert
    if count >= usize::from(u16::MAX) {
        return Err(f.error(format!("`num_experts` ({count}) must be below {}", u16::MAX)));
    }
    let per_token = f.size("num_experts_per_tok")?.unwrap_or(defaults.per_token);
    if per_token > count {
        return Err(f.error(format!("`num_experts_per_tok` ({per_token}) must be at most `num_experts` ({count})")));
    }
    Ok(Experts {
        count,
        per_token,
        intermediate_size: f.size(defaults.width_key)?.unwrap_or(defaults.width),
        normalised: defaults.normalised || f.flag("norm_topk_prob", false)?,
        shared: match defaults.shared {
            Some(width) => Some(f.size("shared_expert_intermediate_size")?.unwrap_or(width)),
            None => None,
        },
        layout: defaults.layout,
        bias: defaults.bias,
    })
}

/// The layers that are dense whatever their place is: `mlp_only_layers`.
fn dense_layers(f: &Fields<'_>) -> Result<Vec<usize>> {
    let list = f.typed("mlp_only_layers", "a list", |v| v.as_array().cloned())?;
    let layer = |entry: &Value| {
        let index = entry.as_u64().and_then(|n| usize::try_from(n).ok());
        index.ok_or_else(|| f.error(format!("`mlp_only_layers` must list indices of layers, found {entry}")))
    };
    list.unwrap_or_default().iter().map(layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;
    use serde_json::json;
    use std::path::Path;

    fn parse(changes: &Value) -> Result<Arch> {
        let mut config = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 6, "num_attention_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 12
        });
        let (Value::Object(config), Value::Object(changes)) = (&mut config, changes) else { panic!("objects") };
        config.extend(changes.clone());
        Arch::from_config(config, Path::new("config.json"))
    }

    fn layers(changes: &Value) -> Vec<usize> {
        parse(changes).unwrap().expert_layers().map(|(layer, _)| layer).collect()
    }

    #[test]
    fn layers_are_mixtures_unless_they_are_listed_or_between_the_steps() {
        assert_eq!(layers(&json!({})), [0, 1, 2, 3, 4, 5]);
        assert_eq!(layers(&json!({"decoder_sparse_step": 2})), [1, 3, 5]);
        let changes = json!({"decoder_sparse_step": 2, "mlp_only_layers": [3, 0]});
        assert_eq!(layers(&changes), [1, 5]);
    }

    #[test]
    fn both_names_of_the_number_of_experts_are_read() {
        let experts = parse(&json!({"num_experts": null, "num_local_experts": 16})).unwrap().experts(0).unwrap();
        let sizes = [experts.count, experts.per_token, experts.intermediate_size];
        assert_eq!((sizes, experts.normalised), ([16, 2, 12], false));
    }

    #[test]
    fn more_experts_a_token_than_there_are_and_unknown_lists_are_refused_by_name() {
        let message = parse(&json!({"num_experts_per_tok": 5})).unwrap_err().to_string();
        assert!(message.contains("`num_experts_per_tok` (5)") && message.contains("(4)"), "{message}");
        let message = parse(&json!({"mlp_only_layers": ["first"]})).unwrap_err().to_string();
        assert!(message.contains("mlp_only_layers") && message.contains("first"), "{message}");
    }

    #[test]
    fn a_window_is_used_only_where_the_config_says_so_and_then_in_all_layers() {
        let windows = |changes: &Value| parse(changes).unwrap().windows;
        assert_eq!(windows(&json!({"sliding_window": 64})), vec![None; 6]);
        let used = json!({"sliding_window": 64, "use_sliding_window": true});
        assert_eq!(windows(&used), vec![Some(64); 6]);
    }
}
