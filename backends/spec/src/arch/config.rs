//! A Hugging Face `config.json` into an [`Arch`], in the style of transformers 4 or 5.

use super::{Activation, Arch, FAMILIES, Family, HeadKind, Rope, RopeScaling};
use crate::{Error, Precision, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Reads typed fields of a JSON object, remembering where it came from for messages.
struct Fields<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn error(&self, detail: String) -> Error {
        Error::Config {
            path: self.path.to_owned(),
            detail,
        }
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.present(key)
            .map(|v| {
                read(v).ok_or_else(|| self.error(format!("`{key}` must be {kind}, found {v}")))
            })
            .transpose()
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a positive whole number", |v| {
            v.as_u64().filter(|&n| n > 0).map(|n| n as usize)
        })
    }

    fn required(&self, key: &str) -> Result<usize> {
        self.size(key)?
            .ok_or_else(|| self.error(format!("`{key}` is missing; expected a positive integer")))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self
            .typed(key, "true or false", Value::as_bool)?
            .unwrap_or(default))
    }
}

impl Arch {
    /// Reads a `config.json`, in the style of transformers 4 (`rope_theta`, `rope_scaling`) or 5
    /// (`rope_parameters`). `path` is only for messages.
    pub fn from_config(config: &Map<String, Value>, path: &Path) -> Result<Self> {
        let (family, head) = Family::parse(config).map_err(|found| Error::UnknownArchitecture {
            found,
            known: Family::known(),
        })?;
        let f = Fields { path, map: config };
        if matches!(head, HeadKind::Scalar { .. }) {
            check_one_label(&f)?;
        }
        let gemma = family == Family::Gemma2;
        let hidden_size = f.required("hidden_size")?;
        let num_layers = f.required("num_hidden_layers")?;
        let num_heads = f.required("num_attention_heads")?;
        let num_kv_heads = f.size("num_key_value_heads")?.unwrap_or(num_heads);
        if num_heads % num_kv_heads != 0 {
            return Err(f.error(format!(
                "`num_attention_heads` ({num_heads}) must be a multiple of `num_key_value_heads` ({num_kv_heads})"
            )));
        }
        let head_dim = match f.size("head_dim")? {
            Some(n) => n,
            None if gemma => 256,
            None if family == Family::Qwen3 => 128,
            None if hidden_size % num_heads == 0 => hidden_size / num_heads,
            None => {
                return Err(f.error(format!(
                    "`hidden_size` ({hidden_size}) is not a multiple of `num_attention_heads` ({num_heads}), and `head_dim` \
                     is not set"
                )));
            }
        };
        if head_dim % 2 != 0 {
            return Err(f.error(format!(
                "`head_dim` must be even for the rotary embedding, found {head_dim}"
            )));
        }
        let bias = f.flag("attention_bias", false)?;
        let scale = f
            .number("query_pre_attn_scalar")?
            .filter(|_| gemma)
            .unwrap_or(head_dim as f64);
        let max_positions = f.size("max_position_embeddings")?.unwrap_or(2048);
        Ok(Self {
            family,
            head,
            vocab_size: f.required("vocab_size")?,
            hidden_size,
            intermediate_size: f.required("intermediate_size")?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            max_positions,
            norm_eps: f.number("rms_norm_eps")?.unwrap_or(1e-6),
            norm_offset: gemma,
            qkv_bias: family == Family::Qwen2 || bias,
            o_bias: bias && family != Family::Qwen2,
            mlp_bias: f.flag("mlp_bias", false)?,
            qk_norm: family == Family::Qwen3,
            post_norms: gemma,
            activation: activation(&f, gemma)?,
            rope: rope(&f, max_positions)?,
            windows: windows(&f, family, num_layers)?,
            attention_scale: scale.sqrt().recip(),
            attention_softcap: gemma
                .then(|| f.number("attn_logit_softcapping"))
                .transpose()?
                .flatten(),
            logit_softcap: gemma
                .then(|| f.number("final_logit_softcapping"))
                .transpose()?
                .flatten(),
            embedding_scale: gemma.then(|| (hidden_size as f64).sqrt()),
            joint_value_head: false,
            tied: head == HeadKind::LanguageModel && f.flag("tie_word_embeddings", gemma)?,
            initializer_range: f.number("initializer_range")?.unwrap_or(0.02),
            precision: Precision::default(),
        })
    }

