//! Weights of a model with pipeline stages: between passes a rank holds the weights of its stage.

use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Category, Home};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_models::decoder::Param;
use firebrick_plan::ModelPlan;
use std::sync::Arc;

/// The ranks that have the stages of a model.
#[derive(Clone, Debug)]
pub(super) struct StageWeights {
    world: World,
}

impl StageWeights {
    /// Those of a model, where it is divided into stages.
    pub fn new(decoder: &Decoder, world: &World) -> Option<Self> {
        decoder.stage().map(|_| Self { world: world.clone() })
    }

    /// Lets go of all units that are on other stages. Returns true if there were any.
    pub fn shard(decoder: &mut Decoder) -> Result<bool> {
        let mut shared = false;
        for unit in 0..decoder.units().len() {
            if decoder.is_on_other_stage(unit) && !decoder.units()[unit].is_sharded() {
                decoder.shard_unit(unit, |_| (0..0, [0, 1]))?;
                shared = true;
            }
        }
        Ok(shared)
    }

    /// Makes all units whole, on all ranks of a pipeline: those that any rank lacks are sent by the first stage that
    /// has them. Returns true if there were any.
    pub fn make_whole(&self, decoder: &mut Decoder, accounts: &Arc<Accounts>) -> Result<bool> {
        let lacks = |unit: &firebrick_models::decoder::Unit| u8::from(unit.is_sharded());
        let sharded: Vec<u8> = decoder.units().iter().map(lacks).collect();
        // after an attempt that failed on one rank, units may be whole on others
        let sharded = self.world.part_ranks().exchange(sharded)?;
        let mut gathered = false;
        for unit in 0..decoder.units().len() {
            if sharded.iter().all(|rank| rank.get(unit) == Some(&0)) {
                continue;
            }
            let values = self.unit(decoder, unit, accounts)?;
            if decoder.units()[unit].is_sharded() {
                let values = values.into_iter().map(Param::Host).collect();
                decoder.unshard_unit(unit, values)?;
            }
            gathered = true;
        }
        Ok(gathered)
    }

    /// The first stage that has the parameter at a flat index, and whether it is this one.
    pub fn owner(decoder: &Decoder, index: usize) -> (usize, bool) {
        let mut units = decoder.units().iter();
        let unit = units.find(|unit| unit.range.contains(&index));
        let (Some(stage), Some(unit)) = (decoder.stage(), unit) else {
            unreachable!("a parameter of a model that is divided into stages")
        };
        let owner = stage.owner(decoder.arch(), unit.kind);
        (owner, owner == stage.stage())
    }

    /// The parameters of a unit, on the host, from the first stage that has them. All ranks of a pipeline come here
    /// together.
    pub fn unit(&self, decoder: &Decoder, unit: usize, accounts: &Arc<Accounts>) -> Result<Vec<HostTensor>> {
        let unit_state = &decoder.units()[unit];
        let Some(stage) = decoder.stage() else { unreachable!("the model is divided into stages") };
        let owner = stage.owner(decoder.arch(), unit_state.kind);
        let mut message = Vec::new();
        if owner == stage.stage() {
            for index in unit_state.range.clone() {
                message.extend_from_slice(decoder.param(index).download()?.as_bytes());
            }
        }
        let bytes = self.world.part_ranks().exchange(message)?.swap_remove(owner);
        let _held = accounts.hold(Category::Communication, Home::Host, bytes.len());
        let dtype = decoder.arch().precision.dtype(decoder.device());
        let mut rest = &bytes[..];
        let values = unit_state.specs.iter().map(|spec| {
            let value;
            (value, rest) = rest.split_at(spec.numel() * dtype.size());
            HostTensor::from_bytes(value.to_vec(), spec.rows_cols(), dtype)
        });
        Ok(values.collect())
    }
}

/// A plan of the whole model as the stage of a decoder has it: the parts of segments that run here.
pub(super) fn plan_of_stage(plan: ModelPlan, decoder: &Decoder) -> ModelPlan {
    plan.within(&decoder.stage_body())
}
