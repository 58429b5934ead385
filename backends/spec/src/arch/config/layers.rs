//! What differs from layer to layer: sliding windows and rotary embeddings.

use super::fields::Fields;
use crate::Result;
use crate::arch::{Family, Mixer, QueryScaling, Rope, RopeScaling, Yarn};
use serde_json::{Map, Value, json};

/// A layer's attention, as transformers' `layer_types` tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerKind {
    /// Whether it is one of the layers with a window (`sliding_attention`), in families that have both kinds.
    pub sliding: bool,
    /// The window, where it has one.
    pub window: Option<usize>,
    /// Whether it rotates queries and keys.
    pub rotary: bool,
    /// What mixes its tokens.
    pub mixer: Mixer,
}

/// The kinds of all layers. `layer_types` wins where a config lists it (transformers 4.53 and later).
pub(super) fn layers(f: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<LayerKind>> {
    let window = window(f, family)?;
    let rotary = rotary(f, family, layers)?;
    let sliding = match layer_types(f, family, layers)? {
        Some(types) => types,
        None => sliding_layers(f, family, layers, &rotary)?,
    };
    let mixers = mixers(f, family, layers)?;
    let kinds = sliding.into_iter().zip(rotary).zip(mixers);
    let kinds = kinds.map(|((sliding, rotary), mixer)| LayerKind {
        sliding,
        window: window.filter(|_| sliding),
        rotary,
        mixer,
    });
    Ok(kinds.collect())
}

/// What mixes the tokens of each layer: in Qwen 3.5 every so-manieth layer attends, unless a list says which.
fn mixers(f: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<Mixer>> {
    if !family.is_qwen3_5() {
        return Ok(vec![Mixer::Attention; layers]);
    }
    let Some(types) = f.by_layer("layer_types", layers)? else {
        let every = f.size("full_attention_interval")?.unwrap_or(4);
        let mixer = |i: usize| match (i + 1) % every {
            0 => Mixer::Attention,
            _ => Mixer::GatedDeltaNet,
        };
        return Ok((0..layers).map(mixer).collect());
    };
    check_length(f, &types, layers)?;
    let mixer = types.iter().map(|t| match t.as_str() {
        Some("full_attention") => Ok(Mixer::Attention),
        Some("linear_attention") => Ok(Mixer::GatedDeltaNet),
        _ => Err(f.error(format!(
            "`layer_types` names {t}; known: full_attention, linear_attention"
        ))),
    });
    mixer.collect()
}

/// `layer_types` has an entry for each layer, and no more.
fn check_length(f: &Fields<'_>, types: &[Value], layers: usize) -> Result<()> {
    if types.len() == layers {
        return Ok(());
    }
    Err(f.error(format!(
        "`layer_types` has {} entries for {layers} layers",
        types.len()
    )))
}

/// The window of the layers that have one.
fn window(f: &Fields<'_>, family: Family) -> Result<Option<usize>> {
    let sliding = f.size("sliding_window")?;
    let absent = f.map.get("sliding_window").is_none();
    let listed = f.present("layer_types").is_some();
    Ok(match family {
        // their configs' default, where the key is absent rather than null
        Family::Gemma2 | Family::Gemma3 | Family::Olmo3 if absent => Some(4096),
        Family::Mistral | Family::Qwen2 | Family::Qwen3 if absent && !listed => Some(4096),
        Family::Qwen3_5 | Family::Qwen3_5Moe => None,
        Family::SmolLm3 | Family::Qwen3Moe if !f.flag("use_sliding_window", false)? => None,
        _ => sliding,
    })
}

fn layer_types(f: &Fields<'_>, family: Family, layers: usize) -> Result<Option<Vec<bool>>> {
    // Ministral 3 has one mask for all of its layers, whatever its config lists; Qwen 3.5 lists mixers
    if family == Family::Ministral3 || family.is_qwen3_5() {
        return Ok(None);
    }
    let Some(types) = f.by_layer("layer_types", layers)? else {
        return Ok(None);
    };
    check_length(f, &types, layers)?;
    let sliding = types.iter().map(|t| match t.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(f.error(format!(
            "`layer_types` names {t}; known: full_attention, sliding_attention"
        ))),
    });
    sliding.collect::<Result<Vec<bool>>>().map(Some)
}

/// Which layers have the window where no list says so.
fn sliding_layers(
    f: &Fields<'_>,
    family: Family,
    layers: usize,
    rotary: &[bool],
) -> Result<Vec<bool>> {
    // every so-manieth layer sees everything
    let except = |every: usize| (0..layers).map(|i| (i + 1) % every != 0).collect();
    Ok(match family {
        Family::Llama | Family::Qwen3_5 | Family::Qwen3_5Moe => vec![false; layers],
        Family::Mistral | Family::Ministral3 | Family::Qwen3Moe => vec![true; layers],
        Family::Gemma2 => except(2),
        Family::Gemma3 => except(f.size("sliding_window_pattern")?.unwrap_or(6)),
        Family::Olmo3 => except(4),
        Family::SmolLm3 => rotary.iter().map(|rotary| !rotary).collect(),
        Family::Qwen2 | Family::Qwen3 => {
            let on = f.flag("use_sliding_window", false)?;
            let from = f
                .typed("max_window_layers", "a whole number", Value::as_u64)?
                .unwrap_or(28) as usize;
            (0..layers).map(|i| on && i >= from).collect()
        }
    })
}

/// Which layers rotate queries and keys: `no_rope_layers` has a 1 for those that do, and a 0 for those that do not.
fn rotary(f: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<bool>> {
    if family != Family::SmolLm3 {
        return Ok(vec![true; layers]);
    }
    let Some(list) = f.by_layer("no_rope_layers", layers)? else {
        let every = f.size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    let rotates = list[..layers].iter().map(|entry| match entry.as_u64() {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        _ => Err(f.error(format!(
            "`no_rope_layers` must be of 0 and 1, found {entry}"
        ))),
    });
    rotates.collect()
}

/// The tables of rotary settings that a config has.
struct RopeTables {
    /// Of all layers, or of those without a window where [`Self::sliding`] has others.
    full: Map<String, Value>,
    /// Of layers with a window, where they have one of their own.
    sliding: Option<Map<String, Value>>,
}

impl RopeTables {
    /// The tables of a config in either style: `rope_parameters`, of all layers or by their type, or `rope_scaling` beside
    /// `rope_theta`.
    fn read(f: &Fields<'_>, family: Family) -> Result<Self> {
        let by_type = matches!(family, Family::Gemma3 | Family::Olmo3);
        let newer = f.object("rope_parameters")?;
        let typed = |table: &Map<String, Value>, key: &str| {
            table.get(key).and_then(Value::as_object).cloned()
        };
        if let Some(table) = newer.as_ref().filter(|_| by_type) {
            let [full, sliding] = ["full_attention", "sliding_attention"].map(|t| typed(table, t));
            if full.is_some() || sliding.is_some() {
                return Ok(Self {
                    full: full.unwrap_or_default(),
                    sliding: Some(sliding.unwrap_or_default()),
                });
            }
        }
        let older = f.object("rope_scaling")?;
        let full = newer.or(older).unwrap_or_else(|| default_table(family));
        Ok(Self {
            full,
            // scaling is that of the layers without a window
            sliding: by_type.then(Map::new),
        })
    }
}

/// The settings of a config that has none.
fn default_table(family: Family) -> Map<String, Value> {
    let table = match family {
        Family::Ministral3 => json!({
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }),
        _ => Value::Null,
    };
    table.as_object().cloned().unwrap_or_default()
}

/// Rotary embeddings by layer.
pub(super) fn ropes(
    f: &Fields<'_>,
    family: Family,
    max_positions: usize,
    kinds: &[LayerKind],
) -> Result<Vec<Option<Rope>>> {
    let tables = RopeTables::read(f, family)?;
    let theta = |key: &str, default: f64| -> Result<f64> { Ok(f.number(key)?.unwrap_or(default)) };
    let base = match family {
        Family::Gemma3 | Family::Ministral3 => 1e6,
        Family::Olmo3 => 5e5,
        Family::SmolLm3 => 2e6,
        Family::Qwen3_5 | Family::Qwen3_5Moe => 1e7,
        _ => 1e4,
    };
    let full_theta = theta("rope_theta", base)?;
    let partial = family.is_qwen3_5();
    let full = rope(f, &tables.full, full_theta, (max_positions, partial))?;
    let sliding = match (&tables.sliding, family) {
        (None, _) => full.clone(),
        (Some(table), Family::Gemma3) => {
            let theta = theta("rope_local_base_freq", 1e4)?;
            rope(f, table, theta, (max_positions, partial))?
        }
        (Some(table), _) => rope(f, table, full_theta, (max_positions, partial))?,
    };
    let of = |kind: &LayerKind| {
        let own = if kind.sliding { &sliding } else { &full };
        kind.rotary.then(|| own.clone())
    };
    Ok(kinds.iter().map(of).collect())
}

/// One table of rotary settings.
fn rope(
    f: &Fields<'_>,
    table: &Map<String, Value>,
    theta: f64,
    (max_positions, may_be_partial): (usize, bool),
) -> Result<Rope> {
    let r = Fields {
        path: f.path,
        map: table,
    };
    let theta = r.number("rope_theta")?.unwrap_or(theta);
    let partial = rotary_factor(f, &r)?.unwrap_or(1.0);
    if !may_be_partial && (partial - 1.0).abs() > f64::EPSILON {
        return Err(f.error(format!(
            "`partial_rotary_factor` {partial} is not supported; only 1.0 is"
        )));
    }
    let scaling = scaling(f, &r, max_positions)?;
    Ok(Rope { theta, scaling })
}

fn rotary_factor(f: &Fields<'_>, table: &Fields<'_>) -> Result<Option<f64>> {
    match table.number("partial_rotary_factor")? {
        Some(own) => Ok(Some(own)),
        None => f.number("partial_rotary_factor"),
    }
}

/// The leading dimensions of a head that are rotated (`partial_rotary_factor`).
pub(super) fn partial_rotary(f: &Fields<'_>, family: Family, head_dim: usize) -> Result<usize> {
    if !family.is_qwen3_5() {
        return Ok(head_dim);
    }
    let table = RopeTables::read(f, family)?.full;
    let table = Fields {
        path: f.path,
        map: &table,
    };
    let factor = rotary_factor(f, &table)?.unwrap_or(0.25);
    let dims = (head_dim as f64 * factor) as usize;
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        return Err(f.error(format!(
            "`partial_rotary_factor` {factor} of heads of {head_dim} gives {dims} dimensions; expected an even number up to {head_dim}"
        )));
    }
    Ok(dims)
}

fn scaling(f: &Fields<'_>, r: &Fields<'_>, max_positions: usize) -> Result<RopeScaling> {
    let kind = r
        .present("rope_type")
        .or_else(|| r.present("type"))
        .map_or(Some("default"), Value::as_str);
    let required = |key: &str| {
        r.number(key)?
            .ok_or_else(|| f.error(format!("rotary scaling {kind:?} needs `{key}`")))
    };
    let original = r
        .size("original_max_position_embeddings")?
        .unwrap_or(max_positions);
    Ok(match kind {
        Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear {
            factor: required("factor")?,
        },
        Some("dynamic") => RopeScaling::Dynamic {
            factor: required("factor")?,
            original,
        },
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
        None => Yarn::default_attention_factor(factor, mscales.map(|(one, all)| [one, all])),
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
            "rotary scaling \"yarn\" needs positive numbers and `beta_fast` no smaller than `beta_slow`, found {yarn:?}"
        )));
    }
    Ok(yarn)
}

