//! The statements of docs/guides/memory.md about settings and formulas, as far as arithmetic can tell.
//! That the arithmetic is right is the business of `tests/memory`, which counts bytes.

mod critic;
mod decoding;
mod head;
mod time;

use super::{Estimate, EstimatePhase, Sizes, Workload, estimate};
use crate::test_support::device;
use crate::{Granularity, MemoryConfig, MomentKind, OptimizerOffload, ParamOffload, RoleMemory};
use firebrick_arch::{Arch, KvCacheDtype};
use firebrick_spec::{Backend, CUBLASLT_WORKSPACE, Category, DeviceProfile, Precision};
use serde_json::{Value, json};
use std::path::Path;

/// Narrow, so that what grows with the tokens is most of a backward pass, and its peak in the last layer.
const HIDDEN: u64 = 128;
const LAYERS: u64 = 8;
const KEY_HEADS: u64 = 2;
const HEAD: u64 = 32;

fn arch(vocab: usize) -> Arch {
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 256,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD,
        "max_position_embeddings": 131_072, "tie_word_embeddings": false
    });
    let Value::Object(config) = config else { unreachable!("an object") };
    Arch::from_config(&config, Path::new("test")).expect("an architecture")
}

/// 64 sequences of 512 tokens, in micro-batches of 16,384.
fn workload() -> Workload {
    Workload::grpo(arch(512), [256, 256], 8, 8)
}

fn parameters() -> u64 {
    Sizes::new(&arch(512), None).total()
}

fn under(workload: &Workload, memory: &MemoryConfig, profile: &DeviceProfile) -> Estimate {
    let (arch, critic) = (&workload.arch, workload.critic_arch());
    let plan = memory.plans(arch, workload.reference, critic, workload.rollouts() as usize);
    estimate(workload, &plan.expect("a plan"), profile)
}

fn on_cuda(workload: &Workload, memory: &MemoryConfig) -> Estimate {
    under(workload, memory, &device(Backend::Cuda))
}

fn held(estimate: &Estimate, phase: EstimatePhase, category: Category) -> u64 {
    estimate.phase(phase).expect("a phase").categories.get(&category).copied().unwrap_or(0)
}

fn total(estimate: &Estimate, phase: EstimatePhase) -> u64 {
    estimate.phase(phase).expect("a phase").total_bytes
}

#[test]
fn rows_are_held_on_the_host_in_every_phase() {
    let plain = workload();
    let with_rows = Workload { rows_bytes: 1_000_000, ..workload() };
    for (backend, is_unified) in [(Backend::Cpu, true), (Backend::Cuda, false)] {
        let memory = unshared();
        let [without, with] = [&plain, &with_rows].map(|workload| under(workload, &memory, &device(backend)));
        assert_eq!(without.phases.len(), with.phases.len());
        for (without, with) in without.phases.iter().zip(&with.phases) {
            let name = &with.name;
            assert_eq!(with.host_bytes, without.host_bytes + 1_000_000, "{name}");
            let more = with.total_bytes - without.total_bytes;
            // the pool of a device adds its share of what is in it
            let wanted = if is_unified { 1_000_000 } else { 0 };
            assert!(more >= wanted && more <= wanted * 2, "{name}: {more}");
        }
    }
}

#[test]
fn cublaslt_has_a_workspace_in_every_phase_and_an_f32_sum_of_rows_in_a_backward_pass() {
    let by_library = Workload { cublaslt: true, ..workload() };
    let [ours, library] = [&workload(), &by_library].map(|workload| on_cuda(workload, &unshared()));
    for (ours, library) in ours.phases.iter().zip(&library.phases) {
        let more = library.total_bytes - ours.total_bytes;
        assert!(more >= CUBLASLT_WORKSPACE as u64, "{}: {more}", library.name);
    }
    let buffers = |estimate| held(estimate, EstimatePhase::Backward, Category::Buffers);
    assert_eq!(buffers(&library) - buffers(&ours), CUBLASLT_WORKSPACE as u64 + row());
}

fn checkpointed() -> MemoryConfig {
    MemoryConfig { gradient_checkpointing: true, ..unshared() }
}

/// The defaults with a prompt for each completion, which the formulas below are of.
fn unshared() -> MemoryConfig {
    MemoryConfig { share_prefix: false, ..MemoryConfig::default() }
}

/// Bytes of one activation of a micro-batch.
fn row() -> u64 {
    4 * HIDDEN * unshared().train_tokens as u64
}

