//! Seconds: what recomputing costs, and where copies hide behind computation.

use super::{HEAD, LAYERS, Sizes, arch, checkpointed, on_cuda, under, unshared, workload};
use crate::estimate::{EstimatePhase, MessageKind, Parallel, Workload, estimate_parallel, rules};
use crate::test_support::device;
use crate::{MemoryConfig, OptimizerOffload, ParamOffload, Zero};
use firebrick_spec::{
    Backend, Cluster, DeviceProfile, KernelRates, LinkKind, LinkSpec, LogitRates, Precision, RowsRate,
};

#[test]
fn recomputing_adds_a_forward_which_is_a_third_of_forward_and_backward() {
    let model = rules::public("Qwen2.5-7B").expect("a public model");
    let workload = Workload::grpo(model, [512, 512], 4, 8);
    let seconds = |memory: &MemoryConfig| on_cuda(&workload, memory).seconds.backward;
    let more = seconds(&checkpointed()) / seconds(&unshared()) - 1.0;
    assert!(more > 0.25 && more < 0.34, "{more}");
}

/// A step's backward passes with streamed weights and inputs on the host, on a device as fast as every other of the
/// test but for its backend, over a link that takes about as long as the computation.
fn offloaded_backward(backend: Backend, prefetch: usize, link: f64) -> f64 {
    let memory =
        MemoryConfig { activation_offload: true, param_offload: ParamOffload::Streamed, prefetch, ..checkpointed() };
    let profile = DeviceProfile { backend, host_link: Some(link), ..device(Backend::Cuda) };
    under(&workload(), &memory, &profile).seconds.backward
}

#[test]
fn copies_hide_behind_computation_only_where_they_have_a_queue_of_their_own() {
    for backend in [Backend::Cuda, Backend::Wgpu, Backend::Vulkan, Backend::Metal] {
        let instant = offloaded_backward(backend, 1, f64::INFINITY);
        let in_place = offloaded_backward(backend, 0, 1e9);
        let ahead = offloaded_backward(backend, 1, 1e9);
        let copies = in_place - instant;
        assert!(copies > 0.0 && ahead > 0.0);
        let expected = if backend == Backend::Cuda { instant.max(copies) } else { instant + copies };
        assert!((ahead - expected).abs() < 1e-9 * expected, "{}: {ahead} instead of {expected} s", backend.name());
    }
}

#[test]
fn in_half_precision_an_idle_optimizer_copies_masters_beside_its_moments() {
    let half = Workload { arch: arch(512).in_precision(Precision::Bf16), ..workload() };
    let copies = |workload: &Workload| {
        let seconds = |optimizer_offload| {
            let memory = MemoryConfig { optimizer_offload, ..unshared() };
            on_cuda(workload, &memory).seconds.optimizer
        };
        seconds(OptimizerOffload::Idle) - seconds(OptimizerOffload::None)
    };
    // 8 bytes of moments, and 4 of a master
    let ratio = copies(&half) / copies(&workload());
    assert!((ratio - 12.0 / 8.0).abs() < 1e-6, "{ratio}");
}

/// Traffic of two devices that shard weights, and seconds of a step's backward passes, over links of a rate, through
/// the hosts.
fn sharded(prefetch: usize, link: Option<&str>) -> (f64, f64) {
    sharded_over(LinkKind::Host, prefetch, link)
}

fn sharded_over(kind: LinkKind, prefetch: usize, link: Option<&str>) -> (f64, f64) {
    let workload = workload();
    let memory = MemoryConfig { zero_stage: 3, prefetch, ..checkpointed() };
    let plan = memory.plans(&workload.arch, false, None, 8).expect("a plan");
    let cluster = link.map(|link| {
        let link: LinkSpec = link.parse().expect("a link");
        let mut cluster = Cluster::new(1, 2, link, link);
        cluster.link.kind = kind;
        cluster
    });
    let mut parallel = Parallel { data: 2, zero: Zero::Stage3, ..Parallel::default() };
    if let Some(cluster) = cluster {
        parallel = parallel.on(cluster, Backend::Cuda);
    }
    let estimate = estimate_parallel(&workload, &plan, &device(Backend::Cuda), &parallel);
    let sums = estimate.communication.iter().filter(|sent| sent.phase == EstimatePhase::Backward);
    let gathers: f64 = sums.filter(|sent| sent.kind == MessageKind::AllGather).map(|sent| sent.seconds).sum();
    (estimate.seconds.backward, gathers)
}

#[test]
fn gathers_of_weights_hide_behind_computation_as_far_as_it_lasts() {
    let (computation, _) = sharded(1, None);
    for link in ["400GB/s", "1MB/s"] {
        let (in_place, all) = sharded(0, Some(link));
        let (ahead, waited) = sharded(1, Some(link));
        let hidden = all - waited;
        let near = (in_place - ahead - hidden).abs() < 1e-9 * in_place;
        assert!(near, "{link}: {ahead} of {in_place} s, {hidden} s hidden");
        if link == "1MB/s" {
            let near = (hidden - computation).abs() < 1e-6 * computation;
            assert!(near, "{hidden} s of {computation} s of computation");
        } else {
            // one of the forward pass's visits: two ends, and as many layers as the backward pass has
            let expected = 1.0 / (2.0 * workload().arch.num_layers as f64 + 2.0);
            assert!(all < computation);
            let share = waited / all;
            assert!((share / expected - 1.0).abs() < 0.1, "{share}, {expected}");
        }
        assert_eq!(sharded(2, Some(link)), (ahead, waited));
    }
}

