//! Attention of some sequences' query heads of one key head.
//!
//! A shared prefix is copied next to each other and read for all of them as matrix products. A sequence's own keys
//! and values are read where they are, once for all queries of the head, and prefetched: the processor's own prefetcher
//! does not know the next block.

use super::products::{add_weighted, dots};
use super::storage::{Kind, Storage};
use super::vectors::{Stored, Vectors};
use crate::cpu::prelude::*;
use crate::cpu::real::sum;
use crate::cpu::rotary::rotate_half;
use crate::paged::PagedAttentionShape;
use firebrick_metadata::slot_runs::{Part, Sequence, SlotRuns};
use firebrick_spec::BLOCK_SIZE;
use pulp::{Simd, WithSimd};

// scores of whole blocks are whole vectors
const _: () = assert!(BLOCK_SIZE.is_multiple_of(LANES));

/// Pieces of keys or values that are prefetched ahead of the one that is read.
const AHEAD: usize = 2;

/// The arguments of a step.
pub(super) struct Step<'a, T, P> {
    pub(super) shape: &'a PagedAttentionShape<'a>,
    pub(super) runs: &'a SlotRuns,
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) cos: &'a [T],
    pub(super) sin: &'a [T],
    pub(super) sinks: Option<&'a [T]>,
    pub(super) pool: P,
    pub(super) out: SharedPtr<T>,
    pub(super) heads: usize,
    pub(super) kv: usize,
    pub(super) slots: usize,
    pub(super) dim: usize,
}

/// Buffers of one thread.
pub(super) struct Scratch<T> {
    queries: Vec<T>,
    scores: Vec<T>,
    mixed: Vec<T>,
    prefix: Vec<T>,
    key: Vec<T>,
}

impl<T> Scratch<T> {
    pub(super) fn new() -> Self {
        Self { queries: Vec::new(), scores: Vec::new(), mixed: Vec::new(), prefix: Vec::new(), key: Vec::new() }
    }
}

/// Attention of some sequences' query heads of one key head.
pub(super) struct Task<'a, T, P> {
    pub(super) step: &'a Step<'a, T, P>,
    pub(super) head: usize,
    pub(super) part: &'a Part,
    pub(super) scratch: &'a mut Scratch<T>,
}

impl<T: Vectors, P: Storage<T>> WithSimd for Task<'_, T, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.step.run(simd, self.head, self.part, self.scratch);
    }
}