#[test]
fn kept_inputs_are_tokens_times_hidden_size_for_each_segment() {
    let kept =
        |memory: &MemoryConfig| held(&on_cuda(&workload(), memory), EstimatePhase::Backward, Category::KeptInputs);
    assert_eq!(kept(&unshared()), 0);
    assert_eq!(kept(&checkpointed()), LAYERS * row());
    let every_second = MemoryConfig { checkpoint_every: 2, ..checkpointed() };
    assert_eq!(kept(&every_second), LAYERS / 2 * row());
    let halves = MemoryConfig { recompute_granularity: Granularity::Half, ..checkpointed() };
    assert_eq!(kept(&halves), 2 * LAYERS * row());
    let first = MemoryConfig { checkpoint_layers: Some(vec![0]), ..checkpointed() };
    assert_eq!(kept(&first), row());
    // larger segments have a larger live graph, smaller ones a smaller
    let live =
        |memory: &MemoryConfig| held(&on_cuda(&workload(), memory), EstimatePhase::Backward, Category::LiveGraph);
    let (layer, two, half) = (live(&checkpointed()), live(&every_second), live(&halves));
    assert!(half < layer && layer < two, "{half}, {layer}, {two}");
}

#[test]
fn a_share_of_one_less_one_in_r_recomputed_divides_the_graphs_by_about_r() {
    let graphs = |memory: &MemoryConfig| {
        held(&on_cuda(&workload(), memory), EstimatePhase::Backward, Category::LiveGraph) as f64
    };
    let plain = graphs(&unshared());
    for r in [2.0, 4.0] {
        let memory = MemoryConfig { checkpoint_ratio: Some(1.0 - 1.0 / r), ..checkpointed() };
        let divided = plain / graphs(&memory);
        assert!((divided / r - 1.0).abs() < 0.15, "{divided} for {r}");
    }
}

#[test]
fn weights_gradients_and_moments_are_so_many_bytes_a_parameter() {
    let half =
        Workload { rollout_precision: Precision::Bf16, arch: arch(512).in_precision(Precision::Bf16), ..workload() };
    let p = parameters();
    for (kind, moments) in
        [(MomentKind::F32, 8 * p), (MomentKind::Bf16, 4 * p), (MomentKind::Block8, 2 * (p + 4 * p.div_ceil(256)))]
    {
        let memory = MemoryConfig { moments: kind, ..unshared() };
        for (workload, weights, masters) in [(&workload(), 4 * p, 0), (&half, 2 * p, 4 * p)] {
            let update = on_cuda(workload, &memory);
            let of = |category| held(&update, EstimatePhase::Optimizer, category);
            assert_eq!(of(Category::Parameters), weights);
            assert_eq!(of(Category::Gradients), 4 * p);
            assert_eq!(of(Category::MasterWeights), masters);
            assert_eq!(of(Category::Moments), moments);
        }
    }
    let kept =
        |workload: &Workload| held(&on_cuda(workload, &checkpointed()), EstimatePhase::Backward, Category::KeptInputs);
    assert_eq!(kept(&workload()), 2 * kept(&half));
    let cache =
        |workload: &Workload| held(&on_cuda(workload, &checkpointed()), EstimatePhase::Rollout, Category::KvCache);
    assert_eq!(cache(&workload()), 2 * cache(&half));
}

#[test]
fn each_offload_takes_its_state_off_the_device() {
    let p = parameters();
    let update = |memory: MemoryConfig| on_cuda(&workload(), &memory);
    let moments = |estimate: &Estimate| held(estimate, EstimatePhase::Optimizer, Category::Moments);
    let host = |estimate: &Estimate| estimate.phase(EstimatePhase::Optimizer).expect("a phase").host_bytes;

    let idle = update(MemoryConfig { optimizer_offload: OptimizerOffload::Idle, ..unshared() });
    // the largest matrix's moments visit
    let largest = Sizes::new(&arch(512), None).largest_trained;
    assert_eq!(moments(&idle), 8 * largest);
    assert_eq!(held(&idle, EstimatePhase::Backward, Category::Moments), 0);
    assert!(host(&idle) >= 8 * (p - largest));

    let cpu = |fraction| {
        update(MemoryConfig { optimizer_offload: OptimizerOffload::Cpu, offload_fraction: fraction, ..unshared() })
    };
    assert_eq!(moments(&cpu(1.0)), 0);
    // moments, and the weights that the host updates
    assert!(host(&cpu(1.0)) >= 12 * p);
    assert!(moments(&cpu(0.5)).abs_diff(4 * p) <= 8);

    let away = update(MemoryConfig { grad_offload: true, ..unshared() });
    assert_eq!(held(&away, EstimatePhase::Optimizer, Category::Gradients), 0);
    assert!(host(&away) >= 4 * p);
}