#[test]
fn gathers_from_gpu_to_gpu_are_waited_for() {
    let link = Some("400GB/s");
    let waits = |prefetch| sharded_over(LinkKind::Nvlink4, prefetch, link);
    assert_eq!(waits(1), waits(0));
    assert!(sharded(1, link) < waits(1), "through the hosts they hide");
}

/// A processor whose kernels take no time but for those that a test asks for.
fn measured(change: impl FnOnce(&mut DeviceProfile, &mut KernelRates)) -> DeviceProfile {
    let instant = f64::INFINITY;
    let mut profile = DeviceProfile {
        memory_bandwidth: instant,
        host_bandwidth: instant,
        kernel_overhead: 0.0,
        ..device(Backend::Cpu)
    };
    profile.matmul_flops.f32 = instant;
    let mut rates = KernelRates {
        product_bandwidth: instant,
        packing_bandwidth: None,
        few_rows: Vec::new(),
        panels: Vec::new(),
        adapter_flops: instant,
        attention_flops: [instant; 2],
        decode_attention_flops: instant,
        elementwise_bandwidth: instant,
        logits: LogitRates { scored: instant, differentiated: instant, drawn: instant },
        operation: 0.0,
    };
    change(&mut profile, &mut rates);
    profile.rates = Some(rates);
    profile
}

#[test]
fn with_measured_kernels_products_take_two_operations_a_parameter_and_token_and_three_times_that_in_training() {
    let profile = measured(|profile, _| profile.matmul_flops.f32 = 1e12);
    let seconds = under(&workload(), &unshared(), &profile).seconds;
    let sizes = Sizes::new(&arch(512), None);
    let forward = 2.0 * (sizes.body() as f64 * 64.0 * 512.0 + sizes.projection as f64 * 64.0 * 256.0);
    for (seconds, passes) in [(seconds.score, 1.0), (seconds.backward, 3.0)] {
        let expected = passes * forward / 1e12;
        assert!((seconds / expected - 1.0).abs() < 1e-9, "{seconds} instead of {expected}");
    }
    let again = under(&workload(), &checkpointed(), &profile).seconds.backward;
    let body = 2.0 * sizes.body() as f64 * 64.0 * 512.0 / 1e12;
    assert!(((again - seconds.backward) / body - 1.0).abs() < 1e-9);
}

#[test]
fn small_micro_batches_read_the_matrices_once_more_each() {
    let profile = measured(|_, rates| rates.product_bandwidth = 1e9);
    let seconds = |micro_batch_size| {
        let memory = MemoryConfig { micro_batch_size, ..unshared() };
        under(&workload(), &memory, &profile).seconds.backward
    };
    // 64 micro-batches in place of two, and 64 chunks of the head in place of sixteen
    let more = seconds(Some(1)) - seconds(None);
    let sizes = Sizes::new(&arch(512), None);
    let numbers = 62 * sizes.body() + 48 * sizes.projection;
    let expected = 3.0 * 4.0 * numbers as f64 / 1e9;
    assert!((more / expected - 1.0).abs() < 0.01, "{more} instead of {expected}");
}

#[test]
fn blocks_of_queries_look_at_the_keys_up_to_their_end() {
    let profile = measured(|_, rates| rates.attention_flops = [1e12, 5e11]);
    let seconds = under(&workload(), &unshared(), &profile).seconds;
    // eight blocks of 64 queries, over 64 to 512 keys
    let pairs = 64.0 * (1..=8).map(|block| f64::from(64 * block)).sum::<f64>();
    let heads = (4 * HEAD) as f64;
    let expected = LAYERS as f64 * 64.0 * 4.0 * heads * pairs / 1e12;
    assert!((seconds.score / expected - 1.0).abs() < 1e-9);
    // forward and backward together at half the rate
    assert!((seconds.backward / (2.0 * expected) - 1.0).abs() < 1e-9);
}

#[test]
fn shorter_sequences_take_less_time_and_as_many_bytes() {
    let profile = measured(|profile, rates| {
        profile.matmul_flops.f32 = 1e12;
        rates.panels = vec![RowsRate { rows: 1, flops: 1e10 }];
        rates.few_rows.clone_from(&rates.panels);
    });
    let memory = unshared();
    let longest = under(&workload(), &memory, &profile);
    let shorter = Workload { mean_lengths: Some([128.0, 128.0]), ..workload() };
    let estimate = under(&shorter, &memory, &profile);
    assert_eq!(estimate.phases, longest.phases);
    for (seconds, longest) in
        [(estimate.seconds.score, longest.seconds.score), (estimate.seconds.backward, longest.seconds.backward)]
    {
        assert!((seconds / longest - 0.5).abs() < 1e-9, "{seconds} of {longest}");
    }
    // prompts and decoded tokens are half as many, all but the first
    let ratio = estimate.seconds.rollout / longest.seconds.rollout;
    assert!((ratio - 0.5).abs() < 0.01, "{ratio}");
}
