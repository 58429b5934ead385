//! What a run holds whatever it computes at the moment: weights, gradients, masters, moments. `P` parameters of `w`
//! bytes: 4, or 2 in half precision; with adapters, gradients, masters and moments are the adapters' alone.
//!
//! | held | bytes | where |
//! |---|---|---|
//! | weights | w P; in few bits those of `estimate::base` | device; streamed: host, and `1 + prefetch` segments on the device while the model runs; all of them during sampling |
//! | gradients | 4 P | device, or host as each segment is complete; with the update in the backward pass one segment's, on the last micro-batch |
//! | masters | 4 P · fraction; 4 P in half precision | host, with the optimizer there; in half precision with the moments, wherever they are |
//! | moments | 8 P in f32, 4 P in bf16, 2 P + 8 P / 256 in 8-bit blocks | device or host; idle ones visit for the update |
//! | reference | w P | like a policy's weights, in the phases that it is idle in and in its own; shared out where the policy's are |
//! | critic | all of the policy's rows, with its own `P` | as its own plan says |
//!
//! The norm of the gradient squares parts of at most 2²³ numbers. An update works on slices of at most 2²¹ elements and
//! needs a few times that.

use super::parallel::Parallel;
use super::sizes::{F32, Sizes};
use super::usage::MemoryUsage;
use crate::{ModelPlan, MomentKind, Plan, Role, Zero};
use firebrick_spec::{Category, Home, KernelTable, Operation};

/// Elements that an update works on at a time.
const SLICE: u64 = 1 << 21;

/// Elements of a gradient that its norm squares at a time.
const SQUARED_AT_ONCE: u64 = 1 << 23;

/// Elements that share one scale in 8-bit moments.
const BLOCK: u64 = 256;

impl MomentKind {
    /// Bytes of both moments of so many parameters.
    #[must_use]
    pub fn bytes(self, parameters: u64) -> u64 {
        match self {
            Self::F32 => 8 * parameters,
            Self::Bf16 => 4 * parameters,
            Self::Block8 => 2 * (parameters + F32 * parameters.div_ceil(BLOCK)),
        }
    }
}

/// What the run is about to do, as far as it decides where whole models wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// The policy samples.
    Sample,
    /// Shares of the policy sample, which are held besides.
    SampleOnGroups,
    /// A model scores or trains.
    Pass(Role),
    /// The reward model of this place in the list scores.
    Reward(usize),
    /// A model's optimizer updates.
    Update(Role),
}

impl Activity {
    /// Where the weights of a model are meanwhile.
    fn presence(self, role: Role) -> Presence {
        match self {
            Self::Sample if role == Role::Policy => Presence::Whole,
            Self::Pass(at_work) | Self::Update(at_work) if at_work == role => Presence::Running,
            _ => Presence::Idle,
        }
    }
}

/// The models of a run on one device.
#[derive(Clone, Copy)]
pub(super) struct Models<'a> {
    /// Those that are trained.
    pub trained: &'a [(Role, Sizes)],
    /// How many of them, from the first on, have optimizer state.
    pub updated: usize,
    /// The whole policy, which samples.
    pub sampled: &'a Sizes,
    /// Reward models.
    pub rewards: &'a [(&'a ModelPlan, Sizes)],
    /// Where the plan keeps what they hold.
    pub plan: &'a Plan,
    /// How devices share models while they train.
    pub training: &'a Parallel,
    /// How they share the policy while it samples.
    pub sampling: &'a Parallel,
}

