//! Seconds of passes where the device's kernels were measured ([`KernelRates`]): what each kernel computes and moves is
//! counted, and taken at its own rate. `n` are the tokens of all micro-batches, `d`, `q`, `k` and `f` the widths of a
//! layer, `V` the vocabulary.
//!
//! | work of a layer | forward | backward |
//! |---|---|---|
//! | matmuls | 2 P n operations, and 4 (n Σ (inputs + outputs) + P) bytes of each micro-batch | twice that; once beside frozen weights |
//! | attention | 4 q operations for each pair of a block of 64 queries and the keys up to its end | by a rate of its own |
//! | norms, rotary embedding, gate | 16 d + 8 (q + k) + 12 f bytes per token | 24 d + 8 (q + k) + 20 f |
//! | sums in tensor operations | 24 d bytes per token | 60 d |
//!
//! The head has a matmul of each chunk, log-probs of its logits and, in training, their gradient and two matmuls more.
//! Gradients of micro-batches and of chunks are added up, and squared for their norm, in tensor operations.

use crate::estimate::{Context, F32, Sublayer};
use crate::{Layout, ModelPlan};
use firebrick_spec::KernelRates;

/// Queries that attention takes together.
const BLOCK: f64 = 64.0;

/// Operations on small tensors of a layer: forward, and forward and backward.
const OPERATIONS: [f64; 2] = [20.0, 60.0];

/// Operations on small tensors of a decoding step, of a layer in it, of each of its sequences, and of a matrix with an
/// adapter: what a step takes between its kernels (`cargo bench --bench decoding_step`, "else"), and to start them on
/// all threads.
const STEP_OPERATIONS: f64 = 60.0;
const DECODE_OPERATIONS: f64 = 60.0;
const ROW_OPERATIONS: f64 = 6.0;
const ADAPTER_OPERATIONS: f64 = 24.0;

/// Bytes that a sum of two tensors moves for a number, and one with a copy of a tensor.
const SUM: f64 = 12.0;

/// The work of a pass, all micro-batches together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Tokens, and padding if there is any.
    pub tokens: f64,
    pub micros: f64,
    /// Twice the mean keys of a token: the tokens of a sequence, where no prefix is shared.
    pub length: f64,
    /// Tokens whose log-prob is wanted.
    pub scored: f64,
}

impl Work {
    /// Work on `sequences` sequences under a plan's limits, in a layout.
    pub fn new(ctx: &Context<'_>, plan: &ModelPlan, layout: Layout, sequences: f64, most_tokens: usize) -> Self {
        let [prompt, response] = ctx.mean_lengths();
        let whole = prompt + response;
        let group = ctx.workload.group as f64;
        let prefix = if ctx.workload.examples.is_some() || group <= 1.0 { 0.0 } else { (prompt - 1.0).max(0.0) };
        let (rows, length) = match layout {
            Layout::Packed => (whole, whole),
            Layout::Padded => (ctx.workload.scored_length() as f64, whole),
            Layout::SharedPrefix => {
                let behind = whole - prefix;
                let rows = prefix / group + behind;
                (rows, (prefix * prefix / group + behind * (prefix + whole)) / rows)
            }
        };
        let tokens = sequences * rows;
        let by_sequences = plan.micro_batch_size.map_or(1.0, |most| sequences / most as f64);
        let micros = (tokens / most_tokens as f64).max(by_sequences).ceil();
        Self { tokens, micros: micros.max(1.0), length, scored: sequences * response }
    }
}

