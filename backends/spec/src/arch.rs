//! What a decoder looks like: everything that the families differ in, as data.

mod config;

use crate::Precision;
use serde_json::{Map, Value};

/// A published decoder family. One [`Arch`] covers them all; the family decides names and defaults.
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
    /// Gemma 2: soft-caps, (1 + w) norms before and after each half, alternating windows.
    Gemma2,
}

/// What the last unit computes from a hidden row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// Logits over the vocabulary (`…ForCausalLM`).
    LanguageModel,
    /// One number a token (`…ForSequenceClassification` and `…ForTokenClassification` with one label):
    /// reward models and critics.
    Scalar {
        /// Whether `score.bias` exists.
        bias: bool,
    },
}

const FAMILIES: [(Family, &str, &str); 5] = [
    (Family::Llama, "llama", "Llama"),
    (Family::Mistral, "mistral", "Mistral"),
    (Family::Qwen2, "qwen2", "Qwen2"),
    (Family::Qwen3, "qwen3", "Qwen3"),
    (Family::Gemma2, "gemma2", "Gemma2"),
];

impl Family {
    /// The `model_type` of its configs.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        FAMILIES.iter().find(|f| f.0 == self).map_or("", |f| f.1)
    }

    /// Its class of models with one number a sequence or token.
    #[must_use]
    pub fn scorer_class(self) -> String {
        let class = FAMILIES.iter().find(|f| f.0 == self).map_or("", |f| f.2);
        format!("{class}ForSequenceClassification")
    }

    /// The class names it is known by, for messages.
    fn known() -> String {
        FAMILIES
            .map(|(_, _, class)| format!("{class}ForCausalLM"))
            .join(", ")
    }

    fn parse(config: &Map<String, Value>) -> Result<(Self, HeadKind), String> {
        let class = config
            .get("architectures")
            .and_then(|a| a.get(0))
            .and_then(Value::as_str);
        let Some(class) = class else {
            let model_type = config
                .get("model_type")
                .and_then(Value::as_str)
                .unwrap_or("(none)");
            return FAMILIES
                .iter()
                .find(|f| f.1 == model_type)
                .map(|f| (f.0, HeadKind::LanguageModel))
                .ok_or_else(|| model_type.to_owned());
        };
        let kinds = [
            ("ForCausalLM", HeadKind::LanguageModel),
            (
                "ForSequenceClassification",
                HeadKind::Scalar { bias: false },
            ),
            ("ForTokenClassification", HeadKind::Scalar { bias: true }),
        ];
        FAMILIES
            .iter()
            .flat_map(|f| kinds.map(|k| (f, k)))
            .find(|(f, k)| class.strip_prefix(f.2) == Some(k.0))
            .map(|(f, k)| (f.0, k.1))
            .ok_or_else(|| class.to_owned())
    }
}

/// The gate's non-linearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · σ(x).
    Silu,
    /// GELU by its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
    /// GELU by erf.
    Gelu,
}

/// How rotary frequencies are stretched beyond the trained context (transformers' `rope_type`).
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware: the base grows with the longest position of the forward once that exceeds `original`.
    Dynamic {
        /// Growth of the base.
        factor: f64,
        /// Context length of training.
        original: usize,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a blend between.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Context length of training.
        original: usize,
    },
}

/// Rotary position embedding, rotate-half form.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching.
    pub scaling: RopeScaling,
}

/// A decoder's shape: everything that the five families differ in, as data.
#[derive(Clone, Debug, PartialEq)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a weight that exists or not, independent of the others"
)]
pub struct Arch {
    /// Family: decides tensor names.
    pub family: Family,
    /// Kind of the last unit.
    pub head: HeadKind,
    /// Beside logits the last unit gives one number a token: a critic that shares the language model's trunk.
    pub joint_value_head: bool,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of (attention, MLP) pairs.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Longest sequence it was made for.
    pub max_positions: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Norm weights are stored as w − 1 (Gemma).
    pub norm_offset: bool,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// RMS norms on each head of q and k.
    pub qk_norm: bool,
    /// Norms after each half as well as before (Gemma 2).
    pub post_norms: bool,
    /// Non-linearity of the MLP's gate.
    pub activation: Activation,
    /// Rotary embedding.
    pub rope: Rope,
    /// Sliding window of each layer, in tokens (the query's own included).
    pub windows: Vec<Option<usize>>,
    /// Attention scores are multiplied by this.
    pub attention_scale: f64,
    /// `c · tanh(score / c)` on attention scores.
    pub attention_softcap: Option<f64>,
    /// The same on logits.
    pub logit_softcap: Option<f64>,
    /// Embeddings are multiplied by this (Gemma).
    pub embedding_scale: Option<f64>,
    /// The head uses the embedding's matrix.
    pub tied: bool,
    /// Standard deviation of a random start.
    pub initializer_range: f64,
    /// The float type that its parameters and activations have when it runs: what a run asks for, not what a file stores.
    pub precision: Precision,
}

impl Arch {
    /// Longest sequence it can be given; `None` where rotary scaling stretches with the sequence.
    #[must_use]
    pub fn context(&self) -> Option<usize> {
        match self.rope.scaling {
            RopeScaling::Dynamic { .. } => None,
            _ => Some(self.max_positions),
        }
    }

    /// The same body with one number a token for a head: what a critic beside this model is.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        if self.head == HeadKind::LanguageModel {
            self.head = HeadKind::Scalar { bias: false };
            self.joint_value_head = false;
            self.tied = false;
        }
        self
    }

    /// The same language model with a number a token beside its logits, from the same hidden rows.
    #[must_use]
    pub fn with_joint_value_head(mut self) -> Self {
        self.joint_value_head = self.head == HeadKind::LanguageModel;
        self
    }

    /// The same to be run in another precision.
    #[must_use]
    pub fn in_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Query heads that share one key/value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Bytes of keys and values a token keeps in the cache, over all layers.
    #[must_use]
    pub fn cache_bytes_per_token(&self) -> usize {
        2 * self.num_layers * self.num_kv_heads * self.head_dim * self.precision.width() as usize
    }
}
