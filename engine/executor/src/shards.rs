//! Gathers of shards: one message per unit, in which a shard of every parameter follows the one before.

use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::collective::Flat;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::world::{Gathering, World};
use firebrick_models::Decoder;
use firebrick_models::decoder::Param;
use firebrick_models::unit::ParamSpec;
use firebrick_plan::Partition;
use std::sync::Arc;

/// A parameter, or a rank's shard of it: what it has where its unit is sharded already.
pub(crate) fn local_part(decoder: &Decoder, index: usize, partition: Partition) -> Param {
    let value = decoder.param(index);
    let mut units = decoder.units().iter();
    let Some(unit) = units.find(|unit| unit.range.contains(&index)) else { unreachable!("a parameter of the model") };
    if partition.is_whole() || unit.is_sharded() {
        return value;
    }
    let range = partition.range(unit.specs[index - unit.range.start].numel());
    let shape = Partition::shape(range.len());
    value.part(range, shape)
}

/// True if ranks gather a unit's values from device to device, without a copy to the host: where they exchange values
/// from there and the unit lies there. The same on every rank.
pub(crate) fn from_device_to_device(world: &World, decoder: &Decoder, unit: usize) -> bool {
    [world.buffers_home(), decoder.units()[unit].store.home()] == [Home::Device; 2]
}

/// Layout of shards in a rank's part of a message: each is filled up to the length of the longest one. Values are in
/// the type that the parameters are stored in.
pub(crate) struct Shards {
    /// Flat index, rows and columns, and the byte at which its shard begins.
    params: Vec<(usize, [usize; 2], usize)>,
    partition: Partition,
    /// Bytes of a rank's part.
    part: usize,
    /// Bytes of a value.
    width: usize,
}

impl Shards {
    /// Of the parameters at some flat indices.
    pub fn new(decoder: &Decoder, indices: &[usize], partition: Partition) -> Self {
        let width = decoder.arch().precision.dtype(decoder.device()).size();
        let specs: Vec<&ParamSpec> = decoder.specs().collect();
        let mut part = 0;
        let params = indices
            .iter()
            .map(|&index| {
                let start = part;
                part += width * partition.part(specs[index].numel());
                (index, specs[index].rows_cols(), start)
            })
            .collect();
        Self { params, partition, part, width }
    }

    /// Gathers the shards of all ranks. `shard_of` gives this rank's of a parameter, by its flat index, where it has
    /// any values.
    ///
    /// # Errors
    /// If a copy fails, or a rank has failed or is gone.
    pub fn gather(
        self,
        world: &World,
        accounts: &Arc<Accounts>,
        shard_of: impl FnMut(usize) -> Result<HostTensor>,
    ) -> Result<Gathered> {
        let held = self.hold(accounts);
        let values = world.all_gather(self.part(shard_of)?)?;
        Ok(Gathered { shards: self, values, _held: held })
    }

    /// Starts a gather without waiting: it runs while this rank computes.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn start(
        self,
        world: &World,
        accounts: &Arc<Accounts>,
        shard_of: impl FnMut(usize) -> Result<HostTensor>,
    ) -> Result<Started> {
        let held = self.hold(accounts);
        let values = world.start_all_gather(self.part(shard_of)?);
        Ok(Started { shards: self, values, held })
    }

    /// Gathers shards that lie on the device, where ranks exchange values from there: the whole parameters, in their
    /// order, as all ranks have them. Waits until they are there. `shard_of` gives this rank's shard of a parameter, by
    /// its flat index, where it has any values.
    ///
    /// # Errors
    /// If memory runs out, or a rank has failed or is gone.
    pub fn gather_on_device(
        self,
        world: &World,
        accounts: &Arc<Accounts>,
        (device, dtype): (&Device, DType),
        mut shard_of: impl FnMut(usize) -> Result<Param>,
    ) -> Result<Vec<Tensor<2>>> {
        let _held = self.hold_in(Home::Device, accounts);
        let (partition, part) = (self.partition, self.part / self.width);
        let mut pieces = Vec::new();
        for &(index, [rows, cols], _) in &self.params {
            let (there, length) = (partition.range(rows * cols).len(), partition.part(rows * cols));
            if there > 0 {
                pieces.push(shard_of(index)?.into_device(device).reshape([there]));
            }
            if there < length {
                pieces.push(Tensor::zeros([length - there], (device, dtype)));
            }
        }
        let gathered = world.all_gather_tensor(Tensor::cat(pieces, 0))?;
        let whole = self.params.iter().map(|&(_, [rows, cols], start)| {
            let numel = rows * cols;
            let of_ranks = (0..partition.ranks()).filter_map(|rank| {
                let len = partition.range_of(rank, numel).len();
                let start = rank * part + start / self.width;
                (len > 0).then(|| gathered.clone().narrow(0, start, len))
            });
            Tensor::cat(of_ranks.collect(), 0).reshape([rows, cols])
        });
        Ok(whole.collect())
    }

    /// Accounts for the shards of all ranks.
    fn hold(&self, accounts: &Arc<Accounts>) -> MemoryGuard {
        self.hold_in(Home::Host, accounts)
    }

    fn hold_in(&self, home: Home, accounts: &Arc<Accounts>) -> MemoryGuard {
        let bytes = self.partition.ranks() * self.part;
        accounts.hold(Category::Communication, home, bytes)
    }

    /// This rank's part.
    fn part(&self, mut shard_of: impl FnMut(usize) -> Result<HostTensor>) -> Result<Flat> {
        let mut part = vec![0; self.part];
        for &(index, [rows, cols], start) in &self.params {
            if self.partition.range(rows * cols).is_empty() {
                continue;
            }
            let shard = shard_of(index)?;
            part[start..start + shard.bytes()].copy_from_slice(shard.as_bytes());
        }
        Ok(Flat::Bytes(part))
    }
}

/// Shards that are being gathered.
pub(crate) struct Started {
    shards: Shards,
    values: Gathering,
    held: MemoryGuard,
}

impl Started {
    /// The shards of all ranks, once they are there.
    ///
    /// # Errors
    /// If a rank has failed or is gone.
    pub fn wait(self) -> Result<Gathered> {
        let Self { shards, values, held } = self;
        Ok(Gathered { shards, values: values.wait()?, _held: held })
    }
}

/// The shards of all ranks.
pub(crate) struct Gathered {
    shards: Shards,
    values: Flat,
    /// Accounts for them.
    _held: MemoryGuard,
}

impl Gathered {
    /// A whole parameter, by its place.
    pub fn whole(&self, place: usize, decoder: &Decoder) -> HostTensor {
        let Shards { params, partition, part, width } = &self.shards;
        let (_, [rows, cols], start) = params[place];
        let (values, numel) = (self.values.as_bytes(), rows * cols);
        let mut bytes = Vec::with_capacity(numel * width);
        for rank in 0..partition.ranks() {
            let len = partition.range_of(rank, numel).len() * width;
            bytes.extend_from_slice(&values[rank * part + start..][..len]);
        }
        let dtype = decoder.arch().precision.dtype(decoder.device());
        HostTensor::from_bytes(bytes, [rows, cols], dtype)
    }
}
