//! What the ranks of a whole run send in a step, beside what `plan.json` says that they do.

use super::config;
use burn::tensor::Device;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::collective::{OperationKind, Settings, Threads, Traffic};
use firebrick_engine::executor::{Residency, ResidentModel};
use firebrick_engine::plan::estimate::{
    Along, EstimatePhase, MessageKind, Parallel, PhaseTraffic, Workload,
};
use firebrick_engine::plan::planner::Request;
use firebrick_engine::plan::{MemoryConfig, PlanReport, Role, Zero};
use firebrick_engine::trainer::Trainer;
use firebrick_engine::world::World;
use firebrick_models::Decoder;
use firebrick_models::generate::{GenerationRequest, Generator, SamplingParams};
use firebrick_models::random::DrawKey;
use firebrick_spec::{Arch, Backend, DeviceProfile};
use std::path::Path;

const KINDS: [(MessageKind, OperationKind); 3] = [
    (MessageKind::AllReduce, OperationKind::AllReduce),
    (MessageKind::ReduceScatter, OperationKind::ReduceScatter),
    (MessageKind::AllGather, OperationKind::AllGather),
];

/// What the first rank of a run of so many steps sends, and what its plan says of one.
fn sent(folder: &Path, size: usize, steps: usize, overrides: &[&str]) -> (Traffic, PlanReport) {
    let own = format!("trainer.steps={steps}");
    let more = [
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "update.old_log_probs=trainer",
        // as many rounds as sequences a rank, however long they are
        "memory.micro_batch_size=1",
        &own,
    ];
    let config = config(folder, &[overrides, &more].concat());
    let ranks = Threads::run(size, Settings::default(), |rank| {
        let builder = Trainer::builder(config.clone()).world(rank.clone());
        let mut trainer = builder.build().unwrap();
        trainer.run().unwrap();
        sum(rank.traffic(), trainer.world().matrices_traffic())
    });
    let text = std::fs::read_to_string(folder.join("plan.json")).unwrap();
    let first = ranks.into_iter().next().unwrap();
    (first.unwrap(), serde_json::from_str(&text).unwrap())
}

/// What was sent in two kinds of groups.
fn sum(mut all: Traffic, more: Traffic) -> Traffic {
    for kind in 0..OperationKind::COUNT {
        all.operations[kind] += more.operations[kind];
        all.bytes[kind] += more.bytes[kind];
    }
    all
}

/// Two ranks share every matrix, in training and while they sample.
const TENSOR: [&str; 2] = [
    "memory.tensor_model_parallel_size=2",
    "rollout.tensor_model_parallel_size=2",
];

#[test]
fn a_step_of_two_and_of_four_ranks_sends_what_its_plan_says() {
    let folders = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str]); 8] = [
        ("zero 1", &["memory.zero_stage=1"]),
        ("zero 2", &["memory.zero_stage=2"]),
        (
            "zero 3",
            &["memory.zero_stage=3", "memory.gradient_checkpointing=true"],
        ),
        (
            "zero 3 that keeps weights",
            &["memory.zero_stage=3", "memory.reshard_after_forward=false"],
        ),
        (
            "zero 3 with a critic",
            &[
                "objective.name=ppo",
                "memory.zero_stage=3",
                "memory.gradient_checkpointing=true",
            ],
        ),
        ("matrices shared", &TENSOR),
        (
            "matrices shared, a norm of each head",
            &[
                TENSOR[0],
                TENSOR[1],
                "model.arch={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 4, max_position_embeddings: 32}",
                "memory.gradient_checkpointing=true",
            ],
        ),
        (
            "matrices shared, zero 3",
            &[
                TENSOR[0],
                TENSOR[1],
                "memory.zero_stage=3",
                "memory.gradient_checkpointing=true",
            ],
        ),
    ];
    for (name, overrides) in cases {
        for size in [2, 4] {
            let of = |steps: usize| {
                let folder = folders.path().join(format!("{name} {size} {steps}"));
                sent(&folder, size, steps, overrides)
            };
            // a step is what a run of three sends beyond one of two
            let ((two, _), (three, plan)) = (of(2), of(3));
            for (kind, own) in KINDS {
                // what groups send while they sample ends with the completions
                let sampled = |t: &PhaseTraffic| {
                    t.phase == EstimatePhase::Rollout && t.along == Along::Tensor
                };
                let said = plan.communication.iter();
                let said = said.filter(|t| t.kind == kind && !sampled(t));
                let said = said.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes));
                let at = own as usize;
                let counted = (
                    three.operations[at] - two.operations[at],
                    three.bytes[at] - two.bytes[at],
                );
                let label = format!("{} of {name}, {size} ranks", own.name());
                if overrides.contains(&TENSOR[0]) {
                    // sums of activations are as long as sequences, which may end early
                    assert_eq!(counted.0, said.0, "{label}");
                    assert!(counted.1 <= said.1, "{label}: {counted:?} {said:?}");
                    assert!(4 * counted.1 >= 3 * said.1, "{label}: {counted:?} {said:?}");
                } else {
                    assert_eq!(counted, said, "{label}");
                }
            }
            assert!(!plan.communication.is_empty());
        }
    }
}

