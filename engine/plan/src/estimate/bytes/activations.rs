//! Activations that sublayers keep for their backward, and their buffers while they run. All in elements (four bytes
//! each, two in half precision), for one token unless it says otherwise.
//!
//! Counted from `models::layer` operation by operation: autodiff keeps the inputs of products, of `exp`, `sqrt` and
//! `sigmoid`, and both sides of element-wise products; sums keep nothing. `d` is the hidden size, `f` the MLP's width,
//! `q = heads · head_dim`, `k = kv_heads · head_dim`, `S = heads · keys` the attention scores of a token.
//!
//! | sublayer | kept | numbers |
//! |---|---|---|
//! | with a norm before the sublayer | `x / rms(x)`, and that times the norm's weight | 2 d |
//! | attention | scaled queries, keys, values, the mixed values | 2 q + 2 k |
//! | | with norms on q and k: each before and after its division | 2 q + 2 k |
//! | | scores minus their maximum, their exponentials, the probabilities | 3 S |
//! | | with a soft-cap: the scores before `tanh` | S |
//! | MLP, `silu` | gate, its sigmoid, their product, up, gate · up | 5 f |
//! | MLP, `gelu` by erf | gate, activation, up, gate · up | 4 f |
//! | MLP, `gelu` by tanh | gate, tanh's argument, 1 + tanh, activation, up, gate · up | 6 f |
//! | experts, `k` of `E` a token, each `f` wide | as an MLP, of each; what each gives; probabilities, where rows lie | 5 k f + k d + E + 8 k |
//! | with a norm after the sublayer | its input, and that divided | 2 d |
//!
//! Kernels keep their inputs and nothing else (the profile's [`KernelTable`](firebrick_spec::KernelTable) says which
//! are used; the CPU has none for `gelu`):
//!
//! | sublayer | kept | numbers |
//! |---|---|---|
//! | with a norm before the sublayer | what the norm gives | d |
//! | attention | queries, keys, values, the mixed values | 2 q + 2 k |
//! | | with norms on q and k: each before its norm | q + k |
//! | MLP | gate, up, gate · up | 3 f |
//! | experts | gate, up, gate · up, and what each gives; gate and up of gpt-oss as one | 3 k f + k d |
//! | with a norm after the sublayer | its input | d |
//!
//! Where a GPU's kernel attends there are no scores: to sequences longer than what is scored at a time, and over a
//! cache to one token of each sequence.
//!
//! In half precision the kernels of the CPU widen what they read and narrow what they give: the f32 inputs and results
//! of one of them at a time, and of its matrix, come on top of what runs. Scores are f32 in every precision.
//!
//! Beside frozen weights (adapters alone are trained) less is kept: no input of a product whose matrix is frozen, and
//! no factor of a frozen norm's weight. A bypass keeps its input (`d`, `q` or `f`; once for those that share it) and
//! the `rank` numbers between its matrices; with dropout its input is its own, with a byte of mask for each element.
//! Beside experts it keeps `d` or `k f` numbers a token, and `k · rank` between its matrices.
//!
//! The input `x` of a sublayer is the output of the one before it and is counted there.

use crate::estimate::{Bypass, Elements, ExpertWidths, F32, LinearWidths, Parallel, Sublayer, Tree};
use firebrick_arch::Arch;
use firebrick_arch::arch::Activation;
use firebrick_arch::lora::LoraConfig;
use firebrick_spec::{Backend, DeviceProfile, Operation};

/// Widths of an architecture.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part that a layer has or has not")]
pub struct LayerWidths {
    d: u64,
    f: u64,
    experts: ExpertWidths,
    q: u64,
    k: u64,
    heads: u64,
    /// True if there is a norm before a sublayer, and after it.
    pre: bool,
    post: bool,
    qk_norm: bool,
    softcap: bool,
    mlp_kept: u64,
    bypass: Option<Bypass>,
    /// Of layers of linear attention.
    linear: Option<LinearWidths>,
    /// True if a gate multiplies what attention mixes: it, and the product.
    gated: bool,
    /// True if a kernel computes norms.
    norms: bool,
    /// As wide as the MLP: gradients that its backward has besides what is kept, and tensors of a forward without a
    /// graph.
    mlp_room: [u64; 2],
    /// If a kernel computes attention: the elements of scores that it has at a time for a token of the longest
    /// sequence.
    attention: Option<u64>,
    /// Which sequences one does it for without any scores.
    attends: Attends,
    /// True if a kernel attends from a token over a cache.
    decodes: bool,
    /// True if kernels widen half precision to f32 before they compute.
    widens: bool,
    /// Bytes of a number.
    width: u64,
}