/// Bytes of all models' weights, and of the optimizer state of those that have any.
pub(super) fn resident(models: Models<'_>, doing: Activity) -> MemoryUsage {
    let Models { trained, updated, sampled, rewards, plan, training: parallel, sampling } = models;
    let mut held = MemoryUsage::default();
    for (index, (role, sizes)) in trained.iter().enumerate() {
        let model = &plan.models[role];
        let presence = doing.presence(*role);
        let (devices, own) = match presence {
            Presence::Whole => (sampling, sampled),
            Presence::Running | Presence::Idle => (parallel, sizes),
        };
        held += weights(own, model, role.category(), devices, presence);
        if index < updated {
            held += optimizer(sizes, model, parallel, doing == Activity::Update(*role));
        }
    }
    if let (Some(reference), Some((_, sizes))) = (plan.reference(), trained.first()) {
        let (role, now) = (Role::Reference, doing.presence(Role::Reference));
        let replicated = parallel.replicated();
        let devices = match reference.zero {
            Zero::Stage3 => parallel,
            Zero::Off | Zero::Stage1 | Zero::Stage2 => &replicated,
        };
        held += weights(sizes, reference, role.category(), devices, now);
    }
    for (index, (own, sizes)) in rewards.iter().enumerate() {
        let now = match doing {
            Activity::Reward(at_work) if at_work == index => Presence::Running,
            _ => Presence::Idle,
        };
        let replicated = parallel.replicated();
        let devices = match own.zero {
            Zero::Stage3 => parallel,
            Zero::Off | Zero::Stage1 | Zero::Stage2 => &replicated,
        };
        held += weights(sizes, own, Category::RewardModel, devices, now);
    }
    held
}

impl ModelPlan {
    /// Bytes of weights that live on the host, embedding and head apart.
    pub(super) fn streamed(&self, sizes: &Sizes) -> u64 {
        self.on_host(|u| sizes.unit_bytes(u))
    }