/// What the first rank of a group sends while it samples from weights that all ranks share out, and what an estimate says of it.
#[test]
fn a_group_that_samples_sends_what_is_predicted() {
    let config = serde_json::json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2});
    let arch = Arch::from_config(config.as_object().unwrap(), Path::new("config.json")).unwrap();
    let (prompt, response, prompts, group) = (6, 5, 4, 3);
    for size in [2, 4] {
        let memory = MemoryConfig {
            zero_stage: 3,
            gradient_checkpointing: true,
            ..MemoryConfig::default()
        };
        let plan = memory.plan(&arch).unwrap();
        let ranks = Threads::run(size, Settings::default(), |rank| {
            let world = World::new(rank).sampling_together(size).unwrap();
            let decoder = Decoder::random(arch.clone(), 1, &Device::flex());
            let accounts = Accounts::new();
            let model = ResidentModel::new(decoder, plan.clone(), Role::Policy, &accounts);
            let mut model = model.shared_by(&world);
            model.set_residency(Residency::Idle).unwrap();
            let before = world.traffic();
            let own = world.tensor_group().unwrap();
            let own = model.tensor_shard(&own, arch.precision).unwrap();
            let gathered = world.traffic();
            let sampling = SamplingParams {
                max_new_tokens: response,
                ..SamplingParams::default()
            };
            let requests: Vec<GenerationRequest> = (0..prompts as u32)
                .map(|i| GenerationRequest {
                    tokens: (0..prompt as u32).map(|t| (7 * i + t) % 64).collect(),
                    key: DrawKey {
                        seed: 1,
                        step: 0,
                        prompt_index: i,
                        sample: 0,
                    },
                    max_new_tokens: None,
                })
                .collect();
            let generator = Generator::new(&own, None, &sampling).unwrap();
            generator.run(&requests, group, prompts * group).unwrap();
            let at = OperationKind::AllGather as usize;
            let weights = (
                gathered.operations[at] - before.operations[at],
                gathered.bytes[at] - before.bytes[at],
            );
            (weights, world.sampling_traffic())
        });
        let (weights, sent) = ranks.into_iter().next().unwrap().unwrap();
        let request = Request {
            workload: Workload {
                reference: false,
                ..Workload::grpo(
                    arch.clone(),
                    [prompt as u64, response as u64],
                    prompts as u64,
                    group as u64,
                )
            },
            memory: memory.clone(),
            max_num_seqs: prompts * group,
            profile: DeviceProfile::assumed(Backend::Cpu),
            budget: None,
            host_budget: None,
            parallel: Parallel::default(),
            ranks: 1,
        };
        let parallel = Parallel {
            data: size as u64,
            zero: Zero::Stage3,
            rollout_tensor: Some(size as u64),
            ..Parallel::default()
        };
        let fit = request.spread(parallel).unwrap().as_configured().unwrap();
        let said = |kind: MessageKind, along: Along| {
            let all = fit.estimate.communication.iter();
            let own = all.filter(|t| {
                t.phase == EstimatePhase::Rollout && t.kind == kind && t.along == along
            });
            own.fold((0, 0), |(n, b), t| (n + t.messages, b + t.bytes))
        };
        let counted =
            |kind: OperationKind| (sent.operations[kind as usize], sent.bytes[kind as usize]);
        let label = format!("{size} ranks");
        assert_eq!(
            weights,
            said(MessageKind::AllGather, Along::Data),
            "{label}"
        );
        assert_eq!(
            counted(OperationKind::AllReduce),
            said(MessageKind::AllReduce, Along::Tensor),
            "{label}"
        );
        assert_eq!(
            counted(OperationKind::AllGather),
            said(MessageKind::AllGather, Along::Tensor),
            "{label}"
        );
    }
}
