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
use firebrick_spec::{Category, Home, KernelTable, Operation};

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
        held
    }

    /// Weights of a model that only scores: sharded where its plan says so.
    fn frozen(&self, sizes: &Sizes, plan: &ModelPlan, category: Category, now: Presence) -> MemoryUsage {
        let replicated = self.training.replicated();
        let parallel = if plan.zero == Zero::Stage3 { self.training } else { &replicated };
        ModelState { sizes, plan, parallel }.weights(category, now)
    }
}

impl ModelPlan {
    /// Bytes of weights that live on the host, embedding and head apart.
    pub(crate) fn streamed(&self, sizes: &Sizes) -> u64 {
        self.on_host(|unit| sizes.unit_bytes(unit))
    }

    /// Sum over the units whose weights live on the host.
    fn on_host(&self, count: impl Fn(usize) -> u64) -> u64 {
        self.segments.iter().filter(|s| s.weights == Home::Host).flat_map(|s| s.units.clone()).map(count).sum()
    }

    /// Location of the layers' weights: the device if all of them are there.
    pub(crate) fn home_of_layers(&self) -> Home {
        let resident = self.segments.iter().all(|s| s.weights == Home::Device);
        if resident { Home::Device } else { Home::Host }
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
    /// True if segments gather their weights from other devices.
    pub fn gathers(&self) -> bool {
        self.parallel.gathers() && self.plan.zero == Zero::Stage3
    }

    /// Bytes of a segment's weights on all devices.
    fn segment(&self, segment: &Segment) -> u64 {
        segment.units.clone().map(|unit| self.sizes.unit_bytes(unit)).sum()
    }

    /// Bytes of whole weights on the device.
    fn whole(&self, bytes: u64) -> u64 {
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

    /// Bytes of weights that a segment gathers from other devices.
    pub fn gathered_by(&self, segment: &Segment) -> u64 {
        if self.gathers() { self.whole(self.segment(segment)) } else { 0 }
    }

    /// Bytes of weights that came to the device for segment `index`. Gathered from other devices: its own, or those of
    /// all segments where they stay until the backward pass. Streamed from the host: with those of `ahead` others.
    pub fn fetched(&self, index: usize, ahead: usize) -> u64 {
        let segments = &self.plan.segments;
        if !self.gathers() {
            // in the backward pass the next ones to be fetched stand before this one
            let around = index.saturating_sub(ahead)..=index.min(segments.len().saturating_sub(1));
            let streamed = segments[around].iter().filter(|s| s.weights == Home::Host);
            return self.parallel.weights(streamed.map(|s| self.segment(s)).sum());
        }
        self.whole(match (self.plan.reshard_after_forward, segments.get(index)) {
            (true, Some(segment)) => self.segment(segment),
            (true, None) => 0,
            (false, _) => segments.iter().map(|s| self.segment(s)).sum(),
        })
    }

    /// Bytes of weights that the `visit`-th of a pass gathers: embedding, segments, head, and in training the segments
    /// again, the last one first.
    fn visited(&self, visit: usize, trains: bool) -> u64 {
        let Self { sizes, plan, .. } = *self;
        let segments = plan.segments.len();
        let end = |numbers: u64| if sizes.is_tied() { 0 } else { sizes.width * numbers };
        match visit {
            0 => end(sizes.embedding),
            place if place <= segments => self.segment(&plan.segments[place - 1]),
            place if place == segments + 1 => end(sizes.projection),
            place if trains && plan.reshard_after_forward && place <= 2 * segments + 1 => {
                self.segment(&plan.segments[2 * segments + 1 - place])
            }
            _ => 0,
        }
    }

    /// Weights that are gathered ahead while the `visit`-th of a pass runs: those of the next visits, one of which is
    /// under way.
    pub fn gathered_ahead(&self, visit: usize, trains: bool) -> MemoryUsage {
        let home = self.plan.home_of_layers();
        // from GPU to GPU they are waited for
        let waited_for = self.parallel.nccl && home == Home::Device;
        if !self.gathers() || waited_for {
            return MemoryUsage::default();
        }
        let ahead = (visit + 1..=visit + self.plan.prefetch).map(|visit| self.visited(visit, trains));
        let (there, largest) = ahead.fold((0, 0), |(sum, most), bytes: u64| (sum + bytes, bytes.max(most)));
        self.parallel.gathering(largest, home).on_host(Category::Communication, self.whole(there - largest))
    }

    /// Buffers while a pass waits for the weights of the visit that gathers most.
    pub fn gathered_in_place(&self) -> MemoryUsage {
        if !self.gathers() {
            return MemoryUsage::default();
        }
        let visits = (0..=self.plan.segments.len() + 1).map(|visit| self.visited(visit, false));
        self.parallel.gathering(visits.max().unwrap_or(0), self.plan.home_of_layers())
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

    /// Moments, and masters if there are any.
    fn optimizer(&self, updates: bool) -> MemoryUsage {
        let Self { sizes, plan, parallel } = *self;
        let (optimizer, total) = (&plan.optimizer, sizes.trained());
        let on_host = match optimizer.home {
            Home::Host => (optimizer.offload_fraction * total as f64).round() as u64,
            Home::Device => 0,
        };
        let on_device = total - on_host;
        let moments = |numbers| parallel.optimizer(optimizer.moments.bytes(numbers));
        let bytes = |numbers| parallel.optimizer(F32 * numbers);
        // state that waits on the host visits the device one matrix at a time
        let visits = if updates && optimizer.idle == Home::Host { sizes.largest_trained.min(on_device) } else { 0 };
        let held = if sizes.is_half() {
            MemoryUsage::default()
                .on_host(Category::MasterWeights, bytes(on_host))
                .and(optimizer.idle, Category::MasterWeights, bytes(on_device) - bytes(visits))
                .on_device(Category::MasterWeights, bytes(visits))
        } else {
            // an f32 weight on the host is its own master, and so is the copy of a shard
            let ends = if plan.ends == Home::Host { sizes.trained_ends(sizes.ends()) } else { 0 };
            let streamed = ends + plan.on_host(|unit| sizes.trained_unit(unit));
            let masters = if parallel.shares() { 0 } else { on_host.saturating_sub(streamed) };
            MemoryUsage::default().on_host(Category::MasterWeights, bytes(masters))
        };
        held.on_host(Category::Moments, moments(on_host))
            .and(optimizer.idle, Category::Moments, moments(on_device) - moments(visits))
            .on_device(Category::Moments, moments(visits))
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
