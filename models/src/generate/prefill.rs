//! Forwards of prompts: a few at a time, in chunks of columns, each prompt once for all samples that share it.

use super::queue::{Job, Sequence};
use crate::Decoder;
use crate::cache::KvCache;
use crate::layer::{Columns, Context};
use burn::tensor::{Int, Tensor, TensorData};
use firebrick_backends::kernels::in_thread_pool;
use std::collections::VecDeque;
use std::rc::Rc;

/// Jobs whose forward is under way, padded on the left.
#[derive(Debug)]
pub(super) struct Filling {
    jobs: Vec<Job>,
    cache: KvCache,
    width: usize,
}

/// A job whose keys and values are there, and those of its sequences that have no slot yet.
#[derive(Debug)]
pub(super) struct Ready {
    pub cache: Rc<KvCache>,
    pub row: usize,
    pub tokens: Vec<u32>,
    pub members: VecDeque<Sequence>,
}

impl Filling {
    pub fn new(decoder: &Decoder, jobs: Vec<Job>) -> Self {
        let width = jobs.iter().map(|job| job.tokens.len()).max().unwrap_or(0);
        let starts = jobs.iter().map(|job| width - job.tokens.len()).collect();
        let cache = KvCache::new(decoder.arch(), starts, width, decoder.device());
        Self { jobs, cache, width }
    }

    pub fn cells(&self) -> usize {
        self.cache.cells()
    }

    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    pub fn into_jobs(self) -> Vec<Job> {
        self.jobs
    }

    /// Runs the next columns, as many as `most` tokens allow. The hidden states of the last one, a row a job, once it is done.
    pub fn run(&mut self, decoder: &Decoder, most: usize) -> Option<Tensor<2>> {
        let (rows, first) = (self.jobs.len(), self.cache.used());
        let len = (most / rows).clamp(1, self.width - first);
        let starts = self.cache.starts().to_vec();
        let mut ids = Vec::with_capacity(rows * len);
        for (job, start) in self.jobs.iter().zip(&starts) {
            let column = |c: usize| c.checked_sub(*start).map_or(0, |at| job.tokens[at] as i32);
            ids.extend((first..first + len).map(column));
        }
        let columns = Columns {
            starts: &starts,
            first,
            len,
        };
        let device = decoder.device();
        let ctx = Context::cached(decoder.arch(), columns, device);
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [rows * len]), device);
        let cache = &mut self.cache;
        let hidden = in_thread_pool(device, || decoder.hidden_cached(ids, &ctx, cache));
        let [_, d] = hidden.dims();
        (self.cache.used() == self.width).then(|| {
            let hidden = hidden.reshape([rows, len, d]);
            hidden.narrow(1, len - 1, 1).reshape([rows, d])
        })
    }

    /// The jobs, to be copied into slots.
    pub fn done(self) -> impl Iterator<Item = Ready> {
        let cache = Rc::new(self.cache);
        self.jobs
            .into_iter()
            .enumerate()
            .map(move |(row, job)| Ready {
                cache: Rc::clone(&cache),
                row,
                tokens: job.tokens,
                members: job.members.into(),
            })
    }
}
