use super::*;
use crate::estimate::{CriticWork, EstimatePhase, Parallel, Sizes, Workload, Zero, rules};
use crate::test_support::{device, kernels};
use crate::{
    Error, Infeasible, MemoryConfig, MomentKind, OptimizerOffload, Packing, ParamOffload, Plan, PlanReport, PlannedFor,
};
use firebrick_arch::Arch;
use firebrick_spec::{Backend, Category};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

mod next_cheaper;
mod stages;
mod warm_up;

const GIB: u64 = 1 << 30;

fn arch(layers: usize, hidden: usize, vocab: usize) -> Arch {
    let config = json!({
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 8192
    });
    let Value::Object(config) = config else { unreachable!("an object") };
    Arch::from_config(&config, Path::new("test")).expect("an architecture")
}

fn request(arch: Arch, backend: Backend) -> Request {
    Request {
        workload: Workload { reference: true, ..Workload::grpo(arch, [256, 256], 8, 8) },
        // formulas below are of prompts for each completion
        memory: MemoryConfig { share_prefix: false, ..MemoryConfig::default() },
        max_num_seqs: 64,
        profile: device(backend),
        budget: None,
        host_budget: None,
        phase_limits: BTreeMap::new(),
        parallel: Parallel::default(),
        ranks: 1,
    }
}

/// Adds a critic with the policy's body.
fn with_critic(mut request: Request) -> Request {
    request.workload.critic = Some(CriticWork {
        arch: request.workload.arch.clone().with_value_head(),
        clips: true,
        starts_from_policy: true,
    });
    request
}

fn within(mut request: Request, budget: u64) -> Request {
    request.budget = Some(budget);
    request
}

fn cost(fit: &Fit) -> f64 {
    fit.estimate.seconds.total() * fit.memory.moments.penalty()
}

fn infeasible(error: Error) -> Infeasible {
    match error {
        Error::Infeasible(infeasible) => *infeasible,
        other => panic!("{other}"),
    }
}

#[test]
fn other_groups_are_proposed_at_as_many_rollouts() {
    let free = request(arch(8, 512, 32_000), Backend::Cuda);
    let proposals = free.fit().expect("fits").groups(&free).expect("groups");
    let sizes: Vec<u64> = proposals.iter().map(|proposal| proposal.group_size).collect();
    assert_eq!(sizes, [2, 4, 16, 32]);
    for proposal in &proposals {
        assert_eq!(proposal.group_size * proposal.prompts, free.workload.rollouts());
        assert!(proposal.fits && proposal.max_num_seqs.is_multiple_of(proposal.group_size));
    }
    // prompts are run once a group
    assert!(proposals[3].seconds < proposals[0].seconds);
    let peak = proposals.iter().map(|proposal| proposal.peak_bytes).min().expect("some");
    let mut tight = free.clone();
    let fit = free.fit().expect("fits");
    tight.budget = Some(peak / 2);
    let tight = fit.groups(&tight).expect("groups");
    assert!(tight.iter().all(|proposal| !proposal.fits), "half of the least is too little");

    let mut alone = free;
    alone.workload.group = 1;
    let fit = alone.fit().expect("fits");
    assert!(fit.groups(&alone).expect("groups").is_empty());
}

#[test]
fn a_padded_plan_has_room_for_sequences_that_are_too_short_for_chunks() {
    let mut long = request(arch(4, 512, 32_000), Backend::Metal);
    long.memory.packing = Packing::Padded;
    long.memory.attention_rows = 256;
    long.workload.prompt_length = 1024;
    long.workload.response_length = 1024;
    let mut short = long.clone();
    // as many tokens, in sequences that attention scores at once
    short.workload.prompt_length = 128;
    short.workload.response_length = 128;
    short.workload.prompts *= 8;
    short.workload.mini_batch *= 8;
    let bytes = |request: &Request, category| {
        let fit = request.as_configured().expect("a plan");
        let backward = fit.estimate.phase(EstimatePhase::Backward).expect("a phase").clone();
        backward.categories.get(&category).copied().unwrap_or(0)
    };
    let kept = bytes(&short, Category::Attention);
    assert!(kept > 0);
    assert!(bytes(&long, Category::Attention) >= kept);
    // where a kernel attends over sequences of every length there are no scores
    short.profile = device(Backend::Cuda);
    assert_eq!(bytes(&short, Category::Attention), 0);
}

#[test]
fn scores_that_no_memory_sees_take_no_time_there() {
    let mut plain = request(arch(4, 512, 32_000), Backend::Metal);
    plain.memory.attention_rows = 0;
    let mut kernel = plain.clone();
    kernel.profile.backend = Backend::Cuda;
    kernel.profile.kernels = kernels(Backend::Cuda);
    let seconds = |request: &Request| request.as_configured().expect("a plan").estimate.seconds;
    assert!(seconds(&kernel).backward < seconds(&plain).backward);
}

