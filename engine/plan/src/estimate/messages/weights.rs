//! Messages about weights and gradients of data-parallel devices, unit by unit, as the trainer sends them
//! (`docs/guides/multi_gpu.md`).
//!
//! A message of shards has every parameter's filled up to the length of the longest ([`Partition::part`]); one that
//! sums gradients has besides, for each device, a number a parameter that counts who had a gradient of it.

use crate::estimate::{Axis, Communication, F32, Group, MessageKind, Parallel, Sizes, Sublayer};
use crate::{ModelPlan, Order, Partition, Segment, Zero};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::parameters::{ParamSpec, Slot, UnitKind, unit_specs};
use firebrick_arch::{Arch, PipelineStage, TensorShare};
use firebrick_spec::Home;

/// Parameters of a unit, as they lie in messages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct UnitParams {
    /// Numbers of a device's part of all parameters, filled up.
    part: u64,
    /// Elements of a device's part of the trained parameters, filled up.
    trained_part: u64,
    /// Trained parameters, and their numbers.
    count: u64,
    trained: u64,
    /// Numbers of trained parameters whose gradients the devices that share matrices sum, since each has a part of
    /// them.
    summed: u64,
}

/// The units of a sharded model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct UnitMessages {
    ends: [UnitParams; 2],
    sublayers: [UnitParams; Sublayer::ALL.len()],
    tied: bool,
    /// True if these are parameters of the first of several devices that share matrices; else messages are divided by
    /// their number.
    cut: bool,
}

impl UnitMessages {
    /// The units of an architecture, sharded over `tensor` devices and `replicas` replicas; with adapters they alone
    /// are trained. One device sends nothing.
    pub fn new(arch: &Arch, lora: Option<&LoraConfig>, (replicas, tensor): (u64, u64)) -> Self {
        if replicas < 2 && tensor < 2 {
            return Self::default();
        }
        let tensor = usize::try_from(tensor).unwrap_or(usize::MAX);
        let shares = tensor > 1 && TensorShare::check_training(arch, tensor).is_ok();
        let share = shares.then(|| TensorShare::new(0, tensor));
        let partition = Partition::new(usize::try_from(replicas).unwrap_or(usize::MAX), 0);
        let unit = |kind: Option<UnitKind>| {
            let mut specs = kind.map_or_else(Vec::new, |kind| unit_specs(arch, kind));
            let adapters = lora.map_or_else(Vec::new, |lora| lora.specs(&specs));
            specs.extend(adapters);
            let mut params = UnitParams::default();
            for spec in &specs {
                let numel = share.map_or(spec.numel(), |share| {
                    share.trained_cut(arch, spec.slot).shape(spec.rows_cols()).iter().product()
                });
                params.add((spec, numel), lora.is_some(), partition);
                let part = |share: TensorShare| share.has_part_of_gradient(arch, spec.slot);
                if share.is_some_and(part) && is_trained(spec, lora.is_some()) {
                    params.summed += spec.numel() as u64;
                }
            }
            params
        };
        Self {
            ends: [UnitKind::Embedding, UnitKind::Head].map(|kind| unit(Some(kind))),
            sublayers: Sublayer::ALL.map(|sublayer| unit(sublayer.unit(arch, 0..arch.num_layers))),
            tied: arch.tied,
            cut: shares,
        }
    }

    /// Keeps the ends that a stage has.
    pub fn for_stage(mut self, arch: &Arch, stage: Option<PipelineStage>) -> Self {
        let kinds = [UnitKind::Embedding, UnitKind::Head];
        for (end, kind) in self.ends.iter_mut().zip(kinds) {
            if stage.is_some_and(|stage| !stage.has(arch, kind)) {
                *end = UnitParams::default();
            }
        }
        self
    }

    fn sublayer(&self, sublayer: Sublayer) -> &UnitParams {
        &self.sublayers[sublayer as usize]
    }

    /// Every unit that is trained, and how many there are.
    fn trained<'a>(&'a self, sizes: &'a Sizes) -> impl Iterator<Item = (&'a UnitParams, u64)> + use<'a> {
        let sublayers = Sublayer::ALL.map(|sublayer| (self.sublayer(sublayer), sizes.count(sublayer)));
        let ends = [(&self.ends[0], 1), (&self.ends[1], 1)];
        ends.into_iter().chain(sublayers).filter(|(unit, times)| unit.count > 0 && *times > 0)
    }
}

