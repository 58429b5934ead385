//! The rotary embedding of each layer, in configs of either style.

use super::fields::Fields;
use super::layers::LayerKind;
use crate::arch::family::FamilySpec;
use crate::arch::{QueryScaling, Rope, RopeScaling, Yarn};
use firebrick_spec::Result;
use serde_json::{Map, Value};

/// The tables of rotary settings that a config has.
struct RopeTables {
    /// The table of all layers, or of layers without a window where [`Self::sliding`] has another.
    full: Map<String, Value>,
    /// The table of layers with a window, where it is another one.
    sliding: Option<Map<String, Value>>,
}

impl RopeTables {
    /// The tables of a config in either style: `rope_parameters`, of all layers or by their type, or `rope_scaling`
    /// beside `rope_theta`. Of both, transformers 5 takes `rope_scaling`, which where tables are by type is laid over
    /// the one of the layers without a window.
    fn read(f: &Fields<'_>, spec: &FamilySpec) -> Result<Self> {
        let newer = f.object("rope_parameters")?;
        let older = f.object("rope_scaling")?.filter(|table| !table.is_empty());
        if !spec.ropes_by_type {
            let full = match (older, newer) {
                (Some(older), Some(newer)) => {
                    check_lost(f, spec, &older, &newer)?;
                    older
                }
                (Some(table), None) | (None, Some(table)) => table,
                (None, None) => serde_json::from_str(spec.rope).unwrap_or_default(),
            };
            return Ok(Self { full, sliding: None });
        }
        let newer = newer.unwrap_or_default();
        let [full, sliding] = ["full_attention", "sliding_attention"].map(|t| newer.get(t).and_then(Value::as_object));
        if full.is_none() && sliding.is_none() && !newer.is_empty() {
            return Err(f.error(
                "`rope_parameters` has neither `full_attention` nor `sliding_attention`, one of which this family \
                 needs; put its keys into them"
                    .into(),
            ));
        }
        let mut full = full.cloned().unwrap_or_default();
        let older = older.unwrap_or_default();
        if older.contains_key("type") && !older.contains_key("rope_type") && full.contains_key("rope_type") {
            return Err(f.error(
                "`rope_scaling` has `type`, but `rope_parameters` has `rope_type`, which counts (as in transformers 5); \
                 write `rope_type` in `rope_scaling` too, or put all settings into `rope_parameters`"
                    .into(),
            ));
        }
        full.extend(older);
        Ok(Self { full, sliding: Some(sliding.cloned().unwrap_or_default()) })
    }
}

/// Refuses a `rope_scaling` that replaces `rope_parameters` and lacks a setting of it: transformers 5 would take its
/// default, which whoever added `rope_scaling` did not mean.
fn check_lost(f: &Fields<'_>, spec: &FamilySpec, older: &Map<String, Value>, newer: &Map<String, Value>) -> Result<()> {
    let [older, newer] = [older, newer].map(|map| Fields { path: f.path, map });
    let partial = if spec.delta_net { PARTIAL } else { 1.0 };
    let defaults = [
        ("rope_theta", Some(spec.rope_theta)),
        ("partial_rotary_factor", Some(partial)),
        ("llama_4_scaling_beta", None),
    ];
    for (key, default) in defaults {
        let Some(lost) = newer.number(key)? else { continue };
        let is_set = older.present(key).is_some() || f.present(key).is_some();
        if !is_set && default != Some(lost) {
            return Err(f.error(format!(
                "has both `rope_parameters` and `rope_scaling`, of which `rope_scaling` counts (as in transformers 5), \
                 but `{key}` ({lost}) is only in `rope_parameters`; put all settings into one of the two"
            )));
        }
    }
    Ok(())
}

/// Default of `partial_rotary_factor` where it is not 1.
const PARTIAL: f64 = 0.25;

/// Rotary embeddings by layer.
pub(super) fn ropes(
    f: &Fields<'_>,
    spec: &FamilySpec,
    max_positions: usize,
    kinds: &[LayerKind],
) -> Result<Vec<Option<Rope>>> {
    let tables = RopeTables::read(f, spec)?;
    let theta = |key: &str, default: f64| -> Result<f64> { Ok(f.number(key)?.unwrap_or(default)) };
    let full_theta = theta("rope_theta", spec.rope_theta)?;
    let rope = |table, theta| rope(f, table, theta, max_positions, spec.delta_net);
    let full = rope(&tables.full, full_theta)?;
    let sliding = match (&tables.sliding, spec.local_theta) {
        (None, _) => full.clone(),
        (Some(table), Some(local)) => rope(table, theta("rope_local_base_freq", local)?)?,
        (Some(table), None) => rope(table, full_theta)?,
    };
    let layer_rope = |kind: &LayerKind| {
        let rope = if kind.sliding { &sliding } else { &full };
        kind.rotary.then(|| rope.clone())
    };
    Ok(kinds.iter().map(layer_rope).collect())
}