    /// Sum over the units whose weights live on the host.
    fn on_host(&self, count: impl Fn(usize) -> u64) -> u64 {
        self.segments.iter().filter(|s| s.weights == Home::Host).flat_map(|s| s.units.clone()).map(count).sum()
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

fn weights(
    sizes: &Sizes,
    plan: &ModelPlan,
    category: Category,
    parallel: &Parallel,
    presence: Presence,
) -> MemoryUsage {
    let held = MemoryUsage::default();
    let share = |bytes: u64| parallel.weights(bytes);
    let on = |home| held.and(home, category, share(sizes.bytes()));
    match presence {
        Presence::Whole => {
            let whole = parallel.replicated().weights(sizes.bytes());
            held.on_device(category, whole)
        }
        Presence::Idle if plan.idle == Home::Host => on(Home::Host),
        Presence::Running | Presence::Idle => {
            let body: [u64; 2] = plan.segments.iter().fold([0, 0], |mut sum, segment| {
                sum[segment.weights as usize] += segment.units.clone().map(|u| sizes.unit_bytes(u)).sum::<u64>();
                sum
            });
            let mut places = body;
            // tied ends are whole on every device
            let whole = if sizes.is_tied() {
                parallel.replicated().weights(sizes.end_bytes())
            } else {
                places[plan.ends as usize] += sizes.end_bytes();
                0
            };
            held.and(Home::Device, category, share(places[Home::Device as usize]))
                .and(Home::Host, category, share(places[Home::Host as usize]))
                .and(plan.ends, category, whole)
        }
    }
}

/// Bytes of gathered weights on the device while segment `index` runs: its own, or those of all segments where they
/// stay until the backward pass.
fn gathered(sizes: &Sizes, plan: &ModelPlan, parallel: &Parallel, index: usize) -> u64 {
    let of = |segment: &crate::Segment| segment.units.clone().map(|u| sizes.unit_bytes(u)).sum::<u64>();
    let bytes = match (plan.reshard_after_forward, plan.segments.get(index)) {
        (true, Some(segment)) => of(segment),
        (true, None) => 0,
        (false, _) => plan.segments.iter().map(of).sum(),
    };
    parallel.replicated().weights(bytes)
}

/// Bytes of weights that a segment gathers from other devices.
pub(super) fn gathered_by(sizes: &Sizes, plan: &ModelPlan, parallel: &Parallel, segment: &crate::Segment) -> u64 {
    if !parallel.gathers() || plan.zero != Zero::Stage3 {
        return 0;
    }
    let bytes = segment.units.clone().map(|u| sizes.unit_bytes(u)).sum();
    parallel.replicated().weights(bytes)
}

/// Bytes of weights that came to the device for segment `index`, streamed from the host with those of `ahead` others or
/// gathered from other devices.
pub(super) fn fetched(sizes: &Sizes, plan: &ModelPlan, parallel: &Parallel, index: usize, ahead: usize) -> u64 {
    if parallel.gathers() && plan.zero == Zero::Stage3 {
        gathered(sizes, plan, parallel, index)
    } else {
        parallel.weights(visiting(sizes, plan, index, ahead))
    }
}

/// Bytes of weights that the `visit`-th of a pass gathers: embedding, segments, head, and in training the segments
/// again, the last one first.
fn visited(sizes: &Sizes, plan: &ModelPlan, visit: usize, trains: bool) -> u64 {
    let segments = plan.segments.len();
    let end = |numbers: u64| {
        if sizes.is_tied() { 0 } else { sizes.width * numbers }
    };
    let segment = |index: usize| -> u64 {
        let units = plan.segments[index].units.clone();
        units.map(|unit| sizes.unit_bytes(unit)).sum()
    };
    match visit {
        0 => end(sizes.embedding),
        own if own <= segments => segment(own - 1),
        own if own == segments + 1 => end(sizes.projection),
        own if trains && plan.reshard_after_forward && own <= 2 * segments + 1 => segment(2 * segments + 1 - own),
        _ => 0,
    }
}

/// Where the weights of a model's layers are: on the device if all of them are.
pub(super) fn home_of_layers(plan: &ModelPlan) -> Home {
    let resident = plan.segments.iter().all(|s| s.weights == Home::Device);
    if resident { Home::Device } else { Home::Host }
}

/// What weights take that are gathered ahead while the `visit`-th of a pass runs: those of the next visits, one of
/// which is under way.
pub(super) fn gathered_ahead(
    sizes: &Sizes,
    plan: &ModelPlan,
    parallel: &Parallel,
    visit: usize,
    trains: bool,
) -> MemoryUsage {
    let home = home_of_layers(plan);
    // from GPU to GPU they are waited for
    let waited_for = parallel.nccl && home == Home::Device;
    if !parallel.gathers() || plan.zero != Zero::Stage3 || waited_for {
        return MemoryUsage::default();
    }
    let ahead = visit + 1..=visit + plan.prefetch;
    let (mut there, mut largest) = (0, 0);
    for bytes in ahead.map(|visit| visited(sizes, plan, visit, trains)) {
        there += bytes;
        largest = largest.max(bytes);
    }
    let waits = parallel.replicated().weights(there - largest);
    let under_way = parallel.gathering(largest, home);
    under_way.on_host(Category::Communication, waits)
}

/// What a pass takes while it waits for the weights of the visit that gathers most.
pub(super) fn gathered_in_place(sizes: &Sizes, plan: &ModelPlan, parallel: &Parallel) -> MemoryUsage {
    if !parallel.gathers() || plan.zero != Zero::Stage3 {
        return MemoryUsage::default();
    }
    let visits = 0..=plan.segments.len() + 1;
    let bytes = visits.map(|visit| visited(sizes, plan, visit, false));
    parallel.gathering(bytes.max().unwrap_or(0), home_of_layers(plan))
}

/// Trained parameters of each unit, in their order: the embedding, the body's, the head.
pub(super) fn trained_units<'s>(sizes: &'s Sizes, plan: &'s ModelPlan) -> impl Iterator<Item = u64> + 's {
    let body = plan.segments.iter().flat_map(|s| s.units.clone());
    let body = body.map(|unit| sizes.trained_unit(unit));
    let below = std::iter::once(sizes.trained_ends(sizes.embedding)).chain(body);
    // the head has what is left
    let mut left = sizes.trained();
    let units = below.map(Some).chain([None]);
    units.map(move |unit| {
        let unit = unit.unwrap_or(left).min(left);
        left -= unit;
        unit
    })
}

/// Bytes of streamed weights on the device while segment `index` runs: its own and those of `ahead` segments on their
/// way.
fn visiting(sizes: &Sizes, plan: &ModelPlan, index: usize, ahead: usize) -> u64 {
    let streamed = |s: &crate::Segment| -> u64 {
        match s.weights {
            Home::Host => s.units.clone().map(|u| sizes.unit_bytes(u)).sum(),
            Home::Device => 0,
        }
    };
    let last = plan.segments.len().saturating_sub(1);
    // in the backward pass the next ones to be fetched stand before this one
    let first = index.saturating_sub(ahead);
    let around = &plan.segments[first..=index.min(last)];
    around.iter().map(streamed).sum::<u64>()
}

fn optimizer(sizes: &Sizes, plan: &ModelPlan, parallel: &Parallel, updates: bool) -> MemoryUsage {
    let optimizer = &plan.optimizer;
    let total = sizes.trained();
    let on_host = match optimizer.home {
        Home::Host => (optimizer.offload_fraction * total as f64).round() as u64,
        Home::Device => 0,
    };
    let moments = |numbers| parallel.optimizer(optimizer.moments.bytes(numbers));
    // moments that wait on the host visit the device one matrix at a time
    let visit = match (updates, optimizer.idle) {
        (true, Home::Host) => moments(sizes.largest_trained.min(total - on_host)),
        _ => 0,
    };
    // streamed weights are on the host anyway: the update works on them there
    let ends = match plan.ends {
        Home::Host => sizes.trained_ends(sizes.ends()),
        Home::Device => 0,
    };
    let streamed = ends + plan.on_host(|u| sizes.trained_unit(u));
    let bytes = |numbers| parallel.optimizer(F32 * numbers);
    let held = if sizes.is_half() {
        let visit = match (updates, optimizer.idle) {
            (true, Home::Host) => sizes.largest_trained.min(total - on_host),
            _ => 0,
        };
        let waiting = bytes(total - on_host) - bytes(visit);
        MemoryUsage::default()
            .on_host(Category::MasterWeights, bytes(on_host))
            .and(optimizer.idle, Category::MasterWeights, waiting)
            .on_device(Category::MasterWeights, bytes(visit))
    } else {
        // an f32 weight on the host is its own master, and so is the copy of a shard
        let masters = if parallel.shares() { 0 } else { on_host.saturating_sub(streamed) };
        MemoryUsage::default().on_host(Category::MasterWeights, bytes(masters))
    };
    held.on_host(Category::Moments, moments(on_host))
        .and(optimizer.idle, Category::Moments, moments(total - on_host) - visit)
        .on_device(Category::Moments, visit)
}

/// What an update needs besides weights, gradients and moments: squares of a part of a gradient for the norm; then
/// temporaries of a slice of a matrix. A kernel updates weights and moments in place, 8-bit ones widened.
pub(super) fn update_buffers(
    sizes: &Sizes,
    plan: &ModelPlan,
    parallel: &Parallel,
    kernels: &KernelTable,
) -> MemoryUsage {
    let largest = parallel.optimizer(F32 * sizes.largest_trained);
    let part = |elements: u64| largest.min(F32 * elements);
    let (squares, slice) = (part(SQUARED_AT_ONCE), part(SLICE));
    let temporaries = slice
        * match (plan.optimizer.moments, kernels.uses(Operation::AdamW)) {
            (MomentKind::F32 | MomentKind::Bf16, true) => 0,
            (MomentKind::F32, false) | (MomentKind::Block8, true) => 2,
            (MomentKind::Bf16, false) => 4,
            (MomentKind::Block8, false) => 6,
        };
    // the new weight beside its master
    let rounded = if sizes.is_half() && plan.optimizer.home == Home::Device {
        parallel.weights(sizes.width * sizes.largest_trained)
    } else {
        0
    };
    let held = MemoryUsage::default().on_device(Category::Buffers, rounded);
    match (plan.optimizer.home, plan.grads) {
        (Home::Device, Home::Device) => held.on_device(Category::Buffers, squares.max(temporaries)),
        (Home::Device, Home::Host) => held.on_device(Category::Buffers, temporaries),
        // the new weight on its way up, where it lives on the device
        (Home::Host, _) if plan.ends == Home::Device => {
            let whole = parallel.optimizer(sizes.width * sizes.largest_trained);
            held.on_device(Category::Buffers, whole)
        }
        (Home::Host, _) => held,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_take_eight_four_and_about_two_bytes_a_parameter() {
        assert_eq!(MomentKind::F32.bytes(1024), 8192);
        assert_eq!(MomentKind::Bf16.bytes(1024), 4096);
        assert_eq!(MomentKind::Block8.bytes(1024), 2 * (1024 + 16));
    }
}
