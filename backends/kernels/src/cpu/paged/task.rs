//! Attention of some sequences' query heads of one key head.
//!
//! A shared prefix is copied next to each other and read for all of them as matrix products. A sequence's own keys
//! and values are read where they are, once for all queries of the head, and prefetched: the processor's own prefetcher
//! does not know the next block.

use super::products::{add_weighted, dots};
use super::storage::{Kind, Storage};
use super::vectors::{Stored, Vectors};
use crate::cpu::prelude::*;
use crate::cpu::rotary::rotate_half;
use crate::cpu::softmax::{MIXED, Scores, mixed_parts, softmax};
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
    /// Sums of values whose chains have ended, and of those whose have not.
    mixed: [Vec<T>; 2],
    prefix: Vec<T>,
    key: Vec<T>,
}

impl<T> Scratch<T> {
    pub(super) fn new() -> Self {
        Self {
            queries: Vec::new(),
            scores: Vec::new(),
            mixed: [Vec::new(), Vec::new()],
            prefix: Vec::new(),
            key: Vec::new(),
        }
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
        for sums in mixed.iter_mut() {
            sums.clear();
            sums.resize(queries * dim, T::ZERO);
        }
        if shared > 0 {
            self.prefix_keys(head, part, unseen, prefix);
            score_all(q, prefix, dim, scores, width);
        }
        let place = |sequence| {
            let [gone, hidden] = self.hidden(part, sequence);
            Place { head, sequence, first: part.first() + part.tokens(), gone: gone - unseen, hidden, shared, width }
        };
        let scaling = Scores { scale: self.shape.scale, softcap: self.shape.softcap };
        let each = || members.iter().map(place).zip(members.iter().map(Some).skip(1).chain([None]));
        let by_member = scores.chunks_exact_mut(group * width).zip(q.chunks_exact(group * dim));
        for ((place, next), (scores, q)) in each().zip(by_member) {
            let next = match next {
                Some(next) => (Kind::Key, next),
                None => (Kind::Value, &members[0]),
            };
            self.score(simd, &place, part, next, q, scores);
            let seen = place.seen();
            for (query, scores) in scores.chunks_exact_mut(width).enumerate() {
                let sink = self.sinks.map(|sinks| sinks[head * group + query]);
                softmax(&mut scores[..seen.end.next_multiple_of(LANES)], &seen, scaling, sink);
            }
        }
        let [mixed, chain] = mixed;
        if shared > 0 {
            self.prefix_values(head, part, unseen, prefix);
            let first = part.first() + unseen;
            for tokens in mixed_parts(first..part.first() + part.tokens()) {
                let at = tokens.start - first;
                let values = &prefix[at * dim..][..tokens.len() * dim];
                add_weighted(simd, &scores[at..], width, values, dim, chain);
                if tokens.end.is_multiple_of(MIXED) {
                    end_chain(chain, mixed);
                }
            }
        }
        let sums = mixed.chunks_exact_mut(group * dim).zip(chain.chunks_exact_mut(group * dim));
        for (((place, next), scores), sums) in each().zip(scores.chunks_exact_mut(group * width)).zip(sums) {
            let next = next.map(|next| (next, self.hidden(part, next)[1]));
            self.mix(simd, &place, next, scores, sums);
        }
        for (sequence, mixed) in members.iter().zip(mixed.chunks_exact(group * dim)) {
            let at = (sequence.row() * self.heads + head * group) * dim;
            // SAFETY: no other task writes these heads of this row.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), mixed.len()) };
            out.copy_from_slice(mixed);
        }
    }

    /// Products of a sequence's queries with its own keys, after those with the prefix. Prefetches the keys or values of
    /// the sequence that is read after it.
    #[inline(always)]
    fn score<S: Simd>(
        &self,
        simd: S,
        place: &Place<'_>,
        part: &Part,
        (kind, next): (Kind, &Sequence),
        q: &[T],
        scores: &mut [T],
    ) {
        let &Place { head, width, .. } = place;
        let pieces = self.runs.suffix_blocks(place.sequence, whole_blocks(place.hidden));
        let keys = pieces.clone().map(|piece| (Kind::Key, piece));
        let next = self.runs.suffix(next, whole_blocks(self.hidden(part, next)[1]));
        let mut ahead = keys.skip(AHEAD).chain(next.take(AHEAD).map(|piece| (kind, piece)));
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

    /// Sums of a sequence's own values, and of those before them. Prefetches the values of the sequence after it.
    #[inline(always)]
    fn mix<S: Simd>(
        &self,
        simd: S,
        place: &Place<'_>,
        next: Option<(&Sequence, usize)>,
        scores: &mut [T],
        (mixed, chain): (&mut [T], &mut [T]),
    ) {
        let &Place { head, width, .. } = place;
        let pieces = self.runs.suffix(place.sequence, place.hidden);
        let next = next.into_iter().flat_map(|(next, hidden)| self.runs.suffix(next, hidden).take(AHEAD));
        let mut ahead = pieces.clone().skip(AHEAD).chain(next).map(|piece| (Kind::Value, piece));
        let mut at = place.shared + place.hidden % BLOCK_SIZE;
        let mut token = place.first + place.hidden;
        for piece in pieces {
            self.prefetch(head, ahead.next());
            if P::SCALED {
                for scores in scores.chunks_exact_mut(width) {
                    let scores = &mut scores[at..at + piece.len()];
                    self.rescale(Kind::Value, head, &piece, scores);
                }
            }
            let values = self.read(Kind::Value, head, &piece);
            for tokens in mixed_parts(token..token + piece.len()) {
                let before = tokens.start - token;
                let values = &values[before * self.dim..][..tokens.len() * self.dim];
                add_weighted(simd, &scores[at + before..], width, values, self.dim, chain);
                if tokens.end.is_multiple_of(MIXED) {
                    end_chain(chain, mixed);
                }
            }
            at += piece.len();
            token += piece.len();
        }
        end_chain(chain, mixed);
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
}

/// A sequence's own part of a task's scores.
struct Place<'a> {
    head: usize,
    sequence: &'a Sequence,
    /// Tokens before its own.
    first: usize,
    /// Scores of the prefix that are of tokens outside its window.
    gone: usize,
    /// Own tokens outside its window.
    hidden: usize,
    /// Scores of the prefix before its own.
    shared: usize,
    /// Scores of a query.
    width: usize,
}

impl Place<'_> {
    /// The scores of tokens in its window. What is before its own tokens is hidden where some of them are.
    #[inline(always)]
    fn seen(&self) -> Range<usize> {
        let skipped = whole_blocks(self.hidden);
        self.gone + self.hidden - skipped..self.shared + self.sequence.tokens() - skipped
    }
}

/// Tokens in whole blocks of so many.
#[inline(always)]
fn whole_blocks(tokens: usize) -> usize {
    tokens - tokens % BLOCK_SIZE
}

/// Adds the chains of sums to the sums before them.
#[inline(always)]
fn end_chain<T: Real>(chain: &mut [T], sums: &mut [T]) {
    for (sum, chain) in sums.iter_mut().zip(chain) {
        *sum += std::mem::replace(chain, T::ZERO);
    }
}

/// Products of all queries with the keys of a prefix, `[dim, tokens]`.
fn score_all<T: Vectors>(q: &[T], keys: &[T], dim: usize, scores: &mut [T], width: usize) {
    let size = Size { m: q.len() / dim, k: dim, n: keys.len() / dim };
    let (q, keys) = (Matrix::row_major(q, dim), Matrix::row_major(keys, size.n));
    multiply(size, Target::new(scores, width, false), q, keys, Parallelism::None);
}
