//! State of a run: weights, gradients, masters, moments. `P` parameters of `w` bytes: 4, or 2 in half precision; with
//! adapters, gradients, masters and moments are the adapters' alone.
//!
//! | held | bytes | where |
//! |---|---|---|
//! | weights | w P; if quantized, the bytes of `quantized_base` | device; streamed: host, and `1 + prefetch` segments on the device while the model runs; all of them during sampling |
//! | gradients | 4 P | device, or host as each segment is complete; with the update in the backward pass one segment's, on the last micro-batch |
//! | masters | 4 P · fraction; 4 P in half precision | host, with the optimizer there; in half precision with the moments, wherever they are |
//! | moments | 8 P in f32, 4 P in bf16, 2 P + 8 P / 256 in 8-bit blocks | device or host; idle ones visit for the update |
//! | reference | w P | like a policy's weights, in the phases that it is idle in and in its own; sharded where the policy's are |
//! | critic | all of the policy's rows, with its own `P` | as its own plan says |
//!
//! The norm of the gradient squares parts of at most 2²³ numbers. An update works on slices of at most 2²¹ elements and
//! needs a few times that.

use crate::estimate::{Context, F32, MemoryUsage, Parallel, Sizes};
use crate::{ModelPlan, Role, Segment, Zero};
use firebrick_spec::{CUBLASLT_WORKSPACE, Category, Home, KernelTable, Operation};

/// Elements that an update works on at a time.
const SLICE: u64 = 1 << 21;

/// Elements of a gradient that its norm squares at a time.
const NORM_CHUNK: u64 = 1 << 23;

/// Work of a run at a moment, as far as it decides where whole models wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// The policy samples.
    Sample,
    /// The policy samples from shards that exist next to its training weights.
    SampleOnGroups,
    /// A model scores or trains.
    Pass(Role),
    /// The reward model of this place in the list scores.
    Reward(usize),
    /// A model's optimizer updates.
    Update(Role),
}

impl Activity {
    /// Presence of a model's weights meanwhile.
    fn presence(self, role: Role) -> Presence {
        match self {
            Self::Sample if role == Role::Policy => Presence::Whole,
            Self::Pass(at_work) | Self::Update(at_work) if at_work == role => Presence::Running,
            _ => Presence::Idle,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// All weights on the device.
    Whole,
    /// In use, segment by segment.
    Running,
    /// Not in use.
    Idle,
}

impl Context<'_> {
    /// Bytes of all models' weights, and of the optimizer state of those that have any.
    pub fn resident(&self, doing: Activity) -> MemoryUsage {
        let mut held = MemoryUsage::default();
        for (index, (role, sizes)) in self.trained.iter().enumerate() {
            let (plan, presence) = (&self.plan.models[role], doing.presence(*role));
            let state = ModelState { sizes, plan, parallel: self.training };
            held += match presence {
                Presence::Whole => ModelState { sizes: &self.counted.whole_policy, plan, parallel: self.parallel },
                Presence::Running | Presence::Idle => state,
            }
            .weights(role.category(), presence);
            if index < self.updated {
                held += state.optimizer(doing == Activity::Update(*role));
            }
        }
        if let (Some(reference), Some((_, sizes))) = (self.plan.reference(), self.trained.first()) {
            held += self.frozen(sizes, reference, Role::Reference.category(), doing.presence(Role::Reference));
        }
        for (index, (plan, sizes)) in self.rewards.iter().enumerate() {
            let now = if doing == Activity::Reward(index) { Presence::Running } else { Presence::Idle };
            held += self.frozen(sizes, plan, Category::RewardModel, now);
        }
        let workspace = if self.workload.cublaslt { CUBLASLT_WORKSPACE as u64 } else { 0 };
        held.on_device(Category::Buffers, workspace)
    }

    /// Weights of a model that only scores: sharded where its plan says so.
    fn frozen(&self, sizes: &Sizes, plan: &ModelPlan, category: Category, now: Presence) -> MemoryUsage {
        let replicated = self.training.replicated();
        let parallel = if plan.zero == Zero::Stage3 { self.training } else { &replicated };
        ModelState { sizes, plan, parallel }.weights(category, now)
    }
}

/// The state of one model on one of the devices that share it.
#[derive(Clone, Copy)]
pub(crate) struct ModelState<'a> {
    pub sizes: &'a Sizes,
    pub plan: &'a ModelPlan,
    pub parallel: &'a Parallel,
}

