//! The architecture of a decoder: everything that the families differ in, as data.

mod config;
mod family;
mod feed_forward;
mod mixer;
mod rope;

pub use family::Family;
pub use feed_forward::{ExpertLayout, Experts, FeedForward, MAX_EXPERT_LAYERS};
pub use firebrick_spec::Activation;
pub use mixer::{GatedDeltaNet, Mixer};
pub use rope::{QueryScaling, Rope, RopeScaling, Yarn};

use firebrick_spec::Precision;
use firebrick_spec::quantized::BaseFormat;

/// Output of the last unit for a hidden row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// Logits over the vocabulary (`…ForCausalLM`).
    LanguageModel,
    /// One number a token (`…ForSequenceClassification` and `…ForTokenClassification` with one label):
    /// reward models and critics.
    Scalar {
        /// True if `score.bias` exists.
        bias: bool,
    },
}

/// Scope of the norms on queries and keys.
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
    /// Token mixer of each layer.
    pub mixers: Vec<Mixer>,
    /// The shape of its gated `DeltaNet` layers, where it has any.
    pub delta_net: Option<GatedDeltaNet>,
    /// True if the output of attention is multiplied by the sigmoid of a gate, which the query's matrix gives next to
    /// each head (Qwen 3.5).
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
    /// Limit l of gpt-oss's gate, which experts with it use in place of [`Self::activation`]: `(up + 1) · gate ·
    /// σ(1.702 gate)` of `gate ≤ l` and `|up| ≤ l` (`swiglu_limit`).
    pub swiglu_limit: Option<f64>,
    /// Rotary embedding of each layer; `None` where a layer has none (`SmolLM` 3).
    pub ropes: Vec<Option<Rope>>,
    /// Growth of queries with their position (Ministral 3).
    pub query_scaling: Option<QueryScaling>,
    /// True if each query head has a learned sink: a further score that joins its softmax (gpt-oss; Xiao et al., 2023,
    /// arXiv:2309.17453).
    pub attention_sinks: bool,
    /// Sliding window of each layer, in tokens (the query's own included).
    pub windows: Vec<Option<usize>>,
    /// Attention scores are multiplied by this.
    pub attention_scale: f64,
    /// `c · tanh(score / c)` on attention scores.
    pub attention_softcap: Option<f64>,
    /// `c · tanh(logit / c)` on logits.
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
    /// The number format of the layers' matrices, where they are a frozen quantized base under adapters: what a run
    /// asks for.
    pub base: Option<BaseFormat>,
}

impl Arch {
    /// Numbers that the head gives for a token: logits, or one.
    pub fn head_width(&self) -> usize {
        match self.head {
            HeadKind::LanguageModel => self.vocab_size,
            HeadKind::Scalar { .. } => 1,
        }
    }

    /// Longest sequence it can be given; `None` where rotary scaling stretches with the sequence.
    pub fn context(&self) -> Option<usize> {
        self.stretches_beyond().is_none().then_some(self.max_positions)
    }

    /// The length beyond which rotary angles follow from the longest sequence of a forward pass; `None` where they
    /// never do.
    pub fn stretches_beyond(&self) -> Option<usize> {
        let dynamic = self.ropes.iter().flatten().filter_map(|rope| match rope.scaling {
            RopeScaling::Dynamic { original, .. } => Some(original),
            _ => None,
        });
        dynamic.min()
    }

    /// The rotary embeddings that differ, in the order of their first layers, and which of them each layer has.
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

    /// Keeps the first `layers` layers.
    #[must_use]
    pub fn with_layers(mut self, layers: usize) -> Self {
        self.num_layers = layers;
        self.windows.truncate(layers);
        self.mixers.truncate(layers);
        self.ropes.truncate(layers);
        self.feed_forwards.truncate(layers);
        self
    }

    /// Replaces the head by one that gives one value per token: the critic of this model, all of whose weights are
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

    /// Adds a value head next to the projection: one value per token from the same hidden rows.
    #[must_use]
    pub fn with_joint_value_head(mut self) -> Self {
        self.joint_value_head = self.head == HeadKind::LanguageModel;
        self
    }

    /// Sets the precision that it runs in.
    #[must_use]
    pub fn in_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the format of the layers' matrices as a frozen quantized base; `None` is the model's precision.
    #[must_use]
    pub fn with_base(mut self, base: Option<BaseFormat>) -> Self {
        self.base = base;
        self
    }

    /// The experts of a layer; `None` where its feed-forward is dense.
    pub fn experts(&self, layer: usize) -> Option<Experts> {
        self.feed_forwards[layer].experts()
    }

    /// Experts that a token goes through, over all layers: numbers of a route.
    pub fn route_width(&self) -> usize {
        self.expert_layers().map(|(_, experts)| experts.per_token).sum()
    }

    /// Index of a layer's first choice in a route.
    pub fn route_offset(&self, layer: usize) -> usize {
        self.expert_layers().take_while(|&(index, _)| index < layer).map(|(_, experts)| experts.per_token).sum()
    }

    /// True if a GPU decodes the model in kernels alone, in steps that can be captured as graphs. Routers of
    /// [experts](Self::expert_layers) choose on the host, and no kernel applies attention's gate, rotates a part of a
    /// head, or has the states of linear attention.
    pub fn decodes_in_kernels(&self) -> bool {
        self.expert_layers().next().is_none()
            && self.delta_net.is_none()
            && !self.attention_gate
            && self.rotary_dim == self.head_dim
    }

    /// The layers with experts, in order.
    pub fn expert_layers(&self) -> impl Iterator<Item = (usize, Experts)> {
        self.feed_forwards.iter().enumerate().filter_map(|(layer, feed_forward)| Some((layer, feed_forward.experts()?)))
    }

    /// True if a checkpoint stores the matrices of a layer's experts as one parameter, and not as separate modules.
    pub fn stacks_experts(&self) -> bool {
        self.expert_layers().next().is_some_and(|(_, experts)| experts.layout.is_joined())
    }

    /// Number of layers with this mixer.
    pub fn count(&self, mixer: Mixer) -> usize {
        self.mixers.iter().filter(|kind| **kind == mixer).count()
    }

    /// Numbers of the states that a sequence has while it is sampled, all layers: of the delta rule, and of the
    /// convolutions.
    pub fn state_numbers(&self) -> [usize; 2] {
        let layers = self.count(Mixer::GatedDeltaNet);
        let state = self.delta_net.map_or([0, 0], |delta| [delta.recurrent_state(), delta.convolution_state()]);
        state.map(|numbers| layers * numbers)
    }

    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}