impl<T: Vectors, P: Storage<T>> Step<'_, T, P> {
    /// Keys or values of some slots.
    #[inline(always)]
    fn read(&self, kind: Kind, head: usize, run: &Range<usize>) -> &[P::Number] {
        assert!(run.end <= self.slots, "a slot outside the pool");
        // SAFETY: the pool has the slots. No task writes what another reads: each sequence alone reads the block that
        // it writes to, and each of its heads is one task's.
        unsafe {
            let first = (head * self.slots + run.start) * self.dim;
            let start = self.pool.start(kind).get().add(first);
            std::slice::from_raw_parts(start, run.len() * self.dim)
        }
    }

    /// Multiplies factors of some slots by the scales of their keys or values.
    #[inline(always)]
    fn rescale(&self, kind: Kind, head: usize, run: &Range<usize>, factors: &mut [T]) {
        assert!(run.end <= self.slots && factors.len() == run.len());
        // SAFETY: as in `read`.
        unsafe {
            let first = head * self.slots + run.start;
            self.pool.rescale(kind, first, factors);
        }
    }

    /// Keys of a prefix without its first `hidden` tokens, which are whole blocks: number by number, `[dim, tokens]`.
    #[inline(always)]
    fn prefix_keys(&self, head: usize, part: &Part, hidden: usize, into: &mut Vec<T>) {
        let (tokens, dim) = (part.tokens() - hidden, self.dim);
        into.resize(dim * tokens, T::ZERO);
        let runs = self.runs.prefix(part, hidden);
        let mut ahead = runs.clone().skip(AHEAD).map(|run| (Kind::Key, run));
        let mut at = 0;
        for run in runs {
            self.prefetch(head, ahead.next());
            for start in run.step_by(BLOCK_SIZE) {
                let slots = start..start + BLOCK_SIZE;
                let mut scales = [T::ONE; BLOCK_SIZE];
                self.rescale(Kind::Key, head, &slots, &mut scales);
                let keys = self.read(Kind::Key, head, &slots);
                for (to, keys) in into.chunks_exact_mut(tokens).zip(keys.chunks_exact(BLOCK_SIZE)) {
                    let to = to[at..][..BLOCK_SIZE].iter_mut();
                    for ((to, &x), &scale) in to.zip(keys).zip(&scales) {
                        *to = x.widen();
                        if P::SCALED {
                            *to = *to * scale;
                        }
                    }
                }
                at += BLOCK_SIZE;
            }
        }
    }

    /// Values of a prefix without its first `hidden` tokens, one after the other.
    #[inline(always)]
    fn prefix_values(&self, head: usize, part: &Part, hidden: usize, into: &mut Vec<T>) {
        into.clear();
        let runs = self.runs.prefix(part, hidden);
        let mut ahead = runs.clone().skip(AHEAD).map(|run| (Kind::Value, run));
        for run in runs {
            self.prefetch(head, ahead.next());
            let first = into.len();
            let values = self.read(Kind::Value, head, &run);
            into.extend(values.iter().map(|x| x.widen()));
            if P::SCALED {
                for (slot, row) in run.zip(into[first..].chunks_exact_mut(self.dim)) {
                    let mut scale = [T::ONE];
                    self.rescale(Kind::Value, head, &(slot..slot + 1), &mut scale);
                    for x in row {
                        *x = *x * scale[0];
                    }
                }
            }
        }
    }

    /// Numbers of tokens of its prefix, and of its own, outside a sequence's window.
    fn hidden(&self, part: &Part, sequence: &Sequence) -> [usize; 2] {
        let hidden = match self.shape.window {
            Some(window) => (part.tokens() + sequence.tokens()).saturating_sub(window),
            None => 0,
        };
        let before = hidden.min(part.tokens());
        [before, hidden - before]
    }

    #[inline(always)]
    fn run<S: Simd>(&self, simd: S, head: usize, part: &Part, scratch: &mut Scratch<T>) {
        let (dim, group) = (self.dim, self.heads / self.kv);
        let members = self.runs.members(part);
        let queries = members.len() * group;
        let Scratch { queries: q, scores, mixed, prefix, key } = scratch;
        q.resize(queries * dim, T::ZERO);
        for (sequence, q) in members.iter().zip(q.chunks_exact_mut(group * dim)) {
            self.append_kv(head, sequence, q, key);
        }
        let unseen = members.iter().map(|sequence| self.hidden(part, sequence)[0]).min();
        let unseen = whole_blocks(unseen.unwrap_or(0));
        let shared = part.tokens() - unseen;
        let most = members.iter().map(Sequence::tokens).max().unwrap_or(0);
        // whole blocks, which are whole vectors, so that no exponential is computed as a scalar
        let width = shared + most.next_multiple_of(BLOCK_SIZE);
        scores.resize(queries * width, T::ZERO);
        mixed.clear();
        mixed.resize(queries * dim, T::ZERO);
        if shared > 0 {
            self.prefix_keys(head, part, unseen, prefix);
            score_all(q, prefix, dim, scores, width);
        }
        for (i, sequence) in members.iter().enumerate() {
            let [gone, hidden] = self.hidden(part, sequence);
            let scores = &mut scores[i * group * width..][..group * width];
            let q = &q[i * group * dim..][..group * dim];
            let mixed = &mut mixed[i * group * dim..][..group * dim];
            let place = Place { head, sequence, hidden, shared, width };
            self.score(simd, &place, q, scores);
            let skipped = whole_blocks(hidden);
            // what is before its own tokens is hidden where some of them are
            let seen = gone - unseen + hidden - skipped..shared + sequence.tokens() - skipped;
            for (query, scores) in scores.chunks_exact_mut(width).enumerate() {
                let sink = self.sinks.map(|sinks| sinks[head * group + query]);
                self.softmax(&mut scores[..seen.end.next_multiple_of(LANES)], &seen, sink);
            }
            let next = members.get(i + 1);
            let next = next.map(|next| (next, self.hidden(part, next)[1]));
            self.mix(simd, &place, next, scores, mixed);
        }
        if shared > 0 {
            self.prefix_values(head, part, unseen, prefix);
            mix_all(scores, width, prefix, dim, mixed);
        }
        for (sequence, mixed) in members.iter().zip(mixed.chunks_exact(group * dim)) {
            let at = (sequence.row() * self.heads + head * group) * dim;
            // SAFETY: no other task writes these heads of this row.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), mixed.len()) };
            out.copy_from_slice(mixed);
        }
    }

    /// Products of a sequence's queries with its own keys, after those with the prefix.
    #[inline(always)]
    fn score<S: Simd>(&self, simd: S, place: &Place<'_>, q: &[T], scores: &mut [T]) {
        let &Place { head, width, .. } = place;
        let pieces = self.runs.suffix_blocks(place.sequence, whole_blocks(place.hidden));
        let keys = pieces.clone().map(|piece| (Kind::Key, piece));
        let values = self.runs.suffix(place.sequence, place.hidden);
        let values = values.map(|piece| (Kind::Value, piece));
        let mut ahead = keys.skip(AHEAD).chain(values.take(AHEAD));
        let mut at = place.shared;
        for piece in pieces {
            self.prefetch(head, ahead.next());
            let keys = self.read(Kind::Key, head, &piece);
            dots(simd, q, self.dim, keys, &mut scores[at..], width);
            if P::SCALED {
                for scores in scores.chunks_exact_mut(width) {
                    let scores = &mut scores[at..at + piece.len()];
                    self.rescale(Kind::Key, head, &piece, scores);
                }
            }
            at += piece.len();
        }
    }

    /// Sums of a sequence's own values. Prefetches the keys of the sequence after it.
    #[inline(always)]
    fn mix<S: Simd>(
        &self,
        simd: S,
        place: &Place<'_>,
        next: Option<(&Sequence, usize)>,
        scores: &mut [T],
        mixed: &mut [T],
    ) {
        let &Place { head, width, .. } = place;
        let pieces = self.runs.suffix(place.sequence, place.hidden);
        let values = pieces.clone().map(|piece| (Kind::Value, piece));
        let next = next.into_iter();
        let next = next.flat_map(|(next, hidden)| {
            let blocks = self.runs.suffix_blocks(next, whole_blocks(hidden));
            blocks.take(AHEAD)
        });
        let keys = next.map(|piece| (Kind::Key, piece));
        let mut ahead = values.skip(AHEAD).chain(keys);
        let mut at = place.shared + place.hidden % BLOCK_SIZE;
        for piece in pieces {
            self.prefetch(head, ahead.next());
            if P::SCALED {
                for scores in scores.chunks_exact_mut(width) {
                    let scores = &mut scores[at..at + piece.len()];
                    self.rescale(Kind::Value, head, &piece, scores);
                }
            }
            let values = self.read(Kind::Value, head, &piece);
            add_weighted(simd, &scores[at..], width, values, self.dim, mixed);
            at += piece.len();
        }
    }

    /// Prefetches the keys or values of some slots.
    #[inline(always)]
    fn prefetch(&self, head: usize, piece: Option<(Kind, Range<usize>)>) {
        if let Some((kind, piece)) = piece {
            let values = self.read(kind, head, &piece);
            let bytes = size_of_val(values);
            for at in (0..bytes).step_by(CACHE_LINE) {
                prefetch(values.as_ptr().cast::<u8>().wrapping_add(at));
            }
            if P::SCALED && kind == Kind::Key {
                let scales = self.pool.scales(head * self.slots + piece.start);
                for at in (0..4 * piece.len()).step_by(CACHE_LINE) {
                    prefetch(scales.wrapping_add(at));
                }
            }
        }
    }

    /// Rotates a sequence's queries and key, and writes key and value to its last slot.
    #[inline(always)]
    fn append_kv(&self, head: usize, sequence: &Sequence, queries: &mut [T], key: &mut Vec<T>) {
        let (dim, half) = (self.dim, self.dim / 2);
        let angles = sequence.row() * half..(sequence.row() + 1) * half;
        let (cos, sin) = (&self.cos[angles.clone()], &self.sin[angles]);
        let from = &self.q[sequence.row() * self.heads * dim + head * queries.len()..][..queries.len()];
        for (out, x) in queries.chunks_exact_mut(dim).zip(from.chunks_exact(dim)) {
            rotate_half(out, x, cos, sin, T::ONE);
        }
        let at = (sequence.row() * self.kv + head) * dim;
        key.resize(dim, T::ZERO);
        rotate_half(key, &self.k[at..][..dim], cos, sin, T::ONE);
        assert!(sequence.last() < self.slots, "a slot outside the pool");
        // SAFETY: the pool has the slot, and no other task accesses this head of it.
        unsafe {
            let row = head * self.slots + sequence.last();
            self.pool.write(row, key, &self.v[at..][..dim]);
        }
    }

    /// Turns products into probabilities, in place; those outside `seen` become 0. A sink takes part, and is left out.
    #[inline(always)]
    fn softmax(&self, scores: &mut [T], seen: &Range<usize>, sink: Option<T>) {
        let scale = T::of(self.shape.scale);
        for s in &mut scores[seen.clone()] {
            *s = *s * scale;
        }
        if let Some(cap) = self.shape.softcap.map(T::of) {
            for s in &mut scores[seen.clone()] {
                *s = (*s / cap).tanh() * cap;
            }
        }
        fill_outside(scores, seen, T::LOWEST);
        let max = largest(scores);
        let max = sink.map_or(max, |sink| max.larger(sink));
        for s in scores.iter_mut() {
            *s = (*s - max).exp();
        }
        fill_outside(scores, seen, T::ZERO);
        let sink_weight = sink.map_or(T::ZERO, |sink| (sink - max).exp());
        let inverse = T::ONE / (sum(scores) + sink_weight);
        for s in scores.iter_mut() {
            *s = *s * inverse;
        }
    }
}