/// Sequences that a kernel attends over without a tensor of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attends {
    None,
    /// Those longer than what is scored at a time.
    Long,
    All,
}

/// Cores whose blocks of scores are there at a time where kernels compute attention, and queries of a block.
const CORES: u64 = 4;
const BLOCK: u64 = 64;

/// Sequences of one micro-batch, all as long as the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows: tokens, and padding where there is any.
    pub tokens: u64,
    /// True if sequences lie one behind the other.
    pub packed: bool,
    /// How sequences share rows.
    pub tree: Tree,
    /// Tokens of the longest sequence.
    pub length: u64,
    /// Tokens whose log-prob is wanted.
    pub scored: u64,
    /// The kind of tokens that attend over a cache, if they do.
    pub over: Option<Cached>,
}

/// What attends over a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// Tokens of prompts.
    Prompts,
    /// A token of each sequence.
    Tokens,
}

impl LayerWidths {
    /// The widths that matter to memory.
    pub fn new(arch: &Arch, lora: Option<&LoraConfig>, profile: &DeviceProfile) -> Self {
        let on_cpu = profile.backend == Backend::Cpu;
        let used = |operation| profile.kernels.uses(operation);
        let gates = used(Operation::Gate) && (!on_cpu || arch.activation == Activation::Silu);
        let linear = LinearWidths::new(arch, profile);
        let heads = arch.num_heads as u64;
        let dim = arch.head_dim as u64;
        let (d, f, q) = (arch.hidden_size as u64, arch.intermediate_size as u64, heads * dim);
        Self {
            d,
            f,
            experts: ExpertWidths::new(arch, on_cpu),
            q,
            k: arch.num_kv_heads as u64 * dim,
            heads,
            pre: arch.pre_norms,
            post: arch.post_norms,
            qk_norm: arch.qk_norm.is_some(),
            softcap: arch.attention_softcap.is_some(),
            mlp_kept: match arch.activation {
                // the clamped gate of experts keeps what it reads, too
                _ if gates || arch.swiglu_limit.is_some() => 3,
                Activation::Silu => 5,
                Activation::Gelu => 4,
                Activation::GeluTanh => 6,
            },
            bypass: lora.map(|l| {
                let v = linear.map_or(0, |linear| linear.values);
                let experts = ExpertWidths::new(arch, on_cpu);
                Bypass::new(l, [d, q, f, v], experts, arch.pre_norms)
            }),
            linear,
            gated: arch.attention_gate,
            norms: used(Operation::Norm),
            mlp_room: match (on_cpu, gates) {
                (true, _) => [2, 3],
                // the gate's gradients take the place of its inputs
                (false, true) => [1, 3],
                // the activation while up is made
                (false, false) => [1, 2],
            },
            attention: (on_cpu && used(Operation::Attention)).then_some(CORES * BLOCK),
            attends: match [Operation::Attention, Operation::LongAttention].map(used) {
                _ if on_cpu => Attends::None,
                [true, _] => Attends::All,
                [false, true] => Attends::Long,
                [false, false] => Attends::None,
            },
            decodes: !on_cpu && used(Operation::DecodeAttention),
            widens: on_cpu,
            width: arch.precision.width(),
        }
    }

    /// The widths with elements of `width` bytes.
    pub fn with_width(self, width: u64) -> Self {
        Self { width, ..self }
    }

    /// Bytes of one device for so many tokens.
    pub fn bytes(&self, numbers: Elements, tokens: u64, parallel: &Parallel) -> u64 {
        numbers.bytes(self.width, tokens, parallel)
    }

    /// Bytes of a row of so many tokens, as wide as the residual stream.
    pub fn row(&self, tokens: u64) -> u64 {
        self.width * tokens * self.d
    }

    /// f32 copies of what a kernel reads and gives in a pass over a half, where that is stored in half precision.
    pub fn widened(&self, sublayer: Sublayer, backward: bool, tokens: u64, parallel: &Parallel) -> u64 {
        if !self.widens || self.width == F32 {
            return 0;
        }
        let times = 1 + u64::from(backward);
        let (c, v) = self.linear_widths();
        let experts = &self.experts;
        // widths of tensors, numbers of matrices, widths of a product's input and output
        let (tensor, matrix, product) = match sublayer {
            Sublayer::Attention => {
                let tensor = if backward { 3 * self.q + 4 * self.k } else { 2 * self.q + 2 * self.k };
                (tensor, times * self.d * self.q, self.d + self.q)
            }
            Sublayer::Linear => (times * (2 * c + 3 * v), times * self.d * c, self.d + c),
            Sublayer::Mlp => (3 * self.f, times * self.d * self.f, self.d + self.f),
            Sublayer::Experts => {
                let matrix = times * experts.count * self.d * experts.f;
                (3 * experts.all(), matrix, experts.per_token * (self.d + experts.f))
            }
        };
        let product = tokens * product;
        parallel.inside(F32 * (tokens * tensor).max(product + matrix))
    }