    /// Completes a hand-written config (a random start) so that transformers reads it as this architecture.
    pub fn complete_config(config: &mut Map<String, Value>) {
        if let Ok((family, _)) = Family::parse(config)
            && let Some((_, model_type, class)) = FAMILIES.iter().find(|f| f.0 == family)
        {
            config
                .entry("architectures")
                .or_insert_with(|| json!([format!("{class}ForCausalLM")]));
            config
                .entry("model_type")
                .or_insert_with(|| json!(model_type));
        }
        let heads = config
            .get("num_attention_heads")
            .cloned()
            .unwrap_or(Value::Null);
        config.entry("num_key_value_heads").or_insert(heads);
        config.entry("rms_norm_eps").or_insert(json!(1e-6));
        config.entry("rope_theta").or_insert(json!(10_000.0));
        config
            .entry("max_position_embeddings")
            .or_insert(json!(2048));
        config.entry("tie_word_embeddings").or_insert(json!(false));
        config.entry("torch_dtype").or_insert(json!("float32"));
    }
}

fn check_one_label(f: &Fields<'_>) -> Result<()> {
    let labels = f.size("num_labels")?.or_else(|| {
        f.present("id2label")
            .and_then(Value::as_object)
            .map(Map::len)
    });
    match labels {
        Some(1) => Ok(()),
        Some(n) => Err(f.error(format!(
            "reward models and critics must have one label; this one has {n}"
        ))),
        // transformers leaves num_labels out when it is its default of two
        None => Err(f.error(
            "reward models and critics must have one label; this config sets none, which means two"
                .into(),
        )),
    }
}

