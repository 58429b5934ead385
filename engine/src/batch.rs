//! Sequences made ready for one optimizer step, and their micro-batches under a hard token budget.

mod pack;
mod partition;

pub use pack::{Batch, BatchStats, MicroBatchLimits};

use crate::objective::TokenInputs;
use crate::plan::Layout;
use crate::sequence::{Sequence, TokenColumns};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, Operation, RowsByToken};
use firebrick_models::adapter::{Dropout, DropoutKey};
use firebrick_models::attention::{Grouping, SequenceLayout};
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::routing::{RouterLoss, Routes, Routing};
use firebrick_models::{Arch, Decoder};

/// Largest share of the rows that attention works on together that may be padding, where a launch costs something. On a CPU
/// it costs next to nothing, and only sequences of one length attend together.
const ATTENTION_WASTE: f64 = 0.1;

/// An optimizer step, as dropout knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropoutStep {
    /// The run's seed.
    pub seed: u64,
    /// Optimizer steps before it, skipped ones included.
    pub step: u64,
}

/// A micro-batch on a device: the rows of its sequences, and which of them are scored.
#[derive(Debug)]
pub struct MicroBatch {
    /// Token ids, `[rows]`.
    pub ids: Tensor<1, Int>,
    /// The rows of each token, where a kernel adds up the embedding's gradient.
    pub segments: Option<RowsByToken>,
    /// Positions, and how rows belong to sequences.
    pub ctx: ForwardContext,
    /// Rows that are scored, `[scored]`.
    pub rows: Tensor<1, Int>,
    /// For every row its place among the scored ones; the number of scored rows where it is none. `[rows]`
    pub places: Tensor<1, Int>,
    /// The token each scored row predicts, `[scored]`.
    pub targets: Tensor<1, Int>,
    /// Scored tokens of each sequence.
    pub lengths: Vec<usize>,
    /// What the losses know of the scored tokens.
    pub inputs: TokenInputs,
    /// Rows of each sequence, and its tokens, which come first.
    strides: Vec<usize>,
    tokens: Vec<usize>,
}

impl MicroBatch {
    /// Lays sequences out on a device. Attention takes `attention_rows` queries at a time (0: all at once).
    #[must_use]
    pub fn new(
        arch: &Arch,
        sequences: &[&Sequence],
        layout: Layout,
        attention_rows: usize,
        device: &Device,
    ) -> Self {
        let own: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let all = match layout {
            Layout::Packed => {
                SequenceLayout::packed(&own, grouping(attention_rows, device), device)
            }
            Layout::Padded => {
                SequenceLayout::padded(own.len(), own.iter().copied().max().unwrap_or(0))
            }
        };
        let strides = all.lengths().to_vec();
        let mut ids = vec![0_i32; all.tokens()];
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        let mut start = 0;
        for (sequence, stride) in sequences.iter().zip(&strides) {
            for (id, &token) in ids[start..].iter_mut().zip(&sequence.tokens) {
                *id = token as i32;
            }
            rows.extend(sequence.positions.iter().map(|p| (start + p) as i32));
            let target = |&p: &usize| sequence.target(p) as i32;
            targets.extend(sequence.positions.iter().map(target));
            start += stride;
        }
        let mut places = vec![rows.len() as i32; ids.len()];
        for (place, &row) in rows.iter().enumerate() {
            places[row as usize] = place as i32;
        }
        let ints = |v: Vec<i32>| {
            let n = v.len();
            Tensor::<1, Int>::from_data(TensorData::new(v, [n]), device)
        };
        let sorts = kernels::available(Operation::Embedding, device);
        Self {
            segments: sorts.then(|| RowsByToken::new(&ids, device)),
            ids: ints(ids),
            ctx: ForwardContext::whole(arch, all, attention_rows, device)
                .with_routing(routing(sequences, &strides)),
            rows: ints(rows),
            places: ints(places),
            targets: ints(targets),
            inputs: inputs(sequences, device),
            lengths: sequences.iter().map(|s| s.positions.len()).collect(),
            strides,
            tokens: own,
        }
    }

