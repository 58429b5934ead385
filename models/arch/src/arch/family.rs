//! Published families: names, and what transformers' classes say where a `config.json` says nothing.

use super::{ExpertLayout, HeadKind, QkNorm};
use serde_json::{Map, Value};

/// A published decoder family. One [`Arch`](super::Arch) covers them all; the family decides names and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 1–3 and everything published in its shape.
    Llama,
    /// Mistral: Llama with a sliding window on every layer.
    Mistral,
    /// Qwen 2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen 3: RMS norms on q and k, a `head_dim` of its own.
    Qwen3,
    /// Qwen 3 with mixtures of experts.
    Qwen3Moe,
    /// Gemma 2: soft-caps, (1 + w) norms before and after each half, alternating windows.
    Gemma2,
    /// Gemma 3, text: Gemma 2 with norms on q and k for its soft-caps, and another rotary embedding in layers with a
    /// window.
    Gemma3,
    /// `SmolLM` 3: Llama with layers that have no rotary embedding.
    SmolLm3,
    /// `OLMo` 3: norms after each half alone, norms on all of q and k, `YaRN` in the layers without a window.
    Olmo3,
    /// Ministral 3: `YaRN`, and queries that grow with their position.
    Ministral3,
    /// Qwen 3.5, text: gated `DeltaNet` layers between layers of gated attention, which rotate a part of each head.
    Qwen3_5,
    /// Qwen 3.5, text, with mixtures of experts, beside which every token goes through one more.
    Qwen3_5Moe,
    /// gpt-oss: attention sinks, alternating windows, experts with biases and a clamped gate, `YaRN`.
    GptOss,
}

/// `sliding_window` of a family.
#[derive(Clone, Copy, Debug)]
pub(super) enum Window {
    /// Never read.
    None,
    /// None where the key is absent.
    Given,
    /// This where the key is absent rather than null.
    Default(usize),
    /// This where the key is absent and `layer_types` too.
    Unlisted(usize),
    /// Read where `use_sliding_window` is true.
    Switched,
}

/// Layers with a window, where no `layer_types` lists them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windowed {
    None,
    All,
    /// All but every so-manieth, which a key may count.
    Except(usize, Option<&'static str>),
    /// Layers without a rotary embedding.
    Unrotated,
    /// Layers from `max_window_layers` on, where `use_sliding_window` is true.
    FromLayer,
}

/// Experts of a family, and the defaults of their keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertDefaults {
    pub count: usize,
    pub per_token: usize,
    pub width: usize,
    /// The key of their width.
    pub width_key: &'static str,
    /// Width of the expert of all tokens, where there is one.
    pub shared: Option<usize>,
    pub layout: ExpertLayout,
    pub bias: bool,
    /// True if weights of chosen experts add up to 1 regardless of `norm_topk_prob`.
    pub normalised: bool,
    /// True if layers may be dense (`mlp_only_layers`, `decoder_sparse_step`).
    pub some_dense: bool,
}

/// A family's names, and what its configs do not say.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct FamilySpec {
    pub family: Family,
    /// The `model_type` of its configs.
    pub model_type: &'static str,
    /// The beginning of the class names of its language models.
    pub class: &'static str,
    /// The beginning of the class names of its models with one value per token.
    pub scorer: &'static str,
    /// Default of `head_dim`; that of the residual stream divided by the heads where there is none.
    pub head_dim: Option<usize>,
    pub norm_eps: f64,
    /// Norm weights are stored as w − 1.
    pub norm_offset: bool,
    pub pre_norms: bool,
    pub post_norms: bool,
    pub qk_norm: Option<QkNorm>,
    /// Default of `attention_bias`.
    pub attention_bias: bool,
    /// Biases on q, k and v alone, regardless of `attention_bias`.
    pub qkv_bias: bool,
    pub tied: bool,
    /// Gemma's embedding scale, soft-caps and GELU, with `query_pre_attn_scalar`.
    pub gemma: bool,
    /// Default of `query_pre_attn_scalar`, where it is not `head_dim`.
    pub query_scalar: Option<f64>,
    pub window: Window,
    pub windowed: Windowed,
    /// True if `layer_types` lists windows.
    pub lists_windows: bool,
    pub rope_theta: f64,
    /// Rotary settings of a config without any, as JSON.
    pub rope: &'static str,
    /// Rotary settings by the type of layers.
    pub ropes_by_type: bool,
    /// `rope_theta` of layers with a window, where it is another (`rope_local_base_freq`).
    pub local_theta: Option<f64>,
    /// Layers without a rotary embedding (`no_rope_layers`).
    pub unrotated: bool,
    /// Queries that grow with their position.
    pub query_scaling: bool,
    /// Gated `DeltaNet` layers, and attention with a gate that rotates a part of each head.
    pub delta_net: bool,
    /// Attention sinks and a clamped gate.
    pub gpt_oss: bool,
    pub experts: Option<ExpertDefaults>,
}