/// The growth of queries with their position.
pub(super) fn query_scaling(
    f: &Fields<'_>,
    family: Family,
    max_positions: usize,
) -> Result<Option<QueryScaling>> {
    if family != Family::Ministral3 {
        return Ok(None);
    }
    let table = RopeTables::read(f, family)?.full;
    let r = Fields {
        path: f.path,
        map: &table,
    };
    let original = r.size("original_max_position_embeddings")?;
    let beta = r.number("llama_4_scaling_beta")?;
    Ok(beta.map(|beta| QueryScaling {
        beta,
        original: original.unwrap_or(max_positions),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;
    use std::path::Path;

    /// Six layers, two heads of eight.
    fn parse(changes: Value) -> Result<Arch> {
        let Value::Object(mut config) = json!({
            "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
            "num_attention_heads": 2, "head_dim": 8, "max_position_embeddings": 64
        }) else {
            unreachable!("an object")
        };
        let Value::Object(changes) = changes else {
            panic!("an object")
        };
        config.extend(changes);
        Arch::from_config(&config, Path::new("config.json"))
    }

    fn plain(theta: f64) -> Rope {
        Rope {
            theta,
            scaling: RopeScaling::Default,
        }
    }

    #[test]
    fn gemma_3_has_two_bases_and_scales_one_of_them_in_both_styles() {
        let linear = json!({"rope_type": "linear", "factor": 8.0});
        let older = json!({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3,
            "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear});
        let types = ["sliding_attention", "sliding_attention", "full_attention"].repeat(2);
        let newer = json!({"model_type": "gemma3_text", "sliding_window": 16, "layer_types": types,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }});
        let (older, newer) = (parse(older).unwrap(), parse(newer).unwrap());
        assert_eq!(older, newer);
        assert_eq!(older.windows, [Some(16), Some(16), None].repeat(2));
        let global = Rope {
            theta: 5e5,
            scaling: RopeScaling::Linear { factor: 8.0 },
        };
        let of_three = [plain(2e4), plain(2e4), global].map(Some);
        assert_eq!(older.ropes[..3], of_three);
        assert_eq!(older.ropes[3..], of_three);
    }

    #[test]
    fn smollm_3_leaves_rotary_embedding_out_of_every_fourth_layer_unless_listed() {
        let rotary = |changes: Value| {
            let ropes = parse(changes).unwrap().ropes.into_iter();
            ropes.map(|rope| rope.is_some()).collect::<Vec<bool>>()
        };
        let all = |list: [u8; 6]| list.map(|x| x == 1).to_vec();
        assert_eq!(
            rotary(json!({"model_type": "smollm3"})),
            all([1, 1, 1, 0, 1, 1])
        );
        let listed = json!({"model_type": "smollm3", "no_rope_layers": [0, 1, 0, 1, 1, 1]});
        assert_eq!(rotary(listed), all([0, 1, 0, 1, 1, 1]));
        let wrong = json!({"model_type": "smollm3", "no_rope_layers": [2, 1, 0, 1, 1, 1]});
        let message = parse(wrong).unwrap_err().to_string();
        assert!(message.contains("no_rope_layers"), "{message}");
    }

    #[test]
    fn smollm_3_has_windows_only_where_they_are_turned_on() {
        let config = |on: bool| json!({"model_type": "smollm3", "sliding_window": 4, "use_sliding_window": on});
        assert_eq!(parse(config(false)).unwrap().windows, vec![None; 6]);
        let some = [None, None, None, Some(4), None, None];
        assert_eq!(parse(config(true)).unwrap().windows, some);
    }

    #[test]
    fn olmo_3_stretches_the_layers_without_a_window_alone() {
        let yarn =
            json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32});
        let arch = parse(json!({"model_type": "olmo3", "rope_scaling": yarn})).unwrap();
        let full = [false, false, false, true, false, false];
        for (layer, full) in full.into_iter().enumerate() {
            assert_eq!(arch.windows[layer].is_none(), full, "layer {layer}");
            let rope = arch.ropes[layer].as_ref().unwrap();
            assert_eq!(rope.theta.to_bits(), 5e5f64.to_bits());
            let stretched = matches!(rope.scaling, RopeScaling::Yarn(_));
            assert_eq!(stretched, full, "layer {layer}");
        }
        assert!(!arch.pre_norms && arch.post_norms);
    }

    #[test]
    fn yarn_is_read_for_every_family_and_lengthens_the_context() {
        let yarn =
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        for family in [
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma2",
            "smollm3",
            "ministral3",
        ] {
            let arch = parse(json!({"model_type": family, "rope_scaling": yarn})).unwrap();
            let Some(RopeScaling::Yarn(own)) = arch.ropes[0].as_ref().map(|r| &r.scaling) else {
                panic!("{family}: {:?}", arch.ropes[0]);
            };
            assert!((own.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
            assert_eq!(arch.max_positions, 256, "{family}");
        }
        let wrong = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 8.0});
        let message = parse(json!({"model_type": "llama", "rope_scaling": wrong})).unwrap_err();
        assert!(message.to_string().contains("beta_fast"), "{message}");
    }

    #[test]
    fn ministral_3_without_rotary_settings_has_those_of_its_release() {
        let arch = parse(json!({"model_type": "ministral3"})).unwrap();
        let scaling = arch.query_scaling.unwrap();
        assert_eq!(
            (scaling.beta.to_bits(), scaling.original),
            (0.1f64.to_bits(), 16_384)
        );
        assert_eq!(arch.max_positions, 262_144);
        assert_eq!(arch.windows, vec![None; 6]);
    }
}