    /// The same micro-batch with the dropout that a decoder's adapters train with.
    #[must_use]
    pub fn with_dropout(
        mut self,
        decoder: &Decoder,
        sequences: &[&Sequence],
        at: DropoutStep,
    ) -> Self {
        let rate = decoder.lora().map_or(0.0, |lora| lora.dropout);
        let keys = sequences.iter().map(|sequence| DropoutKey {
            seed: at.seed,
            step: at.step as u32,
            prompt_index: sequence.id.prompt_index,
            sample: sequence.id.sample as u32,
        });
        let rows = keys.zip(self.strides.iter().copied());
        let dropout = Dropout::new(rate, rows, decoder.device());
        self.ctx = self.ctx.with_dropout(dropout);
        self
    }

    /// The auxiliary loss of routers for this one of a step's micro-batches, which have `all` tokens; `layers` have experts.
    #[must_use]
    pub fn router_loss(&self, coefficient: f64, all: usize, layers: usize) -> RouterLoss {
        let each = self.strides.iter().zip(&self.tokens);
        let rows = each.flat_map(|(&stride, &tokens)| (0..stride).map(move |row| row < tokens));
        RouterLoss::new(coefficient, all, layers, rows.collect())
    }

    /// The same micro-batch with the auxiliary loss of routers in its backward passes.
    #[must_use]
    pub fn with_router_loss(mut self, loss: Option<RouterLoss>) -> Self {
        self.ctx = self.ctx.with_router_loss(loss);
        self
    }

    /// The same micro-batch whose routes are kept, in a model with experts.
    #[must_use]
    pub fn recorded(mut self, arch: &Arch) -> Self {
        let width = arch.route_width();
        if width > 0 {
            let rows = self.strides.iter().sum();
            let routing = self.ctx.routing().clone().recorded(rows, width);
            self.ctx = self.ctx.with_routing(routing);
        }
        self
    }

    /// The routes of each sequence's tokens, after a forward pass that has kept them.
    #[must_use]
    pub fn routes(&self) -> Vec<Option<Routes>> {
        let Some(all) = self.ctx.routing().take_recorded() else {
            return Vec::new();
        };
        let mut start = 0;
        let each = self.strides.iter().zip(&self.tokens);
        let own = each.map(|(stride, tokens)| {
            let rows = start..start + tokens;
            start += stride;
            Some(all.slice(rows))
        });
        own.collect()
    }

    /// Number of scored tokens.
    #[must_use]
    pub fn scored(&self) -> usize {
        self.lengths.iter().sum()
    }
}

/// The routes that sequences bring along, on rows of so many for each.
fn routing(sequences: &[&Sequence], strides: &[usize]) -> Routing {
    let known = sequences.iter().find_map(|s| s.routes.as_ref());
    let Some(width) = known.map(|routes| routes.width()) else {
        return Routing::default();
    };
    let mut all = Routes::unknown(strides.iter().sum(), width);
    let mut start = 0;
    for (sequence, stride) in sequences.iter().zip(strides) {
        if let Some(own) = &sequence.routes {
            all.set(start, own);
        }
        start += stride;
    }
    Routing::default().replayed(all)
}

/// The columns of the sequences' scored tokens, on the device.
fn inputs(sequences: &[&Sequence], device: &Device) -> TokenInputs {
    let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
    let own: Vec<_> = sequences.iter().map(|s| &s.columns).collect();
    let columns = TokenColumns::concat(&own, &lengths);
    TokenInputs {
        columns: columns.map(|values| {
            let n = values.len();
            Tensor::<1>::from_data(TensorData::new(values.clone(), [n]), device)
        }),
        lengths,
    }
}

/// Which packed sequences attend together on a device, at most `attention_rows` queries at a time (0: any number).
#[must_use]
pub fn grouping(attention_rows: usize, device: &Device) -> Grouping {
    Grouping {
        waste: if is_cpu(device) { 0.0 } else { ATTENTION_WASTE },
        queries: attention_rows,
    }
}