/// One table of rotary settings.
fn rope(
    f: &Fields<'_>,
    table: &Map<String, Value>,
    theta: f64,
    max_positions: usize,
    may_be_partial: bool,
) -> Result<Rope> {
    let r = Fields { path: f.path, map: table };
    let theta = r.number("rope_theta")?.unwrap_or(theta);
    let partial = rotary_factor(f, &r)?.unwrap_or(1.0);
    if !may_be_partial && (partial - 1.0).abs() > f64::EPSILON {
        return Err(f.error(format!("`partial_rotary_factor` {partial} is not supported; only 1.0 is")));
    }
    let scaling = scaling(f, &r, max_positions)?;
    Ok(Rope { theta, scaling })
}

fn rotary_factor(f: &Fields<'_>, table: &Fields<'_>) -> Result<Option<f64>> {
    match table.number("partial_rotary_factor")? {
        Some(factor) => Ok(Some(factor)),
        None => f.number("partial_rotary_factor"),
    }
}

/// The leading dimensions of a head that are rotated (`partial_rotary_factor`).
pub(super) fn partial_rotary(f: &Fields<'_>, spec: &FamilySpec, head_dim: usize) -> Result<usize> {
    if !spec.delta_net {
        return Ok(head_dim);
    }
    let table = RopeTables::read(f, spec)?.full;
    let table = Fields { path: f.path, map: &table };
    let factor = rotary_factor(f, &table)?.unwrap_or(PARTIAL);
    let dims = (head_dim as f64 * factor) as usize;
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        return Err(f.error(format!(
            "`partial_rotary_factor` {factor} of heads of {head_dim} gives {dims} dimensions; expected an even number up to {head_dim}"
        )));
    }
    Ok(dims)
}

fn scaling(f: &Fields<'_>, r: &Fields<'_>, max_positions: usize) -> Result<RopeScaling> {
    let kind = r.present("rope_type").or_else(|| r.present("type")).map_or(Some("default"), Value::as_str);
    let required = |key: &str| r.number(key)?.ok_or_else(|| f.error(format!("rotary scaling {kind:?} needs `{key}`")));
    let original = r.size("original_max_position_embeddings")?.unwrap_or(max_positions);
    Ok(match kind {
        Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear { factor: required("factor")? },
        Some("dynamic") => RopeScaling::Dynamic { factor: required("factor")?, original },
        Some("llama3") => RopeScaling::Llama3 {
            factor: required("factor")?,
            low: required("low_freq_factor")?,
            high: required("high_freq_factor")?,
            original,
        },
        Some("yarn") => RopeScaling::Yarn(yarn(f, r, required("factor")?, original)?),
        other => {
            return Err(f.error(format!(
                "rotary scaling {} is not supported; known: default, linear, dynamic, llama3, yarn",
                other.map_or_else(|| "of that type".to_owned(), |name| format!("{name:?}"))
            )));
        }
    })
}

fn yarn(f: &Fields<'_>, r: &Fields<'_>, factor: f64, original: usize) -> Result<Yarn> {
    // transformers takes a zero for a number that is not set
    let number = |key: &str| -> Result<Option<f64>> { Ok(r.number(key)?.filter(|&x| x != 0.0)) };
    let mscales = number("mscale")?.zip(number("mscale_all_dim")?);
    let attention_factor = match r.number("attention_factor")? {
        Some(factor) => factor,
        None => Yarn::default_attention_factor(factor, mscales.map(|(one, all_dim)| [one, all_dim])),
    };
    let yarn = Yarn {
        factor,
        beta_fast: number("beta_fast")?.unwrap_or(32.0),
        beta_slow: number("beta_slow")?.unwrap_or(1.0),
        truncate: r.flag("truncate", true)?,
        attention_factor,
        original,
    };
    let positive = [factor, yarn.beta_fast, yarn.beta_slow, attention_factor];
    if positive.iter().any(|x| !x.is_finite() || *x <= 0.0) || yarn.beta_fast < yarn.beta_slow {
        return Err(f.error(format!(
            "rotary scaling \"yarn\" needs positive values and `beta_fast` no smaller than `beta_slow`, found {yarn:?}"
        )));
    }
    Ok(yarn)
}