#[test]
fn weights_that_are_idle_or_streamed_leave_the_device_except_while_it_samples() {
    let p = parameters();
    // the reference alone scores
    let workload = Workload { reference: true, old_log_probs: false, ..workload() };
    let of = |policy, reference| {
        let memory = MemoryConfig {
            param_offload: policy,
            reference: RoleMemory { param_offload: reference, score_tokens: None },
            ..checkpointed()
        };
        on_cuda(&workload, &memory)
    };
    let (none, idle, streamed) = (
        of(ParamOffload::None, ParamOffload::None),
        of(ParamOffload::Idle, ParamOffload::Idle),
        of(ParamOffload::Streamed, ParamOffload::Streamed),
    );
    for estimate in [&none, &idle, &streamed] {
        assert_eq!(held(estimate, EstimatePhase::Rollout, Category::Parameters), 4 * p);
    }
    assert_eq!(held(&none, EstimatePhase::Score, Category::Parameters), 4 * p);
    assert_eq!(held(&none, EstimatePhase::Backward, Category::Reference), 4 * p);
    for away in [&idle, &streamed] {
        assert_eq!(held(away, EstimatePhase::Score, Category::Parameters), 0);
        assert_eq!(held(away, EstimatePhase::Backward, Category::Reference), 0);
    }
    assert_eq!(held(&idle, EstimatePhase::Backward, Category::Parameters), 4 * p);
    // a layer at work, and as many ahead of it as copies are in flight
    let visiting = held(&streamed, EstimatePhase::Backward, Category::Parameters);
    let sizes = Sizes::new(&arch(512), None);
    let layer = sizes.unit_bytes(1) + sizes.unit_bytes(2);
    assert!(visiting > 0 && visiting <= 2 * layer);
}

#[test]
fn offloaded_inputs_leave_the_device_but_for_those_on_their_way() {
    let offloaded = |prefetch, group| MemoryConfig {
        activation_offload: true,
        activation_offload_group: group,
        prefetch,
        ..checkpointed()
    };
    for (prefetch, group, rows) in [(0, 1, 1), (1, 1, 3), (1, 2, 6), (2, 1, 4)] {
        let away = on_cuda(&workload(), &offloaded(prefetch, group));
        assert_eq!(held(&away, EstimatePhase::Backward, Category::KeptInputs), rows * row());
        assert!(away.host_peak_bytes >= LAYERS * row());
    }
    assert_eq!(unshared().prefetch, 1);
    // of a whole graph recomputing frees the most, and offload comes on top
    let peak = |memory: &MemoryConfig| total(&on_cuda(&workload(), memory), EstimatePhase::Backward);
    let (plain, kept) = (peak(&unshared()), peak(&checkpointed()));
    let away = peak(&offloaded(1, 1));
    assert!(plain - kept > kept - away && kept > away);
}

#[test]
fn keys_and_values_take_whole_blocks_of_every_sequence() {
    let sequences = 64;
    let cache = |workload: &Workload| {
        let estimate = on_cuda(workload, &unshared());
        held(&estimate, EstimatePhase::Rollout, Category::KvCache)
    };
    let bytes = 8 * LAYERS * KEY_HEADS * HEAD * 512 * sequences;
    assert_eq!(cache(&workload()), bytes);
    // the guide's formula has the hidden size for the width of keys: too much by heads over key heads
    let guide = sequences * 512 * LAYERS * HIDDEN * 2 * 4;
    assert_eq!(guide, bytes * 4 / KEY_HEADS);
    let shorter = Workload { response_length: 250, ..workload() };
    assert_eq!(cache(&shorter), bytes, "the last block is whole");
    let int8 = Workload { kv_cache_dtype: KvCacheDtype::Int8, ..workload() };
    let token = KEY_HEADS * (2 * HEAD + 4);
    assert_eq!(cache(&int8), LAYERS * token * 512 * sequences);
    let limited = Workload { kv_cache_bytes: Some(bytes / 4), ..workload() };
    assert_eq!(cache(&limited), bytes / 4);
    let plan = |max_num_seqs| {
        let plan = unshared().plans(&arch(512), false, None, max_num_seqs);
        estimate(&workload(), &plan.expect("a plan"), &device(Backend::Cuda))
    };
    let few = held(&plan(4), EstimatePhase::Rollout, Category::KvCache);
    assert!(few < bytes / 4, "{few} for 4 at a time");
}