const LLAMA: FamilySpec = FamilySpec {
    family: Family::Llama,
    model_type: "llama",
    class: "Llama",
    scorer: "Llama",
    head_dim: None,
    norm_eps: 1e-6,
    norm_offset: false,
    pre_norms: true,
    post_norms: false,
    qk_norm: None,
    attention_bias: false,
    qkv_bias: false,
    tied: false,
    gemma: false,
    query_scalar: None,
    window: Window::Given,
    windowed: Windowed::None,
    lists_windows: true,
    rope_theta: 1e4,
    rope: "{}",
    ropes_by_type: false,
    local_theta: None,
    unrotated: false,
    query_scaling: false,
    delta_net: false,
    gpt_oss: false,
    experts: None,
};

const fn named(family: Family, model_type: &'static str, class: &'static str) -> FamilySpec {
    FamilySpec { family, model_type, class, scorer: class, ..LLAMA }
}

const EXPERTS: ExpertDefaults = ExpertDefaults {
    count: 128,
    per_token: 8,
    width: 768,
    width_key: "moe_intermediate_size",
    shared: None,
    layout: ExpertLayout::Apart,
    bias: false,
    normalised: false,
    some_dense: true,
};

const QWEN3_5: FamilySpec = FamilySpec {
    head_dim: Some(256),
    norm_offset: true,
    qk_norm: Some(QkNorm::Heads),
    window: Window::None,
    lists_windows: false,
    delta_net: true,
    ..named(Family::Qwen3_5, "qwen3_5_text", "Qwen3_5")
};

/// All families, in the order of [`Family`].
static FAMILIES: [FamilySpec; 13] = [
    LLAMA,
    FamilySpec {
        window: Window::Unlisted(4096),
        windowed: Windowed::All,
        ..named(Family::Mistral, "mistral", "Mistral")
    },
    FamilySpec {
        qkv_bias: true,
        window: Window::Unlisted(4096),
        windowed: Windowed::FromLayer,
        ..named(Family::Qwen2, "qwen2", "Qwen2")
    },
    FamilySpec {
        head_dim: Some(128),
        qk_norm: Some(QkNorm::Heads),
        window: Window::Unlisted(4096),
        windowed: Windowed::FromLayer,
        ..named(Family::Qwen3, "qwen3", "Qwen3")
    },
    FamilySpec {
        qk_norm: Some(QkNorm::Heads),
        window: Window::Switched,
        windowed: Windowed::All,
        experts: Some(EXPERTS),
        ..named(Family::Qwen3Moe, "qwen3_moe", "Qwen3Moe")
    },
    FamilySpec {
        head_dim: Some(256),
        norm_offset: true,
        post_norms: true,
        tied: true,
        gemma: true,
        window: Window::Default(4096),
        windowed: Windowed::Except(2, None),
        ..named(Family::Gemma2, "gemma2", "Gemma2")
    },
    FamilySpec {
        // `Gemma3ForSequenceClassification` is that of the model that sees images
        scorer: "Gemma3Text",
        head_dim: Some(256),
        norm_offset: true,
        post_norms: true,
        qk_norm: Some(QkNorm::Heads),
        tied: true,
        gemma: true,
        query_scalar: Some(256.0),
        window: Window::Default(4096),
        windowed: Windowed::Except(6, Some("sliding_window_pattern")),
        rope_theta: 1e6,
        ropes_by_type: true,
        local_theta: Some(1e4),
        ..named(Family::Gemma3, "gemma3_text", "Gemma3")
    },
    FamilySpec {
        tied: true,
        window: Window::Switched,
        windowed: Windowed::Unrotated,
        rope_theta: 2e6,
        unrotated: true,
        ..named(Family::SmolLm3, "smollm3", "SmolLM3")
    },
    FamilySpec {
        norm_eps: 1e-5,
        pre_norms: false,
        post_norms: true,
        qk_norm: Some(QkNorm::Projection),
        window: Window::Default(4096),
        windowed: Windowed::Except(4, None),
        rope_theta: 5e5,
        ropes_by_type: true,
        ..named(Family::Olmo3, "olmo3", "Olmo3")
    },
    FamilySpec {
        head_dim: Some(128),
        norm_eps: 1e-5,
        windowed: Windowed::All,
        // one mask for all layers, regardless of what a config lists
        lists_windows: false,
        rope: r#"{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}"#,
        query_scaling: true,
        ..named(Family::Ministral3, "ministral3", "Ministral3")
    },
    QWEN3_5,
    FamilySpec {
        family: Family::Qwen3_5Moe,
        model_type: "qwen3_5_moe_text",
        class: "Qwen3_5Moe",
        scorer: "Qwen3_5Moe",
        experts: Some(ExpertDefaults {
            count: 256,
            width: 512,
            shared: Some(512),
            layout: ExpertLayout::Stacked,
            normalised: true,
            some_dense: false,
            ..EXPERTS
        }),
        ..QWEN3_5
    },
    FamilySpec {
        head_dim: Some(64),
        norm_eps: 1e-5,
        attention_bias: true,
        window: Window::Default(128),
        windowed: Windowed::Except(2, None),
        rope_theta: 1.5e5,
        rope: r#"{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": false}"#,
        gpt_oss: true,
        experts: Some(ExpertDefaults {
            per_token: 4,
            width: 2880,
            width_key: "intermediate_size",
            layout: ExpertLayout::Interleaved,
            bias: true,
            // the softmax of the chosen logits alone is that of all, divided by the chosen ones' sum
            normalised: true,
            some_dense: false,
            ..EXPERTS
        }),
        ..named(Family::GptOss, "gpt_oss", "GptOss")
    },
];