    /// Channels of the convolution and width of all values of linear attention.
    fn linear_widths(&self) -> (u64, u64) {
        self.linear.map_or((0, 0), |linear| (linear.channels, linear.values))
    }

    /// Widths of linear attention, in an architecture that has it.
    pub(crate) fn linear(&self) -> Option<LinearWidths> {
        self.linear
    }

    /// Numbers of a token's queries and of its keys.
    pub fn query_key_widths(&self) -> [u64; 2] {
        [self.q, self.k]
    }

    /// Kept by a sublayer, scores apart.
    pub fn kept(&self, sublayer: Sublayer) -> Elements {
        // each norm keeps its quotient, and what it gives is kept by the products after it
        let frozen = self.bypass.is_some();
        let norm = if frozen || self.norms { 1 } else { 2 };
        let normed = if self.qk_norm { norm * (self.q + self.k) } else { 0 };
        let post = if self.post { norm * self.d } else { 0 };
        // the gate's sigmoid, and what it multiplies
        let gate = if self.gated { 2 * self.q } else { 0 };
        let linear = self.linear.map_or(0, |linear| linear.kept(self.width));
        // without a norm before them, products keep the sublayer's own input
        let first = match (self.pre, self.norms) {
            (false, _) => 0,
            (true, true) => self.d,
            (true, false) => 2 * self.d,
        };
        let first = if frozen { 0 } else { first };
        // inputs of frozen products alone: gate · up, the values of linear attention, what attention mixes
        let dropped = u64::from(frozen);
        let (between, inside) = match sublayer {
            Sublayer::Attention => (post, normed + gate + (2 - dropped) * self.q + 2 * self.k),
            Sublayer::Linear => (0, linear - dropped * self.linear_widths().1),
            Sublayer::Mlp => (post, (self.mlp_kept - dropped) * self.f),
            Sublayer::Experts => (post + self.experts.per_token * self.d, self.experts.kept(self.mlp_kept - dropped)),
        };
        let bypass = self.bypass.map_or(Elements::default(), |bypass| bypass.0[sublayer as usize]);
        Elements { between: first + between + bypass.between, inside: inside + bypass.inside }
    }

    /// Score-sized tensors that a traced attention keeps.
    fn score_copies(&self) -> u64 {
        3 + u64::from(self.softcap)
    }

    /// True if a kernel attends over sequences, or prompts, and no scores go through memory.
    pub fn attends_by_kernel(&self, shape: Shape, rows: usize) -> bool {
        let over_tokens = shape.over == Some(Cached::Tokens);
        !over_tokens && (self.attention.is_some() || self.keeps_none(shape, rows))
    }

    /// True if a kernel attends without scores, on the graph.
    fn keeps_none(&self, shape: Shape, rows: usize) -> bool {
        let attends = match self.attends {
            Attends::None => false,
            // shared prefixes are the kernel's
            Attends::Long => shape.tree.prefix > 0 || shape.is_chunked(rows),
            Attends::All => true,
        };
        match shape.over {
            None => attends,
            // prompts that run in one piece attend as sequences do
            Some(Cached::Prompts) => self.attends == Attends::All && shape.tokens >= shape.length,
            Some(Cached::Tokens) => false,
        }
    }

    /// Scores that are there at a time, one tensor of them.
    fn scores(&self, shape: Shape, rows: usize) -> u64 {
        if let Some(scored) = self.attention {
            return scored.min(CORES * shape.length) * shape.length;
        }
        if self.keeps_none(shape, rows) || (self.decodes && shape.over == Some(Cached::Tokens)) {
            return 0;
        }
        self.scores_of_operations(shape, rows)
    }

    /// Scores that are there at a time if tensor operations attend.
    fn scores_of_operations(&self, shape: Shape, rows: usize) -> u64 {
        let scores = if shape.packed {
            shape.length * at_most(rows, shape.tokens)
        } else {
            shape.tokens * at_most(rows, shape.length)
        };
        self.heads * scores
    }

