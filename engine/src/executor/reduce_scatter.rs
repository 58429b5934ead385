//! Gradients of which each rank keeps its shard of the sum (`ZeRO`, arXiv:1910.02054): of a whole optimizer step at its end, or of a
//! unit as soon as a pass has completed it.

use super::gradient_shards::Reduced;
use super::gradients::Gradients;
use super::runtime::Runtime;
use crate::Result;
use crate::plan::Partition;
use burn::tensor::DType;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{Element, Flat};
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use std::ops::Range;
use std::sync::Arc;

/// How the gradients of a unit lie in a message: a block for each rank, in which its shards of the parameters follow each other, each
/// filled up with zeros to the length of the longest, and then for every parameter how many ranks had a gradient of it.
struct Layout {
    /// Flat index, elements, and where its shard begins in a block.
    params: Vec<(usize, usize, usize)>,
    /// Where a block's counts begin.
    counts: usize,
    block: usize,
}

impl Layout {
    /// Of the trained parameters among some; none where none is.
    fn of(decoder: &Decoder, params: Range<usize>, partition: Partition) -> Option<Self> {
        let mut counts = 0;
        let specs = decoder.specs().enumerate().skip(params.start);
        let params: Vec<_> = specs
            .take(params.len())
            .filter(|(_, spec)| spec.trainable)
            .map(|(index, spec)| {
                let start = counts;
                counts += partition.part(spec.numel());
                (index, spec.numel(), start)
            })
            .collect();
        let block = counts + params.len();
        (!params.is_empty()).then_some(Self {
            params,
            counts,
            block,
        })
    }
}

impl Gradients {
    /// Adds up the gradients of all ranks that are not summed yet: afterwards every rank has all of them, or its shard of each.
    ///
    /// # Errors
    /// Where a copy fails, or a rank has failed or is gone.
    pub fn reduce(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        self.sum_tied_ends(decoder, runtime)?;
        match self.reduced().map(Reduced::each_pass) {
            None => self.all_reduce(decoder, runtime),
            Some(true) => Ok(()),
            Some(false) => (0..decoder.units().len())
                .filter(|&unit| !decoder.is_elsewhere(unit))
                .try_for_each(|unit| {
                    self.reduce_scatter(decoder, decoder.units()[unit].range.clone(), runtime)
                }),
        }
    }

    /// Says that a pass adds nothing more to these parameters: their gradients leave for the host, or are summed over the ranks, where the
    /// plan says so. On several ranks all come here for the same units in the same order.
    pub(super) fn complete(
        &mut self,
        decoder: &Decoder,
        params: Range<usize>,
        runtime: &Runtime,
    ) -> Result<()> {
        if self.reduced().is_some_and(Reduced::each_pass) {
            self.reduce_scatter(decoder, params, runtime)
        } else {
            self.offload(params, runtime)
        }
    }

    /// Adds this rank's shard of the sum over all ranks to what it has of some parameters, and drops what was summed.
    fn reduce_scatter(
        &mut self,
        decoder: &Decoder,
        params: Range<usize>,
        runtime: &Runtime,
    ) -> Result<()> {
        self.sum_parts(decoder, params.clone(), runtime)?;
        self.finish()?;
        let world = runtime.world().replicas();
        let (accounts, home) = (Arc::clone(self.accounts()), self.home());
        let Some(partition) = self.reduced().map(Reduced::partition) else {
            return Ok(());
        };
        let Some(layout) = Layout::of(decoder, params, partition) else {
            return Ok(());
        };
        let element = match decoder.arch().precision.dtype(decoder.device()) {
            DType::F64 => Element::F64,
            _ => Element::F32,
        };
        let ranks = partition.ranks();
        let len = ranks * layout.block;
        let _held = accounts.hold(Category::Communication, Home::Host, len * element.bytes());
        let mut message = Flat::zeros(element, len);
        let one = ones(element);
        for (place, &(index, numel, start)) in layout.params.iter().enumerate() {
            let Some(gradient) = self.take_own(index) else {
                continue;
            };
            let values = gradient.into_host()?.into_flat();
            for rank in 0..ranks {
                let block = rank * layout.block;
                message.write(block + start, &values, partition.range_of(rank, numel));
                message.write(block + layout.counts + place, &one, 0..1);
            }
        }
        let sum = world.reduce_scatter(message)?;
        let zero = Flat::zeros(element, 1);
        let Some(reduced) = self.reduced_mut() else {
            return Ok(());
        };
        for (place, &(index, numel, start)) in layout.params.iter().enumerate() {
            let count = layout.counts + place;
            if sum.slice(count..count + 1) == zero {
                continue;
            }
            reduced.note(index);
            let own = partition.range(numel).len();
            if own > 0 {
                let values = sum.slice(start..start + own);
                let shard = HostTensor::from_flat(values, Partition::shape(own));
                reduced.add(index, shard, home, (&accounts, decoder.device()));
            }
        }
        Ok(())
    }
}

fn ones(element: Element) -> Flat {
    match element {
        Element::F64 => Flat::F64(vec![1.0]),
        _ => Flat::F32(vec![1.0]),
    }
}