/// The growth of queries with their position.
pub(super) fn query_scaling(f: &Fields<'_>, spec: &FamilySpec, max_positions: usize) -> Result<Option<QueryScaling>> {
    if !spec.query_scaling {
        return Ok(None);
    }
    let table = RopeTables::read(f, spec)?.full;
    let r = Fields { path: f.path, map: &table };
    let original = r.size("original_max_position_embeddings")?;
    let beta = r.number("llama_4_scaling_beta")?;
    Ok(beta.map(|beta| QueryScaling { beta, original: original.unwrap_or(max_positions) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;
    use serde_json::json;
    use std::path::Path;

    fn parse(family: &str, keys: &Value) -> Result<Arch> {
        let mut config = json!({"model_type": family, "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8});
        let (Value::Object(config), Value::Object(keys)) = (&mut config, keys) else { panic!("objects") };
        config.extend(keys.clone());
        Arch::from_config(config, Path::new("config.json"))
    }

    /// Results of transformers 5.24 for both keys: the base, and the factor of the scaling, of the first and last
    /// layer.
    #[test]
    fn of_two_keys_for_one_setting_the_one_that_transformers_takes_counts() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
        let linear = json!({"type": "linear", "factor": 2.0, "rope_theta": 9e5});
        let plain = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let by_type = json!({"sliding_attention": plain(1e4), "full_attention": plain(3e6)});
        for (family, keys, first, last) in [
            ("llama", json!({"rope_scaling": yarn, "rope_parameters": plain(1e4)}), (1e4, 4.0), (1e4, 4.0)),
            (
                "llama",
                json!({"rope_scaling": yarn, "rope_parameters": plain(5e5), "rope_theta": 7e5}),
                (7e5, 4.0),
                (7e5, 4.0),
            ),
            ("llama", json!({"rope_scaling": linear, "rope_parameters": plain(5e5)}), (9e5, 2.0), (9e5, 2.0)),
            ("llama", json!({"rope_scaling": {}, "rope_parameters": linear}), (9e5, 2.0), (9e5, 2.0)),
            ("llama", json!({"rope_scaling": null, "rope_parameters": plain(5e5)}), (5e5, 1.0), (5e5, 1.0)),
            ("llama", json!({"rope_theta": 7e5, "rope_parameters": plain(5e5)}), (5e5, 1.0), (5e5, 1.0)),
            ("llama", json!({"rope_theta": 7e5, "rope_parameters": {"rope_type": "default"}}), (7e5, 1.0), (7e5, 1.0)),
            ("qwen3", json!({"rope_scaling": yarn, "rope_theta": 1e6}), (1e6, 4.0), (1e6, 4.0)),
            ("ministral3", json!({"rope_scaling": yarn}), (1e4, 4.0), (1e4, 4.0)),
            ("qwen3_5_text", json!({"rope_parameters": {"rope_type": "default"}}), (1e4, 1.0), (1e4, 1.0)),
            ("gemma3_text", json!({"rope_scaling": yarn, "rope_parameters": by_type}), (1e4, 1.0), (3e6, 4.0)),
            (
                "gemma3_text",
                json!({"rope_theta": 5e6, "rope_local_base_freq": 2e4, "rope_parameters": by_type}),
                (1e4, 1.0),
                (3e6, 1.0),
            ),
        ] {
            let arch = parse(family, &keys).unwrap_or_else(|e| panic!("{family} {keys}: {e}"));
            let of = |layer: usize| {
                let rope = arch.ropes[layer].clone().unwrap();
                let factor = match rope.scaling {
                    RopeScaling::Yarn(yarn) => yarn.factor,
                    RopeScaling::Linear { factor } => factor,
                    _ => 1.0,
                };
                (rope.theta, factor)
            };
            assert_eq!((of(0), of(5)), (first, last), "{family} {keys}");
        }
    }

    #[test]
    fn a_setting_that_only_the_replaced_key_has_is_refused_with_both_keys() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
        for (family, lost) in [
            ("llama", json!({"rope_theta": 5e5})),
            ("qwen3_5_text", json!({"partial_rotary_factor": 0.5})),
            ("ministral3", json!({"llama_4_scaling_beta": 0.1})),
        ] {
            let key = lost.as_object().unwrap().keys().next().unwrap().clone();
            let keys = json!({"rope_scaling": yarn, "rope_parameters": lost});
            let message = parse(family, &keys).unwrap_err().to_string();
            for part in ["`rope_scaling`", "`rope_parameters`", &key] {
                assert!(message.contains(part), "{part} is not in: {message}");
            }
        }
        // transformers keeps `rope_type: default`
        let older = json!({"type": "linear", "factor": 2.0});
        let newer = json!({"full_attention": {"rope_type": "default"}});
        let message = parse("gemma3_text", &json!({"rope_scaling": older, "rope_parameters": newer})).unwrap_err();
        assert!(message.to_string().contains("`type`"), "{message}");
        // transformers drops a table without types where layers have them
        let flat = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}});
        assert!(parse("gemma3_text", &flat).unwrap_err().to_string().contains("`full_attention`"));
    }
}
