//! Gradients of which each rank keeps its shard of the sum (`ZeRO`, arXiv:1910.02054): of a whole optimizer step at its
//! end, or of a unit as soon as a pass has completed it.

use super::gradient::Gradient;
use super::gradients::{Gradients, gradient_dtype};
use super::runtime::Runtime;
use burn::tensor::{DType, Device, Tensor, TensorData};
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{Element, Flat};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_plan::Partition;
use std::ops::Range;
use std::sync::Arc;

/// Layout of a unit's gradients in a message: a block for each rank, in which its shards of the parameters follow each
/// other, each filled up with zeros to the length of the longest, and then for every parameter how many ranks had a
/// gradient of it.
struct Layout {
    /// Flat index, elements, and where its shard begins in a block.
    params: Vec<(usize, usize, usize)>,
    /// First index of a block's counts.
    counts: usize,
    block: usize,
}

impl Layout {
    /// Of the trained parameters among some; none if none is.
    fn new(decoder: &Decoder, params: Range<usize>, partition: Partition) -> Option<Self> {
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
        (!params.is_empty()).then_some(Self { params, counts, block })
    }
}

impl Gradients {
    /// Adds up the gradients of all ranks that are not summed yet: afterwards every rank has all of them, or its shard
    /// of each.
    ///
    /// # Errors
    /// If a copy fails, or a rank has failed or is gone.
    pub fn reduce(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        self.sum_tied_ends(decoder, runtime)?;
        match self.reduced.as_ref().map(|reduced| reduced.each_pass) {
            None => self.all_reduce(decoder, runtime),
            Some(true) => Ok(()),
            Some(false) => (0..decoder.units().len())
                .filter(|&unit| !decoder.is_on_other_stage(unit))
                .try_for_each(|unit| self.reduce_scatter(decoder, decoder.units()[unit].range.clone(), runtime)),
        }
    }

    /// Says that a pass adds nothing more to these parameters: their gradients leave for the host, or are summed over
    /// the ranks, where the plan says so. On several ranks all come here for the same units in the same order.
    pub(super) fn complete(&mut self, decoder: &Decoder, params: Range<usize>, runtime: &Runtime) -> Result<()> {
        if self.reduced.as_ref().is_some_and(|reduced| reduced.each_pass) {
            self.reduce_scatter(decoder, params, runtime)
        } else {
            self.offload(params, runtime)
        }
    }

    /// Adds this rank's shard of the sum over all ranks to what it has of some parameters, and drops what was summed.
    fn reduce_scatter(&mut self, decoder: &Decoder, params: Range<usize>, runtime: &Runtime) -> Result<()> {
        self.sum_parts(decoder, params.clone(), runtime)?;
        self.finish()?;
        let world = runtime.world().replicas();
        let (accounts, home) = (Arc::clone(&self.accounts), self.home);
        let Some(partition) = self.reduced.as_ref().map(|reduced| reduced.partition) else {
            return Ok(());
        };
        let Some(layout) = Layout::new(decoder, params, partition) else {
            return Ok(());
        };
        let dtype = gradient_dtype(decoder);
        let element = Element::of(dtype);
        let len = partition.ranks() * layout.block;
        let (at, bytes) = (world.buffers_home(), len * element.bytes());
        let _held = accounts.hold(Category::Communication, at, bytes);
        let mut take = |index| self.take_own(index);
        let shards = if [home, at] == [Home::Device; 2] {
            layout.sum_on_device(partition, (decoder.device(), dtype), &world, &mut take)?
        } else {
            layout.sum_on_host((partition, element), &world, &mut take)?
        };
        let Some(reduced) = self.reduced_mut() else {
            return Ok(());
        };
        for (index, shard) in shards {
            reduced.contributed[index] = true;
            if let Some(shard) = shard {
                reduced.add(index, shard, home, (&accounts, decoder.device()))?;
            }
        }
        Ok(())
    }
}