impl UnitParams {
    /// Adds a parameter of which a device has so many numbers.
    fn add(&mut self, (spec, numel): (&ParamSpec, usize), adapted: bool, partition: Partition) {
        let part = partition.part(numel) as u64;
        self.part += part;
        if is_trained(spec, adapted) {
            self.trained_part += part;
            self.count += 1;
            self.trained += numel as u64;
        }
    }
}

/// True if a parameter is trained, where there may be adapters.
fn is_trained(spec: &ParamSpec, adapted: bool) -> bool {
    !adapted || spec.slot.is_adapter() || spec.slot == Slot::Value
}

/// Traffic of weights and gradients in an optimizer step, for any number of micro-batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingMessages {
    /// Weights that one forward pass and one backward pass gather.
    pub gathers: [Communication; 2],
    /// In each round: these, and gradients that are summed in each.
    each_round: Communication,
    /// Gradients that are summed after the last.
    at_the_end: Communication,
}

impl TrainingMessages {
    /// The traffic of `rounds` rounds.
    pub fn in_rounds(&self, rounds: u64) -> Communication {
        let mut traffic = self.each_round.times(rounds);
        traffic += self.at_the_end;
        traffic
    }
}

/// Messages about one model: its units, their sizes, and how they are sharded.
pub(crate) struct ModelMessages<'a> {
    pub units: &'a UnitMessages,
    pub sizes: &'a Sizes,
    pub plan: &'a ModelPlan,
    pub parallel: &'a Parallel,
}

