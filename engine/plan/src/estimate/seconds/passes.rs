//! Seconds of one pass over a layer or the head, from a device's rates of large matmuls and long copies.

use crate::estimate::{Context, F32, HeadCost, Shape, Sizes, Sublayer};
use firebrick_spec::Backend;

/// Operations of a layer's forward; a backward has about twice as many.
pub(crate) const LAYER_OPERATIONS: f64 = 60.0;
/// Times that a byte an element-wise operation keeps is read or written in the forward.
const TRAFFIC: f64 = 3.0;

impl Context<'_> {
    pub(crate) fn flops(&self, operations: f64) -> f64 {
        self.flops_in(operations, self.sizes.is_half())
    }

    /// Of matmuls in half precision, or in f32.
    pub(crate) fn flops_in(&self, operations: f64, half: bool) -> f64 {
        let shares = (self.parallel.tensor * self.parallel.sequence) as f64;
        let rates = &self.profile.matmul_flops;
        let rate = match rates.bf16 {
            Some(rate) if half => rate,
            _ => rates.f32,
        };
        operations / rate / shares
    }

    /// A device's share of divided computation.
    pub(crate) fn shared(&self, seconds: f64) -> f64 {
        seconds / (self.parallel.tensor * self.parallel.sequence) as f64
    }

    pub(crate) fn copy(&self, bytes: f64) -> f64 {
        // in one memory a copy is a copy all the same
        let rate = self.profile.host_link.unwrap_or(self.profile.memory_bandwidth / 2.0);
        bytes / rate
    }

    pub(crate) fn launch(&self, operations: f64) -> f64 {
        operations * self.profile.kernel_overhead
    }

    /// Scores of attention, in operations per layer.
    pub(crate) fn attention_operations(&self, shape: Shape, rows: usize) -> f64 {
        let arch = self.arch;
        let q = (arch.num_heads * arch.head_dim) as f64;
        let whole = 4.0 * q * shape.tree.keys() * shape.tokens as f64;
        if self.widths.attends_by_kernel(shape, rows) {
            whole / 2.0
        } else if shape.is_chunked(rows) {
            whole * (1.0 + rows as f64 / shape.length as f64) / 2.0
        } else {
            whole
        }
    }

    /// Bytes of a layer's scores: none where a kernel has a few at a time.
    pub(crate) fn scores_bytes(&self, shape: Shape, rows: usize) -> f64 {
        if self.widths.attends_by_kernel(shape, rows) {
            return 0.0;
        }
        F32 as f64 * self.attention_operations(shape, rows) / (4.0 * self.arch.head_dim as f64)
    }

    /// A layer's forward: that of all, divided among them.
    pub(crate) fn layer(&self, shape: Shape, rows: usize) -> f64 {
        let tokens = shape.tokens as f64;
        let layers = self.sizes.layers.max(1) as f64;
        let products = 2.0 * self.sizes.active_body() as f64 / layers * tokens;
        let share = |sublayer| self.sizes.count(sublayer) as f64 / layers;
        let bytes = |sublayer: Sublayer| {
            let kept = self.widths.kept(sublayer);
            share(sublayer) * self.widths.bytes(kept, shape.tokens, self.parallel) as f64
        };
        let kept: f64 = self.sizes.kinds().map(bytes).sum();
        let attend = share(Sublayer::Attention);
        let shares = (self.parallel.tensor * self.parallel.sequence) as f64;
        let scores = attend * self.scores_bytes(shape, rows) / shares;
        let widened = self.widened_traffic(shape.tokens) / layers;
        let traffic = (TRAFFIC * (kept + 2.0 * scores) + widened) / self.profile.memory_bandwidth;
        let linear = self.widths.linear();
        let (rule, launches) = linear.map_or((0.0, 0.0), |linear| {
            let share = share(Sublayer::Linear);
            (share * linear.operations() * tokens, share * linear.launches(shape.tree))
        });
        let chunks = if self.widths.attends_by_kernel(shape, rows) { 1.0 } else { chunks(shape, rows) as f64 };
        self.flops(products + attend * self.attention_operations(shape, rows))
            + self.flops_in(rule, false)
            + traffic
            + self.launch(LAYER_OPERATIONS + launches + 8.0 * (chunks - 1.0) + self.expert_operations(tokens))
    }

    /// Bytes that a pass of `tokens` tokens over quantized matrices moves: codes and dequantized values.
    pub(crate) fn widened_traffic(&self, tokens: u64) -> f64 {
        let sizes = &self.sizes;
        match sizes.quantized_elements() {
            0 => 0.0,
            _ => {
                let codes = sizes.used_bytes(tokens) - sizes.end_bytes();
                (codes + widened_bytes(sizes, tokens)) as f64
            }
        }
    }

    /// Operations of experts, a layer: three matmuls each, on a GPU one after the other.
    pub(crate) fn expert_operations(&self, tokens: f64) -> f64 {
        let Some((_, layer)) = self.arch.expert_layers().next() else {
            return 0.0;
        };
        if self.profile.backend == Backend::Cpu {
            return 0.0;
        }
        let share = self.sizes.count(Sublayer::Experts) as f64 / self.sizes.layers as f64;
        let used = (layer.count as f64).min(tokens * layer.per_token as f64);
        3.0 * used * share
    }

    /// The scores of attention alone, once more.
    pub(crate) fn scores_again(&self, shape: Shape, rows: usize) -> f64 {
        if self.widths.recomputes(shape, rows) {
            let scores = self.scores_bytes(shape, rows);
            self.flops(self.attention_operations(shape, rows)) + 2.0 * TRAFFIC * scores / self.profile.memory_bandwidth
        } else {
            0.0
        }
    }

    /// The head's forward over scored tokens.
    pub(crate) fn head(&self, scored: u64, head_rows: usize) -> f64 {
        if !self.has_head() {
            return 0.0;
        }
        let width = self.arch.hidden_size;
        let logits = HeadCost::new(self.arch, head_rows, self.profile).logits(scored) as f64;
        let chunks = scored.div_ceil(head_rows as u64) as f64;
        self.flops(2.0 * logits * width as f64)
            + 8.0 * F32 as f64 * logits / self.profile.memory_bandwidth
            + self.launch(20.0 * chunks)
    }
}

/// Pieces in which a layer's attention is computed.
fn chunks(shape: Shape, rows: usize) -> u64 {
    if rows == 0 {
        1
    } else if shape.packed {
        shape.tokens.div_ceil(rows as u64)
    } else {
        shape.length.div_ceil(rows as u64)
    }
}

/// Bytes of the dequantized matrices that `tokens` tokens use, written and read once. Reading the codes is not
/// included.
pub(crate) fn widened_bytes(sizes: &Sizes, tokens: u64) -> u64 {
    2 * sizes.width * sizes.dequantized_elements(tokens as f64)
}