fn activation(f: &Fields<'_>, gemma: bool) -> Result<Activation> {
    let key = if gemma && f.present("hidden_activation").is_some() {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    let default = if gemma { "gelu_pytorch_tanh" } else { "silu" };
    match f.present(key).map_or(Some(default), Value::as_str) {
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("gelu") => Ok(Activation::Gelu),
        _ => Err(f.error(format!(
            "`{key}` is {}; known: silu, gelu, gelu_pytorch_tanh",
            f.present(key).unwrap_or(&Value::Null)
        ))),
    }
}

fn rope(f: &Fields<'_>, max_positions: usize) -> Result<Rope> {
    let object = |key: &str| f.typed(key, "an object", |v| v.as_object().cloned());
    let newer = object("rope_parameters")?;
    let table = match &newer {
        Some(table) => Some(table.clone()),
        None => object("rope_scaling")?,
    }
    .unwrap_or_default();
    let r = Fields {
        path: f.path,
        map: &table,
    };
    let theta = match r.number("rope_theta")? {
        Some(theta) => theta,
        None => f.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let partial = match r.number("partial_rotary_factor")? {
        Some(p) => p,
        None => f.number("partial_rotary_factor")?.unwrap_or(1.0),
    };
    if (partial - 1.0).abs() > f64::EPSILON {
        return Err(f.error(format!(
            "`partial_rotary_factor` {partial} is not supported; only 1.0 is"
        )));
    }
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
    let scaling = match kind {
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
        other => {
            return Err(f.error(format!(
                "rotary scaling {} is not supported; known: default, linear, dynamic, llama3",
                other.map_or_else(|| "of that type".to_owned(), |name| format!("{name:?}"))
            )));
        }
    };
    Ok(Rope { theta, scaling })
}

/// Sliding windows by layer. `layer_types` wins where a config lists it (transformers 4.53 and later).
fn windows(f: &Fields<'_>, family: Family, layers: usize) -> Result<Vec<Option<usize>>> {
    let sliding = f.size("sliding_window")?;
    if let Some(types) = f.typed("layer_types", "a list", |v| v.as_array().cloned())? {
        if types.len() != layers {
            return Err(f.error(format!(
                "`layer_types` has {} entries for {layers} layers",
                types.len()
            )));
        }
        return types
            .iter()
            .map(|t| match t.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") => Ok(sliding),
                _ => Err(f.error(format!(
                    "`layer_types` names {t}; known: full_attention, sliding_attention"
                ))),
            })
            .collect();
    }
    let absent = f.map.get("sliding_window").is_none();
    Ok(match family {
        Family::Llama => vec![None; layers],
        // MistralConfig's default, where the key is absent rather than null
        Family::Mistral => vec![if absent { Some(4096) } else { sliding }; layers],
        Family::Gemma2 => {
            let window = if absent { Some(4096) } else { sliding };
            (0..layers).map(|i| window.filter(|_| i % 2 == 0)).collect()
        }
        Family::Qwen2 | Family::Qwen3 => {
            let window = if absent { Some(4096) } else { sliding };
            let on = f.flag("use_sliding_window", false)?;
            let from = f
                .typed("max_window_layers", "a whole number", Value::as_u64)?
                .unwrap_or(28) as usize;
            (0..layers)
                .map(|i| window.filter(|_| on && i >= from))
                .collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: Value) -> Result<Arch> {
        let Value::Object(map) = value else {
            panic!("an object")
        };
        Arch::from_config(&map, Path::new("config.json"))
    }

    fn llama() -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 16,
               "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2})
    }

    fn with(mut value: Value, key: &str, entry: Value) -> Value {
        value[key] = entry;
        value
    }

    #[test]
    fn an_unknown_architecture_is_named_with_those_we_know() {
        let message = parse(json!({"architectures": ["BertModel"]}))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("BertModel") && message.contains("Gemma2ForCausalLM"),
            "{message}"
        );
    }

    #[test]
    fn an_unknown_rope_kind_is_named() {
        let yarn = with(
            llama(),
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0}),
        );
        let message = parse(yarn).unwrap_err().to_string();
        assert!(
            message.contains("yarn") && message.contains("llama3"),
            "{message}"
        );
    }

    #[test]
    fn both_config_styles_give_the_same_rope() {
        let old = with(llama(), "rope_theta", json!(5e5));
        let new = with(
            llama(),
            "rope_parameters",
            json!({"rope_theta": 5e5, "rope_type": "default"}),
        );
        assert_eq!(parse(old).unwrap(), parse(new).unwrap());
    }

    #[test]
    fn a_missing_size_names_its_key() {
        let mut config = llama();
        config.as_object_mut().unwrap().remove("hidden_size");
        assert!(
            parse(config)
                .unwrap_err()
                .to_string()
                .contains("hidden_size")
        );
    }

    #[test]
    fn mistral_without_the_key_has_its_default_window_and_null_has_none() {
        let mistral = with(llama(), "architectures", json!(["MistralForCausalLM"]));
        assert_eq!(parse(mistral.clone()).unwrap().windows, vec![Some(4096); 2]);
        assert_eq!(
            parse(with(mistral, "sliding_window", Value::Null))
                .unwrap()
                .windows,
            vec![None; 2]
        );
    }

    #[test]
    fn a_hand_written_config_is_completed_for_transformers() {
        let Value::Object(mut map) = json!({"model_type": "qwen3", "num_attention_heads": 4})
        else {
            unreachable!()
        };
        Arch::complete_config(&mut map);
        assert_eq!(map["architectures"], json!(["Qwen3ForCausalLM"]));
        assert_eq!(map["num_key_value_heads"], json!(4));
    }
}
