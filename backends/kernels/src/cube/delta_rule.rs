//! The gated delta rule (arXiv:2412.06464) over the rows of several sequences, with its gradient, token by token.
//!
//! The columns of a state `[key_dim, value_dim]` do not see each other, so that a unit has a column in registers and
//! runs through the rows of a sequence; a cube has some columns of one value head, and its units share queries and
//! keys. A token is `S' = eᵍ S`, `u = v − S'ᵀ k`, `S = S' + k (β u)ᵀ`, `o = Sᵀ q`, with queries and keys divided by
//! their norms, and queries by √`key_dim`.
//!
//! With dS the gradient of the state after a token, from what reads it later, the gradient is, from the last token to
//! the first,
//!
//! `dS ← dS + q dOᵀ`, `dδ = dSᵀ k`, `dS ← eᵍ (dS − k (β dδ)ᵀ)`
//!
//! which needs no state. So the backward pass runs through each sequence twice, a unit having a column: forward,
//! keeping u of every token and the states before chunks of [`CHUNK`] tokens; backward, keeping dδ and the gradients of
//! the states after chunks. The rest is of chunks by themselves, a unit having a row of the state: `dq = S dO`, `dk =
//! dS (β u) − S' (β dδ)` (`chunks`). Then dV = β dδ, `dβ = dδ · u`, and, as `⟨dS', S'⟩` of a token is that of the next
//! plus `dq · q − dV · v`, the gradient of g is a sum from the end of the chunk on: exact at every end of a chunk,
//! where both are known, so that what is rounded does not add up over a sequence.
//!
//! Sequences that go on behind others run after them, and back before them. End states that others begin with are kept
//! until these have run.
//!
//! Besides gradients a backward pass has, in f32 and until it ends: `2 value_dim + 2 key_dim` numbers for each token
//! and value head, and two states for each chunk and value head, one for each sequence that others go on behind, and one
//! for each of those.

mod chunks;
mod rows;
mod runs;
mod sizes;
mod tile;

use super::prelude::*;
use crate::delta::{DeltaHeads, SequenceRows, SequenceTable};
use sizes::{Keep, Sizes};
use std::ops::Range;
use tile::RuleLayoutLaunch;