/// A sequence's own part of a task's scores.
struct Place<'a> {
    head: usize,
    sequence: &'a Sequence,
    /// Own tokens outside its window.
    hidden: usize,
    /// Scores of the prefix before its own.
    shared: usize,
    /// Scores of a query.
    width: usize,
}

/// Tokens in whole blocks of so many.
#[inline(always)]
fn whole_blocks(tokens: usize) -> usize {
    tokens - tokens % BLOCK_SIZE
}

/// Fills the elements outside a range.
#[inline(always)]
fn fill_outside<T: Copy>(values: &mut [T], range: &Range<usize>, value: T) {
    values[..range.start].fill(value);
    values[range.end..].fill(value);
}

/// Products of all queries with the keys of a prefix, `[dim, tokens]`.
fn score_all<T: Vectors>(q: &[T], keys: &[T], dim: usize, scores: &mut [T], width: usize) {
    let size = Size { m: q.len() / dim, k: dim, n: keys.len() / dim };
    let (q, keys) = (Matrix::row_major(q, dim), Matrix::row_major(keys, size.n));
    multiply(size, Target::new(scores, width, false), q, keys, Parallelism::None);
}

/// Adds the values of a prefix to all sums, each times its weight.
fn mix_all<T: Vectors>(scores: &[T], width: usize, values: &[T], dim: usize, mixed: &mut [T]) {
    let size = Size { m: mixed.len() / dim, k: values.len() / dim, n: dim };
    let (scores, values) = (Matrix::row_major(scores, width), Matrix::row_major(values, dim));
    multiply(size, Target::new(mixed, dim, true), scores, values, Parallelism::None);
}
