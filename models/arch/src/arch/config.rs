//! A Hugging Face `config.json` into an [`Arch`], in the style of transformers 4 or 5.

mod delta_net;
mod experts;
mod fields;
mod layers;
mod nested;
mod rotary;

use super::family::FamilySpec;
use super::{Activation, Arch, Family, HeadKind, Mixer, Rope, RopeScaling};
use experts::feed_forwards;
use fields::Fields;
use firebrick_spec::{Error, Precision, Result};
use layers::layers;
use rotary::{partial_rotary, query_scaling, ropes};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Bound of the number of parameters: bytes of all of them, and of their state, fit 64 bits.
const MAX_PARAMETERS: f64 = 1e15;

/// Most layers, which lists have entries for.
const MAX_LAYERS: usize = 4096;

impl Arch {
    /// Reads a `config.json`, in the style of transformers 4 (`rope_theta`, `rope_scaling`) or 5
    /// (`rope_parameters`). `path` is only for messages.
    ///
    /// # Errors
    /// `Error::UnknownArchitecture` for a class or `model_type` that is not supported; `Error::Config` for a key that
    /// is missing, has another type, or asks for what no decoder here computes.
    pub fn from_config(config: &Map<String, Value>, path: &Path) -> Result<Self> {
        let (family, head) =
            Family::parse(config).map_err(|found| Error::UnknownArchitecture { found, known: Family::known() })?;
        let f = Fields { path, map: config };
        if matches!(head, HeadKind::Scalar { .. }) {
            check_one_label(&f)?;
        }
        if f.flag("use_bidirectional_attention", false)? {
            return Err(f.error(
                "`use_bidirectional_attention` is true: such a model computes embeddings and does not generate text"
                    .into(),
            ));
        }
        let spec = family.spec();
        let hidden_size = f.required("hidden_size")?;
        let num_layers = f.required("num_hidden_layers")?;
        if num_layers > MAX_LAYERS {
            return Err(f.error(format!("`num_hidden_layers` is {num_layers}, expected at most {MAX_LAYERS}")));
        }
        let [num_heads, num_kv_heads, head_dim] = heads(&f, spec, hidden_size)?;
        let bias = f.flag("attention_bias", spec.attention_bias)?;
        let scale = f.number("query_pre_attn_scalar")?.filter(|_| spec.gemma).or(spec.query_scalar);
        let max_positions = f.size("max_position_embeddings")?.unwrap_or(2048);
        let kinds = layers(&f, spec, num_layers)?;
        let ropes = ropes(&f, spec, max_positions, &kinds)?;
        let mixers: Vec<Mixer> = kinds.iter().map(|kind| kind.mixer).collect();
        let of_gemma = |key: &str| spec.gemma.then(|| f.number(key)).transpose().map(Option::flatten);
        let arch = Self {
            family,
            head,
            vocab_size: f.required("vocab_size")?,
            hidden_size,
            intermediate_size: intermediate_size(&f, spec)?,
            feed_forwards: feed_forwards(&f, spec, num_layers)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            delta_net: delta_net::read(&f, &mixers)?,
            mixers,
            attention_gate: spec.delta_net && f.flag("attn_output_gate", true)?,
            rotary_dim: partial_rotary(&f, spec, head_dim)?,
            max_positions: stretched(&ropes, max_positions),
            norm_eps: f.number("rms_norm_eps")?.unwrap_or(spec.norm_eps),
            norm_offset: if spec.norm_offset { 1.0 } else { 0.0 },
            qkv_bias: spec.qkv_bias || bias,
            o_bias: bias && !spec.qkv_bias,
            mlp_bias: f.flag("mlp_bias", false)?,
            qk_norm: spec.qk_norm,
            pre_norms: spec.pre_norms,
            post_norms: spec.post_norms,
            activation: activation(&f, spec.gemma)?,
            swiglu_limit: spec.gpt_oss.then(|| swiglu_limit(&f)).transpose()?,
            attention_sinks: spec.gpt_oss,
            query_scaling: query_scaling(&f, spec, max_positions)?,
            ropes,
            windows: kinds.iter().map(|kind| kind.window).collect(),
            attention_scale: scale.unwrap_or(head_dim as f64).sqrt().recip(),
            attention_softcap: of_gemma("attn_logit_softcapping")?,
            logit_softcap: of_gemma("final_logit_softcapping")?,
            embedding_scale: spec.gemma.then(|| (hidden_size as f64).sqrt()),
            joint_value_head: false,
            tied: head == HeadKind::LanguageModel && f.flag("tie_word_embeddings", spec.tied)?,
            initializer_range: f.number("initializer_range")?.unwrap_or(0.02),
            precision: Precision::default(),
            base: None,
        };
        match arch.parameters() {
            count if count > MAX_PARAMETERS => Err(f.error(format!(
                "its sizes are those of {count:.0e} parameters, and no model has more than {MAX_PARAMETERS:.0e}"
            ))),
            _ => Ok(arch),
        }
    }