/// This rank's shards of the sums of parameters that any rank had a gradient of, by flat index: none of one whose
/// shards are all other ranks'.
type Shards = Vec<(usize, Option<Gradient>)>;

impl Layout {
    /// Sums what ranks have in a message in host memory.
    fn sum_on_host(
        &self,
        (partition, element): (Partition, Element),
        world: &World,
        take: &mut impl FnMut(usize) -> Option<Gradient>,
    ) -> Result<Shards> {
        let ranks = partition.ranks();
        let mut message = Flat::zeros(element, ranks * self.block);
        let one = ones(element);
        for (place, &(index, numel, start)) in self.params.iter().enumerate() {
            let Some(gradient) = take(index) else {
                continue;
            };
            let values = Flat::from(gradient.into_host()?);
            for rank in 0..ranks {
                let block = rank * self.block;
                message.write(block + start, &values, partition.range_of(rank, numel));
                message.write(block + self.counts + place, &one, 0..1);
            }
        }
        let sum = world.reduce_scatter(message)?;
        let zero = Flat::zeros(element, 1);
        let contributed = self.params.iter().enumerate().filter(|(place, _)| {
            let count = self.counts + place;
            sum.slice(count..count + 1) != zero
        });
        let shard = |&(index, numel, start): &(usize, usize, usize)| {
            let take = partition.range(numel).len();
            let shard = (take > 0).then(|| {
                let values = sum.slice(start..start + take);
                Gradient::Host(values.into_host_tensor(Partition::shape(take)))
            });
            (index, shard)
        };
        Ok(contributed.map(|(_, param)| shard(param)).collect())
    }

    /// Sums gradients of all ranks in a message that stays on the device: only the counts are read.
    fn sum_on_device(
        &self,
        partition: Partition,
        (device, dtype): (&Device, DType),
        world: &World,
        take: &mut impl FnMut(usize) -> Option<Gradient>,
    ) -> Result<Shards> {
        let ranks = partition.ranks();
        let zeros = |columns: usize| Tensor::<2>::zeros([ranks, columns], (device, dtype));
        let mut columns = Vec::with_capacity(self.params.len() + 1);
        let mut counts = Vec::with_capacity(self.params.len());
        for &(index, numel, _) in &self.params {
            let part = partition.part(numel);
            let gradient = take(index);
            counts.push(f32::from(u8::from(gradient.is_some())));
            columns.push(match gradient {
                Some(gradient) => {
                    let values = gradient.into_device(device).reshape([numel]);
                    zero_padded(values, ranks * part).reshape([ranks, part])
                }
                None => zeros(part),
            });
        }
        let params = self.params.len();
        let counts = Tensor::<1>::from_data(TensorData::new(counts, [params]), (device, dtype));
        columns.push(counts.reshape([1, params]).expand([ranks, params]));
        let message = Tensor::cat(columns, 1).reshape([ranks * self.block]);
        let sum = world.reduce_scatter_tensor(message)?;
        let counts = sum.clone().narrow(0, self.counts, params).reshape([1, params]);
        let counts = HostTensor::download(counts)?.to_f64();
        let shard = |&(index, numel, start): &(usize, usize, usize)| {
            let take = partition.range(numel).len();
            let shard = (take > 0).then(|| {
                let values = sum.clone().narrow(0, start, take);
                Gradient::Device(values.reshape(Partition::shape(take)))
            });
            (index, shard)
        };
        Ok(self.params.iter().zip(counts).filter(|(_, count)| *count > 0.0).map(|(param, _)| shard(param)).collect())
    }
}

/// Values with zeros behind them.
fn zero_padded(values: Tensor<1>, len: usize) -> Tensor<1> {
    let [values_len] = values.dims();
    if values_len == len {
        return values;
    }
    let zeros = Tensor::zeros([len - values_len], (&values.device(), values.dtype()));
    Tensor::cat(vec![values, zeros], 0)
}

fn ones(element: Element) -> Flat {
    match element {
        Element::F64 => Flat::F64(vec![1.0]),
        _ => Flat::F32(vec![1.0]),
    }
}
