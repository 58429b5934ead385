//! What a decoder looks like: everything that the families differ in, as data.

mod config;
mod feed_forward;
mod mixer;
mod rope;

pub use feed_forward::{ExpertLayout, Experts, FeedForward, MAX_EXPERT_LAYERS};
pub use firebrick_spec::Activation;
pub use mixer::{GatedDeltaNet, Mixer};
pub use rope::{QueryScaling, Rope, RopeScaling, Yarn};

use firebrick_spec::Precision;
use firebrick_spec::quantized::BaseFormat;
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

/// Families, the `model_type` of their configs, and what their class names begin with: of language models, and of
/// models with one number a token.
const FAMILIES: [(Family, &str, &str, &str); 13] = [
    (Family::Llama, "llama", "Llama", "Llama"),
    (Family::Mistral, "mistral", "Mistral", "Mistral"),
    (Family::Qwen2, "qwen2", "Qwen2", "Qwen2"),
    (Family::Qwen3, "qwen3", "Qwen3", "Qwen3"),
    (Family::Qwen3Moe, "qwen3_moe", "Qwen3Moe", "Qwen3Moe"),
    (Family::Gemma2, "gemma2", "Gemma2", "Gemma2"),
    // `Gemma3ForSequenceClassification` is that of the model that sees images
    (Family::Gemma3, "gemma3_text", "Gemma3", "Gemma3Text"),
    (Family::SmolLm3, "smollm3", "SmolLM3", "SmolLM3"),
    (Family::Olmo3, "olmo3", "Olmo3", "Olmo3"),
    (Family::Ministral3, "ministral3", "Ministral3", "Ministral3"),
    (Family::Qwen3_5, "qwen3_5_text", "Qwen3_5", "Qwen3_5"),
    (Family::Qwen3_5Moe, "qwen3_5_moe_text", "Qwen3_5Moe", "Qwen3_5Moe"),
    (Family::GptOss, "gpt_oss", "GptOss", "GptOss"),
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
        let class = FAMILIES.iter().find(|f| f.0 == self).map_or("", |f| f.3);
        format!("{class}ForSequenceClassification")
    }

    /// Gemma 2 and what came after it.
    #[must_use]
    pub fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Qwen 3.5, dense or with experts.
    #[must_use]
    pub fn is_qwen3_5(self) -> bool {
        matches!(self, Self::Qwen3_5 | Self::Qwen3_5Moe)
    }

    /// The class names it is known by, for messages.
    fn known() -> String {
        FAMILIES.map(|(_, _, class, _)| format!("{class}ForCausalLM")).join(", ")
    }

    fn parse(config: &Map<String, Value>) -> Result<(Self, HeadKind), String> {
        let class = config.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        let Some(class) = class else {
            let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("(none)");
            return FAMILIES
                .iter()
                .find(|f| f.1 == model_type)
                .map(|f| (f.0, HeadKind::LanguageModel))
                .ok_or_else(|| model_type.to_owned());
        };
        let kinds = [
            ("ForCausalLM", HeadKind::LanguageModel),
            ("ForSequenceClassification", HeadKind::Scalar { bias: false }),
            ("ForTokenClassification", HeadKind::Scalar { bias: true }),
        ];
        FAMILIES
            .iter()
            .flat_map(|f| kinds.map(|k| (f, k)))
            .find(|(f, k)| {
                let prefix = match k.1 {
                    HeadKind::LanguageModel => f.2,
                    HeadKind::Scalar { .. } => f.3,
                };
                class.strip_prefix(prefix) == Some(k.0)
            })
            .map(|(f, k)| (f.0, k.1))
            .ok_or_else(|| class.to_owned())
    }
}

/// What the norms on queries and keys are taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself, with one weight for all.
    Heads,
    /// The whole projection, all heads together.
    Projection,
}

/// A decoder's shape: everything that the families differ in, as data.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a weight that exists or not, independent of the others")]
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
    /// Width of a dense MLP.
    pub intermediate_size: usize,
    /// The feed-forward of each layer.
    pub feed_forwards: Vec<FeedForward>,
    /// Number of (attention, MLP) pairs.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// What mixes the tokens of each layer.
    pub mixers: Vec<Mixer>,
    /// The shape of its gated `DeltaNet` layers, where it has any.
    pub delta_net: Option<GatedDeltaNet>,
    /// Whether what attention mixes is multiplied by the sigmoid of a gate, which the query's matrix gives beside each
    /// head (Qwen 3.5).
    pub attention_gate: bool,
    /// Leading dimensions of a head that are rotated; all of them, but in Qwen 3.5.
    pub rotary_dim: usize,
    /// Longest sequence it was made for.
    pub max_positions: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f64,
    /// Norm weights are stored as w − 1 (Gemma).
    pub norm_offset: f64,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// RMS norms on q and k.
    pub qk_norm: Option<QkNorm>,
    /// Norms before each half (all but `OLMo` 3).
    pub pre_norms: bool,
    /// Norms after each half, before the residual is added (Gemma, `OLMo` 3).
    pub post_norms: bool,
    /// Non-linearity of the MLP's gate.
    pub activation: Activation,
    /// Where it is given, experts have gpt-oss's gate in place of [`Self::activation`]: with this limit l,
    /// `(up + 1) · gate · σ(1.702 gate)` of `gate ≤ l` and `|up| ≤ l` (`swiglu_limit`).
    pub swiglu_limit: Option<f64>,
    /// Rotary embedding of each layer; `None` where a layer has none (`SmolLM` 3).
    pub ropes: Vec<Option<Rope>>,
    /// Growth of queries with their position (Ministral 3).
    pub query_scaling: Option<QueryScaling>,
    /// Whether a learned number for each query head joins the softmax of its scores and takes its share away (gpt-oss;
    /// Xiao et al., 2023, arXiv:2309.17453).
    pub attention_sinks: bool,
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
    /// The float type that its parameters and activations have when it runs: what a run asks for, not what a file
    /// stores.
    pub precision: Precision,
    /// The number format of the layers' matrices, where they are a frozen base in few bits under adapters: what a run
    /// asks for.
    pub base: Option<BaseFormat>,
}

