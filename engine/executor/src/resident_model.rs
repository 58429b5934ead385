//! A model in its place: its weights where the plan wants them in the phase at hand.

use super::stage_weights::{StageWeights, plan_of_stage};
use super::weight_shards::WeightShards;
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_models::decoder::{Param, ValueRange};
use firebrick_models::unit::UnitKind;
use firebrick_models::{Arch, Decoder, TensorGroup};
use firebrick_plan::{ModelPlan, Partition, Role};
use std::sync::Arc;

/// Use of a model in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// Samples from it: all weights are resident.
    Rollout,
    /// Runs it segment by segment, with or without gradients.
    Pass,
    /// Nothing.
    Idle,
}

/// Sharding of a model's weights between passes.
#[derive(Debug)]
pub(super) enum WeightSharding {
    /// Each has a shard of every parameter.
    Shards(WeightShards),
    /// Each has some of the units.
    Stages(StageWeights),
}

/// Values that a rank keeps between passes under a plan, by unit and number of a parameter's values: its shard where
/// ranks shard weights, nothing of other stages, else all.
pub fn kept_values(
    plan: &ModelPlan,
    arch: &Arch,
    world: &World,
) -> impl Fn(UnitKind, usize) -> Option<ValueRange> + use<> {
    let (stage, arch) = (world.pipeline_stage(), arch.clone());
    let partition = WeightShards::partition_of(plan, &world.replicas());
    move |kind, numel| {
        if let Some(stage) = stage {
            return (!stage.has(&arch, kind)).then_some((0..0, [0, 1]));
        }
        let is_end = matches!(kind, UnitKind::Embedding | UnitKind::Head);
        let range = partition.filter(|_| !(arch.tied && is_end))?.range(numel);
        let shape = Partition::shape(range.len());
        Some((range, shape))
    }
}

/// A decoder, its plan, and the accounts of its weights.
#[derive(Debug)]
pub struct ResidentModel {
    /// The model.
    pub decoder: Decoder,
    /// Its plan.
    pub plan: ModelPlan,
    role: Role,
    accounts: Arc<Accounts>,
    holds: Vec<MemoryGuard>,
    /// The ranks that shard its weights between passes, where the plan says so or its layers are divided into stages.
    sharding: Option<WeightSharding>,
    /// The ranks of the run.
    world: World,
}

impl ResidentModel {
    /// Takes a model over as it is.
    pub fn new(decoder: Decoder, plan: ModelPlan, role: Role, accounts: &Arc<Accounts>) -> Self {
        let mut this = Self {
            plan: plan_of_stage(plan, &decoder),
            decoder,
            role,
            accounts: accounts.for_model(role),
            holds: Vec::new(),
            sharding: None,
            world: World::default(),
        };
        this.account();
        this
    }

    /// Sets the ranks, which shard its weights if the plan says so, or its layers are divided into stages.
    #[must_use]
    pub fn shared_by(mut self, world: &World) -> Self {
        self.sharding = match StageWeights::new(&self.decoder, world) {
            Some(stages) => Some(WeightSharding::Stages(stages)),
            None => WeightShards::new(&self.plan, &world.replicas()).map(WeightSharding::Shards),
        };
        self.world = world.clone();
        self
    }

