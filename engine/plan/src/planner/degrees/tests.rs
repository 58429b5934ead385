use super::*;
use crate::estimate::rules::public;
use crate::estimate::{EstimatePhase, MessageKind, Workload};
use crate::test_support::kernels;
use crate::{MemoryConfig, ParamOffload, PlanReport};
use firebrick_spec::{Backend, DeviceProfile, LinkSpec, Precision};
use std::collections::BTreeMap;

const GIB: u64 = 1 << 30;

/// A model on H100s: 128 prompts of 8 completions, 512 + 512 tokens.
fn request(model: &str, budget: u64) -> Request {
    let arch = public(model).expect("known").in_precision(Precision::Bf16);
    let profile = DeviceProfile::known("NVIDIA H100 80GB HBM3").expect("known");
    Request {
        workload: Workload::grpo(arch, [512, 512], 128, 8),
        // few sizes of chunks to search
        memory: MemoryConfig { head_rows: 256, attention_rows: 64, ..MemoryConfig::default() },
        max_num_seqs: 256,
        profile: profile.with_kernels(kernels(Backend::Cuda)),
        budget: Some(budget),
        host_budget: None,
        phase_limits: BTreeMap::new(),
        parallel: Parallel::default(),
        ranks: 1,
    }
}

/// The request on a device that shares memory with its host: nothing moves there, so that there is less to search.
fn unified(mut request: Request) -> Request {
    request.profile.host_link = None;
    request
}

fn cluster(nodes: u64, devices: u64, links: [&str; 2]) -> Cluster {
    let [link, node_link] = links.map(|text| text.parse::<LinkSpec>().expect(text));
    Cluster::new(nodes, devices, link, node_link)
}

const FAST: [&str; 2] = ["nvlink4", "infiniband-ndr"];

fn estimated() -> Degrees {
    Degrees { estimated: true, ..Degrees::default() }
}

#[test]
fn degrees_make_up_the_devices_and_the_trainer_runs_those_that_are_not_asked_to_be_estimates() {
    let request = unified(request("Qwen2.5-1.5B", 80 * GIB));
    let two = cluster(2, 8, FAST);
    let cluster_fit = request.fit_cluster(two, &Degrees::default()).expect("fits");
    assert!(cluster_fit.request.parallel.is_supported());
    assert_eq!(cluster_fit.request.parallel.devices(), 16);
    assert!(cluster_fit.fit.estimate.peak_bytes <= request.allowed().expect("a budget"));
    // others that fit are there, and none is faster
    let seconds = cluster_fit.fit.estimate.seconds.total();
    assert!(!cluster_fit.others.is_empty());
    for other in &cluster_fit.others {
        assert!(other.parallel.is_supported() && other.seconds >= seconds, "{other:?}");
    }
    let report = PlanReport::new(&cluster_fit.request, cluster_fit.fit).expect("a report");
    let text = serde_json::to_string(&report).expect("writes");
    let back: PlanReport = serde_json::from_str(&text).expect("reads");
    assert_eq!(back.parallel, report.parallel);
    assert_eq!(back.communication, report.communication);
}

#[test]
fn more_kinds_to_choose_from_are_never_slower_and_tensors_stay_in_a_machine() {
    let request = unified(request("Qwen2.5-1.5B", 80 * GIB));
    let two = cluster(2, 4, FAST);
    let plain = request.fit_cluster(two, &Degrees::default()).expect("fits");
    let exhaustive = request.fit_cluster(two, &estimated()).expect("fits");
    let seconds = |fit: &ClusterFit| fit.fit.estimate.seconds.total();
    assert!(seconds(&exhaustive) <= seconds(&plain));
    for (parallel, _) in degrees(cluster(4, 8, FAST), &estimated()) {
        assert_eq!(parallel.devices(), 32);
        assert!(parallel.tensor * parallel.sequence <= 8, "{parallel}");
        assert!(parallel.rollout_tensor.unwrap_or(1) <= 8, "{parallel}");
        assert!(parallel.pipeline == 1 || parallel.zero <= Zero::Stage1);
        assert!(parallel.data > 1 || parallel.zero == Zero::Off);
    }
}

