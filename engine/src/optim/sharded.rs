//! An optimizer step of ranks that share out its state (`ZeRO`, arXiv:1910.02054): each updates its shards, and gathers the others'.

use super::adamw::{AdamW, own_part, update_at};
use super::state::Update;
use crate::Result;
use crate::executor::{Gradient, Runtime};
use crate::plan::Partition;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::Flat;
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use firebrick_models::decoder::Param;
use firebrick_models::unit::ParamSpec;

/// What ranks gather of a unit: of every parameter a shard, filled up to the length of the longest. The values are in the type that the
/// parameters are stored in.
struct Shards {
    /// Flat index, rows and columns, and the byte at which its shard begins in a rank's part.
    params: Vec<(usize, [usize; 2], usize)>,
    /// Bytes of a rank's part.
    part: usize,
    /// Bytes of a value.
    width: usize,
}

impl Shards {
    fn of(decoder: &Decoder, indices: &[usize], partition: Partition) -> Self {
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
        Self {
            params,
            part,
            width,
        }
    }

    /// A parameter's values, from the parts of all ranks.
    fn join(&self, place: usize, all: &[u8], partition: Partition) -> Vec<u8> {
        let (_, [rows, cols], start) = self.params[place];
        let mut bytes = Vec::with_capacity(rows * cols * self.width);
        for rank in 0..partition.ranks() {
            let len = partition.range_of(rank, rows * cols).len() * self.width;
            bytes.extend_from_slice(&all[rank * self.part + start..][..len]);
        }
        bytes
    }
}

impl AdamW {
    /// Updates this rank's shards of some parameters of a unit, which are the same on every rank, and replaces these by what all ranks
    /// made of theirs.
    pub(super) fn update_shards(
        &mut self,
        decoder: &mut Decoder,
        (unit, indices): (usize, &[usize]),
        rates: (f64, f64),
        runtime: &Runtime,
        mut gradient: impl FnMut(usize) -> Result<Option<Gradient>>,
    ) -> Result<()> {
        if indices.is_empty() {
            return Ok(());
        }
        let partition = self.partition();
        let shards = Shards::of(decoder, indices, partition);
        let bytes = partition.ranks() * shards.part;
        let _held = self
            .accounts
            .hold(Category::Communication, Home::Host, bytes);
        let mut own = vec![0; shards.part];
        for &(index, _, start) in &shards.params {
            // a rank whose shard is empty has no gradient of it
            if let Some(gradient) = gradient(index)? {
                let fresh = self.update_shard(decoder, index, rates, gradient)?;
                own[start..start + fresh.bytes()].copy_from_slice(fresh.as_bytes());
            }
        }
        let all = runtime.world().all_gather(Flat::Bytes(own))?;
        let (device, dtype) = (decoder.device().clone(), decoder.arch().precision);
        let dtype = dtype.dtype(&device);
        decoder.update_unit(unit, |index, spec, value| {
            let found = shards.params.iter().position(|(own, ..)| *own == index);
            let Some(place) = found else {
                return Ok(value);
            };
            let bytes = shards.join(place, all.as_bytes(), partition);
            let fresh = HostTensor::from_bytes(bytes, spec.rows_cols(), dtype);
            Ok(match value {
                Param::Device(_) => Param::Device(fresh.into_device(&device)),
                Param::Host(_) => Param::Host(fresh),
            })
        })
    }

    /// One step of this optimizer's shard of a parameter: its new values on the host.
    fn update_shard(
        &mut self,
        decoder: &Decoder,
        index: usize,
        (clip, lr): (f64, f64),
        gradient: Gradient,
    ) -> Result<HostTensor> {
        let value = own_part(decoder, index, self.partition());
        let Self {
            config,
            states,
            steps,
            accounts,
            value_rate,
            ..
        } = self;
        let Some(spec) = decoder.specs().nth(index) else {
            unreachable!("a parameter of the model")
        };
        let update = Update {
            config,
            at: update_at(config, spec, *steps, (lr, *value_rate)),
            clip,
            device: decoder.device(),
            accounts,
        };
        // a copy that the host updates is there already, and needs no master beside it
        let value = match states[index].home() {
            Home::Host => Param::Host(value.download()?),
            Home::Device => value,
        };
        Ok(states[index].update(update, value, gradient)?.download()?)
    }
}