    /// A model with the same values, which it shares with this one until one of the two is updated.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self::new(self.decoder.clone(), self.plan.clone(), self.role, &Accounts::new())
    }

    /// True if ranks shard its weights.
    pub fn is_shared_out(&self) -> bool {
        self.sharding.is_some()
    }

    /// The sharding.
    pub(super) fn sharding(&self) -> Option<&WeightSharding> {
        self.sharding.as_ref()
    }

    /// The ranks of the run.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The accounts of its weights.
    pub(super) fn accounts(&self) -> &Arc<Accounts> {
        &self.accounts
    }

    /// Takes another plan, of the whole model. Weights move at the next [`set_residency`](Self::set_residency).
    pub fn take_plan(&mut self, plan: &ModelPlan) {
        self.plan = plan_of_stage(plan.clone(), &self.decoder);
    }

    /// Gathers all weights in their location, for readers outside of passes. A collective call; the next phase shards
    /// them again.
    ///
    /// # Errors
    /// If memory runs out, the device fails, or a rank has failed or is gone. It may be asked for again.
    pub fn make_whole(&mut self) -> Result<()> {
        let (decoder, accounts) = (&mut self.decoder, &self.accounts);
        let gathered = match &self.sharding {
            Some(WeightSharding::Shards(shards)) => shards.make_whole(decoder, accounts)?,
            Some(WeightSharding::Stages(stages)) => stages.make_whole(decoder, accounts)?,
            None => false,
        };
        if gathered {
            self.account();
        }
        Ok(())
    }

    /// Keeps what is this rank's where ranks shard weights.
    fn shard(&mut self) -> Result<()> {
        let shared = match &self.sharding {
            Some(WeightSharding::Shards(shards)) => shards.shard(&mut self.decoder)?,
            Some(WeightSharding::Stages(_)) => StageWeights::shard(&mut self.decoder)?,
            None => false,
        };
        if shared {
            self.account();
        }
        Ok(())
    }

    /// The parameters of a unit as this rank has them between passes, its shards of them gathered.
    fn unit(&self, unit: usize) -> Result<Vec<Param>> {
        let decoder = &self.decoder;
        let unit_state = &decoder.units()[unit];
        Ok(match &self.sharding {
            Some(WeightSharding::Shards(shards)) if unit_state.is_sharded() => {
                shards.gather(decoder, &[unit], &self.accounts)?.into_iter().flatten().map(Param::Host).collect()
            }
            _ => unit_state.range.clone().map(|index| decoder.param(index)).collect(),
        })
    }

    /// The parameters of a unit as every rank has them that shares this one's matrices, by rank, on the host.
    fn parts(&self, unit: usize) -> Result<Vec<Vec<HostTensor>>> {
        let params = self.unit(unit)?;
        let shards: Vec<HostTensor> = params.iter().map(|param| Ok(param.download()?)).collect::<Result<_>>()?;
        let message: Vec<u8> = shards.iter().flat_map(HostTensor::as_bytes).copied().collect();
        let bytes = self.world.tensor_size() * message.len();
        let _held = self.accounts.hold(Category::Communication, Home::Host, bytes);
        let ranks = self.world.tensor_ranks().exchange(message)?.into_iter().map(|bytes| {
            let mut left = &bytes[..];
            let parts = shards.iter().map(|like| {
                let part;
                (part, left) = left.split_at(like.bytes());
                self.tensor(part.to_vec(), like.dims())
            });
            parts.collect()
        });
        Ok(ranks.collect())
    }

    /// The whole model, where ranks share its matrices: on the host, a unit at a time. All ranks of the run call it
    /// together; those that do not keep it take part in the messages. `None` for these, and where the decoder is the
    /// whole model.
    ///
    /// # Errors
    /// If memory runs out, the device fails, or a rank has failed or is gone. It may be asked for again.
    pub fn assembled(&self, keeps: bool) -> Result<Option<Decoder>> {
        let decoder = &self.decoder;
        if decoder.share().is_none() {
            return Ok(None);
        }
        if keeps {
            return decoder.assembled(|unit| self.parts(unit)).map(Some);
        }
        (0..decoder.units().len()).try_for_each(|unit| self.parts(unit).map(drop))?;
        Ok(None)
    }

    /// This rank's share of the model for sampling on a group of ranks, in a precision, on the device: cut from the
    /// weights as they are, a unit at a time. Where ranks shard weights, all ranks of the run call it together, and
    /// gather each unit on the host for that; so they do where other groups share matrices in training. Groups that are
    /// the same in training and sampling need no message for it.
    ///
    /// # Errors
    /// If memory runs out, the device fails, or a rank has failed or is gone.
    pub fn sampling_shard(&self, group: &TensorGroup, precision: Precision) -> Result<Decoder> {
        let decoder = &self.decoder;
        match decoder.share() {
            Some(share) if share == group.share() => {
                decoder.as_sampling_shard(group, precision, |unit| self.unit(unit))
            }
            Some(_) => decoder.sampling_shard(group, precision, |unit| {
                Ok(decoder.joined(unit, &self.parts(unit)?).into_iter().map(Param::Host).collect())
            }),
            None => decoder.sampling_shard(group, precision, |unit| self.unit(unit)),
        }
    }

    /// Which model it is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Moves weights to where a phase needs them. What is there already stays.
    ///
    /// # Errors
    /// `Error::Model` where a copy fails; `Error::Device` where gathering weights from other ranks does.
    pub fn set_residency(&mut self, now: Residency) -> Result<()> {
        match now {
            Residency::Rollout => self.make_whole()?,
            Residency::Pass | Residency::Idle => self.shard()?,
        }
        let last = self.decoder.units().len() - 1;
        let mut homes = vec![Home::Device; last + 1];
        match now {
            Residency::Rollout => {}
            Residency::Idle if self.plan.idle == Home::Host => homes.fill(Home::Host),
            Residency::Pass | Residency::Idle => {
                for segment in &self.plan.segments {
                    homes[segment.units.clone()].fill(segment.weights);
                }
                homes[0] = self.plan.ends;
                homes[last] = self.plan.ends;
            }
        }
        let mut moved = false;
        for (unit, home) in homes.into_iter().enumerate() {
            if self.decoder.units()[unit].store.home() != home {
                self.decoder.move_unit(unit, home)?;
                moved = true;
            }
        }
        if moved {
            self.account();
        }
        Ok(())
    }

    /// Replaces the model.
    pub fn replace(&mut self, decoder: Decoder) {
        self.decoder = decoder;
        self.account();
    }

    fn account(&mut self) {
        let category = self.role.category();
        // given back first, so that a peak never counts a model twice
        self.holds.clear();
        self.holds = [Home::Device, Home::Host]
            .map(|home| {
                let bytes = self.decoder.bytes_in(home);
                self.accounts.hold(category, home, bytes)
            })
            .into();
    }
}