impl Arch {
    /// Longest sequence it can be given; `None` where rotary scaling stretches with the sequence.
    #[must_use]
    pub fn context(&self) -> Option<usize> {
        match self.stretches_beyond() {
            Some(_) => None,
            None => Some(self.max_positions),
        }
    }

    /// The length beyond which rotary angles follow from the longest sequence of a forward pass; `None` where they
    /// never do.
    #[must_use]
    pub fn stretches_beyond(&self) -> Option<usize> {
        let dynamic = self.ropes.iter().flatten().filter_map(|rope| match rope.scaling {
            RopeScaling::Dynamic { original, .. } => Some(original),
            _ => None,
        });
        dynamic.min()
    }

    /// The rotary embeddings that differ, in the order of their first layers, and which of them each layer has.
    #[must_use]
    pub fn rope_kinds(&self) -> (Vec<Option<&Rope>>, Vec<usize>) {
        let mut kinds: Vec<Option<&Rope>> = Vec::new();
        let of_layers = self.ropes.iter().map(|rope| {
            let known = kinds.iter().position(|&kind| kind == rope.as_ref());
            known.unwrap_or_else(|| {
                kinds.push(rope.as_ref());
                kinds.len() - 1
            })
        });
        let of_layers = of_layers.collect();
        (kinds, of_layers)
    }

    /// The same with fewer layers.
    #[must_use]
    pub fn with_layers(mut self, layers: usize) -> Self {
        self.num_layers = layers;
        self.windows.truncate(layers);
        self.mixers.truncate(layers);
        self.ropes.truncate(layers);
        self.feed_forwards.truncate(layers);
        self
    }

    /// The same body with one number a token for a head: what a critic beside this model is, all of whose weights are
    /// trained.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        self.base = None;
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

    /// The same with the layers' matrices as a frozen base in few bits, or in the model's precision.
    #[must_use]
    pub fn with_base(mut self, base: Option<BaseFormat>) -> Self {
        self.base = base;
        self
    }

    /// The experts of a layer; `None` where its feed-forward is dense.
    #[must_use]
    pub fn experts(&self, layer: usize) -> Option<Experts> {
        self.feed_forwards[layer].experts()
    }

    /// Experts that a token goes through, over all layers: numbers of a route.
    #[must_use]
    pub fn route_width(&self) -> usize {
        let layers = self.expert_layers();
        layers.map(|(_, own)| own.per_token).sum()
    }

    /// Where a layer's choices begin in a route.
    #[must_use]
    pub fn route_offset(&self, layer: usize) -> usize {
        let before = self.expert_layers().take_while(|&(index, _)| index < layer);
        before.map(|(_, own)| own.per_token).sum()
    }

    /// Whether a GPU decodes the model through kernels alone, in steps that can be captured as graphs. Routers of
    /// [experts](Self::expert_layers) choose on the host, and no kernel gates what attention mixes, rotates a part of a
    /// head, or has the states of linear attention.
    #[must_use]
    pub fn decodes_in_kernels(&self) -> bool {
        self.expert_layers().next().is_none()
            && self.delta_net.is_none()
            && !self.attention_gate
            && self.rotary_dim == self.head_dim
    }

    /// The layers with experts, in order.
    pub fn expert_layers(&self) -> impl Iterator<Item = (usize, Experts)> {
        let layers = self.feed_forwards.iter().enumerate();
        layers.filter_map(|(layer, own)| Some((layer, own.experts()?)))
    }

    /// Whether a checkpoint has the matrices of a layer's experts as one parameter, and not as modules of their own.
    #[must_use]
    pub fn stacks_experts(&self) -> bool {
        let first = self.expert_layers().next();
        first.is_some_and(|(_, own)| own.layout.is_joined())
    }

    /// Number of layers with this mixer.
    #[must_use]
    pub fn count(&self, mixer: Mixer) -> usize {
        self.mixers.iter().filter(|own| **own == mixer).count()
    }

    /// Numbers of the states that a sequence has while it is sampled, all layers: of the delta rule, and of the
    /// convolutions.
    #[must_use]
    pub fn state_numbers(&self) -> [usize; 2] {
        let layers = self.count(Mixer::GatedDeltaNet);
        let own = self.delta_net.map_or([0, 0], |delta| [delta.recurrent_state(), delta.convolution_state()]);
        own.map(|numbers| layers * numbers)
    }

    /// Query heads that share one key/value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Bytes of keys and values a token keeps in the cache, over all layers.
    #[must_use]
    pub fn cache_bytes_per_token(&self) -> usize {
        let layers = self.count(Mixer::Attention);
        2 * layers * self.num_kv_heads * self.head_dim * self.precision.width() as usize
    }
}
