//! Sequences made ready for one optimizer step, and their micro-batches under a hard token budget.

mod pack;
mod part;
mod partition;
mod shared_prefix;

pub use pack::{Batch, BatchStats, MicroBatchLimits};
pub use part::{Part, Whole};
pub use shared_prefix::{Node, forest};

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
    /// The consecutive rows of sequences and of their shared prefixes, and those of each that are here, counted from
    /// its first.
    runs: Vec<Run>,
    spans: Vec<Range<usize>>,
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
        let runs = runs(sequences, layout);
        let strides: Vec<usize> = runs.iter().map(|run| run.rows).collect();
        let all = match layout {
            Layout::SharedPrefix if runs.iter().any(Run::is_shared) => {
                let parents: Vec<Option<usize>> = runs.iter().map(|run| run.parent).collect();
                SequenceLayout::shared_prefix(&strides, &parents)
            }
            Layout::Packed | Layout::SharedPrefix => {
                SequenceLayout::packed(&strides, grouping(attention_rows, device), device)
            }
            Layout::Padded => SequenceLayout::padded(strides.len(), strides.first().copied().unwrap_or(0)),
        };
        let here = part.rows(all.tokens());
        let mut ids = vec![0_i32; here.len()];
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        let mut lengths = Vec::with_capacity(sequences.len());
        let mut start = 0;
        for run in &runs {
            let sequence = sequences[run.sequence];
            for (row, &token) in (start..).zip(&sequence.tokens[run.positions()]) {
                if here.contains(&row) {
                    ids[row - here.start] = token as i32;
                }
            }
            if !run.is_shared() {
                let row = |p: usize| start + p - run.first;
                let scored = sequence.positions.iter().filter(|&&p| here.contains(&row(p)));
                rows.extend(scored.clone().map(|&p| (row(p) - here.start) as i32));
                // the token that follows, wherever it lies
                targets.extend(scored.clone().map(|&p| sequence.target(p) as i32));
                lengths.push(scored.count());
            }
            start += run.rows;
        }
        let padding = here.end.saturating_sub(here.start.max(start));
        let spans = spans(&here, &strides);
        let before = scored_before(sequences, &runs, here.start);
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
            ctx: context(arch, all, (&runs, &spans), padding, attention_rows, device)
                .with_routing(routing(sequences, &runs, here)),
            rows: ints(rows),
            places: ints(places),
            targets: ints(targets),
            inputs: inputs(sequences, before..before + lengths.iter().sum::<usize>(), &lengths, device),
            whole: part.is_one_of_several().then(|| Whole::new(sequences, before, device)),
            lengths,
            runs,
            spans,
            padding,
        }
    }

    /// Adds the dropout of a decoder's adapters, which drops other inputs for each sequence.
    ///
    /// # Panics
    /// If sequences share rows.
    #[must_use]
    pub fn with_dropout(mut self, decoder: &Decoder, sequences: &[&Sequence], at: DropoutStep) -> Self {
        let rate = decoder.lora().map_or(0.0, |lora| lora.dropout);
        assert!(rate <= 0.0 || self.runs.iter().all(|run| !run.is_shared()), "a row has the dropout of one sequence");
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
    pub fn router_loss(&self, coefficient: f64, all: usize, layers: usize) -> RouterLoss {
        let each = self.spans.iter().zip(&self.runs);
        let tokens = |run: &Run, row: usize| if row < run.tokens { run.shared_by as f32 } else { 0.0 };
        let rows = each.flat_map(|(span, run)| span.clone().map(move |row| tokens(run, row)));
        let rows = rows.chain(std::iter::repeat_n(0.0, self.padding));
        RouterLoss::new(coefficient, all, layers, rows.collect())
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
        let Some(recorded) = self.ctx.routing().take_recorded() else {
            return Vec::new();
        };
        let mut start = 0;
        let mut paths: Vec<Routes> = Vec::with_capacity(self.runs.len());
        for (span, run) in self.spans.iter().zip(&self.runs) {
            let rows = recorded.slice(start..start + span.end.min(run.tokens).saturating_sub(span.start));
            start += span.len();
            paths.push(match run.parent {
                None => rows,
                Some(parent) => {
                    let mut path = paths[parent].clone();
                    path.append(rows);
                    path
                }
            });
        }
        paths.into_iter().zip(&self.runs).filter(|(_, run)| !run.is_shared()).map(|(path, _)| Some(path)).collect()
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

/// Consecutive rows of a sequence, or of several that share them.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// The sequence; of shared rows the first one.
    sequence: usize,
    /// Position of the first row in the sequence.
    first: usize,
    /// Rows that are tokens.
    tokens: usize,
    /// All rows: tokens, then padding.
    rows: usize,
    /// Sequences whose rows they are.
    shared_by: usize,
    /// The run before it in its sequences.
    parent: Option<usize>,
}

impl Run {
    fn is_shared(&self) -> bool {
        self.shared_by > 1
    }

    fn positions(&self) -> Range<usize> {
        self.first..self.first + self.tokens
    }
}

/// The runs of sequences, in the order of their rows: a shared prefix stands before the sequences that have it.
fn runs(sequences: &[&Sequence], layout: Layout) -> Vec<Run> {
    let width = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    let run = |Node { members, positions, parent }: Node| {
        let tokens = positions.len();
        let rows = if layout == Layout::Padded { width } else { tokens };
        Run { sequence: members.start, first: positions.start, tokens, rows, shared_by: members.len(), parent }
    };
    nodes(sequences, layout).into_iter().map(run).collect()
}

/// The forest of sequences under a layout: a node for each where no prefix is shared.
fn nodes(sequences: &[&Sequence], layout: Layout) -> Vec<Node> {
    match layout {
        Layout::Packed | Layout::Padded => {
            sequences.iter().enumerate().map(|(i, sequence)| Node::single(i, sequence.tokens.len())).collect()
        }
        Layout::SharedPrefix => forest(sequences),
    }
}

/// The context of rows of which each run has these, and `padding` rows behind them.
fn context(
    arch: &Arch,
    all: SequenceLayout,
    (runs, spans): (&[Run], &[Range<usize>]),
    padding: usize,
    attention_rows: usize,
    device: &Device,
) -> ForwardContext {
    let rows = runs.iter().zip(spans).flat_map(|(run, span)| span.clone().map(|row| (run.first + row) as u32));
    let positions: Vec<u32> = rows.chain(std::iter::repeat_n(0, padding)).collect();
    ForwardContext::for_rows(arch, all, &positions, attention_rows, device)
}

/// Recorded expert routes, scattered to this rank's rows `here`.
fn routing(sequences: &[&Sequence], runs: &[Run], here: Range<usize>) -> Routing {
    let known = sequences.iter().find_map(|s| s.routes.as_ref());
    let Some(width) = known.map(|routes| routes.width()) else {
        return Routing::default();
    };
    let rows = runs.iter().map(|run| run.rows).sum::<usize>().max(here.end);
    let mut routes = Routes::unknown(rows, width);
    let mut start = 0;
    for run in runs {
        if let Some(recorded) = &sequences[run.sequence].routes {
            let [first, end] = [run.positions().start, run.positions().end].map(|row| row.min(recorded.rows()));
            routes.set(start, &recorded.slice(first..end));
        }
        start += run.rows;
    }
    Routing::default().replayed(routes.slice(here))
}

/// The layout of forward-only micro-batches under a plan's: prefixes are shared if the device has a kernel that attends
/// to them.
pub fn scoring_layout(planned: Layout, decoder: &Decoder) -> Layout {
    let kernels = [Operation::Attention, Operation::LongAttention];
    let attends = kernels.into_iter().any(|kernel| kernels::available(kernel, decoder.device()));
    if planned == Layout::SharedPrefix && !attends { Layout::Packed } else { planned }
}

/// [`scoring_layout`] of training micro-batches.
pub fn training_layout(planned: Layout, decoder: &Decoder) -> Layout {
    scoring_layout(planned.in_training(decoder.lora()), decoder)
}

/// Which packed sequences attend together on a device, at most `attention_rows` queries at a time (0: any number).
pub fn grouping(attention_rows: usize, device: &Device) -> Grouping {
    Grouping { waste: if is_cpu(device) { 0.0 } else { ATTENTION_WASTE }, queries: attention_rows }
}
