//! Predicted and counted bytes of a rank that samples with two others, from weights that each has.

use crate::cases::llama;
use crate::loopback::Loopback;
use crate::measure::{Case, requests};
use crate::own_process::in_own_process;
use firebrick::backends::DeviceSpec;
use firebrick::backends::accounts::Accounts;
use firebrick::backends::allocator;
use firebrick::backends::device::{Backend, open};
use firebrick::backends::profile;
use firebrick::engine::executor::{Residency, ResidentModel};
use firebrick::engine::plan::estimate::{Parallel, estimate_parallel};
use firebrick::engine::plan::{MemoryConfig, Role};
use firebrick::engine::world::World;
use firebrick::models::Decoder;
use firebrick::models::generate::{Generator, SamplingParams};
use firebrick::spec::{Category, Pool};
use std::sync::Arc;

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.15;

/// Ranks that sample together.
const TOGETHER: usize = 3;

in_own_process!(predictions_for_a_rank_that_samples_with_others_are_within_15_percent,);

/// What was counted while a share was cut and sampled from, and what was predicted of it: without the optimizer's state, which is not there.
fn measure(case: &Case, memory: &MemoryConfig) -> [u64; 2] {
    let before = allocator::heap().map_or(0, |heap| heap.current_bytes);
    let plan = memory
        .plans(&case.arch, false, None, case.sequences)
        .expect("a plan");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let world = World::new(Arc::new(Loopback(TOGETHER)));
    let world = world.sampling_together(TOGETHER).expect("a mesh");
    let decoder = Decoder::random(case.arch.clone(), 1, &device);
    let policy = plan.policy().clone();
    let model = ResidentModel::new(decoder, policy, Role::Policy, &Accounts::new());
    let mut model = model.shared_by(&world);
    model.set_residency(Residency::Idle).expect("weights away");
    let sampling = SamplingParams {
        max_new_tokens: case.response,
        ..SamplingParams::default()
    };
    allocator::reset_peak();
    let group = world.tensor_group().expect("a group");
    let own = model.tensor_shard(&group, case.arch.precision);
    let own: Decoder = own.expect("a share");
    Generator::new(&own, None, &sampling)
        .map(|generator| generator.prepack(case.prepack))
        .and_then(|generator| generator.run(&requests(case), case.group, case.sequences))
        .expect("samples");
    let heap = allocator::heap().expect("the counting allocator is installed");
    let counted = heap.peak_bytes - before;
    let parallel = Parallel {
        data: TOGETHER as u64,
        zero: plan.policy().zero,
        rollout_tensor: Some(TOGETHER as u64),
        ..Parallel::default()
    };
    let profile = profile::assumed(Backend::Cpu);
    let predicted = estimate_parallel(&case.workload(), &plan, &profile, &parallel);
    let rollout = predicted.phase("rollout").expect("a phase");
    let state = [
        Category::MasterWeights,
        Category::Moments,
        Category::Gradients,
    ];
    let state: u64 = state
        .iter()
        .filter_map(|category| rollout.categories.get(category))
        .sum();
    [rollout.total_bytes - state, counted]
}

fn predictions_for_a_rank_that_samples_with_others_are_within_15_percent() {
    let memory = MemoryConfig {
        gradient_checkpointing: true,
        ..MemoryConfig::default()
    };
    let case = Case::new("llama, 26 M, sampling", &llama(), [48, 16, 32]).sampled(8);
    let [predicted, counted] = measure(&case, &memory);
    let off = predicted.abs_diff(counted);
    let allowed = (TOLERANCE * counted as f64) as u64 + Pool::HEAP.fixed_bytes;
    assert!(off <= allowed, "{predicted} predicted, {counted} counted");
}