    /// Approximate number of parameters. Sizes may be those of no model, whose products exceed 64 bits.
    fn parameters(&self) -> f64 {
        let product = |sizes: &[usize]| sizes.iter().map(|&size| size as f64).product::<f64>();
        let experts = self.feed_forwards.iter().filter_map(|kind| kind.experts());
        let experts =
            experts.map(|e| product(&[3, e.count, e.intermediate_size]) + product(&[3, e.shared.unwrap_or(0)]));
        let attention = product(&[2, self.num_heads + self.num_kv_heads, self.head_dim]);
        let delta_net = self.delta_net.map_or(0.0, |net| {
            product(&[4, net.num_key_heads, net.key_head_dim]) + product(&[4, net.num_value_heads, net.value_head_dim])
        });
        let layer = attention + delta_net + product(&[3, self.intermediate_size]) + experts.fold(0.0, f64::max);
        self.hidden_size as f64 * (self.vocab_size as f64 + self.num_layers as f64 * layer)
    }

    /// The config of the language model inside a model that sees images (`text_config`), as that of a model by itself;
    /// `None` for every other config.
    pub fn language_model_config(config: &Map<String, Value>) -> Option<Map<String, Value>> {
        nested::language_model(config)
    }

    /// True if the language model inside this model is exported with everything around it: in Qwen 3.5. Others are
    /// exported as language models.
    pub fn keeps_outer_model(config: &Map<String, Value>) -> bool {
        nested::keeps_outer_model(config)
    }

    /// Completes a hand-written config (a random start) so that transformers reads it as this architecture.
    pub fn complete_config(config: &mut Map<String, Value>) {
        if let Ok((family, _)) = Family::parse(config) {
            config.entry("architectures").or_insert_with(|| json!([family.class()]));
            config.entry("model_type").or_insert_with(|| json!(family.model_type()));
        }
        let heads = config.get("num_attention_heads").cloned().unwrap_or(Value::Null);
        config.entry("num_key_value_heads").or_insert(heads);
        config.entry("rms_norm_eps").or_insert(json!(1e-6));
        config.entry("rope_theta").or_insert(json!(10_000.0));
        config.entry("max_position_embeddings").or_insert(json!(2048));
        config.entry("tie_word_embeddings").or_insert(json!(false));
        config.entry("torch_dtype").or_insert(json!("float32"));
    }
}

/// The width of dense feed-forwards; 0 in a family that has none.
fn intermediate_size(f: &Fields<'_>, spec: &FamilySpec) -> Result<usize> {
    match spec.experts {
        Some(experts) if !experts.some_dense => Ok(f.size("intermediate_size")?.unwrap_or(0)),
        _ => f.required("intermediate_size"),
    }
}

/// Factor of the gate in the sigmoid of gpt-oss's experts (`swiglu_alpha`).
const SWIGLU_ALPHA: f64 = 1.702;

/// The limit of the clamped gate.
fn swiglu_limit(f: &Fields<'_>) -> Result<f64> {
    let alpha = f.number("swiglu_alpha")?.unwrap_or(SWIGLU_ALPHA);
    if (alpha - SWIGLU_ALPHA).abs() > f64::EPSILON {
        return Err(f.error(format!("`swiglu_alpha` {alpha} is not supported; only {SWIGLU_ALPHA} is")));
    }
    match f.number("swiglu_limit")?.unwrap_or(7.0) {
        limit if limit > 0.0 => Ok(limit),
        limit => Err(f.error(format!("`swiglu_limit` must be above 0, found {limit}"))),
    }
}

/// Query heads, key/value heads, and their width.
fn heads(f: &Fields<'_>, spec: &FamilySpec, hidden_size: usize) -> Result<[usize; 3]> {
    let num_heads = f.required("num_attention_heads")?;
    let num_kv_heads = f.size("num_key_value_heads")?.unwrap_or(num_heads);
    if num_heads % num_kv_heads != 0 {
        return Err(f.error(format!(
            "`num_attention_heads` ({num_heads}) must be a multiple of `num_key_value_heads` ({num_kv_heads})"
        )));
    }
    let head_dim = match f.size("head_dim")?.or(spec.head_dim) {
        Some(n) => n,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(f.error(format!(
                "`hidden_size` ({hidden_size}) is not a multiple of `num_attention_heads` ({num_heads}), and `head_dim` \
                 is not set"
            )));
        }
    };
    if head_dim % 2 != 0 {
        return Err(f.error(format!("`head_dim` must be even for the rotary embedding, found {head_dim}")));
    }
    Ok([num_heads, num_kv_heads, head_dim])
}