#[test]
fn a_greedy_completion_of_every_prompt_takes_its_time() {
    let plain = request(arch(8, 512, 32_000), Backend::Cuda);
    let mut greedy = plain.clone();
    greedy.workload.greedy = true;
    let seconds = |request: &Request| request.as_configured().expect("a plan").estimate.seconds;
    let (without, with) = (seconds(&plain), seconds(&greedy));
    assert!(with.rollout > without.rollout && with.rollout < 2.0 * without.rollout);
    let trained = with.backward - without.backward;
    assert!(trained.abs() < 1e-12, "it is not trained on");
}

#[test]
fn without_a_budget_nothing_that_costs_time_is_turned_on() {
    let fit = request(arch(8, 512, 32_000), Backend::Cuda).fit().expect("fits");
    assert!(!fit.memory.gradient_checkpointing);
    assert_eq!(fit.memory.param_offload, ParamOffload::None);
    assert_eq!(fit.memory.optimizer_offload, OptimizerOffload::None);
    assert_eq!(fit.memory.moments, MomentKind::F32);
}

#[test]
fn the_peak_stays_below_the_budget_by_the_margin() {
    let mut request = within(request(arch(8, 512, 32_000), Backend::Cuda), 3 * GIB);
    request.memory.margin = 0.2;
    let fit = request.fit().expect("fits");
    assert!(fit.estimate.peak_bytes <= 3 * GIB / 5 * 4);
}

#[test]
fn a_model_larger_than_the_device_streams() {
    let model = rules::public("Qwen2.5-7B").expect("known");
    let weights = 4 * Sizes::new(&model, None).total();
    let fit = within(request(model, Backend::Cuda), 48 * GIB).fit().expect("fits");
    let state = 4 * weights;
    assert!(state > 48 * GIB && fit.estimate.peak_bytes < 48 * GIB);
    assert!(fit.estimate.host_peak_bytes > weights);
}

#[test]
fn on_one_memory_nothing_is_ever_moved_to_the_host() {
    let free = request(arch(8, 512, 32_000), Backend::Cpu);
    let smallest = search::smallest(&free).expect("searches").expect("some").0;
    for share in [1.2, 1.5, 2.0, 4.0] {
        let fit = within(free.clone(), (smallest as f64 * share) as u64).fit().expect("fits");
        let m = &fit.memory;
        assert!(!m.activation_offload && !m.grad_offload, "{m:?}");
        assert_eq!(m.param_offload, ParamOffload::None);
        assert_eq!(m.reference.param_offload, ParamOffload::None);
        assert_eq!(m.optimizer_offload, OptimizerOffload::None);
    }
}

#[test]
fn a_host_budget_is_respected_and_can_be_what_is_missing() {
    let mut tight = within(request(arch(12, 2048, 150_000), Backend::Cuda), 12 * GIB);
    let free = tight.fit().expect("fits").estimate.host_peak_bytes;
    assert!(free > 0, "a billion parameters' state is 16 GiB");
    tight.host_budget = Some(free - 1);
    let fit = tight.fit().expect("another way");
    assert!(fit.estimate.host_peak_bytes < free);
    tight.host_budget = Some(1 << 20);
    let message = tight.fit().expect_err("nothing").to_string();
    assert!(message.contains("host_budget") || message.contains("too much"), "{message}");
}

#[test]
fn a_budget_bounds_each_of_several_devices() {
    let model = rules::public("Qwen2.5-7B").expect("known");
    let mut alone = within(request(model, Backend::Cuda), 80 * GIB);
    alone.host_budget = Some(16 * GIB);
    infeasible(alone.fit().expect_err("policy, reference and gradients are 28 GiB each, and the host holds 16"));
    let fsdp = Parallel { data: 16, zero: Zero::Stage3, ..Parallel::default() };
    let fit = alone.spread(fsdp).expect("divides").fit().expect("fits");
    assert!(fit.estimate.peak_bytes <= 80 * GIB * 9 / 10);
    assert_eq!(fit.batch.effective_batch, 64);
    assert_eq!(fit.batch.micro_batch * fit.batch.accumulation, 4);
}

#[test]
fn where_nothing_fits_it_says_by_how_much_and_what_would() {
    let tight = within(request(arch(16, 1024, 150_000), Backend::Cpu), 2 * GIB);
    let infeasible_plan = infeasible(tight.fit().expect_err("nothing fits"));
    let over = infeasible_plan.over_by().expect("the device's budget is what is missing");
    assert!(over > 0);
    assert!(!infeasible_plan.advice.is_empty());
    let budget = infeasible_plan.advice.last().expect("a budget");
    let enough: crate::size::Bytes =
        budget.strip_prefix("a budget of ").expect("the last line").parse().expect("a size");
    let fit = within(tight.clone(), enough.0).fit();
    assert!(fit.is_ok(), "the budget it asks for is enough");
    let message = tight.fit().expect_err("nothing fits").to_string();
    assert!(message.contains("too much"), "{message}");
}