/// Bytes of training, of keys and values, and of the host, for as many sequences at a time as there are.
fn of_batch(prompts: u64, group: u64, lengths: [u64; 2]) -> [u64; 3] {
    let workload = Workload::grpo(arch(512), lengths, prompts, group);
    let estimate = on_cuda(&workload, &unshared());
    let backward = estimate.phase(EstimatePhase::Backward).expect("a phase");
    let cache = held(&estimate, EstimatePhase::Rollout, Category::KvCache);
    [backward.total_bytes, cache, backward.host_bytes]
}

#[test]
fn more_prompts_and_larger_groups_are_more_micro_batches_and_not_larger_ones() {
    let [training, cache, host] = of_batch(16, 8, [256, 256]);
    for (prompts, group) in [(32, 8), (16, 16)] {
        let more = of_batch(prompts, group, [256, 256]);
        // what is known of the tokens of a step is on the host
        assert_eq!(more, [training, 2 * cache, 2 * host]);
    }
}

#[test]
fn shorter_texts_take_fewer_keys_and_values_and_as_much_for_training_in_less_time() {
    let [training, cache, _] = of_batch(16, 8, [256, 256]);
    let [less, half, _] = of_batch(16, 8, [128, 128]);
    assert_eq!(2 * half, cache);
    assert!(less <= training && training - less < training / 100);
    let seconds = |lengths| {
        let workload = Workload::grpo(arch(512), lengths, 16, 8);
        on_cuda(&workload, &unshared()).seconds.backward
    };
    assert!(seconds([128, 128]) < seconds([256, 256]));
}

#[test]
fn scoring_has_micro_batches_of_its_own() {
    let memory = unshared();
    assert!(memory.score_tokens > memory.train_tokens);
    let small = MemoryConfig { score_tokens: 4096, ..memory.clone() };
    let (large, small) = (on_cuda(&workload(), &memory), on_cuda(&workload(), &small));
    assert!(total(&small, EstimatePhase::Score) < total(&large, EstimatePhase::Score));
    assert_eq!(total(&small, EstimatePhase::Backward), total(&large, EstimatePhase::Backward));
    assert_eq!(held(&large, EstimatePhase::Score, Category::LiveGraph), 0);
}

#[test]
fn long_sequences_take_memory_in_proportion_to_their_length() {
    let of = |length: usize, attention_rows, profile: &DeviceProfile| {
        let workload = Workload::grpo(arch(512), [1024, length as u64 - 1024], 1, 2);
        let memory = MemoryConfig { attention_rows, train_tokens: length, ..checkpointed() };
        under(&workload, &memory, profile)
    };
    // where kernels attend, nothing grows faster
    for backend in [Backend::Cpu, Backend::Cuda, Backend::Wgpu] {
        let bytes = |length| total(&of(length, 512, &device(backend)), EstimatePhase::Backward);
        assert!(bytes(65_536) < 2 * bytes(32_768), "{backend:?}");
    }
    // where tensor operations do, scores of a chunk of queries grow with the length, and those of all with its square
    let profile = DeviceProfile::assumed(Backend::Cuda);
    let scores = |length, rows| held(&of(length, rows, &profile), EstimatePhase::Backward, Category::Attention);
    assert_eq!(scores(8192, 512), 2 * scores(4096, 512));
    assert_eq!(scores(8192, 0), 4 * scores(4096, 0));
}

#[test]
fn a_checkpoint_beside_a_step_has_its_buffers_in_the_phases_before_the_update_and_raises_no_peak() {
    let [cpu, gpu] = [Backend::Cpu, Backend::Cuda].map(device);
    let saving = Workload { saves_beside: true, ..workload() };
    let under = |workload: &Workload, profile| under(workload, &MemoryConfig::default(), profile);
    let [plain, beside] = [&workload(), &saving].map(|workload| under(workload, &cpu));
    assert!(beside.saves_beside && !plain.saves_beside);
    assert_eq!(beside.peak_bytes, plain.peak_bytes);
    let buffers = held(&plain, EstimatePhase::Save, Category::Buffers);
    assert!(buffers > 0);
    for phase in [EstimatePhase::Rollout, EstimatePhase::Score] {
        assert_eq!(total(&beside, phase), total(&plain, phase) + buffers);
    }
    assert_eq!(total(&beside, EstimatePhase::Backward), total(&plain, EstimatePhase::Backward));
    // tensors of a GPU stay on their thread
    assert!(!under(&saving, &gpu).saves_beside);
    // a cache as large as the update leaves no room
    let narrow = Workload { validation: 1 << 20, max_num_batched_tokens: 1 << 24, prompt_length: 8192, ..saving };
    let narrow = under(&narrow, &cpu);
    assert!(!narrow.saves_beside, "{narrow:?}");
}