impl<'a> ModelState<'a> {
    /// Bytes of a segment's weights on all devices.
    pub(crate) fn segment(&self, segment: &Segment) -> u64 {
        segment.units.clone().map(|unit| self.sizes.unit_bytes(unit)).sum()
    }

    /// Bytes of whole weights on the device.
    pub(crate) fn whole(&self, bytes: u64) -> u64 {
        self.parallel.replicated().weights(bytes)
    }

    fn weights(&self, category: Category, presence: Presence) -> MemoryUsage {
        let Self { sizes, plan, parallel } = *self;
        let held = MemoryUsage::default();
        match presence {
            Presence::Whole => return held.on_device(category, self.whole(sizes.bytes())),
            Presence::Idle if plan.idle == Home::Host => {
                return held.on_host(category, parallel.weights(sizes.bytes()));
            }
            Presence::Running | Presence::Idle => {}
        }
        let mut places = [0; 2];
        for segment in &plan.segments {
            places[segment.weights as usize] += self.segment(segment);
        }
        // tied ends are whole on every device
        let whole = if sizes.is_tied() {
            self.whole(sizes.end_bytes())
        } else {
            places[plan.ends as usize] += sizes.end_bytes();
            0
        };
        held.on_device(category, parallel.weights(places[Home::Device as usize]))
            .on_host(category, parallel.weights(places[Home::Host as usize]))
            .and(plan.ends, category, whole)
    }

    /// Trained parameters of each unit, in their order: the embedding, the body's, the head.
    pub fn trained_units(self) -> impl Iterator<Item = u64> + use<'a> {
        let sizes = self.sizes;
        let body = self.plan.segments.iter().flat_map(|s| s.units.clone()).map(|unit| sizes.trained_unit(unit));
        let below = std::iter::once(sizes.trained_ends(sizes.embedding)).chain(body);
        // the head has what is left
        let mut left = sizes.trained();
        below.map(Some).chain([None]).map(move |unit| {
            let unit = unit.unwrap_or(left).min(left);
            left -= unit;
            unit
        })
    }

    /// Buffers of an update: squares of a part of a gradient for the norm; then temporaries of a slice of a matrix. A
    /// kernel updates weights and moments in place, 8-bit ones widened.
    pub fn update_buffers(&self, kernels: &KernelTable) -> MemoryUsage {
        let Self { sizes, plan, parallel } = *self;
        let largest = parallel.optimizer(F32 * sizes.largest_trained);
        let part = |elements: u64| largest.min(F32 * elements);
        let temporaries = part(SLICE) * plan.optimizer.moments.temporaries(kernels.uses(Operation::AdamW));
        let bytes = match (plan.optimizer.home, plan.grads) {
            (Home::Device, Home::Device) => part(NORM_CHUNK).max(temporaries),
            (Home::Device, Home::Host) => temporaries,
            // the new weight on its way up, where it lives on the device
            (Home::Host, _) if plan.ends == Home::Device => parallel.optimizer(sizes.width * sizes.largest_trained),
            (Home::Host, _) => 0,
        };
        // the new weight beside its master
        let rounds = sizes.is_half() && plan.optimizer.home == Home::Device;
        let rounded = if rounds { parallel.weights(sizes.width * sizes.largest_trained) } else { 0 };
        MemoryUsage::default().on_device(Category::Buffers, bytes + rounded)
    }
}