    /// Scores that a traced attention keeps, over all tokens: none where they are computed again. Padded micro-batches
    /// of sequences that are too short for chunks keep theirs whatever the length limit is: at most `rows` of them a
    /// token.
    pub fn scores_kept(&self, shape: Shape, rows: usize) -> u64 {
        if self.attention.is_some() || self.attends == Attends::All || shape.packed {
            0
        } else {
            self.score_copies() * self.scores_of_operations(shape, rows)
        }
    }

    /// Scores that an attention sublayer's backward has besides those it keeps.
    pub fn scores_extra(&self, shape: Shape, rows: usize) -> u64 {
        let copies = if self.recomputes(shape, rows) {
            // the probabilities and their gradient; under a soft-cap the tanh of the scores
            2 + u64::from(self.softcap)
        } else {
            // the gradient of the probabilities comes while all of them are there
            1
        };
        copies * self.scores(shape, rows)
    }

    /// Scores of a forward without a graph: before and after softmax.
    pub fn scores_forward(&self, shape: Shape, rows: usize) -> u64 {
        let copies = if self.attention.is_some() { 1 } else { 2 };
        copies * self.scores(shape, rows)
    }

    /// True if a trained attention keeps no scores.
    pub fn recomputes(&self, shape: Shape, rows: usize) -> bool {
        self.attention.is_some() || self.keeps_none(shape, rows) || shape.recomputes(rows)
    }

    /// True if attention's backward runs outside of the graph, which cuts it at every attention sublayer.
    pub fn splits(&self, shape: Shape, rows: usize) -> bool {
        self.attention.is_none() && !self.keeps_none(shape, rows) && shape.recomputes(rows)
    }

    /// Gradients on their way through a sublayer, besides what it keeps and scores apart.
    pub fn extra(&self, sublayer: Sublayer, recomputes: bool) -> Elements {
        let inside = match (sublayer, recomputes) {
            // the queries', keys' and values' gradients, when the mixed values are gone
            (Sublayer::Attention, _) if self.attention.is_some() => self.q + 2 * self.k,
            (Sublayer::Attention, false) => self.q,
            // the mixed values' gradient, the queries' by chunks and in one piece, the keys' and values'
            (Sublayer::Attention, true) => 3 * self.q + 2 * self.k,
            (Sublayer::Linear, _) => self.linear.map_or(0, |linear| linear.extra()),
            (Sublayer::Mlp, _) => self.mlp_room[0] * self.f,
            (Sublayer::Experts, _) => self.experts.running(self.mlp_room)[0],
        };
        Elements { between: 2 * self.d + self.sorted(sublayer), inside }
    }

    /// Running tensors of a sublayer without a graph, scores apart.
    pub fn forward(&self, sublayer: Sublayer) -> Elements {
        Elements {
            between: 2 * self.d + self.sorted(sublayer),
            inside: match sublayer {
                Sublayer::Attention if self.attention.is_some() => 2 * self.q + 2 * self.k,
                // queries, keys, values, and the mixed values by chunks and in one piece
                Sublayer::Attention => 3 * self.q + 2 * self.k,
                Sublayer::Linear => self.linear.map_or(0, |linear| linear.forward(self.width)),
                Sublayer::Mlp => self.mlp_room[1] * self.f,
                Sublayer::Experts => self.experts.running(self.mlp_room)[1],
            },
        }
    }

    /// Rows by expert, as wide as the residual stream: what the experts read, and what they give.
    fn sorted(&self, sublayer: Sublayer) -> u64 {
        match sublayer {
            Sublayer::Experts => 2 * self.experts.per_token * self.d,
            Sublayer::Attention | Sublayer::Linear | Sublayer::Mlp => 0,
        }
    }

    /// The hidden size.
    pub fn hidden(&self) -> u64 {
        self.d
    }
}

impl Shape {
    /// Tokens of sequences of `length` that attend over a cache.
    pub fn over(cached: Cached, tokens: u64, length: u64, scored: u64) -> Self {
        Self { tokens, packed: false, tree: Tree::single(length), length, scored, over: Some(cached) }
    }

    /// True if attention takes its queries in chunks of `rows`.
    pub fn is_chunked(self, rows: usize) -> bool {
        at_most(rows, self.length) < self.length
    }

    /// True if attention in tensor operations computes its scores once more in the backward.
    fn recomputes(self, rows: usize) -> bool {
        self.packed || self.is_chunked(rows)
    }
}

/// Queries of `all` that are scored at a time; 0 rows are all.
fn at_most(rows: usize, length: u64) -> u64 {
    if rows == 0 { length } else { length.min(rows as u64) }
}