#[test]
fn leaving_degrees_out_by_their_time_without_memory_limits_finds_what_trying_all_finds() {
    let request = unified(request("Qwen2.5-1.5B", 48 * GIB));
    for links in [FAST, ["pcie4", "ethernet-10g"]] {
        let candidates = request.candidates(cluster(2, 2, links), &estimated()).expect("some");
        assert!(candidates.len() > 20, "{}", candidates.len());
        let [all, pruned] =
            [false, true].map(|prunes| best_of(candidates.clone(), prunes).expect("searches").expect("fits"));
        assert_eq!(pruned.request.parallel, all.request.parallel, "{links:?}");
        assert_eq!(pruned.fit.plan, all.fit.plan, "{links:?}");
    }
}

#[test]
fn slow_links_between_machines_make_a_step_longer_and_change_the_choice() {
    let request = request("Qwen3-8B", 80 * GIB);
    let with = |links| request.fit_cluster(cluster(2, 2, links), &Degrees::default()).expect("fits");
    let (fast, slow) = (with(FAST), with(["nvlink4", "ethernet-10g"]));
    let waits = |fit: &ClusterFit| -> f64 {
        let sent = &fit.fit.estimate.communication;
        sent.iter().map(|traffic| traffic.seconds).sum()
    };
    assert!(waits(&slow) > 2.0 * waits(&fast));
    let step = |fit: &ClusterFit| fit.fit.estimate.seconds.total();
    assert!(step(&slow) > step(&fast));
    let sent = |fit: &ClusterFit| -> u64 {
        let sent = &fit.fit.estimate.communication;
        sent.iter().map(|traffic| traffic.bytes).sum()
    };
    assert!(sent(&slow) <= sent(&fast), "less is sent where that is slow");
}

#[test]
fn messages_are_among_the_seconds_of_their_phase() {
    let request = request("Qwen2.5-1.5B", 80 * GIB);
    let two = cluster(2, 8, FAST);
    let stage = Degrees { zero: Some(Zero::Stage3), rollout_tensor: Some(1), ..Degrees::default() };
    let cluster_fit = request.fit_cluster(two, &stage).expect("fits");
    let mut without = cluster_fit.request.clone();
    without.parallel.cluster = None;
    let silent = without.predict(cluster_fit.fit.plan.clone()).estimate;
    let sent = &cluster_fit.fit.estimate.communication;
    let pairs = cluster_fit.fit.estimate.seconds.by_phase().into_iter();
    for ((phase, with), (_, without)) in pairs.zip(silent.seconds.by_phase()) {
        let waits: f64 = sent.iter().filter(|traffic| traffic.phase == phase).map(|traffic| traffic.seconds).sum();
        assert!((with - without - waits).abs() < 1e-9 * with.max(1.0), "{phase}");
    }
    let gathers = sent.iter().filter(|traffic| traffic.kind == MessageKind::AllGather);
    assert!(gathers.clone().any(|traffic| traffic.phase == EstimatePhase::Rollout));
    assert!(gathers.clone().any(|traffic| traffic.phase == EstimatePhase::Backward));
    assert_eq!(sent.len(), silent.communication.len());
}

#[test]
fn a_model_of_70_billion_is_sampled_by_groups_and_the_message_says_by_how_much_one_gpu_is_too_small() {
    let request = request("Llama-3.1-70B", 80 * GIB);
    let one = cluster(1, 8, FAST);
    // few degrees to try
    let replicas = Degrees { data: Some(8), ..Degrees::default() };
    let cluster_fit = request.fit_cluster(one, &replicas).expect("fits");
    let parallel = cluster_fit.request.parallel;
    assert!(cluster_fit.request.is_supported() && parallel.samples_on_groups(), "{parallel}");
    assert!(cluster_fit.fit.estimate.peak_bytes <= request.allowed().expect("a budget"));
    let by_itself = Degrees { rollout_tensor: Some(1), ..replicas };
    let error = request.fit_cluster(one, &by_itself);
    let Err(Error::Infeasible(cluster_fit)) = error else { panic!("{error:?}") };
    assert!(cluster_fit.over_by().is_some_and(|bytes| bytes > 50 * GIB));
    let message = cluster_fit.to_string();
    assert!(message.contains("data 8 (ZeRO-"), "{message}");
}

#[test]
fn where_nothing_fits_more_machines_are_named_under_which_something_does() {
    let request = unified(request("Qwen3-8B", 48 * GIB));
    let none = Degrees::default();
    let Err(error) = request.fit_cluster(cluster(1, 2, FAST), &none) else {
        panic!("gradients and state of 8 billion numbers on two devices")
    };
    let message = error.to_string();
    let line = message.lines().find(|line| line.contains("--nodes ")).unwrap_or_else(|| panic!("{message}"));
    let nodes = line.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    let more = cluster(nodes.expect("a number"), 2, FAST);
    request.fit_cluster(more, &none).expect("what was said fits");
}