impl ModelMessages<'_> {
    fn gathers(&self) -> bool {
        self.parallel.gathers() && self.plan.zero == Zero::Stage3
    }

    fn shares(&self) -> bool {
        self.parallel.shares() && self.plan.zero > Zero::Off
    }

    /// A device's part of bytes that devices with shares of each matrix divide.
    fn part(&self, bytes: u64) -> u64 {
        if self.units.cut { bytes } else { bytes.div_ceil(self.parallel.tensor) }
    }

    /// So many messages in which every replica gives `numbers` of `width` bytes to all others.
    fn gather(&self, to: &mut Communication, times: u64, numbers: u64) {
        if numbers == 0 {
            return;
        }
        let part = self.part(self.sizes.width * numbers);
        self.shards(to, MessageKind::AllGather, times, part);
    }

    /// So many messages in which every replica sends a block to each other.
    fn shards(&self, to: &mut Communication, kind: MessageKind, times: u64, block: u64) {
        let group = self.parallel.gradient_group();
        let buffer = (group.size * block) as f64;
        to.add((kind, group), times, (group.size - 1) * block, buffer);
    }

    /// Weights of embedding and head, where they are sharded.
    fn gather_ends(&self, to: &mut Communication) {
        if !self.units.tied {
            for end in &self.units.ends {
                self.gather(to, 1, end.part);
            }
        }
    }

    fn gather_segments(&self, to: &mut Communication) {
        let of = |segment: &Segment| {
            segment.units.clone().map(|unit| self.units.sublayer(self.sizes.sublayer(unit)).part).sum()
        };
        for segment in &self.plan.segments {
            self.gather(to, 1, of(segment));
        }
    }

    /// Weights that a forward pass gathers.
    pub fn forward(&self, rounds: u64) -> Communication {
        let mut traffic = Communication::default();
        if self.gathers() {
            self.gather_ends(&mut traffic);
            self.gather_segments(&mut traffic);
        }
        traffic.times(rounds)
    }

    /// Weights that are made whole for sampling, a unit a message.
    pub fn make_whole(&self) -> Communication {
        let mut traffic = Communication::default();
        if self.gathers() {
            self.gather_ends(&mut traffic);
            for sublayer in Sublayer::ALL {
                self.gather(&mut traffic, self.sizes.count(sublayer), self.units.sublayer(sublayer).part);
            }
        }
        traffic
    }

    /// Rounds of an optimizer step in which gradients are summed or weights gathered, of the given number of
    /// micro-batches per device.
    pub fn rounds(&self, micros: u64) -> u64 {
        match self.plan.order {
            Order::MicroMajor => micros,
            Order::SegmentMajor => micros.min(1),
        }
    }

    /// True if gathers are under way while another visit computes. From GPU to GPU over NCCL, as shards that stay on
    /// the device are, they are waited for: only what goes through the host does so beside the GPU's work.
    pub fn runs_ahead(&self) -> bool {
        let waited_for = self.parallel.nccl && self.plan.home_of_layers() == Home::Device;
        self.plan.prefetch > 0 && !waited_for
    }

    /// Of seconds that gathers of forward passes take, those of gathers that are under way while another visit
    /// computes: all but the first visit's.
    pub fn ahead(&self, seconds: f64) -> f64 {
        if !self.runs_ahead() {
            return 0.0;
        }
        let ends = if self.units.tied { 0 } else { 2 };
        let visits = (self.plan.segments.len() + ends) as f64;
        seconds * (1.0 - 1.0 / visits.max(1.0))
    }

    /// Weights that the passes of an optimizer step gather, and gradients that they sum.
    pub fn training(&self) -> TrainingMessages {
        let mut again = Communication::default();
        if self.gathers() && self.plan.reshard_after_forward {
            self.gather_segments(&mut again);
        }
        let gathers = [self.forward(1), again];
        let mut sums = Communication::default();
        self.sum_parts(&mut sums);
        self.sum_gradients(&mut sums);
        let (mut each_round, mut at_the_end) = (gathers[0], Communication::default());
        each_round += gathers[1];
        if self.parallel.reduces_each_pass() && self.plan.zero >= Zero::Stage2 {
            each_round += sums;
            // tied ends are summed as the head has added to them, and again as the embedding has
            if self.units.tied {
                self.scatter(&mut each_round, &self.units.ends[0], 1);
            }
        } else {
            at_the_end = sums;
        }
        TrainingMessages { gathers, each_round, at_the_end }
    }

    /// Gradients of which each device that shares matrices has a part, unit by unit.
    fn sum_parts(&self, to: &mut Communication) {
        let group = self.parallel.group(Axis::Tensor);
        for (unit, times) in self.units.trained(self.sizes) {
            if unit.summed > 0 && group.size > 1 {
                let buffer = (F32 * unit.summed) as f64;
                to.even(MessageKind::AllReduce, group, times, buffer);
            }
        }
    }

    fn scatter(&self, to: &mut Communication, unit: &UnitParams, times: u64) {
        if unit.count == 0 {
            return;
        }
        let block = self.part(F32 * (unit.trained_part + unit.count));
        self.shards(to, MessageKind::ReduceScatter, times, block);
    }

    /// Gradients of all units, once.
    fn sum_gradients(&self, to: &mut Communication) {
        let replicas = self.parallel.gradient_group();
        if replicas.size < 2 {
            return;
        }
        for (unit, times) in self.units.trained(self.sizes) {
            if !self.shares() {
                self.all_reduce(to, replicas, unit.trained, times);
                continue;
            }
            self.scatter(to, unit, times);
        }
    }

    fn all_reduce(&self, to: &mut Communication, group: Group, numbers: u64, times: u64) {
        let len = self.part(numbers);
        let shard = len.div_ceil(group.size);
        let bytes = F32 * (len - shard + shard * (group.size - 1));
        let at = (MessageKind::AllReduce, group);
        to.add(at, times, bytes, (F32 * len) as f64);
    }

    /// Weights that an update gathers from the devices that made them.
    pub fn optimizer(&self) -> Communication {
        let mut traffic = Communication::default();
        if !self.shares() {
            return traffic;
        }
        if !self.gathers() {
            for (unit, times) in self.units.trained(self.sizes) {
                self.gather(&mut traffic, times, unit.trained_part);
            }
        } else if self.units.tied {
            for end in self.units.ends.iter().filter(|end| end.count > 0) {
                self.gather(&mut traffic, 1, end.trained_part);
            }
        }
        traffic
    }
}

/// Traffic of the first of `ranks` data-parallel ranks in an optimizer step of a model under a plan, in which every
/// rank makes `rounds` passes: to be compared with what a run counts.
pub fn update_traffic(
    arch: &Arch,
    lora: Option<&LoraConfig>,
    plan: &ModelPlan,
    ranks: u64,
    rounds: u64,
) -> Communication {
    let (units, sizes) = (UnitMessages::new(arch, lora, (ranks, 1)), Sizes::new(arch, lora));
    let parallel = Parallel { data: ranks, zero: plan.zero, ..Parallel::default() };
    let messages = ModelMessages { units: &units, sizes: &sizes, plan, parallel: &parallel };
    let mut traffic = messages.training().in_rounds(rounds);
    traffic += messages.optimizer();
    traffic
}
