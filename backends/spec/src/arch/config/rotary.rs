//! The rotary embedding of each layer, in configs of either style.

use super::fields::Fields;
use super::layers::LayerKind;
use crate::Result;
use crate::arch::{Family, QueryScaling, Rope, RopeScaling, Yarn};
use serde_json::{Map, Value, json};

/// The tables of rotary settings that a config has.
struct RopeTables {
    /// Of all layers, or of those without a window where [`Self::sliding`] has others.
    full: Map<String, Value>,
    /// Of layers with a window, where they have one of their own.
    sliding: Option<Map<String, Value>>,
}

impl RopeTables {
    /// The tables of a config in either style: `rope_parameters`, of all layers or by their type, or `rope_scaling`
    /// beside `rope_theta`.
    fn read(f: &Fields<'_>, family: Family) -> Result<Self> {
        let by_type = matches!(family, Family::Gemma3 | Family::Olmo3);
        let newer = f.object("rope_parameters")?;
        let typed = |table: &Map<String, Value>, key: &str| table.get(key).and_then(Value::as_object).cloned();
        if let Some(table) = newer.as_ref().filter(|_| by_type) {
            let [full, sliding] = ["full_attention", "sliding_attention"].map(|t| typed(table, t));
            if full.is_some() || sliding.is_some() {
                return Ok(Self { full: full.unwrap_or_default(), sliding: Some(sliding.unwrap_or_default()) });
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
        Family::GptOss => json!({
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": false,
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
        Family::GptOss => 1.5e5,
        _ => 1e4,
    };
    let full_theta = theta("rope_theta", base)?;
    let partial = family.is_qwen3_5();
    let full = rope(f, &tables.full, full_theta, max_positions, partial)?;
    let sliding = match (&tables.sliding, family) {
        (None, _) => full.clone(),
        (Some(table), Family::Gemma3) => {
            let theta = theta("rope_local_base_freq", 1e4)?;
            rope(f, table, theta, max_positions, partial)?
        }
        (Some(table), _) => rope(f, table, full_theta, max_positions, partial)?,
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
    let table = Fields { path: f.path, map: &table };
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
            "rotary scaling \"yarn\" needs positive values and `beta_fast` no smaller than `beta_slow`, found {yarn:?}"
        )));
    }
    Ok(yarn)
}

/// The growth of queries with their position.
pub(super) fn query_scaling(f: &Fields<'_>, family: Family, max_positions: usize) -> Result<Option<QueryScaling>> {
    if family != Family::Ministral3 {
        return Ok(None);
    }
    let table = RopeTables::read(f, family)?.full;
    let r = Fields { path: f.path, map: &table };
    let original = r.size("original_max_position_embeddings")?;
    let beta = r.number("llama_4_scaling_beta")?;
    Ok(beta.map(|beta| QueryScaling { beta, original: original.unwrap_or(max_positions) }))
}
