//! Sequences made ready for one optimizer step, and their micro-batches under a hard token budget.

mod pack;
mod part;
mod partition;

pub use pack::{Batch, BatchStats, MicroBatchLimits};
pub use part::{Part, Whole};

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, Operation, RowsByToken};
use firebrick_core::sequence::Sequence;
use firebrick_models::adapter::{Dropout, DropoutKey};
use firebrick_models::attention::{Grouping, SequenceLayout};
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::routing::{RouterLoss, Routes, Routing};
use firebrick_models::{Arch, Decoder};
use firebrick_objectives::TokenInputs;
use firebrick_plan::Layout;
use part::{inputs, scored_before, spans};
use std::ops::Range;

/// Largest share of the rows that attention works on together that may be padding, where a launch costs something. On a
/// CPU it costs next to nothing, and only sequences of one length attend together.
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
    /// Columns of the scored tokens for the losses.
    pub inputs: TokenInputs,
    /// The whole micro-batch of all ranks that share its sequences, if this one has a part.
    pub whole: Option<Whole>,
    /// The rows of each sequence that are here, counted from its first, and its tokens in all, which come first.
    spans: Vec<Range<usize>>,
    tokens: Vec<usize>,
    /// Rows behind them that are of no sequence.
    padding: usize,
}

impl MicroBatch {
    /// Lays sequences out on a device. Attention takes `attention_rows` queries at a time (0: all at once).
    pub fn new(arch: &Arch, sequences: &[&Sequence], layout: Layout, attention_rows: usize, device: &Device) -> Self {
        Self::part(arch, sequences, layout, attention_rows, Part::ALL, device)
    }

