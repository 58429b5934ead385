//! A model of which each rank has a part, as it is written or read: rank 0, or every rank, asks for rows of a
//! parameter, and all ranks give theirs. So no rank ever holds more of it than its part and those rows.

use super::resident_model::{ResidentModel, WeightSharding};
use super::stage_weights::StageWeights;
use super::weight_shards::WeightShards;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::{Error, Result};
use firebrick_models::Decoder;
use firebrick_models::checkpoint::WholeModel;
use firebrick_models::decoder::Param;
use std::cell::Cell;
use std::ops::Range;

/// The whole model, on the rank that writes it.
struct GatheredModel<'a> {
    model: &'a ResidentModel,
    /// True if an operation of the ranks, or this rank's part in one, has failed: then the others do not wait for
    /// another question.
    failed: Cell<bool>,
}

impl GatheredModel<'_> {
    /// Tells the other ranks which rows are next, or that there are none.
    fn ask(&self, next: Option<(usize, Range<usize>)>) -> Result<()> {
        self.model.world().broadcast(next).map(drop)
    }
}

impl WholeModel for GatheredModel<'_> {
    fn decoder(&self) -> &Decoder {
        &self.model.decoder
    }

    fn rows(&self, index: usize, rows: Range<usize>) -> firebrick_models::Result<Param> {
        self.failed.set(true);
        let rows = self.ask(Some((index, rows.clone()))).and_then(|()| self.model.gather_rows(index, rows));
        let rows = rows.map_err(Error::into_model)?;
        self.failed.set(false);
        Ok(Param::Host(rows))
    }
}

/// The whole model on every rank, all of which ask for the same rows in the same order.
struct ReplicatedRead<'a>(&'a ResidentModel);

impl WholeModel for ReplicatedRead<'_> {
    fn decoder(&self) -> &Decoder {
        &self.0.decoder
    }

    fn rows(&self, index: usize, rows: Range<usize>) -> firebrick_models::Result<Param> {
        let Self(model) = self;
        if model.is_whole() {
            return Ok(model.decoder.param_rows(index, rows));
        }
        let rows = model.gather_rows(index, rows);
        Ok(Param::Host(rows.map_err(Error::into_model)?))
    }
}

impl ResidentModel {
    /// True if this rank has all of it.
    fn is_whole(&self) -> bool {
        self.sharding().is_none() && self.decoder.share().is_none()
    }