/// The longest sequence: `YaRN` stretches that of training, whether or not a config counts it in
/// `max_position_embeddings`.
fn stretched(ropes: &[Option<Rope>], max_positions: usize) -> usize {
    let yarn = ropes.iter().flatten().filter_map(|rope| match &rope.scaling {
        RopeScaling::Yarn(yarn) => Some((yarn.original as f64 * yarn.factor) as usize),
        _ => None,
    });
    yarn.fold(max_positions, usize::max)
}

fn check_one_label(f: &Fields<'_>) -> Result<()> {
    let labels = f.size("num_labels")?.or_else(|| f.present("id2label").and_then(Value::as_object).map(Map::len));
    match labels {
        Some(1) => Ok(()),
        Some(n) => Err(f.error(format!("reward models and critics must have one label; this one has {n}"))),
        // transformers leaves num_labels out when it is its default of two
        None => {
            Err(f.error("reward models and critics must have one label; this config sets none, which means two".into()))
        }
    }
}

fn activation(f: &Fields<'_>, gemma: bool) -> Result<Activation> {
    let key = if gemma && f.present("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: Value) -> Result<Arch> {
        let Value::Object(map) = value else { panic!("an object") };
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
        let message = parse(json!({"architectures": ["BertModel"]})).unwrap_err().to_string();
        assert!(message.contains("BertModel") && message.contains("Gemma2ForCausalLM"), "{message}");
    }

    #[test]
    fn an_unknown_rope_kind_is_named() {
        let longrope = with(llama(), "rope_scaling", json!({"rope_type": "longrope", "factor": 4.0}));
        let message = parse(longrope).unwrap_err().to_string();
        assert!(message.contains("longrope") && message.contains("yarn"), "{message}");
    }

    #[test]
    fn both_config_styles_give_the_same_rope() {
        let old = with(llama(), "rope_theta", json!(5e5));
        let new = with(llama(), "rope_parameters", json!({"rope_theta": 5e5, "rope_type": "default"}));
        assert_eq!(parse(old).unwrap(), parse(new).unwrap());
    }

    #[test]
    fn a_missing_size_names_its_key() {
        let mut config = llama();
        config.as_object_mut().unwrap().remove("hidden_size");
        assert!(parse(config).unwrap_err().to_string().contains("hidden_size"));
    }

    #[test]
    fn mistral_without_the_key_has_its_default_window_and_null_has_none() {
        let mistral = with(llama(), "architectures", json!(["MistralForCausalLM"]));
        assert_eq!(parse(mistral.clone()).unwrap().windows, vec![Some(4096); 2]);
        assert_eq!(parse(with(mistral, "sliding_window", Value::Null)).unwrap().windows, vec![None; 2]);
    }

    #[test]
    fn gpt_oss_without_its_keys_has_those_of_its_release_and_others_of_the_gate_are_refused() {
        let config = json!({"model_type": "gpt_oss", "vocab_size": 8, "hidden_size": 2880,
            "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8});
        let arch = parse(config.clone()).unwrap();
        assert_eq!(arch.windows, [Some(128), None, Some(128), None]);
        let experts = arch.experts(0).unwrap();
        let sizes = [experts.count, experts.per_token, experts.intermediate_size, arch.head_dim];
        assert_eq!(sizes, [128, 4, 2880, 64]);
        assert!(arch.attention_sinks && arch.qkv_bias && arch.o_bias && experts.bias);
        assert_eq!((arch.swiglu_limit, arch.max_positions), (Some(7.0), 131_072));
        let rope = arch.ropes[1].clone().unwrap();
        let RopeScaling::Yarn(yarn) = rope.scaling else { panic!("{rope:?}") };
        assert!(!yarn.truncate && (yarn.attention_factor - (0.1 * 32f64.ln() + 1.0)).abs() < 1e-15);
        for (key, value) in [("swiglu_alpha", 1.0), ("swiglu_limit", 0.0)] {
            let message = parse(with(config.clone(), key, json!(value))).unwrap_err();
            assert!(message.to_string().contains(key), "{message}");
        }
    }

    #[test]
    fn a_hand_written_config_is_completed_for_transformers() {
        let Value::Object(mut map) = json!({"model_type": "qwen3", "num_attention_heads": 4}) else { unreachable!() };
        Arch::complete_config(&mut map);
        assert_eq!(map["architectures"], json!(["Qwen3ForCausalLM"]));
        assert_eq!(map["num_key_value_heads"], json!(4));
    }
}