    /// The part of a micro-batch that one of several ranks has: as many of its rows as every rank, in their order. The
    /// last rows are padding where their number is no multiple of the ranks.
    pub fn part(
        arch: &Arch,
        sequences: &[&Sequence],
        layout: Layout,
        attention_rows: usize,
        part: Part,
        device: &Device,
    ) -> Self {
        let tokens: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let whole = match layout {
            Layout::Packed => SequenceLayout::packed(&tokens, grouping(attention_rows, device), device),
            Layout::Padded => SequenceLayout::padded(tokens.len(), tokens.iter().copied().max().unwrap_or(0)),
        };
        let strides = whole.lengths().to_vec();
        let here = part.rows(whole.tokens());
        let mut ids = vec![0_i32; here.len()];
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        let mut lengths = Vec::with_capacity(sequences.len());
        let mut start = 0;
        for (sequence, stride) in sequences.iter().zip(&strides) {
            for (row, &token) in (start..).zip(&sequence.tokens) {
                if here.contains(&row) {
                    ids[row - here.start] = token as i32;
                }
            }
            let scored = sequence.positions.iter().filter(|&p| here.contains(&(start + p)));
            rows.extend(scored.clone().map(|p| (start + p - here.start) as i32));
            // the token that follows, wherever it lies
            targets.extend(scored.clone().map(|&p| sequence.target(p) as i32));
            lengths.push(scored.count());
            start += stride;
        }
        let padding = here.end.saturating_sub(here.start.max(start));
        let spans = spans(&here, &strides);
        let before = scored_before(sequences, &strides, here.start);
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
            ctx: context(arch, whole, &spans, padding, attention_rows, device)
                .with_routing(routing(sequences, &strides, here)),
            rows: ints(rows),
            places: ints(places),
            targets: ints(targets),
            inputs: inputs(sequences, before..before + lengths.iter().sum::<usize>(), &lengths, device),
            whole: part.is_one_of_several().then(|| Whole::new(sequences, before, device)),
            lengths,
            spans,
            tokens,
            padding,
        }
    }

    /// Adds the dropout of a decoder's adapters.
    #[must_use]
    pub fn with_dropout(mut self, decoder: &Decoder, sequences: &[&Sequence], at: DropoutStep) -> Self {
        let rate = decoder.lora().map_or(0.0, |lora| lora.dropout);
        let keys = sequences.iter().map(|sequence| DropoutKey {
            seed: at.seed,
            step: at.step as u32,
            prompt_index: sequence.id.prompt_index,
            sample: sequence.id.sample as u32,
        });
        let rows = keys.zip(self.spans.iter().cloned()).chain([(DropoutKey::default(), 0..self.padding)]);
        let dropout = Dropout::from_parts(rate, rows, decoder.device());
        self.ctx = self.ctx.with_dropout(dropout);
        self
    }

    /// The auxiliary loss of routers for this one of a step's micro-batches, which have `tokens` tokens; `layers` have
    /// experts.
    pub fn router_loss(&self, coefficient: f64, tokens: usize, layers: usize) -> RouterLoss {
        let each = self.spans.iter().zip(&self.tokens);
        let rows = each.flat_map(|(span, &tokens)| span.clone().map(move |row| row < tokens));
        let rows = rows.chain(std::iter::repeat_n(false, self.padding));
        RouterLoss::new(coefficient, tokens, layers, rows.collect())
    }

    /// Adds the auxiliary loss of routers in backward passes.
    #[must_use]
    pub fn with_router_loss(mut self, loss: Option<RouterLoss>) -> Self {
        self.ctx = self.ctx.with_router_loss(loss);
        self
    }

    /// Records routes, in a model with experts.
    #[must_use]
    pub fn recorded(mut self, arch: &Arch) -> Self {
        let width = arch.route_width();
        if width > 0 {
            let rows = self.spans.iter().map(Range::len).sum::<usize>() + self.padding;
            let routing = self.ctx.routing().clone().recorded(rows, width);
            self.ctx = self.ctx.with_routing(routing);
        }
        self
    }

    /// The routes of each sequence's tokens that are here, after a forward pass that has kept them.
    pub fn routes(&self) -> Vec<Option<Routes>> {
        let Some(routes) = self.ctx.routing().take_recorded() else {
            return Vec::new();
        };
        let mut start = 0;
        let slices = self.spans.iter().zip(&self.tokens).map(|(span, &tokens)| {
            let rows = start..start + span.end.min(tokens).saturating_sub(span.start);
            start += span.len();
            Some(routes.slice(rows))
        });
        slices.collect()
    }

    /// Number of scored tokens.
    pub fn scored(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Number of sequences whose first scored token is here.
    pub fn begun(&self) -> usize {
        match &self.whole {
            None => self.lengths.iter().filter(|&&n| n > 0).count(),
            Some(whole) => whole.begun(&self.lengths),
        }
    }
}

/// The context of rows of which each sequence has these, and `padding` rows behind them.
fn context(
    arch: &Arch,
    layout: SequenceLayout,
    spans: &[Range<usize>],
    padding: usize,
    attention_rows: usize,
    device: &Device,
) -> ForwardContext {
    let positions = spans.iter().flat_map(|span| span.clone().map(|row| row as u32));
    let positions: Vec<u32> = positions.chain(std::iter::repeat_n(0, padding)).collect();
    ForwardContext::for_rows(arch, layout, &positions, attention_rows, device)
}

/// Recorded expert routes, scattered to this rank's rows `here`. `strides` has the rows of each sequence.
fn routing(sequences: &[&Sequence], strides: &[usize], here: Range<usize>) -> Routing {
    let known = sequences.iter().find_map(|s| s.routes.as_ref());
    let Some(width) = known.map(|routes| routes.width()) else {
        return Routing::default();
    };
    let rows = strides.iter().sum::<usize>().max(here.end);
    let mut routes = Routes::unknown(rows, width);
    let mut start = 0;
    for (sequence, stride) in sequences.iter().zip(strides) {
        if let Some(recorded) = &sequence.routes {
            routes.set(start, recorded);
        }
        start += stride;
    }
    Routing::default().replayed(routes.slice(here))
}

/// Which packed sequences attend together on a device, at most `attention_rows` queries at a time (0: any number).
pub fn grouping(attention_rows: usize, device: &Device) -> Grouping {
    Grouping { waste: if is_cpu(device) { 0.0 } else { ATTENTION_WASTE }, queries: attention_rows }
}