#[test]
fn advice_holds() {
    let free = request(arch(8, 512, 32_000), Backend::Cpu);
    let smallest = search::smallest(&free).expect("searches").expect("some").0;
    let tight = within(free, (smallest as f64 * 1.05) as u64);
    let infeasible_plan = infeasible(tight.fit().expect_err("the margin is missing"));
    let response = infeasible_plan.advice.iter().find_map(|a| a.strip_prefix("rollout.response_length="));
    if let Some(length) = response {
        let mut shorter = tight;
        shorter.workload.response_length = length.parse().expect("a number");
        assert!(shorter.fit().is_ok());
    }
}

#[test]
fn a_report_reads_back_and_its_plan_is_the_one_that_train_takes() {
    let request = within(request(arch(8, 512, 32_000), Backend::Cuda), 2 * GIB);
    let fit = request.fit().expect("fits");
    let report = PlanReport::new(&request, fit.clone()).expect("a report");
    let text = serde_json::to_string(&report).expect("writes");
    let back: PlanReport = serde_json::from_str(&text).expect("reads");
    assert_eq!(back.plan, fit.plan);
    assert_eq!(back.peak_bytes, fit.estimate.peak_bytes);
    let sum = |p: &crate::estimate::PhaseEstimate| p.categories.values().sum::<u64>();
    assert!(report.phases.iter().all(|p| sum(p) == p.total_bytes));

    let path = Path::new("plan.json");
    let alone = PlannedFor { ranks: 1, sequence: 1, critic_sequence: 1, tensor: 1, pipeline: 1, sampling: 1 };
    let plan = Plan::from_json(&text, path, &alone).expect("loads");
    assert_eq!(plan, fit.plan);
    for (text, expected) in [
        ("{", "is not JSON"),
        ("{}", "has no `plan`"),
        (r#"{"plan": {"models": {}, "rollout": {"max_num_seqs": 4}}}"#, "`policy`"),
        (r#"{"plan": {"models": {}, "rollout": {"max_num_seqs": "x"}}}"#, "max_num_seqs"),
        (
            r#"{"parallel": {"data": 4, "zero": "stage2"}}"#,
            "was made for 4 devices: data 4 (ZeRO-2), and this run has 1",
        ),
        (r#"{"parallel": {"data": 1, "pipeline": 2}}"#, "memory.pipeline_model_parallel_size is 1; set it to 2"),
        (
            r#"{"parallel": {"data": 1, "pipeline": 2, "tensor": 2}}"#,
            "is an estimate for 4 devices: tensor 2 x pipeline 2",
        ),
        (
            r#"{"parallel": {"data": 2, "pipeline": 2, "rollout_tensor": 2}}"#,
            "is an estimate for 4 devices: data 2 x pipeline 2 x tensor 2 in sampling",
        ),
        (r#"{"parallel": {"data": 1, "tensor": 2}}"#, "memory.tensor_model_parallel_size is 1; set it to 2"),
        (r#"{"parallel": {"data": 2, "rollout_tensor": 2}}"#, "rollout.tensor_model_parallel_size is 1; set it to 2"),
    ] {
        let message = Plan::from_json(text, path, &alone).expect_err("refused").to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn settings_of_a_fit_spell_out_the_same_plan() {
    let request = within(request(arch(8, 512, 32_000), Backend::Cuda), 2 * GIB);
    let fit = request.fit().expect("fits");
    let w = &request.workload;
    let plan = fit.memory.plans(&w.arch, w.reference, w.critic_arch(), fit.plan.rollout.max_num_seqs);
    assert_eq!(plan.expect("a plan"), fit.plan);
    assert!(fit.overrides().iter().any(|s| s.starts_with("memory.")));
    let decisions = fit.decisions(&request).expect("decisions");
    assert!(decisions.iter().any(|d| d.saves_bytes > 0), "{decisions:?}");
}

#[test]
fn a_critic_moves_what_the_policy_moves_and_keeps_its_own_limits() {
    let free = with_critic(request(arch(8, 512, 32_000), Backend::Cuda));
    let alone = request(arch(8, 512, 32_000), Backend::Cuda).as_configured();
    let (alone, with_critic) = (alone.expect("plans"), free.as_configured().expect("plans"));
    for phase in &alone.estimate.phases {
        let beside = with_critic.estimate.phase(phase.name).expect("the same phases");
        assert!(beside.total_bytes > phase.total_bytes, "{}", phase.name);
    }
    assert!(with_critic.estimate.seconds.total() > alone.estimate.seconds.total());

    let mut limited = within(free, 3 * GIB);
    limited.memory.critic.set_size("train_tokens", Some(512));
    let fit = limited.fit().expect("fits");
    let (policy, critic) = (fit.plan.policy(), fit.plan.critic().expect("a critic"));
    assert!(fit.estimate.peak_bytes <= 3 * GIB * 9 / 10);
    assert!(critic.train_tokens <= 512 && critic.train_tokens <= policy.train_tokens);
    assert_eq!((critic.grads, critic.idle), (policy.grads, policy.idle));
    let w = &limited.workload;
    let seqs = fit.plan.rollout.max_num_seqs;
    let spelled = fit.memory.plans(&w.arch, w.reference, w.critic_arch(), seqs);
    assert_eq!(spelled.expect("a plan"), fit.plan);
}

/// Draws of a few cases, the same in every run.
fn cases() -> impl Iterator<Item = fastrand::Rng> {
    (0..6).map(fastrand::Rng::with_seed)
}

fn any_backend(rng: &mut fastrand::Rng) -> Backend {
    let backends = [Backend::Cpu, Backend::Cuda, Backend::Metal];
    rng.choice(backends).expect("some")
}

#[test]
fn a_larger_budget_never_gives_a_slower_plan() {
    for mut rng in cases() {
        let arch = arch(rng.usize(2..10), 128 * rng.usize(1..6), 8192);
        let mut free = request(arch, any_backend(&mut rng));
        free.workload.reference = rng.bool();
        if rng.bool() {
            free = with_critic(free);
        }
        let smallest = search::smallest(&free).expect("searches").expect("some").0 as f64;
        let fitted = |share: f64| {
            let budget = (smallest * share / (1.0 - free.memory.margin)) as u64 + 1;
            within(free.clone(), budget).fit().expect("no less than the smallest")
        };
        let shares = [(); 2].map(|()| 1.0 + 5.0 * rng.f64());
        let (less, more) = (shares[0].min(shares[1]), shares[0].max(shares[1]));
        let (small, large) = (fitted(less), fitted(more));
        assert!(cost(&large) <= cost(&small) * (1.0 + 1e-12));
        // the small plan fits the large budget too: had it been faster, it would have been taken
        for share in [less, more] {
            assert!(small.estimate.peak_bytes as f64 <= smallest * share + 1.0);
        }
    }
}

#[test]
fn below_the_smallest_nothing_fits_and_above_it_something_does() {
    for mut rng in cases() {
        let arch = arch(rng.usize(2..8), 128 * rng.usize(1..4), 8192);
        let free = request(arch, any_backend(&mut rng));
        let whole = search::smallest(&free).expect("searches").expect("some").0 as f64 / (1.0 - free.memory.margin);
        assert!(within(free.clone(), whole as u64 + 2).fit().is_ok());
        let small = within(free, (whole * 0.95) as u64).fit();
        let infeasible_plan = infeasible(small.expect_err("too small"));
        assert!(infeasible_plan.over_by().expect("by how much") > 0);
    }
}

#[test]
fn a_phase_never_needs_less_with_longer_completions_or_more_rows() {
    for mut rng in cases() {
        let mut short = request(arch(rng.usize(2..8), 256, 8192), Backend::Cuda);
        short.workload.response_length = rng.u64(64..1024);
        short.memory.head_rows = rng.choice([64, 256, 1024]).expect("some");
        // scored at once: the last chunk of a longer sequence may be the smaller one
        short.memory.attention_rows = 0;
        let mut long = short.clone();
        long.workload.response_length += 64;
        long.memory.train_tokens *= 2;
        long.memory.score_tokens *= 2;
        long.memory.head_rows *= 2;
        let [short, long] = [short, long].map(|request| request.as_configured().expect("plans"));
        for (a, b) in short.estimate.phases.iter().zip(&long.estimate.phases) {
            assert!(a.total_bytes <= b.total_bytes, "{}", a.name);
        }
    }
}

#[test]
fn a_gpus_plan_keeps_logits_and_recomputing_them_frees_all_but_a_tile_for_more_time() {
    let (vocab, tile) = (100_000, 8192);
    let mut request = request(arch(4, 256, vocab), Backend::Cuda);
    let kept = request.fit().expect("fits");
    assert!(!kept.memory.recompute_logits);
    request.memory.recompute_logits = true;
    let recomputed = request.as_configured().expect("a plan");
    let [more, less] =
        [&kept, &recomputed].map(|fit| fit.estimate.phase(EstimatePhase::Backward).expect("a phase").total_bytes);
    // and what pools waste of it
    let logits = 4 * 1024 * (vocab as u64 - tile);
    assert!((logits..logits * 21 / 20).contains(&(more - less)), "{more}, {less}");
    assert!(kept.estimate.seconds.total() < recomputed.estimate.seconds.total());
}