#[test]
fn degrees_that_cannot_be_are_refused_by_name() {
    let request = request("Qwen2.5-1.5B", 80 * GIB);
    let refused = |cluster, degrees: Degrees| request.fit_cluster(cluster, &degrees).expect_err("refused").to_string();
    let two = cluster(2, 8, FAST);
    let of_tensor = |tensor| Degrees { tensor: Some(tensor), ..Degrees::default() };
    assert!(refused(two, of_tensor(3)).contains("16 devices, and no degrees match them with tensor 3"));
    assert!(refused(two, of_tensor(16)).contains("stay inside a machine"));
    assert!(refused(two, of_tensor(8)).contains("12 heads"));
    let many = Degrees { data: Some(2048), ..Degrees::default() };
    let message = refused(cluster(256, 8, FAST), many);
    assert!(message.contains("1024 sequences"), "{message}");
    let data = Degrees { data: Some(5), ..Degrees::default() };
    assert!(refused(two, data).contains("data 5"));
}

#[test]
fn sampling_on_groups_divides_the_weights_of_that_phase_alone() {
    let plain = request("Qwen3-8B", 80 * GIB);
    let of = |rollout_tensor| {
        let parallel = Parallel { data: 8, zero: Zero::Stage2, rollout_tensor, ..Parallel::default() };
        let mut request = plain.clone().spread(parallel).expect("divides");
        request.max_num_seqs = 1024;
        request.memory.zero_stage = 2;
        request.memory.gradient_checkpointing = true;
        // else the weights that are trained wait on the device, beside the shares
        request.memory.param_offload = ParamOffload::Idle;
        request.as_configured().expect("a plan").estimate
    };
    let (whole, shared) = (of(None), of(Some(4)));
    let held = |estimate: &crate::estimate::Estimate, phase: EstimatePhase| {
        estimate.phase(phase).expect("a phase").categories[&firebrick_spec::Category::Parameters]
    };
    assert_eq!(held(&shared, EstimatePhase::Rollout), held(&whole, EstimatePhase::Rollout).div_ceil(4));
    assert_eq!(held(&shared, EstimatePhase::Backward), held(&whole, EstimatePhase::Backward));
    assert!(of(Some(4)).seconds.rollout < whole.seconds.rollout);
    let experts = request("Qwen3-30B-A3B", 80 * GIB);
    let of_experts = Parallel { data: 8, rollout_tensor: Some(4), ..Parallel::default() };
    let on_paper = experts.spread(of_experts).expect("divides");
    assert!(on_paper.parallel.is_supported() && !on_paper.is_supported(), "experts are not divided");
    let wrong = Parallel { data: 8, rollout_tensor: Some(3), ..Parallel::default() };
    let error = plain.spread(wrong).expect_err("divides nothing");
    assert!(error.to_string().contains("of sampling is 3"), "{error}");
}

#[test]
fn what_several_ranks_refuse_is_never_chosen() {
    let mut free = unified(request("Qwen2.5-1.5B", 80 * GIB));
    free.workload.clips = false;
    let cluster_fit = free.fit_cluster(cluster(1, 4, FAST), &Degrees::default()).expect("fits");
    assert!(!cluster_fit.fit.plan.policy().optimizer.in_backward);
    let replicated = Degrees { zero: Some(Zero::Off), ..Degrees::default() };
    free.budget = Some(60 * GIB);
    let result = free.fit_cluster(cluster(1, 4, FAST), &replicated);
    assert!(!result.expect("fits").fit.plan.policy().optimizer.in_backward);
    let mut coded = free;
    coded.workload.arch = coded.workload.arch.with_base(Some(firebrick_spec::BaseFormat::Nf4));
    let lora = firebrick_arch::lora::LoraConfig::default();
    coded.workload.lora = Some(lora.in_arch(&coded.workload.arch));
    let candidates = coded.candidates(cluster(1, 4, FAST), &Degrees::default());
    let stages: Vec<Zero> = candidates.expect("some").iter().map(|(_, request)| request.parallel.zero).collect();
    assert!(stages.contains(&Zero::Stage2) && !stages.contains(&Zero::Stage3));
}