impl Family {
    /// Its row of the table.
    pub(super) fn spec(self) -> &'static FamilySpec {
        &FAMILIES[self as usize]
    }

    /// The `model_type` of its configs.
    pub fn model_type(self) -> &'static str {
        self.spec().model_type
    }

    /// Its class of language models.
    pub(super) fn class(self) -> String {
        format!("{}ForCausalLM", self.spec().class)
    }

    /// Its class of models with one number a sequence or token.
    pub fn scorer_class(self) -> String {
        format!("{}ForSequenceClassification", self.spec().scorer)
    }

    /// Qwen 3.5, dense or with experts.
    pub fn is_qwen3_5(self) -> bool {
        matches!(self, Self::Qwen3_5 | Self::Qwen3_5Moe)
    }

    /// The class names it is known by, for messages.
    pub(super) fn known() -> String {
        FAMILIES.each_ref().map(|spec| spec.family.class()).join(", ")
    }

    /// The family and head of a config; the class or `model_type` that is none of them.
    pub(super) fn parse(config: &Map<String, Value>) -> Result<(Self, HeadKind), String> {
        let class = config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        let Some(class) = class else {
            let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("(none)");
            let spec = FAMILIES.iter().find(|spec| spec.model_type == model_type);
            return spec.map(|spec| (spec.family, HeadKind::LanguageModel)).ok_or_else(|| model_type.to_owned());
        };
        let kinds = [
            ("ForCausalLM", HeadKind::LanguageModel),
            ("ForSequenceClassification", HeadKind::Scalar { bias: false }),
            ("ForTokenClassification", HeadKind::Scalar { bias: true }),
        ];
        let classes = FAMILIES.iter().flat_map(|spec| kinds.map(|(end, head)| (spec, end, head)));
        let mut named = classes.filter(|(spec, end, head)| {
            let start = if *head == HeadKind::LanguageModel { spec.class } else { spec.scorer };
            class.strip_prefix(start) == Some(*end)
        });
        named.next().map(|(spec, _, head)| (spec.family, head)).ok_or_else(|| class.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_families() {
        for (at, spec) in FAMILIES.iter().enumerate() {
            assert_eq!(spec.family as usize, at, "{spec:?}");
            assert_eq!(spec.family.spec().model_type, spec.model_type);
        }
    }
}