    /// The whole model, for all ranks of the run to read together: they ask for the same rows in the same order.
    pub fn read_together(&self) -> impl WholeModel + '_ {
        ReplicatedRead(self)
    }

    /// Hands the whole model to `write` on the rank that writes files; the others give their parts of what it asks for.
    /// All ranks of the run call it together, and then tell each other of errors (`World::together`).
    ///
    /// # Errors
    /// Those of `write`; where memory runs out, the device fails, or a rank has failed or is gone.
    pub fn write_whole(&self, write: impl FnOnce(&dyn WholeModel) -> Result<()>) -> Result<()> {
        match (self.world().writes(), self.is_whole()) {
            (true, true) => write(&self.decoder),
            (false, true) => Ok(()),
            (true, false) => {
                let model = GatheredModel { model: self, failed: Cell::new(false) };
                let written = write(&model);
                if model.failed.get() {
                    return written;
                }
                written.and(model.ask(None))
            }
            (false, false) => {
                while let Some((index, rows)) = self.world().broadcast(None::<(usize, Range<usize>)>)? {
                    self.gather_rows(index, rows)?;
                }
                Ok(())
            }
        }
    }

    /// Rows of a whole parameter, on the host. All ranks call it together.
    fn gather_rows(&self, index: usize, rows: Range<usize>) -> Result<HostTensor> {
        let decoder = &self.decoder;
        if decoder.share().is_some() {
            return self.gather_matrix(index, rows);
        }
        let [_, cols] = self.rows_cols(index);
        match self.sharding() {
            Some(WeightSharding::Shards(shards)) if WeightShards::has(decoder, index) => {
                let wanted = rows.start * cols..rows.end * cols;
                let shards_of_ranks = shards.world.exchange(self.own_values(index, &wanted)?)?;
                let _held = self.hold(shards_of_ranks.iter().map(Vec::len).sum());
                Ok(self.tensor(shards_of_ranks.concat(), [rows.len(), cols]))
            }
            Some(WeightSharding::Stages(_)) => {
                let (owner, here) = StageWeights::owner(decoder, index);
                let message = if here {
                    decoder.param_rows(index, rows.clone()).download()?.as_bytes().to_vec()
                } else {
                    Vec::new()
                };
                let bytes = self.world().part_ranks().exchange(message)?.swap_remove(owner);
                let _held = self.hold(bytes.len());
                Ok(self.tensor(bytes, [rows.len(), cols]))
            }
            Some(WeightSharding::Shards(_)) | None => Ok(decoder.param_rows(index, rows).download()?),
        }
    }

    /// Gathers rows of a parameter of which tensor-parallel ranks have parts; of these, replicas may have shards.
    fn gather_matrix(&self, index: usize, rows: Range<usize>) -> Result<HostTensor> {
        let decoder = &self.decoder;
        let [own_rows, own_cols] = self.rows_cols(index);
        let values = match self.sharding() {
            Some(WeightSharding::Shards(shards)) if WeightShards::has(decoder, index) => {
                let values = self.own_values(index, &(0..own_rows * own_cols))?;
                shards.world.exchange(values)?.concat()
            }
            _ => decoder.param(index).download()?.as_bytes().to_vec(),
        };
        let parts = self.world().tensor_ranks().exchange(values)?;
        let parts: Vec<HostTensor> = parts.into_iter().map(|bytes| self.tensor(bytes, [own_rows, own_cols])).collect();
        let _held = self.hold(parts.iter().map(HostTensor::bytes).sum());
        let whole = decoder.joined_param(index, &parts.iter().collect::<Vec<_>>());
        let [all, cols] = whole.dims();
        if rows.len() == all {
            return Ok(whole);
        }
        Ok(whole.part(rows.start * cols..rows.end * cols, [rows.len(), cols]))
    }

    /// Accounts for what ranks have given each other.
    fn hold(&self, bytes: usize) -> MemoryGuard {
        self.accounts().hold(Category::Communication, Home::Host, bytes)
    }

    /// Bytes of those of a range of a parameter's values that are in this rank's shard of it.
    fn own_values(&self, index: usize, wanted: &Range<usize>) -> Result<Vec<u8>> {
        let Some(WeightSharding::Shards(shards)) = self.sharding() else {
            unreachable!("shards are requested only if there are some")
        };
        let [rows, cols] = self.rows_cols(index);
        let shard = shards.partition.range(rows * cols);
        let common = wanted.start.max(shard.start)..wanted.end.min(shard.end);
        if common.is_empty() {
            return Ok(Vec::new());
        }
        let mut units = self.decoder.units().iter();
        let first = if units.any(|unit| unit.is_sharded() && unit.range.contains(&index)) { shard.start } else { 0 };
        let here = common.start - first..common.end - first;
        Ok(self.decoder.param_values(index, here).download()?.as_bytes().to_vec())
    }

    /// Rows and columns of a parameter as this rank, or those that have its shards, has it.
    fn rows_cols(&self, index: usize) -> [usize; 2] {
        self.decoder.specs().nth(index).map_or([0, 0], firebrick_models::unit::ParamSpec::rows_cols)
    }

    /// Values in the type that weights are stored in.
    pub(super) fn tensor(&self, bytes: Vec<u8>, shape: [usize; 2]) -> HostTensor {
        let dtype = self.decoder.arch().precision.dtype(self.decoder.device());
        HostTensor::from_bytes(bytes, shape, dtype)
    }
}
