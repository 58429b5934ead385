//! The feed-forward half of a layer: one gated MLP for all tokens, or experts of which a router chooses some for each
//! token.

/// The kind of a layer's feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// One gated MLP.
    Dense,
    /// A mixture of gated MLPs (Shazeer et al., 2017, arXiv:1701.06538).
    Experts(Experts),
}

impl FeedForward {
    /// The experts; `None` where it is dense.
    pub fn experts(self) -> Option<Experts> {
        match self {
            Self::Dense => None,
            Self::Experts(experts) => Some(experts),
        }
    }
}

/// Most layers of a model with experts.
pub const MAX_EXPERT_LAYERS: usize = 1024;

/// The experts of a layer and how its router chooses among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of the layer.
    pub count: usize,
    /// Experts that run for a token (`num_experts_per_tok`).
    pub per_token: usize,
    /// Width of one expert (`moe_intermediate_size`).
    pub intermediate_size: usize,
    /// True if the weights of the chosen experts are divided by their sum (`norm_topk_prob`).
    pub normalised: bool,
    /// Width of the expert that every token goes through besides, by the sigmoid of a gate of its own
    /// (`shared_expert_intermediate_size`).
    pub shared: Option<usize>,
    /// Layout of their matrices in a checkpoint.
    pub layout: ExpertLayout,
    /// True if the router and every matrix of an expert have biases.
    pub bias: bool,
}

/// Layout of the matrices of a layer's experts in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertLayout {
    /// A tensor for each matrix of each expert.
    Apart,
    /// All experts in one tensor, `[experts, out, in]`, the rows of the gate before those of up in the same.
    Stacked,
    /// All experts in one tensor, `[experts, in, out]`, the columns of gate and up in turns (gpt-oss). In memory they
    /// lie as `Stacked`.
    Interleaved,
}

impl ExpertLayout {
    /// True if gate and up are one matrix.
    pub fn is_joined(self) -> bool {
        self != Self::Apart
    }
}