/// Returns true if the kernels take these tensors: queries, keys and values in any type, all others in f32.
pub(crate) fn takes([qkv, g, beta]: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> bool {
    let wide = [g, beta].iter().all(|t| t.dtype() == DType::F32);
    supports(Operation::DeltaNet, qkv) && wide && Sizes::new(heads).is_some() && sequences.table().is_some()
}

/// [`takes`], from states in a pool.
pub(crate) fn continues(
    inputs: [&Tensor<2>; 3],
    pool: &Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> bool {
    let tracked = inputs.iter().any(|t| t.device().is_autodiff());
    !tracked && takes(inputs, heads, sequences) && pool.dtype() == DType::F32
}

/// See [`crate::gated_delta_rule`].
pub(crate) fn gated_delta_rule(inputs: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> Tensor<2> {
    run(DeltaRule::new(heads, sequences), inputs.map(|t| autodiff::input(t.clone())))
}

/// See [`crate::continue_delta_rule`].
pub(crate) fn continue_delta_rule(
    inputs: [&Tensor<2>; 3],
    pool: Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let _span = span("delta rule", 0.0);
    let rule = DeltaRule::new(heads, sequences);
    let inputs = inputs.map(|t| detached(t.clone()));
    let pool = into_writable(detached(pool));
    let out = rule.advance(&inputs, Some(&pool));
    (Cube::tensor(out), Cube::tensor(pool))
}

#[derive(Clone, Debug)]
struct DeltaRule {
    heads: DeltaHeads,
    sizes: Sizes,
    table: SequenceTable,
}

/// Buffers of the backward pass's runs through sequences.
struct Kept {
    /// u of every token, then dδ: `[2, rows, values, value_dim]`.
    vectors: CubeTensor,
    /// The states before chunks, then the gradients of those after them, then end states that others begin with, then
    /// the gradients of first states: `[2 chunks + ends + starts, values, key_dim, value_dim]`.
    states: CubeTensor,
}

impl DeltaRule {
    fn new(heads: DeltaHeads, sequences: &SequenceRows) -> Self {
        let sizes = Sizes::new(heads).expect("heads that a kernel takes");
        let table = sequences.table().cloned().expect("sequences of a GPU");
        Self { heads, sizes, table }
    }

    /// Cubes of a run through some sequences.
    fn runs(&self, sequences: &Range<usize>) -> usize {
        sequences.len() * self.heads.values * self.sizes.slices()
    }

    fn runs_grid<const N: usize>(&self, largest: [&CubeTensor; N], sequences: &Range<usize>) -> Grid {
        Grid::new(largest, self.runs(sequences), CubeDim::new_1d(self.sizes.units() as u32))
    }

    /// States before the end states, where a pass keeps those of chunks or no others.
    fn states_before_ends(&self, keep: Keep) -> usize {
        if keep == Keep::Chunks { 2 * self.table.chunks } else { 0 }
    }

    /// The layout of a launch with so many tasks, for the sequences from `first` on. End states lie behind `before`
    /// others.
    fn layout(&self, rows: usize, tasks: usize, first: usize, before: usize) -> RuleLayoutLaunch {
        let DeltaHeads { keys, values, key_dim, value_dim } = self.heads;
        let state = self.heads.state();
        RuleLayoutLaunch::new(
            tasks,
            keys,
            values,
            (key_dim as f32).sqrt().recip(),
            self.table.chunks_at(),
            self.table.rows_at(),
            rows * values * value_dim,
            self.table.chunks * state,
            before * state,
            (before + self.table.handed[0]) * state,
            first,
            self.table.generations.first().map_or(0, ExactSizeIterator::len),
            rows * values * 2 * key_dim,
        )
    }

    /// The output, from states of zeros or those in a pool.
    fn advance(&self, inputs: &[CubeTensor; 3], pool: Option<&CubeTensor>) -> CubeTensor {
        let [rows, _] = dims(&inputs[0]);
        let shape = [rows, self.heads.values * self.heads.value_dim];
        let whole = self.table.rows == rows;
        let out = empty_or_zeros(&inputs[0], shape, DType::F32, whole);
        match pool {
            Some(pool) => self.run_forward(inputs, [&out, pool], Keep::Pool),
            None => {
                // a buffer of nothing cannot be bound
                let ends = (self.table.handed[0] * self.heads.state()).max(1);
                self.run_forward(inputs, [&out, &empty(&out, [ends], DType::F32)], Keep::Ends);
            }
        }
        out
    }

    fn run_forward(&self, [qkv, g, beta]: &[CubeTensor; 3], [out, states]: [&CubeTensor; 2], keep: Keep) {
        let [rows, _] = dims(qkv);
        for sequences in &self.table.generations {
            let grid = self.runs_grid([qkv, out, states], sequences);
            let layout = self.layout(rows, self.runs(sequences), sequences.start, self.states_before_ends(keep));
            let (table, dtype) = (integers(&self.table.words), elem(qkv));
            launch!(
                runs::delta_rule_forward,
                grid,
                [qkv, g, beta, table, out, states],
                layout,
                keep,
                self.sizes,
                dtype
            );
        }
    }

    /// Fills the second halves of `kept` by a run through sequences from their ends.
    fn run_back(&self, [qkv, g, beta]: &[CubeTensor; 3], d_out: &CubeTensor, kept: &Kept) {
        let [rows, _] = dims(qkv);
        let Kept { vectors, states } = kept;
        for sequences in self.table.generations.iter().rev() {
            let grid = self.runs_grid([qkv, vectors, states], sequences);
            let before = self.states_before_ends(Keep::Chunks);
            let layout = self.layout(rows, self.runs(sequences), sequences.start, before);
            let (table, sizes) = (integers(&self.table.words), self.sizes);
            launch!(
                runs::delta_rule_reverse,
                grid,
                [qkv, g, beta, d_out, table, vectors, states],
                layout,
                sizes,
                elem(qkv)
            );
        }
    }

    /// Gradients of normed queries and keys, and products of states and their gradients; see `chunks`.
    fn key_gradients(&self, [qkv, g, beta]: &[CubeTensor; 3], d_out: &CubeTensor, kept: &Kept) -> CubeTensor {
        let [rows, _] = dims(qkv);
        let tasks = self.table.chunks * self.heads.values;
        let numbers = rows * self.heads.values * 2 * self.heads.key_dim;
        let d_qk = empty(qkv, [numbers + tasks], DType::F32);
        let Kept { vectors, states } = kept;
        for back in [false, true] {
            let (table, dim) = (integers(&self.table.words), CubeDim::new_1d(self.sizes.row_units() as u32));
            let grid = Grid::new([qkv, vectors, states, &d_qk], tasks, dim);
            launch!(
                chunks::delta_rule_chunks,
                grid,
                [qkv, g, beta, d_out, table, vectors, states, &d_qk],
                self.layout(rows, tasks, 0, 0),
                back,
                self.sizes,
                elem(qkv),
            );
        }
        d_qk
    }

    /// Writes the gradients of the inputs.
    fn input_gradients(
        &self,
        [qkv, _, beta]: &[CubeTensor; 3],
        vectors: CubeTensor,
        d_qk: &CubeTensor,
        [d_qkv, d_g, d_beta]: &[CubeTensor; 3],
    ) {
        let [rows, _] = dims(qkv);
        let grid = RowGrid::new(self.heads.key_dim.max(self.heads.value_dim));
        let tasks = self.table.rows * self.heads.keys;
        let table = integers(&self.table.words);
        launch!(
            rows::delta_rule_rows,
            grid.cubes([qkv, &vectors, d_qk], tasks),
            [qkv, beta, vectors, d_qk, &table, d_qkv, d_g, d_beta],
            self.layout(rows, tasks, 0, 0),
            grid,
            self.sizes,
            elem(qkv),
        );
        let tasks = self.table.chunks * self.heads.values;
        let grid = Grid::elements([d_qk], tasks);
        launch!(rows::delta_rule_decays, grid, [d_qk, table, d_g], self.layout(rows, tasks, 0, 0));
    }
}

impl Kernel<Cube, 3> for DeltaRule {
    const NAME: &str = "delta rule";
    type Saved = [CubeTensor; 3];

    fn forward(&self, inputs: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        (self.advance(&inputs, None), inputs)
    }

    fn backward(&self, inputs: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [rows, _] = dims(&inputs[0]);
        let whole = self.table.rows == rows;
        let like = |t: &CubeTensor| empty_or_zeros(t, t.shape(), t.dtype, whole);
        let gradients = inputs.each_ref().map(like);
        if self.table.sequences > 0 {
            let width = self.heads.values * self.heads.value_dim;
            let states = 2 * self.table.chunks + self.table.handed.iter().sum::<usize>();
            let kept = Kept {
                vectors: empty(&gradient, [2, rows, width], DType::F32),
                states: empty(&gradient, [states, self.heads.state()], DType::F32),
            };
            self.run_forward(&inputs, [&kept.vectors, &kept.states], Keep::Chunks);
            self.run_back(&inputs, &gradient, &kept);
            let d_qk = self.key_gradients(&inputs, &gradient, &kept);
            let Kept { vectors, states } = kept;
            drop(states);
            self.input_gradients(&inputs, vectors, &d_qk, &gradients);
        }
        let mut wanted = wanted.into_iter();
        gradients.map(|gradient| wanted.next().unwrap_or(false).then_some(gradient))
    }
}
