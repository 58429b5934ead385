//! Chunked prefill: a few prompts at a time, in chunks of columns, each prompt once for all of its samples.

use super::sequence::{Sequence, SequenceGroup};
use crate::Decoder;
use crate::cache::KvCache;
use crate::forward_context::{Columns, ForwardContext};
use burn::tensor::{Int, Tensor, TensorData};
use firebrick_backends::kernels::in_thread_pool;
use std::collections::VecDeque;
use std::rc::Rc;

/// Groups in prefill, padded on the left to one width.
#[derive(Debug)]
pub(super) struct Prefill {
    groups: Vec<SequenceGroup>,
    cache: KvCache,
    width: usize,
}

/// A prefilled group, and those of its sequences that are not being decoded yet.
#[derive(Debug)]
pub(super) struct PrefilledGroup {
    pub cache: Rc<KvCache>,
    pub row: usize,
    pub tokens: Vec<u32>,
    pub members: VecDeque<Sequence>,
}

impl Prefill {
    pub fn new(decoder: &Decoder, groups: Vec<SequenceGroup>) -> Self {
        let width = groups
            .iter()
            .map(|group| group.tokens.len())
            .max()
            .unwrap_or(0);
        let starts = groups
            .iter()
            .map(|group| width - group.tokens.len())
            .collect();
        let cache = KvCache::new(decoder.arch(), starts, width, decoder.device());
        Self {
            groups,
            cache,
            width,
        }
    }

    pub fn cells(&self) -> usize {
        self.cache.cells()
    }

    pub fn groups(&self) -> &[SequenceGroup] {
        &self.groups
    }

    pub fn into_groups(self) -> Vec<SequenceGroup> {
        self.groups
    }

    /// Runs the next columns, of at most `most` tokens. After the last, the hidden states of the last column, `[groups, hidden]`.
    pub fn run(&mut self, decoder: &Decoder, most: usize) -> Option<Tensor<2>> {
        let (rows, first) = (self.groups.len(), self.cache.used());
        let len = (most / rows).clamp(1, self.width - first);
        let starts = self.cache.starts().to_vec();
        let mut ids = Vec::with_capacity(rows * len);
        for (group, start) in self.groups.iter().zip(&starts) {
            let column = |c: usize| {
                c.checked_sub(*start)
                    .map_or(0, |at| group.tokens[at] as i32)
            };
            ids.extend((first..first + len).map(column));
        }
        let columns = Columns {
            starts: &starts,
            first,
            len,
        };
        let device = decoder.device();
        let ctx = ForwardContext::cached(decoder.arch(), columns, device);
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [rows * len]), device);
        let cache = &mut self.cache;
        let hidden = in_thread_pool(device, || decoder.hidden_cached(ids, &ctx, cache));
        let [_, d] = hidden.dims();
        (self.cache.used() == self.width).then(|| {
            let hidden = hidden.reshape([rows, len, d]);
            hidden.narrow(1, len - 1, 1).reshape([rows, d])
        })
    }

    /// The prefilled groups.
    pub fn finish(self) -> impl Iterator<Item = PrefilledGroup> {
        let cache = Rc::new(self.cache);
        self.groups
            .into_iter()
            .enumerate()
            .map(move |(row, group)| PrefilledGroup {
                cache: Rc::clone(&cache),
                row,
                tokens: group.tokens,
                members: group.members.into(),
            })
    }
}