impl Context<'_> {
    /// The rates of the device's kernels, where they were measured and are those that the model runs through: of f32,
    /// wide matrices and attention.
    pub(crate) fn rates(&self) -> Option<&KernelRates> {
        let wide = !self.sizes.is_half() && self.sizes.quantized_elements() == 0;
        let attends = self.widths.linear().is_none();
        self.profile.rates.as_ref().filter(|_| wide && attends)
    }

    /// Tokens of a prompt and of a completion.
    pub(crate) fn mean_lengths(&self) -> [f64; 2] {
        let w = self.workload;
        match (w.examples, w.mean_lengths) {
            (Some(examples), _) => [0.0, examples.length as f64],
            (None, Some(mean)) => mean,
            (None, None) => [w.prompt_length as f64, w.response_length as f64],
        }
    }

    /// Sums over the matrices of all layers that a token goes through: inputs and outputs.
    fn matmul_widths(&self) -> f64 {
        let arch = self.arch;
        let d = arch.hidden_size as f64;
        let [q, k] = self.widths.query_key_widths().map(|width| width as f64);
        let of = |sublayer: Sublayer| match sublayer {
            Sublayer::Attention | Sublayer::Linear => 4.0 * d + 2.0 * (q + k),
            Sublayer::Mlp => 3.0 * (d + arch.intermediate_size as f64),
            Sublayer::Experts => {
                let experts = arch.expert_layers().next();
                experts.map_or(0.0, |(_, layer)| 3.0 * layer.per_token as f64 * (d + layer.intermediate_size as f64))
            }
        };
        self.sizes.kinds().map(|sublayer| self.sizes.count(sublayer) as f64 * of(sublayer)).sum()
    }

    /// One pass of the matmuls of all layers.
    fn body_products(&self, rates: &KernelRates, work: Work) -> f64 {
        let used = self.sizes.active_body() as f64;
        let bytes = F32 as f64 * (work.tokens * self.matmul_widths() + work.micros * used);
        2.0 * used * work.tokens / self.profile.matmul_flops.f32 + bytes / rates.product_bandwidth
    }

    /// Operations of attention over all layers.
    fn body_attention(&self, work: Work) -> f64 {
        let [q, _] = self.widths.query_key_widths();
        let layers = self.sizes.count(Sublayer::Attention) as f64;
        layers * 4.0 * q as f64 * attention_pairs(work.length) * work.tokens / work.length.max(1.0)
    }

    /// Bytes that kernels and tensor operations move in a pass over all layers: for a token, forward and backward of
    /// each.
    fn body_bytes(&self) -> [[f64; 2]; 2] {
        let arch = self.arch;
        let d = arch.hidden_size as f64;
        let [q, k] = self.widths.query_key_widths().map(|width| width as f64);
        let layers = self.sizes.layers as f64;
        let norms = 1.0 + f64::from(u8::from(arch.pre_norms && arch.post_norms));
        let normed = if arch.qk_norm.is_some() { q + k } else { 0.0 };
        let gate = match arch.expert_layers().next() {
            Some((_, layer)) => (layer.per_token * layer.intermediate_size) as f64,
            None => arch.intermediate_size as f64,
        };
        let forward = 16.0 * norms * d + 8.0 * (q + k + normed) + 12.0 * gate;
        let backward = 24.0 * norms * d + 8.0 * (q + k) + 12.0 * normed + 20.0 * gate;
        let [before, back] = [2.0 * SUM * d, 5.0 * SUM * d];
        // a bypass is scaled and added to what its matrix gives
        let outputs = if self.lora.is_some() { self.matmul_widths() / layers / 2.0 } else { 0.0 };
        let bypass = (SUM + 8.0) * outputs;
        [[layers * forward, layers * backward], [layers * (before + bypass), layers * (back + bypass)]]
    }

    /// A forward pass of all layers without a graph, or with one.
    pub(crate) fn body_forward(&self, rates: &KernelRates, work: Work) -> f64 {
        let [[kernels, _], [sums, _]] = self.body_bytes();
        let operations = self.sizes.layers as f64 * work.micros * OPERATIONS[0];
        self.body_products(rates, work)
            + self.body_attention(work) / rates.attention_flops[0]
            + work.tokens * kernels / rates.elementwise_bandwidth
            + work.tokens * sums / self.profile.memory_bandwidth
            + operations * rates.operation
    }

    /// The backward pass of all layers after it.
    pub(crate) fn body_backward(&self, rates: &KernelRates, work: Work) -> f64 {
        let [[_, kernels], [_, sums]] = self.body_bytes();
        let [forward, both] = rates.attention_flops;
        let attention = self.body_attention(work) * (1.0 / both - 1.0 / forward).max(0.0);
        let passes = if self.lora.is_some() { 1.0 } else { 2.0 };
        let operations = self.sizes.layers as f64 * work.micros * (OPERATIONS[1] - OPERATIONS[0]);
        let gradients = (work.micros - 1.0) * SUM * self.sizes.trained() as f64;
        passes * self.body_products(rates, work)
            + attention
            + work.tokens * kernels / rates.elementwise_bandwidth
            + (work.tokens * sums + gradients) / self.profile.memory_bandwidth
            + operations * rates.operation
    }

    /// Products of the head, one of them over all chunks.
    fn head_product(&self, rates: &KernelRates, scored: f64, chunks: f64) -> f64 {
        let (d, v) = (self.arch.hidden_size as f64, self.vocabulary());
        let bytes = F32 as f64 * (scored * (d + v) + chunks * d * v);
        2.0 * d * v * scored / self.profile.matmul_flops.f32 + bytes / rates.product_bandwidth
    }

    /// Columns of the head's projection.
    fn vocabulary(&self) -> f64 {
        self.sizes.projection as f64 / self.arch.hidden_size as f64
    }

    /// Scores of all chunks of the head.
    pub(crate) fn head_forward(&self, rates: &KernelRates, work: Work, head_rows: usize) -> f64 {
        if !self.has_head() {
            return 0.0;
        }
        let logits = work.scored * self.vocabulary();
        self.head_product(rates, work.scored, chunks(work, head_rows)) + logits / rates.logits.scored
    }

    /// Their gradient after it.
    pub(crate) fn head_backward(&self, rates: &KernelRates, work: Work, head_rows: usize) -> f64 {
        if !self.has_head() {
            return 0.0;
        }
        let chunks = chunks(work, head_rows);
        let logits = work.scored * self.vocabulary();
        let projection = self.sizes.trained_ends(self.sizes.projection) as f64;
        let passes = if projection > 0.0 { 2.0 } else { 1.0 };
        passes * self.head_product(rates, work.scored, chunks)
            + logits / rates.logits.differentiated
            + (chunks - 1.0) * SUM * projection / self.profile.memory_bandwidth
    }

    /// Seconds to zero the embedding's gradient and to square all gradients for their norm.
    pub(crate) fn gradient_passes(&self) -> f64 {
        let sizes = &self.sizes;
        let zeroed = if sizes.is_tied() { 0 } else { sizes.trained_ends(sizes.embedding) };
        let squared = if self.model().optimizer.in_backward { 0 } else { sizes.trained() };
        (F32 * zeroed) as f64 / self.profile.memory_bandwidth + SUM * squared as f64 / self.profile.memory_bandwidth
    }

    /// Seconds to decode a token of each of `rows` sequences of `length` tokens.
    pub(crate) fn decoded(&self, rates: &KernelRates, rows: f64, length: f64) -> f64 {
        let panels = self.workload.prepack.panels;
        let measured = if panels { &rates.panels } else { &rates.few_rows };
        let flops = KernelRates::flops_at(measured, rows).unwrap_or(self.profile.matmul_flops.f32);
        let used = self.sizes.active_body() + self.sizes.projection;
        let [q, _] = self.widths.query_key_widths();
        let attend = self.sizes.count(Sublayer::Attention) as f64;
        let attention = attend * 4.0 * q as f64 * length * rows / rates.decode_attention_flops;
        let [[kernels, _], _] = self.body_bytes();
        let layers = self.sizes.layers as f64;
        // two matmuls of each adapter, a scale and a sum
        let adapters = self.lora.map_or(0.0, |lora| {
            let modules = layers * lora.target_modules.len() as f64;
            2.0 * self.sizes.trained() as f64 * rows / rates.adapter_flops
                + ADAPTER_OPERATIONS * modules * rates.operation
        });
        2.0 * used as f64 * rows / flops
            + adapters
            + attention
            + rows * kernels / rates.elementwise_bandwidth
            + rows * self.vocabulary() / rates.logits.drawn
            + (STEP_OPERATIONS + layers * DECODE_OPERATIONS + rows * ROW_OPERATIONS) * rates.operation
    }
}

/// Chunks of the head in all micro-batches.
fn chunks(work: Work, head_rows: usize) -> f64 {
    work.micros * (work.scored / work.micros / head_rows as f64).ceil().max(1.0)
}

/// Pairs of queries and keys in attention over a sequence of `length` tokens: a block of queries attends to all keys up
/// to its end.
fn attention_pairs(length: f64) -> f64 {
    let whole = (length / BLOCK).floor();
    let rest = length - whole * BLOCK;
    BLOCK * BLOCK * whole * (whole + 1.0) / 2.0 + rest * length
}
