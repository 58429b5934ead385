//! Predicted and counted bytes of a rank that samples with two others, from weights that each has or that they share
//! out.

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
use firebrick::engine::plan::estimate::{EstimatePhase, Parallel, estimate_parallel};
use firebrick::engine::plan::{MemoryConfig, ModelPlan, Role};
use firebrick::engine::world::World;
use firebrick::models::Decoder;
use firebrick::sampler::{Generator, SamplingParams};
use firebrick::spec::{Category, Pool};
use serde_json::Value;
use std::io::Write;
use std::sync::Arc;

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.15;

/// Ranks that sample together.
const TOGETHER: usize = 3;

in_own_process!(
    predictions_for_a_rank_that_samples_with_others_are_within_15_percent,
    predictions_for_a_rank_that_samples_from_weights_that_are_shared_out_are_within_15_percent,
    predictions_are_as_close_where_embedding_and_head_are_shared_out_too,
    weights_that_ranks_share_out_leave_nothing_of_the_whole_behind,
);

fn together() -> World {
    let world = World::new(Arc::new(Loopback::first(TOGETHER)));
    world.with_rollout_tensor_parallel(TOGETHER).expect("a mesh")
}

/// A random model of a case as one of the ranks has it: whole, until it is moved.
fn random(case: &Case, plan: &ModelPlan, world: &World) -> ResidentModel {
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let decoder = Decoder::random(case.arch.clone(), 1, &device);
    ResidentModel::new(decoder, plan.clone(), Role::Policy, &Accounts::new()).shared_by(world)
}

/// What was counted while a share was cut and sampled from, and what was predicted of it: without the optimizer's
/// state, which is not there.
fn measure(case: &Case, memory: &MemoryConfig) -> [u64; 2] {
    let before = allocator::heap().map_or(0, |heap| heap.current_bytes);
    let plan = memory.plans(&case.arch, false, None, case.sequences).expect("a plan");
    let world = together();
    let mut model = random(case, plan.policy(), &world);
    model.set_residency(Residency::Idle).expect("weights away");
    let sampling = SamplingParams { max_new_tokens: case.response, ..SamplingParams::default() };
    allocator::reset_peak();
    let group = world.tensor_group().expect("a group");
    let own = model.sampling_shard(&group, case.arch.precision);
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
    let rollout = predicted.phase(EstimatePhase::Rollout).expect("a phase");
    let state = [Category::MasterWeights, Category::Moments, Category::Gradients];
    let state: u64 = state.iter().filter_map(|category| rollout.categories.get(category)).sum();
    [rollout.total_bytes - state, counted]
}

/// Settings under which the ranks share out as much as a stage of `ZeRO` does.
fn sharing(zero_stage: u8) -> MemoryConfig {
    MemoryConfig { gradient_checkpointing: true, zero_stage, ..MemoryConfig::default() }
}

fn sampled(config: &Value) -> Case {
    Case::new("llama, 26 M, sampling", config, [48, 16, 32]).sampled(8)
}

fn assert_close(case: &Case, memory: &MemoryConfig) {
    let [predicted, counted] = measure(case, memory);
    let off = predicted.abs_diff(counted);
    let allowed = (TOLERANCE * counted as f64) as u64 + Pool::HEAP.fixed_bytes;
    let said = format!("{predicted} predicted, {counted} counted");
    writeln!(std::io::stderr(), "memory: sampling on groups: {said}").expect("writing to stderr");
    assert!(off <= allowed, "{said}");
}

fn predictions_for_a_rank_that_samples_with_others_are_within_15_percent() {
    assert_close(&sampled(&llama()), &sharing(0));
}

fn predictions_for_a_rank_that_samples_from_weights_that_are_shared_out_are_within_15_percent() {
    // the ends are tied, so that each rank has them whole
    assert_close(&sampled(&llama()), &sharing(3));
}

fn predictions_are_as_close_where_embedding_and_head_are_shared_out_too() {
    assert_close(&sampled(&untied()), &sharing(3));
}

/// The same model with a head of its own.
fn untied() -> Value {
    let mut config = llama();
    config["tie_word_embeddings"] = Value::Bool(false);
    config
}

/// On the CPU a slice is a view of the whole, which it would keep.
fn weights_that_ranks_share_out_leave_nothing_of_the_whole_behind() {
    let held = || allocator::heap().expect("the counting allocator").current_bytes;
    let (case, world) = (sampled(&untied()), together());
    let plans = sharing(3).plans(&case.arch, false, None, case.sequences);
    let plans = plans.expect("a plan");
    let before = held();
    let mut model = random(&case, plans.policy(), &world);
    let whole = held() - before;
    model.set_residency(Residency::Idle).expect("weights away");
    let share = held() - before;
    let (ranks, slack) = (TOGETHER as u64, 1 << 20);
    assert!(share.abs_diff(whole / ranks) < slack, "{share} of {whole} bytes are held");
    // and again after they were gathered
    model.make_whole().expect("all of them");
    assert!((held() - before).abs_diff(whole) < slack);
    model.set_residency(Residency::Idle).expect("weights away");
    assert!((held() - before).abs_diff(whole / ranks) < slack);
}
