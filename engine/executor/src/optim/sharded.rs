//! An optimizer step of ranks that shard its state (`ZeRO`, arXiv:1910.02054): each updates its shards, and gathers the
//! others'.

use super::adamw::{AdamW, update_at};
use super::state::Update;
use crate::{Gradient, Runtime, Shards, from_device_to_device, local_part};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels::AdamWBatch;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_models::Decoder;
use firebrick_models::decoder::Param;
use std::collections::BTreeMap;
use std::sync::Arc;

impl AdamW {
    /// Updates this rank's shards of some parameters of a unit, which are the same on every rank, and replaces these by
    /// what all ranks made of theirs.
    pub(super) fn update_shards(
        &mut self,
        decoder: &mut Decoder,
        unit: usize,
        indices: &[usize],
        rates: (f64, f64),
        runtime: &Runtime,
        mut gradient: impl FnMut(usize) -> Result<Option<Gradient>>,
    ) -> Result<()> {
        if indices.is_empty() {
            return Ok(());
        }
        let sharded = decoder.units()[unit].is_sharded();
        if sharded {
            return self.update_in_place(decoder, unit, indices, rates, gradient);
        }
        let shards = Shards::new(decoder, indices, self.partition());
        let accounts = Arc::clone(&self.accounts);
        let world = runtime.world().replicas();
        let mut updated = |index| match gradient(index)? {
            Some(gradient) => self.update_shard(decoder, index, rates, gradient),
            None => Ok(local_part(decoder, index, self.partition())),
        };
        let fresh = if from_device_to_device(&world, decoder, unit) {
            let device = decoder.device();
            let values = (device, decoder.arch().precision.dtype(device));
            let whole = shards.gather_on_device(&world, &accounts, values, updated)?.into_iter().map(Param::Device);
            indices.iter().copied().zip(whole).collect()
        } else {
            let download = |index| Ok(updated(index)?.download()?);
            let gathered = shards.gather(&world, &accounts, download)?;
            let whole = |(place, &index)| (index, Param::Host(gathered.whole(place, decoder)));
            indices.iter().enumerate().map(whole).collect()
        };
        replace(decoder, unit, fresh)
    }

    /// Updates a unit that stays sharded.
    fn update_in_place(
        &mut self,
        decoder: &mut Decoder,
        unit: usize,
        indices: &[usize],
        rates: (f64, f64),
        mut gradient: impl FnMut(usize) -> Result<Option<Gradient>>,
    ) -> Result<()> {
        let mut fresh = BTreeMap::new();
        for &index in indices {
            if let Some(gradient) = gradient(index)? {
                let new = self.update_shard(decoder, index, rates, gradient)?;
                fresh.insert(index, new);
            }
        }
        replace(decoder, unit, fresh)
    }

    /// One step of this optimizer's shard of a parameter: its new values, where they were.
    fn update_shard(
        &mut self,
        decoder: &Decoder,
        index: usize,
        (clip, lr): (f64, f64),
        gradient: Gradient,
    ) -> Result<Param> {
        let value = local_part(decoder, index, self.partition());
        let Self { config, states, steps, accounts, value_rate, .. } = self;
        let Some(spec) = decoder.specs().nth(index) else { unreachable!("a parameter of the model") };
        let update = Update {
            config,
            at: update_at(config, spec, *steps, lr, *value_rate),
            clip,
            device: decoder.device(),
            accounts,
        };
        // a copy that the host updates is there already, and needs no master beside it
        let value = match states[index].home() {
            Home::Host => Param::Host(value.download()?),
            Home::Device => value,
        };
        let mut batch = AdamWBatch::default();
        let new = states[index].update(update, value, gradient, &mut batch)?;
        batch.launch();
        Ok(new)
    }
}

/// Puts new values, by their flat index, where a unit's old ones were.
fn replace(decoder: &mut Decoder, unit: usize, mut fresh: BTreeMap<usize, Param>) -> Result<()> {
    let device = decoder.device().clone();
    decoder.update_unit(unit, |index, _, value| {
        Ok(match (fresh.remove(&index), value) {
            (None, value) => value,
            (Some(new), Param::Device(_)) => Param::Device(new.into_device(&device)),
            (Some(Param::Device(new)), Param::Host(_)) => Param::Host(HostTensor::download(new)?),
            (Some(new), Param::Host(_)) => new,
        })
    })
}
